"""Numbers that are never given twice in a pool: ids, cookies, chores, and generations."""

import itertools
import threading
import time

from kvfuse.catalog.catalog import Catalog


class Numbers:
    """The supply of numbers of one mounted pool; thread-safe.

    Both kinds start above the clock and above what the catalog knows to have been given: that
    covers a clock that went back, the clock a catalog that was lost. Nobody makes a thousand
    million files a second, so the clock stays ahead of the ids.
    """

    def __init__(self, catalog: Catalog, floor: int = 0) -> None:
        with catalog.read() as txn:
            floor = max(floor, int(txn.meta(b"floor") or 0), txn.highest_number())
        self._mutex = threading.Lock()
        self._last_generation = max(floor, time.time_ns())
        self._ids = itertools.count(self._last_generation)

    def next_id(self) -> int:
        """Return a fresh id."""
        return next(self._ids)

    def generation(self, after: int = 0) -> int:
        """Return a generation higher than any before, and than *after*: now, in nanoseconds."""
        with self._mutex:
            self._last_generation = max(time.time_ns(), self._last_generation + 1, after + 1)
            return self._last_generation

    def last_generation(self) -> int:
        """Return the newest generation given; every later one is higher."""
        return self._last_generation

    def floor(self) -> int:
        """Return a number above every one given so far."""
        with self._mutex:
            return max(self._last_generation, next(self._ids)) + 1
