"""Keeps one disk between its watermarks: measures it, condemns ahead of need, removes.

Victims stand in a *line*: condemned early, removed late. As long as a disk is above its low
watermark the line is kept as long as what will be written during a lease, so that room is there
when it is needed; whoever is asked for meanwhile leaves it.

Concurrency: one thread for each disk runs its evictor; ``ask`` and ``wake`` come from any thread.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvfuse.cleaning import removal
from kvfuse.cleaning.line import Line
from kvfuse.cleaning.patrol import Patrol
from kvfuse.cleaning.removal import Unit
from kvfuse.cleaning.selection import Selection
from kvfuse.core import records
from kvfuse.core.eviction import Need, Protection, Usage
from kvfuse.heart.state import PoolState
from kvfuse.space.returning import Returning
from kvfuse.space.tasks import Result, Task, Tasks, Trigger

_log = logging.getLogger(__name__)

BUSY_INTERVAL_S = 0.1
IDLE_INTERVAL_S = 0.2
RIPE_INTERVAL_S = 0.02
BATCH = 32
AHEAD_RATIO = 0.05  # of a disk: condemned at least, above the low watermark
AHEAD_RATIO_MAX = 0.5
UNSETTLED_RATIO = 0.02  # of a btrfs disk: written, and not in its own count yet
RETURNS_S = 1.0  # who waits for room believes so long that what was removed comes back
_RATE_WINDOW_S = 2.0


class Evictor:
    """The evictor of the disk with *number*."""

    def __init__(self, state: PoolState, number: int, tasks: Tasks) -> None:
        self._state = state
        self._number = number
        self._tasks = tasks
        disk = state.carriers[number].disk
        self._counts_late = disk.counts_late
        self._frees_late = disk.frees_late
        self._line = Line(state, number)
        self._patrol = Patrol(state, number, tasks)
        self._task: Task | None = None
        self._asked: deque[tuple[Task, Selection]] = deque()
        self._mutex = threading.Lock()
        self._event = threading.Event()
        self._rate = _Rate()
        self._returning = Returning()
        self._noted = 0  # uses of files at the last batch
        self._settled_bytes: int | None = None  # written, and counted by the next measurement

    # -- from other threads

    def wake(self) -> None:
        """Look at once."""
        self._event.set()

    def ask(self, task: Task, selection: Selection) -> Task:
        """Do *task* after what is asked already; an equal one that waits or runs is returned."""
        with self._mutex:
            for other, _ in self._asked:
                if (other.selection, other.dry_run) == (task.selection, task.dry_run):
                    return other
            self._asked.append((task, selection))
        self._event.set()
        return task

    def ask_by_use(self) -> Task:
        """Clean the disk down to its low watermark; a cleanup that does that already is joined."""
        with self._mutex:
            if self._task is None:
                self._begin(Trigger.MANUAL)
            task = self._task
        self._event.set()
        assert task is not None, "begun"
        return task

    # -- the thread

    def run(self, stopping: threading.Event) -> None:
        """Work until *stopping* is set and ``wake`` is called."""
        wait_s = 0.0
        while not stopping.is_set():
            self._event.wait(wait_s)
            self._event.clear()
            if stopping.is_set():
                return
            try:
                wait_s = self.tick()
            except Exception as exc:  # noqa: BLE001 - whatever it was, the disk must not fill up
                # A disk that fails says so each time; a bug is told with where it is.
                _log.warning(
                    "disk %s: cleanup: %s", self._state.slots[self._number].path, exc,
                    exc_info=not isinstance(exc, OSError),
                )  # fmt: skip
                wait_s = 1.0

    def tick(self) -> float:
        """Do one step; return how long nothing is to be done, in seconds."""
        state = self._state
        slot = state.slots[self._number]
        if not slot.health.readable:
            return 1.0
        usage = self._measure()
        if usage is None or not slot.health.writable:
            return 1.0
        asked_s = self._work_off_asked()
        need = self._need(usage)
        self._line.keep(self._ahead_bytes(usage, need))
        self._patrol.step()
        if need:
            return min(asked_s, self._clean(need))
        is_written = state.reservations.files(self._number) > 0
        return min(asked_s, BUSY_INTERVAL_S if is_written else IDLE_INTERVAL_S)

    def _measure(self) -> Usage | None:
        """Ask the disk for its room, and the files that are written for their size."""
        state, number = self._state, self._number
        for node_id in state.handles.written(number):
            fd = state.handles.dup(node_id)
            if fd is not None:
                try:
                    blocks = os.fstat(fd).st_blocks
                finally:
                    os.close(fd)
                state.reservations.written(
                    node_id, blocks * records.BLOCK_BYTES, is_counted=not self._counts_late
                )
        is_settled = self._settle_writes()
        state.measure_room(number, is_settled=is_settled)
        state.leases.be_quiet(on=any(state.rooms.is_filling(n) for n in state.carriers))
        state.leases.prune()
        usage = state.rooms.usage(number)
        if usage is not None:
            now_s, grown_bytes = time.monotonic(), state.reservations.grown(number)
            self._rate.note(now_s, usage.used_bytes + self._returning.removed_bytes)
            state.rooms.written(number, self._rate.per_s)
            if self._frees_late and self._settled_bytes is not None:
                self._returning.measured(now_s, usage.used_bytes, grown_bytes, self._settled_bytes)
            self._settled_bytes = None
        return usage

    def _settle_writes(self) -> bool:
        """See to it that a measurement covers what was written before; whether it does now."""
        reservations, number = self._state.reservations, self._number
        if not self._counts_late:
            self._settled_bytes = reservations.grown(number)
            return True
        largest_bytes = self._state.rooms.largest_bytes(number)
        ended_bytes = reservations.unmeasured(number)
        if largest_bytes is None or ended_bytes <= largest_bytes * UNSETTLED_RATIO:
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Have the disk count what was written and removed until now."""
        written_bytes = self._state.reservations.grown(self._number)
        with self._state.on(self._number):
            self._state.carriers[self._number].disk.settle_removals()
        self._settled_bytes = written_bytes

    # -- how much

    def _need(self, usage: Usage) -> Need:
        """Return what has to go now; begins and ends the task that says so."""
        state, number = self._state, self._number
        marks = state.rooms.watermarks
        now_s = time.monotonic()
        need = marks.need(usage).less(self._returning.still_bytes(now_s), 0)
        short_bytes = state.rooms.short(number) - self._returning.still_bytes(now_s, RETURNS_S)
        if short_bytes > 0:
            need = Need(max(need.size_bytes, short_bytes), max(need.inodes, 1))
        if self._task is None and self._line.is_vain:
            if short_bytes > 0:
                self._give_up()
            return Need()
        promised_bytes = state.reservations.unwritten(number)
        with self._mutex:
            if self._task is None and need:
                if short_bytes > 0:
                    self._begin(Trigger.FULL)
                elif marks.exceeded(usage, promised_bytes):
                    self._begin(Trigger.WATERMARK)
        if self._task is not None and not need:
            self._end(Result.DONE)
        return need if self._task is not None else Need()

    def _begin(self, trigger: Trigger) -> None:
        self._task = self._tasks.make(self._number, trigger)
        self._task.result = Result.RUNNING

    def _end(self, result: Result, reason: str = "") -> None:
        with self._mutex:
            task, self._task = self._task, None
        if task is not None:
            self._tasks.end(task, result, reason)
            _log.info(
                "disk %s: task %d (%s): %s, %d files, %d bytes%s",
                self._state.slots[self._number].path, task.id, task.trigger, result, task.files,
                task.size_bytes, f" ({reason})" if reason else "",
            )  # fmt: skip

    def _ahead_bytes(self, usage: Usage, need: Need) -> int:
        """Return how much is to be condemned: what has to go, and what will have to soon."""
        state = self._state
        if not need and not state.rooms.is_filling(self._number):
            return 0
        written_bytes = int(self._rate.per_s * state.leases.silence_s)
        ahead_bytes = max(int(AHEAD_RATIO * usage.capacity_bytes), written_bytes)
        most_bytes = int(AHEAD_RATIO_MAX * usage.capacity_bytes)
        return need.size_bytes + min(ahead_bytes, most_bytes)

    # -- removing

    def _clean(self, need: Need) -> float:
        """Remove what is ripe, a batch; return when to go on."""
        assert self._task is not None, "there is a need"
        task = self._task
        began_s = time.monotonic()
        units = self._line.take_ripe(need, BATCH)
        if not units:
            if self._line.is_vain:
                self._give_up()
                self._end(Result.SHORT, "everything else is in use, leased or pinned")
                return BUSY_INTERVAL_S
            return RIPE_INTERVAL_S
        self._remove(units, task)
        return 0.0 if task.trigger is Trigger.FULL else self._pause_s(began_s)

    def _pause_s(self, began_s: float) -> float:
        """Return how long to rest after a batch begun at *began_s*: reads come first.

        Nobody rests while nobody reads, nor while somebody waits for room.
        """
        before, self._noted = self._noted, self._state.accesses.noted
        if self._noted == before:
            return 0.0
        return min(time.monotonic() - began_s, RIPE_INTERVAL_S)

    def _give_up(self) -> None:
        """Nothing more may go: let nobody wait for it who cannot wait until something may."""
        state, number = self._state, self._number
        # What is being written may go as soon as it is finished.
        is_written = state.reservations.files(number) > 0
        state.rooms.give_up(number, time.monotonic() if is_written else self._line.again_s)

    def _remove(self, units: list[Unit], task: Task) -> None:
        state = self._state
        removed = removal.remove(state, units, f"task {task.id} ({task.trigger})")
        for unit, protection in removed.kept:
            task.skipped[protection.value] += 1
            if protection is Protection.IN_USE:
                for node_id in unit.ids:
                    state.leases.spare(node_id)
        self._line.went(removed.gone)
        size_bytes = sum(unit.size_bytes for unit in removed.gone)
        self._tasks.count(task, sum(len(unit.nodes) for unit in removed.gone), size_bytes)
        self._give_back(size_bytes)

    def _give_back(self, size_bytes: int) -> None:
        """See to it that a measurement counts what was removed."""
        self._returning.removed(size_bytes)
        if self._frees_late and size_bytes:
            with contextlib.suppress(OSError):
                self._settle()

    # -- what was asked for

    def _work_off_asked(self) -> float:
        """Do the next step of the oldest cleanup somebody asked for; return when to do the next."""
        with self._mutex:
            if not self._asked:
                return math.inf
            task, selection = self._asked[0]
        task.result = Result.RUNNING
        began_s = time.monotonic()
        try:
            is_over = selection.step(self._remove_of(task))
        except Exception as exc:
            with self._mutex:
                self._asked.popleft()
            self._tasks.end(task, Result.FAILED, str(exc))
            raise
        if is_over:
            with self._mutex:
                self._asked.popleft()
            self._tasks.end(task, selection.result)
            return 0.0
        return self._pause_s(began_s)

    def _remove_of(self, task: Task) -> Callable[[list[Unit]], None]:
        return lambda units: self._remove(units, task)


class _Rate:
    """How fast a disk is written, in bytes a second, of late."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self.per_s = 0.0

    def note(self, now_s: float, written_bytes: int) -> None:
        """So much was written until now, ever."""
        self._seen.append((now_s, written_bytes))
        while self._seen[0][0] < now_s - _RATE_WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        first_s, first_bytes = self._seen[0]
        if now_s > first_s:
            self.per_s = max(0.0, (written_bytes - first_bytes) / (now_s - first_s))
