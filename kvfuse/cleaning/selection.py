"""Files an operator wants removed: by key, by pattern, all, or down to the low watermark.

They are condemned like any victim: what is leased or open stays until it is free, or is skipped.

Concurrency: the evictor's thread only, but for ``matching``.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvfuse.cleaning import removal
from kvfuse.cleaning.line import is_young_temp
from kvfuse.cleaning.removal import Unit
from kvfuse.core.eviction import Need, Protection
from kvfuse.core.records import Node
from kvfuse.heart.state import PoolState
from kvfuse.space.tasks import SHOWN_MAX, Result, Task, Tasks

STEP_MAX = 256  # files looked at in one step
BATCH = 32
PATIENCE = 3  # leases: how long what is asked for again and again is waited for


class Matcher(Protocol):
    """What is searched for in keys; None matches every key."""

    def search(self, key: str) -> object:
        """Return something true when *key* matches."""
        ...


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
    _waiting: list[Unit] = field(default_factory=list)
    _until_s: float = 0.0
    _is_read: bool = False

    def step(self, remove: Callable[[list[Unit]], None]) -> bool:
        """Do some of the work; return whether it is over."""
        if not self._is_read:
            self._read()
            return False
        if self.task.dry_run:
            return True
        leases = self.state.leases
        now_s = time.monotonic()
        ripe: list[Unit] = []
        rest: list[Unit] = []
        for unit in self._waiting:
            ripe_s = leases.ripe_s(unit.ids[0])
            if ripe_s is None:
                leases.condemn(unit.ids[0])
                rest.append(unit)
            elif ripe_s <= now_s and len(ripe) < BATCH:
                ripe.append(unit)
            else:
                rest.append(unit)
        self._waiting = rest
        if ripe:
            remove(ripe)
        elif rest and now_s > self._until_s:
            self.task.skipped[Protection.LEASED.value] += len(rest)
            self._waiting = []
            self.result = Result.SHORT
        elif rest:
            time.sleep(0.01)
        return not self._waiting

    def _read(self) -> None:
        """Take in the next files."""
        leases = self.state.leases
        with self.state.catalog.read() as txn:
            for _ in range(STEP_MAX):
                node_id = next(self.ids, None)
                if node_id is None or (self.need is not None and not self.need):
                    self._is_read = True
                    break
                node = txn.node(node_id)
                if node is None or not node.is_evictable or node.disk != self.task.disk:
                    continue
                self._take(node)
        self._until_s = time.monotonic() + PATIENCE * leases.silence_s

    def _take(self, node: Node) -> None:
        state, task = self.state, self.task
        try:
            path = state.path(node.parent)
        except OSError:
            return
        key = path + b"/" + node.name if path else node.name
        shown = key.decode(errors="backslashreplace")
        if self.matcher is not None and not self.matcher.search(shown):
            return
        if state.rules.pins.hold(key):
            task.skipped[Protection.PINNED.value] += 1
            return
        if is_young_temp(state, node):
            task.skipped[Protection.UNCOMMITTED.value] += 1
            return
        unit = Unit((node,))
        if removal.is_in_use(state, node):
            task.skipped[Protection.IN_USE.value] += 1
            return
        if self.need is not None:
            self.need = self.need.less(unit.size_bytes, 1)
        if task.dry_run:
            self.tasks.count(task, 1, unit.size_bytes)
            if len(task.keys) < SHOWN_MAX:
                task.keys.append(shown)
            return
        state.leases.condemn(node.id)
        if state.expire is not None:
            leases = state.leases
            state.expire(node.disk, node.parent, node.name, lambda: leases.expired(node.id))
        self._waiting.append(unit)
