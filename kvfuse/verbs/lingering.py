"""Files that a rename has just replaced stay openable for a moment.

A client that opens a name looks it up and then opens the file it got. When a rename replaced that
file in between, the kernel is told ESTALE and tries once more, but only once: a client that meets
two renames in one open would fail, which never happens on a local disk. So the replaced file is
kept open, and who still asks for it gets it, as he would there.

Concurrency: any thread; one mutex, held for a few statements.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

from kvfuse.core.records import Node
from kvfuse.heart.state import PoolState
from kvfuse.verbs.files import Files

_log = logging.getLogger(__name__)

KEPT_S = 1.0
KEPT_MAX = 64  # on a disk; each holds a descriptor, and its file's room on the disk


class Lingering:
    """What renames have just replaced."""

    def __init__(self, state: PoolState, files: Files) -> None:
        self._state = state
        self._files = files
        self._mutex = threading.Lock()
        # By disk, for its thread closes them: until when (monotonic), handle.
        self._kept: dict[int, deque[tuple[float, int]]] = {n: deque() for n in state.carriers}

    @contextlib.contextmanager
    def while_replaced(self, target: Node) -> Iterator[None]:
        """Keep *target*, whose name is locked, if what is done meanwhile replaces it."""
        fh = self._open(target) if target.is_regular else None
        try:
            yield
        except BaseException:
            if fh is not None:
                self._close(fh)
            raise
        if fh is not None:
            now_s = time.monotonic()
            with self._mutex:
                self._kept[target.disk].append((now_s + KEPT_S, fh))
                is_full = len(self._kept[target.disk]) > KEPT_MAX
            if is_full:
                self.tidy(target.disk, now_s)

    def _open(self, target: Node) -> int | None:
        """Return a handle of the file that is about to be replaced, if it can be had."""
        request = self._state.request
        unique, request.unique = request.unique, 0  # no client's: the next server lets go of it
        try:
            return self._files.open(target.id, 0, locked=(target.parent, target.name))
        except OSError:  # it cannot be opened now: nobody else could either
            return None
        finally:
            request.unique = unique

    def tidy(self, number: int, now_s: float) -> None:
        """Close what has been kept long enough on a disk, and the oldest of too many.

        Waits for that disk, which frees what is removed when it is closed.
        """
        kept = self._kept[number]
        while True:
            with self._mutex:
                if not kept:
                    return
                until_s, fh = kept[0]
                if until_s > now_s and len(kept) <= KEPT_MAX:
                    return
                kept.popleft()
            self._close(fh)

    def _close(self, fh: int) -> None:
        try:
            self._files.release(fh)
        except OSError as exc:
            _log.warning("a replaced file cannot be closed: %s", exc)
        self._state.handles.free(fh)
