"""Looks through the files of one disk for temps that nobody will rename any more, and removes them.

On the way it adds up what is pinned: nobody else looks at all files.

A temp that is open is never touched, however old; nor one that somebody used lately.

Concurrency: the evictor's thread only.
"""

import time

from kvfuse.cleaning import removal
from kvfuse.cleaning.line import is_abandoned, is_pinned
from kvfuse.cleaning.removal import Unit
from kvfuse.core.records import BLOCK_BYTES, Node, State
from kvfuse.core.routing import is_temp
from kvfuse.heart.state import PoolState
from kvfuse.space.tasks import Result, Tasks, Trigger

STEP_MAX = 128  # files in one step
STEPS_IN_LIFE = 100  # of a temp's age: how often a step is made at least
PAUSE_S_MAX = 0.5


class Patrol:
    """The patrol of the disk with *number*."""

    def __init__(self, state: PoolState, number: int, tasks: Tasks) -> None:
        self._state = state
        self._number = number
        self._tasks = tasks
        self._at = (0, 0)
        self._pause_s = min(PAUSE_S_MAX, state.rules.temp_max_age_s / STEPS_IN_LIFE)
        self._next_s = 0.0
        self._waiting: dict[int, Unit] = {}
        self._pinned_bytes = 0  # of the files seen in this round
        self._is_first_round = True

    def step(self) -> None:
        """Look at some files, if it is time; remove what was found and is not asked for."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (0.0 if self._is_first_round else self._pause_s)
        state = self._state
        rules, now_ns = state.rules, time.time_ns()
        with state.catalog.read() as txn:
            places = zip(txn.recent(self._number, self._at), range(STEP_MAX), strict=False)
            found = [place for place, _ in places]
            nodes = [txn.node(node_id) for _, node_id in found]
        self._at = found[-1] if len(found) == STEP_MAX else (0, 0)
        self._add_pinned([node for node in nodes if node is not None])
        for node in nodes:
            if (
                node is not None
                and is_temp(node.name, patterns=rules.temp_patterns)
                and is_abandoned(node, rules.temp_max_age_s, now_ns)
            ):
                self._find(node)
        self._remove_ripe(now_s)

    def _add_pinned(self, nodes: list[Node]) -> None:
        for node in nodes:
            if is_pinned(self._state, node):
                self._pinned_bytes += node.blocks * BLOCK_BYTES
        rooms, is_over = self._state.rooms, self._at == (0, 0)
        if is_over or self._is_first_round:
            rooms.pinned_bytes[self._number] = self._pinned_bytes
        if is_over:
            self._pinned_bytes, self._is_first_round = 0, False

    def _find(self, node: Node) -> None:
        state = self._state
        if node.id in self._waiting or node.state != State.COMMITTED:
            return
        if state.handles.inode(node.id) is None and state.leases.condemn(node.id):
            self._waiting[node.id] = Unit((node,))

    def _remove_ripe(self, now_s: float) -> None:
        leases = self._state.leases
        for node_id, unit in list(self._waiting.items()):
            ripe_s = leases.ripe_s(node_id)
            if ripe_s is None:  # spared
                del self._waiting[node_id]
            elif ripe_s <= now_s:
                del self._waiting[node_id]
                self._remove(unit)

    def _remove(self, unit: Unit) -> None:
        task = self._tasks.make(self._number, Trigger.TEMP, selection="abandoned temps")
        removed = removal.remove(self._state, [unit], f"task {task.id} (temp)")
        self._tasks.count(task, len(removed.gone), sum(u.size_bytes for u in removed.gone))
        for _, protection in removed.kept:
            task.skipped[protection.value] += 1
        self._tasks.end(task, Result.DONE)
