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
from collections.abc import Callable

from kvfuse.drivers.direct.protocol import Rename, Request
from kvfuse.pool import RENAME_EXCHANGE, Pool

log = logging.getLogger(__name__)

KEPT_S = 1.0
KEPT_MAX = 64  # each holds a descriptor, and its file's room on the disk


class Lingering:
    """Keeps what renames replace."""

    def __init__(self, pool: Pool, close: Callable[[int], None]) -> None:
        self._pool = pool
        self._close = close
        self._mutex = threading.Lock()
        self._kept: deque[tuple[float, int]] = deque()  # until when (monotonic), handle

    def around(self, rename: Callable[[Request], bytes]) -> Callable[[Request], bytes]:
        """Return *rename* as a handler that keeps what it replaces."""

        def handler(request: Request) -> bytes:
            fh = self._open_target(request.args)
            if fh is None:
                return rename(request)
            try:
                reply = rename(request)
            except BaseException:
                self._close(fh)
                raise
            with self._mutex:
                self._kept.append((time.monotonic() + KEPT_S, fh))
            return reply

        return handler

    def _open_target(self, args: Rename) -> int | None:
        """Return a handle of the file that is about to be replaced, if there is one."""
        if args.flags & RENAME_EXCHANGE:
            return None
        try:
            node = self._pool.lookup(args.new_parent, args.new_name)
            if node is None or not node.is_regular:
                return None
        except OSError:
            return None
        request = self._pool.request
        unique, request.unique = request.unique, 0  # no client's: the next server lets go of it
        try:
            return self._pool.open(node.id, 0)
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
            try:
                self._close(fh)
            except OSError as exc:
                log.warning("a replaced file cannot be closed: %s", exc)
