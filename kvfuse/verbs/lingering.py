"""Files that a rename has just replaced stay openable for a moment.

A client that opens a name looks it up and then opens the file it got. When a rename replaced that
file in between, the kernel is told ESTALE and tries once more, but only once: a client that meets
two renames in one open would fail, which never happens on a local disk. So the replaced file is
kept open, and who still asks for it gets it, as he would there.

Concurrency: any thread; one mutex, held for a few statements.
"""

import logging
import threading
import time
from collections import deque

from kvfuse.heart.state import PoolState
from kvfuse.verbs.files import Files
from kvfuse.verbs.renames import RENAME_EXCHANGE, Renames

_log = logging.getLogger(__name__)

KEPT_S = 1.0
KEPT_MAX = 64  # each holds a descriptor, and its file's room on the disk


class Lingering:
    """The verb that renames, keeping what it replaces."""

    def __init__(self, state: PoolState, files: Files, renames: Renames) -> None:
        self._state = state
        self._files = files
        self._renames = renames
        self._mutex = threading.Lock()
        self._kept: deque[tuple[float, int]] = deque()  # until when (monotonic), handle

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename, replace or exchange; *flags* as renameat2(2)."""
        fh = None if flags & RENAME_EXCHANGE else self._open_target(new_parent, new_name)
        if fh is None:
            self._renames.rename(parent, name, new_parent, new_name, flags)
            return
        try:
            self._renames.rename(parent, name, new_parent, new_name, flags)
        except BaseException:
            self._close(fh)
            raise
        with self._mutex:
            self._kept.append((time.monotonic() + KEPT_S, fh))

    def _open_target(self, parent: int, name: bytes) -> int | None:
        """Return a handle of the file that is about to be replaced, if there is one."""
        with self._state.catalog.read() as txn:
            node = txn.child(parent, name)
        if node is None or not node.is_regular or not self._state.visible(node):
            return None
        request = self._state.request
        unique, request.unique = request.unique, 0  # no client's: the next server lets go of it
        try:
            return self._files.open(node.id, 0)
        except OSError:  # it cannot be opened now: nobody else could either
            return None
        finally:
            request.unique = unique

    def tidy(self, now_s: float) -> None:
        """Close what has been kept long enough, and the oldest of too many."""
        while True:
            with self._mutex:
                if not self._kept:
                    return
                until_s, fh = self._kept[0]
                if until_s > now_s and len(self._kept) <= KEPT_MAX:
                    return
                self._kept.popleft()
            self._close(fh)

    def _close(self, fh: int) -> None:
        try:
            self._files.release(fh)
        except OSError as exc:
            _log.warning("a replaced file cannot be closed: %s", exc)
        self._state.handles.free(fh)
