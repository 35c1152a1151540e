"""For each disk, how many threads may wait for it, and who waits for such a thread.

A disk that hangs keeps the threads of its own lane and nothing else: further requests for it stand
in its queue, and are refused when that is full.

Concurrency: any thread; one mutex for all lanes, held for a few statements.
"""

import threading
from collections import deque

from kvfuse.drivers.direct.abi import Opcode
from kvfuse.drivers.direct.protocol import Request

THREADS_MAX = 16  # of one disk: NVMe is kept busy, and 2 disks cannot take all threads
WAITING_MAX = 512  # of one disk; load is not failure, so above what a node of engines asks at once


class Waiting:
    """A request that stands in a queue since *since_s* (monotonic)."""

    __slots__ = ("request", "since_s")

    def __init__(self, request: Request, since_s: float) -> None:
        self.request = request
        self.since_s = since_s


class _Lane:
    __slots__ = ("running", "slow", "waiting")

    def __init__(self) -> None:
        self.running = 0
        self.slow = 0  # requests among those running that keep a thread longer than a moment
        self.waiting: deque[Waiting] = deque()


class Lanes:
    """The lanes of all disks; ``None`` is the lane of what waits for no disk but for a lock."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lanes: dict[int | None, _Lane] = {}
        self.any_slow = False  # read without the mutex, by the leader, before each request

    def _lane(self, disk: int | None) -> _Lane:
        lane = self._lanes.get(disk)
        if lane is None:
            lane = self._lanes[disk] = _Lane()
        return lane

    def is_slow(self, disk: int | None) -> bool:
        """Return whether a request has kept a thread on *disk* for longer than a moment."""
        lane = self._lanes.get(disk)
        return lane is not None and lane.slow > 0

    def enter(self, disk: int | None) -> bool:
        """Take a thread's place on *disk*; return False when all are taken."""
        with self._mutex:
            lane = self._lane(disk)
            if lane.running >= THREADS_MAX:
                return False
            lane.running += 1
            return True

    def wait(self, disk: int | None, waiting: Waiting) -> bool:
        """Queue for *disk*; return False when the queue is full, which it never is for RELEASE."""
        with self._mutex:
            lane = self._lane(disk)
            if len(lane.waiting) >= WAITING_MAX and waiting.request.opcode != Opcode.RELEASE:
                return False
            lane.waiting.append(waiting)
            return True

    def slow_down(self, disk: int | None) -> None:
        """Note that a request outside the lane is kept by *disk*; it takes a place from now on."""
        with self._mutex:
            lane = self._lane(disk)
            lane.slow += 1
            lane.running += 1
            self.any_slow = True

    def speed_up(self, disk: int | None) -> None:
        """Note that a thread that was kept by *disk* is back."""
        with self._mutex:
            self._lane(disk).slow -= 1
            self.any_slow = any(lane.slow for lane in self._lanes.values())

    def next_or_leave(self, disk: int | None) -> Request | None:
        """Return the next request of the queue of *disk*, or give the thread's place back."""
        with self._mutex:
            lane = self._lane(disk)
            if lane.waiting:
                return lane.waiting.popleft().request
            lane.running -= 1
            return None

    def expired(self, before_s: float) -> list[Request]:
        """Take from the queues and return what stands there since before *before_s*.

        A RELEASE stays: nobody waits for it, but it has to happen.
        """
        found: list[Request] = []
        with self._mutex:
            for lane in self._lanes.values():
                if not lane.waiting or lane.waiting[0].since_s >= before_s:
                    continue
                kept = deque[Waiting]()
                for waiting in lane.waiting:
                    late = waiting.since_s < before_s
                    if late and waiting.request.opcode != Opcode.RELEASE:
                        found.append(waiting.request)
                    else:
                        kept.append(waiting)
                lane.waiting = kept
        return found

    def withdraw(self, unique: int) -> bool:
        """Take request *unique* out of its queue; return False when it stands in none."""
        with self._mutex:
            for lane in self._lanes.values():
                for waiting in lane.waiting:
                    if waiting.request.unique == unique:
                        lane.waiting.remove(waiting)
                        return True
        return False
