"""What the pool does on its own between requests: backlogs, syncfs, access times, readers.

Concurrency: one thread for each disk, so that a sick disk delays only its own backlog, and one for
the catalog. Nothing a client waits for.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvfuse.cleaning.evictor import Evictor
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.inflight import threads_of
from kvfuse.heart.state import PoolState
from kvfuse.pool.recovery import readmit, settle_left
from kvfuse.pool.resume import answers
from kvfuse.space.tasks import Tasks

_log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 30.0
ACCESS_INTERVAL_S = 0.1
FENCED_INTERVAL_S = 0.25
ROOM_INTERVAL_S = 0.2
READER_CHECK_INTERVAL_S = 60.0
PARKED_INTERVAL_S = 600.0


class Upkeep:
    """The threads of one mounted pool; each of *tidy* is called with the number of a disk, for
    which it may wait, and the time (monotonic).
    """

    def __init__(
        self,
        state: PoolState,
        tidy: Sequence[Callable[[int, float], None]],
    ) -> None:
        self._state = state
        self._tidy = tidy
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._disk_loop, args=(number, carriers), daemon=True,
                name=f"upkeep-{number}",
            )
            for number, carriers in state.carriers.items()
        ]  # fmt: skip
        self._threads.append(
            threading.Thread(target=self._catalog_loop, daemon=True, name="upkeep-catalog")
        )
        self.tasks = Tasks(state.next_id())
        self.evictors = {n: Evictor(state, n, self.tasks) for n in state.carriers}
        state.rooms.urge = lambda number: self.evictors[number].wake()
        self._threads += [
            threading.Thread(
                target=evictor.run, args=(self._stopping,), daemon=True, name=f"evictor-{number}"
            )
            for number, evictor in self.evictors.items()
        ]

    def start(self) -> None:
        """Start."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Ask all to end and wait that long for them; one that hangs on a disk is left."""
        self._stopping.set()
        for event in self._state.work.values():
            event.set()
        for evictor in self.evictors.values():
            evictor.wake()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _disk_loop(self, number: int, carriers: Carriers) -> None:
        state = self._state
        work = state.work[number]
        plan = _SyncPlan(time.monotonic(), state.rules.op_timeout_s)
        next_retry_s = time.monotonic() + PARKED_INTERVAL_S
        while not self._stopping.is_set():
            is_woken = work.wait(min(plan.wait_s(time.monotonic()), ROOM_INTERVAL_S))
            if self._stopping.is_set():
                return
            for tidy in self._tidy:
                tidy(number, time.monotonic())
            if not is_woken and plan.wait_s(time.monotonic()):
                continue
            work.clear()
            if state.slots[number].health.is_stuck:
                self._try_readmit(number, carriers)
            if not state.slots[number].health.writable:
                continue
            settle_left(state, number)
            is_retry = time.monotonic() >= next_retry_s
            if is_retry:
                next_retry_s = time.monotonic() + PARKED_INTERVAL_S
            with contextlib.suppress(OSError), state.on(number):
                carriers.retry() if is_retry else carriers.drain()
            state.change_health(number, lambda health, now_s: health.on_success(now_s=now_s))
            generation = plan.due(time.monotonic(), state.numbers.last_generation())
            if generation is not None:
                self._sync(number, carriers, generation)

    def _try_readmit(self, number: int, carriers: Carriers) -> None:
        """Wait a moment; take a fenced disk back when no call of anybody hangs on it."""
        state = self._state
        if self._stopping.wait(FENCED_INTERVAL_S):
            return
        state.work[number].set()  # look again
        state.stuck_pids = [pid for pid in state.stuck_pids if threads_of(pid)]
        if number in state.inflight.busy() or state.stuck_pids or not answers(carriers.disk):
            return
        with contextlib.suppress(OSError), state.on(number):
            readmit(state, number)

    def _sync(self, number: int, carriers: Carriers, generation: int) -> None:
        try:
            with self._state.on(number):
                self._state.sync(number, generation)
        except OSError as exc:
            _log.warning("disk %s: syncfs: %s", carriers.disk.path, exc.strerror)

    def _catalog_loop(self) -> None:
        next_check_s = time.monotonic() + READER_CHECK_INTERVAL_S
        while not self._stopping.wait(ACCESS_INTERVAL_S):
            self._state.accesses.flush()
            if time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + READER_CHECK_INTERVAL_S
                self._state.catalog.check_readers()


class _SyncPlan:
    """When to sync a disk, and up to which generation that counts.

    A generation is taken before its file is renamed. So it is noted first, and the disk synced when
    every request that was under way then has ended: after its deadline.
    """

    def __init__(self, now_s: float, op_timeout_s: float) -> None:
        self._op_timeout_s = op_timeout_s
        self._next_s = now_s + SYNC_INTERVAL_S
        self._noted: int | None = None
        self._synced = 0

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing is due."""
        return max(0.0, self._next_s - now_s)

    def due(self, now_s: float, generation: int) -> int | None:
        """Return the generation to sync up to, None when it is not time."""
        if now_s < self._next_s:
            return None
        if self._noted is None:
            self._next_s = now_s + self._op_timeout_s
            self._noted = generation
            return None
        self._next_s = now_s + SYNC_INTERVAL_S
        noted, self._noted = self._noted, None
        if noted == self._synced:
            return None
        self._synced = noted
        return noted
