"""The disks of a pool and their weights, numbered by epoch, as every disk remembers them. Pure.

A topology is (epoch, random id, parent id, members). Every disk carries the newest one it saw;
``settle`` decides between them at mount, ``Topology.changed`` makes the next. A disk that is
missing stays a member; one dropped from the configuration leaves.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvfuse.core.records import FORMAT

HISTORY_MAX = 16
MEMBERS_MAX = 4096
EPOCH_MAX = (1 << 63) - 1
_T = TypeVar("_T")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Member:
    """A disk of the pool; *weight* is its share of the keys relative to the others', above 0."""

    disk_id: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The disks in force since *epoch*; *history* is (epoch, id) of those before, oldest first.

    Members are kept sorted by id. Raises ValueError, with one line, when anything is impossible.
    """

    pool_id: str
    epoch: int
    id: str
    parent: str | None
    members: tuple[Member, ...]
    history: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be, and sort the members."""
        ids = (self.pool_id, self.id, *(() if self.parent is None else (self.parent,)))
        for value in (*ids, *(m.disk_id for m in self.members), *(h[1] for h in self.history)):
            if not _UUID.fullmatch(value):
                raise ValueError(f"topology: {_show(value)} is not a UUID")
        if not 1 <= self.epoch <= EPOCH_MAX:
            raise ValueError(f"topology: epoch {self.epoch} is not in 1..{EPOCH_MAX}")
        if not 1 <= len(self.members) <= MEMBERS_MAX:
            raise ValueError(f"topology: {len(self.members)} disks, need 1 to {MEMBERS_MAX}")
        if len({m.disk_id for m in self.members}) != len(self.members):
            raise ValueError("topology: a disk is listed twice")
        for member in self.members:
            if not (math.isfinite(member.weight) and member.weight > 0):
                raise ValueError(f"topology: weight {member.weight} of {member.disk_id}, need > 0")
        if len(self.history) > HISTORY_MAX:
            raise ValueError(f"topology: history of {len(self.history)}, at most {HISTORY_MAX}")
        if any(not 1 <= epoch < self.epoch for epoch, _ in self.history):
            raise ValueError("topology: history holds an epoch that is not before this one")
        in_order = tuple(sorted(self.members, key=lambda m: m.disk_id))
        object.__setattr__(self, "members", in_order)

    @classmethod
    def first(cls, pool_id: str, new_id: str, members: Iterable[Member]) -> "Topology":
        """Return the topology of a new pool."""
        return cls(pool_id=pool_id, epoch=1, id=new_id, parent=None, members=tuple(members))

    def changed(self, members: Iterable[Member], new_id: str) -> "Topology":
        """Return the next topology, with *members* and the fresh id *new_id*.

        Raises:
            ValueError: the members or the id are impossible.
        """
        if new_id == self.id:
            raise ValueError(f"topology: {new_id} is the id of the one before")
        return Topology(
            pool_id=self.pool_id,
            epoch=self.epoch + 1,
            id=new_id,
            parent=self.id,
            members=tuple(members),
            history=_newest((*self.history, (self.epoch, self.id))),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``topology.json``."""
        return {
            "format": FORMAT,
            "pool_id": self.pool_id,
            "epoch": self.epoch,
            "id": self.id,
            "parent": self.parent,
            "disks": [{"id": m.disk_id, "weight": m.weight} for m in self.members],
            "history": [{"epoch": epoch, "id": topology_id} for epoch, topology_id in self.history],
        }

    @classmethod
    def from_json(cls, data: object) -> "Topology":
        """Return the topology in *data*, a decoded ``topology.json``.

        Raises:
            ValueError: it was written by a newer version, or anything in it is odd.
        """
        table = _table(data, "topology")
        written = _take(table, "format", int)
        if written > FORMAT:
            raise ValueError(f"topology: format {written} is newer than {FORMAT}; upgrade kvfuse")
        if written < 1:
            raise ValueError(f"topology: format {written} does not exist")
        _no_more_than(table, {"format", "pool_id", "epoch", "id", "parent", "disks", "history"})
        parent = table.get("parent")
        return cls(
            pool_id=_take(table, "pool_id", str),
            epoch=_take(table, "epoch", int),
            id=_take(table, "id", str),
            parent=None if parent is None else _take(table, "parent", str),
            members=tuple(_member(row) for row in _take(table, "disks", list)),
            history=tuple(_past(row) for row in _take(table, "history", list)),
        )


def settle(found: Sequence[Topology], new_id: str) -> Topology:
    """Return the topology that holds, of those *found* on the disks of one pool; *new_id* is fresh.

    The highest epoch wins. Different ones of one epoch mean that halves of the pool were mounted
    apart, or that a crash came between two disks: they become a new epoch with the members of all
    and both in its history; which copy of a file is newer is then for generations to say.

    Raises:
        ValueError: none was given, or they are of different pools.
    """
    if not found:
        raise ValueError("topology: none found")
    pools = sorted({topology.pool_id for topology in found})
    if len(pools) > 1:
        raise ValueError(f"topology: of different pools: {', '.join(pools)}")
    epoch = max(topology.epoch for topology in found)
    # Sorted, so that the same disks in another order settle on the same.
    newest = sorted({t for t in found if t.epoch == epoch}, key=lambda t: (t.id, repr(t)))
    if len(newest) == 1:
        return newest[0]
    members = {m.disk_id: m for topology in newest for m in topology.members}
    past = {entry for topology in newest for entry in topology.history}
    past.update((t.epoch, t.id) for t in newest)
    return Topology(
        pool_id=pools[0],
        epoch=epoch + 1,
        id=new_id,
        parent=newest[-1].id,
        members=tuple(members.values()),
        history=_newest(sorted(past)),
    )


def _newest(history: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(history[-HISTORY_MAX:])


def _member(row: object) -> Member:
    table = _table(row, "disk")
    _no_more_than(table, {"id", "weight"})
    weight = table.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"topology: weight {_show(weight)} is not a number")  # noqa: TRY004
    try:
        return Member(_take(table, "id", str), float(weight))
    except OverflowError as exc:
        raise ValueError("topology: a weight is too large") from exc


def _past(row: object) -> tuple[int, str]:
    table = _table(row, "history entry")
    _no_more_than(table, {"epoch", "id"})
    return _take(table, "epoch", int), _take(table, "id", str)


def _table(data: object, what: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"topology: {what} is {_show(data)}, not an object")  # noqa: TRY004
    return data


def _take(table: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = table.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(  # noqa: TRY004 - one class for every oddity of a file
            f"topology: {key} is {_show(value)}, not {kind.__name__}"
        )
    return value


def _no_more_than(table: Mapping[str, Any], keys: set[str]) -> None:
    if unknown := table.keys() - keys:
        raise ValueError(f"topology: unknown key {_show(min(unknown, key=str))}")


def _show(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
