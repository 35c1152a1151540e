"""Files an operator wants removed: by key, by pattern, all, or down to the low watermark.

They are condemned like any victim, with those that go with them: what is leased or open stays
until it is free, or is skipped.

Concurrency: the evictor's thread only.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from kvfuse.cleaning import removal
from kvfuse.cleaning.line import is_pinned, is_young_temp, unit_of
from kvfuse.cleaning.removal import Unit
from kvfuse.core.eviction import Need, Protection
from kvfuse.core.records import Node
from kvfuse.heart.state import PoolState
from kvfuse.space.tasks import SHOWN_MAX, Result, Task, Tasks

STEP_MAX = 128  # files looked at in one step
BATCH = 32
WAITING_MAX = 1024  # units that wait for silence; the next are taken when these have gone
PATIENCE = 3  # leases: how long what is asked for again and again is waited for


class Matcher(Protocol):
    """What is searched for in keys; None matches every key."""

    def search(self, key: str) -> object:
        """Return something true when *key* matches."""
        ...


class _Waiting(NamedTuple):
    unit: Unit
    until_s: float


@dataclass(slots=True)
class Selection:
    """The files on one disk that one task is to remove."""

    state: PoolState
    tasks: Tasks
    task: Task
    ids: Iterator[int]  # of files to look at
    matcher: Matcher | None = None
    need: Need | None = None  # until that much is found; None: all
    result: Result = Result.DONE
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _taken: set[int] = field(default_factory=set)  # with others, before it was their turn
    _is_read: bool = False

    def step(self, remove: Callable[[list[Unit]], None]) -> bool:
        """Do some of the work; return whether it is over."""
        if not self._is_read and len(self._waiting) < WAITING_MAX:
            self._read()
            if not self._waiting:
                return self._is_read
        ripe = self._take_ripe()
        if ripe:
            remove(ripe)
        elif self._is_read or len(self._waiting) >= WAITING_MAX:
            time.sleep(0.01)
        return self._is_read and not self._waiting

    def _take_ripe(self) -> list[Unit]:
        """Take out of those that wait a batch that may go; look at each of some once."""
        leases = self.state.leases
        now_s = time.monotonic()
        ripe: list[Unit] = []
        for _ in range(min(len(self._waiting), STEP_MAX)):
            unit, until_s = self._waiting.popleft()
            at_s = [leases.ripe_s(node_id) for node_id in unit.ids]
            if all(each_s is not None and each_s <= now_s for each_s in at_s):
                ripe.append(unit)
                if len(ripe) == BATCH:
                    break
            elif now_s > until_s:
                self.task.skipped[Protection.LEASED.value] += len(unit.nodes)
                self.result = Result.SHORT
            else:
                for node_id, each_s in zip(unit.ids, at_s, strict=True):
                    if each_s is None:  # spared
                        leases.condemn(node_id)
                self._waiting.append(_Waiting(unit, until_s))
        return ripe

    def _read(self) -> None:
        """Take in the next files."""
        with self.state.catalog.read() as txn:
            for _ in range(STEP_MAX):
                node_id = next(self.ids, None)
                if node_id is None or (self.need is not None and not self.need):
                    self._is_read = True
                    return
                if node_id in self._taken:
                    self._taken.discard(node_id)
                    continue
                node = txn.node(node_id)
                if node is None or not node.is_evictable or node.disk != self.task.disk:
                    continue
                shown = self._matched(node)
                if shown is None:
                    continue
                unit = unit_of(self.state, txn, node)
                if unit is None:
                    self.task.skipped[Protection.UNCOMMITTED.value] += 1
                elif self._may_go(unit):
                    turn = (node.access, node.id)
                    self._taken.update(
                        other.id for other in unit.nodes[1:] if (other.access, other.id) > turn
                    )
                    self._take(unit)

    def _matched(self, node: Node) -> str | None:
        """Return the key of a file that is wanted, readable; None of any other."""
        try:
            shown = self.state.key(node).decode(errors="backslashreplace")
        except OSError:
            return None  # its directory is just going
        return shown if self.matcher is None or self.matcher.search(shown) else None

    def _may_go(self, unit: Unit) -> bool:
        """Whether nothing but a lease protects these files; what does is counted."""
        for node in unit.nodes:
            protection = None
            if is_pinned(self.state, node):
                protection = Protection.PINNED
            elif is_young_temp(self.state, node):
                protection = Protection.UNCOMMITTED
            elif self.state.handles.inode(node.id) is not None or (
                # What is mapped is asked again, and more dearly, when it is removed.
                self.task.dry_run and removal.is_in_use(self.state, node)
            ):
                protection = Protection.IN_USE
            if protection is not None:
                self.task.skipped[protection.value] += 1
                return False
        return True

    def _take(self, unit: Unit) -> None:
        state, task = self.state, self.task
        if self.need is not None:
            self.need = self.need.less(unit.size_bytes, len(unit.nodes))
        if task.dry_run:
            self.tasks.count(task, len(unit.nodes), unit.size_bytes)
            for node in unit.nodes[: SHOWN_MAX - len(task.keys)]:
                task.keys.append(state.key(node).decode(errors="backslashreplace"))
            return
        for node in unit.nodes:
            state.leases.condemn(node.id)
            if state.expire is not None:
                expired = partial(state.leases.expired, node.id)
                state.expire(node.disk, node.parent, node.name, expired)
        until_s = time.monotonic() + PATIENCE * state.leases.silence_s
        self._waiting.append(_Waiting(unit, until_s))
