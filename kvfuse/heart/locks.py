"""Locks on names and directories, by key, all or nothing, with a deadline.

One table replaces a lock object per name: a verb takes every key it needs in one step, so there is
no order to keep and nothing to deadlock on. Waiting counts against the deadline of the request.
"""

import errno
import threading
import time
from collections.abc import Hashable
from types import TracebackType

_EXCLUSIVE = -1


class Hold:
    """Keys held until the end of a ``with`` block."""

    __slots__ = ("_exclusive", "_shared", "_table")

    def __init__(
        self, table: "KeyedLocks", exclusive: tuple[Hashable, ...], shared: tuple[Hashable, ...]
    ) -> None:
        self._table = table
        self._exclusive = exclusive
        self._shared = shared

    def __enter__(self) -> None:
        self._table.acquire(self._exclusive, self._shared)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._table.release(self._exclusive, self._shared)


class KeyedLocks:
    """Shared and exclusive locks on any hashable keys.

    Concurrency: any number of threads. Contention is rare (the kernel already serialises changes in
    one directory), so one condition wakes all waiters.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[Hashable, int] = {}
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0

    def hold(self, *exclusive: Hashable, shared: tuple[Hashable, ...] = ()) -> Hold:
        """Return a context manager that holds the keys; a key must not be in both groups."""
        return Hold(self, exclusive, shared)

    def _free(self, exclusive: tuple[Hashable, ...], shared: tuple[Hashable, ...]) -> bool:
        held = self._held
        for key in exclusive:
            if key in held:
                return False
        for key in shared:  # noqa: SIM110 - a generator takes three times as long
            if held.get(key) == _EXCLUSIVE:
                return False
        return True

    def acquire(self, exclusive: tuple[Hashable, ...], shared: tuple[Hashable, ...]) -> None:
        """Take all keys.

        Raises:
            OSError: EIO when they were not free within the timeout.
        """
        with self._mutex:
            if not self._free(exclusive, shared):
                self._wait(exclusive, shared)
            held = self._held
            for key in exclusive:
                held[key] = _EXCLUSIVE
            for key in shared:
                held[key] = held.get(key, 0) + 1

    def _wait(self, exclusive: tuple[Hashable, ...], shared: tuple[Hashable, ...]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting += 1
        try:
            while not self._free(exclusive, shared):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise OSError(errno.EIO, "a name stayed locked beyond the deadline")
                self._changed.wait(left_s)
        finally:
            self._waiting -= 1

    def release(self, exclusive: tuple[Hashable, ...], shared: tuple[Hashable, ...]) -> None:
        """Give all keys back."""
        with self._mutex:
            held = self._held
            for key in exclusive:
                del held[key]
            for key in shared:
                count = held[key] - 1
                if count:
                    held[key] = count
                else:
                    del held[key]
            if self._waiting:
                self._changed.notify_all()
