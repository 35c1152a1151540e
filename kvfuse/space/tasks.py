"""Cleanup tasks: what kvfuse deletes on its own, why, and what came of it.

Concurrency: any thread; one mutex. A task is changed by the evictor of its disk only.
"""

import itertools
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

KEPT_MAX = 1000
SHOWN_MAX = 100  # keys of a dry run


class Trigger(StrEnum):
    """Why a disk is cleaned."""

    WATERMARK = "watermark"
    FULL = "full"  # a file could not be made, or not be written
    MANUAL = "manual"
    STALE = "stale"
    TEMP = "temp"


class Result(StrEnum):
    """How a task stands."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    SHORT = "short"  # all that may go has gone, and that was not enough
    FAILED = "failed"


@dataclass(slots=True)
class Task:
    """One cleanup of one disk. *selection* is "lru", "all", or what the files were chosen by."""

    id: int
    disk: int
    trigger: Trigger
    selection: str = "lru"
    dry_run: bool = False
    result: Result = Result.QUEUED
    reason: str = ""
    files: int = 0
    size_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    keys: list[str] = field(default_factory=list)  # of a dry run
    created: float = field(default_factory=time.time)
    ended: float | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def to_json(self, disk_id: str) -> dict[str, Any]:
        """Return this, JSON-ready."""
        return {
            "id": self.id,
            "disk": disk_id,
            "trigger": self.trigger.value,
            "selection": self.selection,
            "dry_run": self.dry_run,
            "result": self.result.value,
            "reason": self.reason,
            "files": self.files,
            "bytes": self.size_bytes,
            "skipped": dict(self.skipped),
            "keys": self.keys,
            "created": round(self.created, 3),
            "ended": None if self.ended is None else round(self.ended, 3),
        }


class Tasks:
    """The tasks of a mounted pool, the last ``KEPT_MAX`` of them. They do not outlive the server.

    Ids go on over restarts: they come from the pool's supply of numbers.
    """

    def __init__(self, first_id: int) -> None:
        self._mutex = threading.Lock()
        self._ids = itertools.count(first_id)
        self._tasks: OrderedDict[int, Task] = OrderedDict()
        self.evicted: Counter[tuple[int, str]] = Counter()  # files by (disk, trigger)
        self.evicted_bytes: Counter[tuple[int, str]] = Counter()

    def make(
        self, disk: int, trigger: Trigger, *, selection: str = "lru", dry_run: bool = False
    ) -> Task:
        """Return a new task."""
        with self._mutex:
            task = Task(next(self._ids), disk, trigger, selection, dry_run)
            self._tasks[task.id] = task
            while len(self._tasks) > KEPT_MAX:
                self._tasks.popitem(last=False)
            return task

    def count(self, task: Task, files: int, size_bytes: int) -> None:
        """A task has removed so much more."""
        task.files += files
        task.size_bytes += size_bytes
        if not task.dry_run:
            self.evicted[task.disk, task.trigger.value] += files
            self.evicted_bytes[task.disk, task.trigger.value] += size_bytes

    def end(self, task: Task, result: Result, reason: str = "") -> None:
        """A task is over."""
        task.result, task.reason, task.ended = result, reason, time.time()
        task.done.set()

    def find(self, task_id: int) -> Task | None:
        """Return a task, None when it is unknown or forgotten."""
        return self._tasks.get(task_id)

    def all(self) -> list[Task]:
        """Return all that are remembered, the newest last."""
        with self._mutex:
            return list(self._tasks.values())
