"""Blocking verbs off the loop: for each disk a bounded set of threads, and a deadline.

A disk that hangs keeps its own threads and nothing else. Who waits for it is answered EIO when the
deadline is over; its thread stays in the kernel until the disk lets go, and what it brings back
then is handed to *on_late*, never to a client.

Concurrency: every method is called in the trio loop; verbs and *on_late* run in threads.
"""

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Generic, TypeVar, TypeVarTuple

import trio

log = logging.getLogger(__name__)

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Lanes beside those of the disks, so that a hung disk cannot take the threads of other work:
MEMORY = -1  # verbs that ask no disk, but may wait for a lock another thread holds
EVERY = -2  # verbs that ask all disks

# Load is not failure: the bound is above what a node full of engines asks at once, and below what
# the driver can keep waiting (pyfuse3 holds one task for each request that is unanswered).
WAITING_MAX = 512


class _Stage(Enum):
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()
    ABANDONED = auto()  # while waiting: it will not run
    LATE = auto()  # while running: nobody waits for the result


class _Lane:
    """The threads of one disk, and what they owe."""

    def __init__(self, limit: int) -> None:
        self.limiter = trio.CapacityLimiter(limit)
        self.unanswered = 0  # calls somebody waits for; only the loop counts
        self.late = 0  # threads past their deadline, under lock
        self.owed: deque[Callable[[], object]] = deque()  # must run once, no matter when
        self.lock = threading.Lock()

    def pay(self) -> None:
        """Run what is owed, in this thread."""
        while True:
            try:
                debt = self.owed.popleft()
            except IndexError:
                return
            _settle(debt)


def _settle(call: Callable[[], object]) -> None:
    """Run *call*, whose result and failure nobody can be told."""
    try:
        call()
    except OSError as exc:
        log.warning("a late call failed: %s", exc)
    except Exception:
        log.exception("bug in a late call")


class _Call(Generic[R]):
    """One verb on its way through a thread; its lane's lock decides who owns the result."""

    __slots__ = ("_error", "_fn", "_lane", "_on_late", "_result", "_stage", "thread")

    def __init__(
        self, lane: _Lane, fn: Callable[[], R], on_late: Callable[[R], object] | None
    ) -> None:
        self.thread = 0  # native id of the thread, once it runs
        self._lane = lane
        self._fn = fn
        self._on_late = on_late
        self._stage = _Stage.WAITING
        self._result: R | None = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Run the verb (in a thread), then whatever the lane owes."""
        with self._lane.lock:
            if self._stage is _Stage.ABANDONED:  # given up between limiter and thread
                return
            self._stage = _Stage.RUNNING
            self.thread = threading.get_native_id()
        try:
            self._result = self._fn()
        except BaseException as exc:  # noqa: BLE001 - handed to the waiter as it is
            self._error = exc
        with self._lane.lock:
            late = self._stage is _Stage.LATE
            self._stage = _Stage.DONE
        if late:
            self.drop()
            with self._lane.lock:
                self._lane.late -= 1
        self._lane.pay()

    def leave(self) -> _Stage:
        """Stop waiting for it; return how far it had come."""
        with self._lane.lock:
            stage = self._stage
            if stage is _Stage.WAITING:
                self._stage = _Stage.ABANDONED
            elif stage is _Stage.RUNNING:
                self._stage = _Stage.LATE
                self._lane.late += 1
        return stage

    def take(self) -> R:
        """Return what the verb returned, or raise what it raised; it must be done."""
        error = self._error
        if error is not None:
            self._error = None  # no cycle: the traceback holds this frame
            raise error
        result: Any = self._result
        taken: R = result
        return taken

    def drop(self) -> None:
        """Hand a result that nobody waits for to *on_late*."""
        if self._error is None and self._on_late is not None:
            on_late, result = self._on_late, self.take()
            _settle(lambda: on_late(result))


class DiskThreads:
    """Runs verbs in threads, at most *limit_per_disk* of each disk at once.

    *note_timeout* is told of each verb that outlived *op_timeout_s*: its disk, or lane, and the
    native id of its thread, for it may wait for something else than that disk.
    """

    def __init__(
        self,
        note_timeout: Callable[[int, int], object],
        *,
        op_timeout_s: float,
        limit_per_disk: int = 16,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        assert limit_per_disk > 0, "a disk needs a thread"
        self._note_timeout = note_timeout
        self._op_timeout_s = op_timeout_s
        self._limit = limit_per_disk
        self._unanswered_max = limit_per_disk + waiting_max
        self._lanes: dict[int, _Lane] = {}

    def _lane(self, disk: int) -> _Lane:
        lane = self._lanes.get(disk)
        if lane is None:
            lane = self._lanes[disk] = _Lane(self._limit)
        return lane

    async def run(
        self,
        disk: int | None,
        fn: Callable[[*Ts], R],
        *args: *Ts,
        on_late: Callable[[R], object] | None = None,
        late_errno: int = errno.EIO,
        timeout_s: float | None = None,
    ) -> R:
        """Return ``fn(*args)``, run in a thread of *disk*, or here when *disk* is None.

        *timeout_s* replaces the usual deadline; waiting for a thread counts. When the deadline is
        over, a verb that has not begun never will; one that has is left behind, and its result, if
        it ever comes, goes to *on_late*.

        Raises:
            OSError: *late_errno* when the deadline is over, too many wait, or all threads are left
                behind.
        """
        if disk is None:
            return fn(*args)
        lane = self._lane(disk)
        if lane.late >= self._limit:
            raise OSError(late_errno, f"disk {disk} hangs")
        if lane.unanswered >= self._unanswered_max:
            raise OSError(late_errno, f"disk {disk}: too many requests wait")
        call = _Call(lane, lambda: fn(*args), on_late)
        await self._attend(lane, call, self._op_timeout_s if timeout_s is None else timeout_s)
        match call.leave():
            case _Stage.DONE:
                return call.take()
            case _Stage.RUNNING:
                self._note_timeout(disk, call.thread)
                raise OSError(late_errno, f"disk {disk}: no answer in time")
            case _:
                raise OSError(late_errno, f"disk {disk}: no thread was free in time")

    async def run_surely(self, disk: int | None, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``fn(*args)`` once, whatever happens; return when it did or the deadline is over.

        What *fn* raises is logged. When no thread can be had in time it runs as soon as one of the
        disk's threads is free again.
        """
        debt: list[Callable[[], object]] = [lambda: fn(*args)]

        def pay() -> None:
            if debt:  # only this thread, or the loop after giving up on this thread
                _settle(debt.pop())

        if disk is None:
            pay()
            return
        lane = self._lane(disk)
        if lane.late >= self._limit or lane.unanswered >= self._unanswered_max:
            lane.owed.append(pay)
            return
        call = _Call(lane, pay, None)
        await self._attend(lane, call, self._op_timeout_s)
        stage = call.leave()
        if stage is _Stage.WAITING:
            lane.owed.append(pay)
        elif stage is _Stage.RUNNING:
            self._note_timeout(disk, call.thread)

    async def _attend(self, lane: _Lane, call: _Call[Any], timeout_s: float) -> None:
        """Wait for *call* until the deadline."""
        lane.unanswered += 1
        try:
            with trio.move_on_after(timeout_s):
                await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=lane.limiter)
        except BaseException:  # shutdown, or no thread to be had
            if call.leave() is _Stage.DONE:
                call.drop()
            raise
        finally:
            lane.unanswered -= 1

    def pay_all(self) -> None:
        """Run here what is still owed to any disk; may block (for a clean end)."""
        for lane in self._lanes.values():
            with contextlib.suppress(IndexError):
                lane.pay()
