"""Cleanups that an operator asks for: which files on which disks, and what tasks there are.

Concurrency: any thread; the work is done by the evictors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import re2

from kvfuse.cleaning.evictor import Evictor
from kvfuse.cleaning.selection import Matcher, Selection
from kvfuse.core.errors import ConfigError, KvfuseError
from kvfuse.core.eviction import Need
from kvfuse.core.records import ROOT_ID
from kvfuse.heart.state import PoolState
from kvfuse.space.tasks import Task, Tasks, Trigger

PATTERN_CHARS_MAX = 1000
_PATTERN_MEMORY_BYTES = 8 << 20
_WALK = 1024


class Cleanups:
    """The cleanups of a mounted pool."""

    def __init__(self, state: PoolState, evictors: Mapping[int, Evictor], tasks: Tasks) -> None:
        self._state = state
        self._evictors = evictors
        self._tasks = tasks

    def clean(
        self,
        *,
        disk: str | None = None,
        keys: Sequence[bytes] = (),
        regex: str | None = None,
        everything: bool = False,
        dry_run: bool = False,
    ) -> list[dict[str, Any]]:
        """Begin one task for each disk in question, or join an equal one; return them.

        Without *keys*, *regex* and *everything* each disk is cleaned down to its low watermark.
        *disk* is an id, a unique prefix of one, or a path. With *dry_run* nothing is removed.

        Raises:
            KvfuseError: no such disk or key, or the pattern cannot be used.
        """
        numbers = self._numbers(disk)
        if keys:
            return self._shown(self._by_keys(keys, numbers, dry_run=dry_run))
        if regex is not None:
            matcher, selection = _compiled(regex), f"regex {regex}"
        else:
            matcher, selection = None, "all" if everything else "lru"
        tasks = []
        for number in numbers:
            if selection == "lru" and not dry_run:
                tasks.append(self._evictors[number].ask_by_use())
                continue
            task = self._tasks.make(number, Trigger.MANUAL, selection=selection, dry_run=dry_run)
            chosen = Selection(
                self._state, self._tasks, task, _walk(self._state, number), matcher,
                self._need(number) if selection == "lru" else None,
            )  # fmt: skip
            tasks.append(self._evictors[number].ask(task, chosen))
        return self._shown(tasks)

    def tasks(self, task_id: int | None = None) -> list[dict[str, Any]]:
        """Return all tasks that are remembered, or the one asked for.

        Raises:
            KvfuseError: there is no such task.
        """
        if task_id is None:
            return self._shown(self._tasks.all())
        task = self._tasks.find(task_id)
        if task is None:
            raise KvfuseError(f"task {task_id}: unknown, or forgotten; see: kvfuse tasks")
        return self._shown([task])

    def _by_keys(
        self, keys: Sequence[bytes], numbers: Sequence[int], *, dry_run: bool
    ) -> list[Task]:
        by_disk: dict[int, list[int]] = {}
        with self._state.catalog.read() as txn:
            for key in keys:
                node = txn.node(ROOT_ID)
                for part in (part for part in key.split(b"/") if part):
                    node = None if node is None else txn.child(node.id, part)
                shown = key.decode(errors="backslashreplace")
                if node is None or not self._state.visible(node):
                    raise KvfuseError(f"{shown}: no such file in the pool")
                if not node.is_regular:
                    raise KvfuseError(f"{shown}: not a file; name files, or use --regex")
                by_disk.setdefault(node.disk, []).append(node.id)
        tasks = []
        for number, ids in by_disk.items():
            if number in numbers:
                selection = f"keys {sorted(ids)}"
                task = self._tasks.make(
                    number, Trigger.MANUAL, selection=selection, dry_run=dry_run
                )
                chosen = Selection(self._state, self._tasks, task, iter(ids))
                tasks.append(self._evictors[number].ask(task, chosen))
        return tasks

    def _numbers(self, disk: str | None) -> list[int]:
        slots = [slot for slot in self._state.slots.values() if slot.number in self._evictors]
        if disk is not None:
            slots = [s for s in slots if s.disk_id.startswith(disk) or s.path == disk.rstrip("/")]
            if len(slots) != 1:
                which = "no disk that is there" if not slots else "several disks"
                raise KvfuseError(f"{disk}: {which} of this pool; see: kvfuse disk list")
            if not slots[0].health.writable:
                raise KvfuseError(f"{disk}: {slots[0].health.state.value}, nothing can be removed")
        return [slot.number for slot in slots if slot.health.writable]

    def _need(self, number: int) -> Need:
        usage = self._state.rooms.usage(number)
        return Need() if usage is None else self._state.rooms.watermarks.need(usage)

    def _shown(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        return [task.to_json(self._state.slots[task.disk].disk_id) for task in tasks]


def _compiled(regex: str) -> Matcher:
    """Return what finds *regex* in linear time.

    Raises:
        ConfigError: it is no regular expression, or needs too much memory.
    """
    if len(regex) > PATTERN_CHARS_MAX:
        raise ConfigError(f"--regex: {len(regex)} characters; use at most {PATTERN_CHARS_MAX}")
    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        matcher: Matcher = re2.compile(regex, options)
    except re2.error as exc:
        why = exc.args[0].decode() if isinstance(exc.args[0], bytes) else exc
        raise ConfigError(f"--regex: {why}; write one that RE2 knows") from exc
    return matcher


def _walk(state: PoolState, number: int) -> Iterator[int]:
    """Yield the ids of the committed files of a disk in their order, a bounded look at a time."""
    after = (0, 0)
    while True:
        with state.catalog.read() as txn:
            found = [at for at, _ in zip(txn.recent(number, after), range(_WALK), strict=False)]
        if not found:
            return
        after = found[-1]
        yield from (node_id for _, node_id in found)
