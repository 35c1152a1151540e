"""Disks and a catalog that fail, or end the process, at the k-th step."""

import functools
import os
from collections.abc import Callable
from typing import Any

from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.intenttable import IntentTable
from kvfuse.disks.disk import Disk
from kvfuse.pool.pool import Pool

CHANGES = (
    "make_dir", "set_dir", "remove_dir", "create", "rename", "rename_new", "exchange", "link",
    "unlink", "symlink", "write", "truncate", "fallocate", "set_mode", "set_owner", "set_owner_at",
    "set_times", "set_times_at", "set_xattr", "remove_xattr", "write_label", "write_label_at",
)  # fmt: skip
QUESTIONS = ("open_dir", "open_subdir", "open", "stat", "read_label_at", "readlink")


class Faults:
    """Counts steps; when armed, the one with number *at* fails, before or *late* after it is done.

    *always* lets every later step on that disk fail too: a disk that died.
    """

    def __init__(self) -> None:
        self.at = 0
        self.late = False
        self.act: Callable[[], None] = lambda: None
        self.always = False
        self.questions = False
        self.count = 0
        self.names: list[str] = []
        self._dead: object = None

    def arm(
        self, at: int, act: Callable[[], None], *, late: bool = False, always: bool = False,
        questions: bool = False,
    ) -> None:  # fmt: skip
        """Let step *at* (from 1) fail by *act*; with *questions* reading calls are steps too."""
        self.at, self.act, self.late, self.always = at, act, late, always
        self.questions, self.count, self.names, self._dead = questions, 0, [], None

    def disarm(self) -> None:
        """Fail no more; ``names`` keeps the steps that were seen."""
        self.at, self.always, self._dead = 0, False, None

    @property
    def hit(self) -> bool:
        """Whether the step came."""
        return 0 < self.at <= self.count

    def step(
        self, name: str, where: object, call: Callable[[], Any], abort: Callable[[], None]
    ) -> Any:
        """Do *call*, or fail."""
        if not self.at:
            return call()
        self.count += 1
        self.names.append(name)
        if self._dead is not None and where is self._dead:
            self.act()
        if self.count != self.at:
            return call()
        if self.always and isinstance(where, Disk):
            self._dead = where
        if self.late:
            call()
        else:
            abort()
        self.act()
        return None


def _nothing() -> None:
    pass


def _wrap(name: str, *, question: bool) -> Callable[..., Any]:
    original = getattr(Disk, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        faults = self.faults
        if question and not faults.questions:
            return original(self, *args, **kwargs)
        return faults.step(name, self, lambda: original(self, *args, **kwargs), _nothing)

    return wrapped


class FaultyDisk(Disk):
    """A real disk whose calls are steps."""

    faults: Faults


for _name in CHANGES:
    setattr(FaultyDisk, _name, _wrap(_name, question=False))
for _name in QUESTIONS:
    setattr(FaultyDisk, _name, _wrap(_name, question=True))


class FaultyCatalog(Catalog):
    """A real catalog whose commits are steps."""

    faults: Faults

    def commit(self, txn: Any) -> None:
        self.faults.step("commit", self, lambda: super(FaultyCatalog, self).commit(txn), txn.abort)


class FaultyIntentTable(IntentTable):
    """A real table in which to say and to drop are steps."""

    faults: Faults

    def say(self, number: int, intent: bytes) -> bool:
        said = functools.partial(super().say, number, intent)
        return bool(self.faults.step("say", self, said, _nothing))

    def drop(self, number: int) -> None:
        self.faults.step("drop", self, functools.partial(super().drop, number), _nothing)


def make_faulty(pool: Pool) -> Faults:
    """Turn the disks and the catalog of *pool* into ones that can fail."""
    faults = Faults()
    state = pool._state
    state.catalog.__class__ = FaultyCatalog
    state.catalog.faults = faults  # type: ignore[attr-defined]
    state.catalog._said.__class__ = FaultyIntentTable
    state.catalog._said.faults = faults
    for carriers in state.carriers.values():
        carriers.disk.__class__ = FaultyDisk
        carriers.disk.faults = faults  # type: ignore[attr-defined]
    return faults


def error(code: int) -> Callable[[], None]:
    """Return what raises *code*."""

    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act
