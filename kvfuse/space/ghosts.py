"""Names of files that went lately, for policies that ask: hashes only, a bounded number of them.

Concurrency: one mutex.
"""

import threading
from collections import OrderedDict

GHOSTS_MAX = 1 << 16


class Ghosts:
    """The last ``GHOSTS_MAX`` names; they do not outlive the server."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._names: OrderedDict[int, None] = OrderedDict()

    def add(self, parent: int, name: bytes, *, at_most: int) -> None:
        """A file of this name went; of more than *at_most* names the oldest are forgotten."""
        with self._mutex:
            self._names[hash((parent, name))] = None
            while len(self._names) > min(GHOSTS_MAX, at_most):
                self._names.popitem(last=False)

    def take(self, parent: int, name: bytes) -> bool:
        """Return whether a file of this name went lately, and forget it."""
        with self._mutex:
            return self._names.pop(hash((parent, name)), True) is None
