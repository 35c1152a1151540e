"""Where a new file goes: disks in order of preference. Pure.

``candidates`` depends on nothing but the routing name, the disk ids and their weights, and is part
of the on-disk format: it changes only together with ``records.FORMAT``. ``least_used`` depends on
how full the disks are, and binds nobody: the catalog knows where each file went.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from blake3 import blake3

from kvfuse.core.topology import Member

LEVELS = 256  # of use that ``least_used`` tells apart

_SPAN = float(1 << 64)
_BELOW_ONE = math.nextafter(1.0, 0.0)  # ln(1) is 0: the largest hashes would divide by it


class Policy(StrEnum):
    """How disks are preferred.

    RENDEZVOUS moves only what must move when the disks change, and knows weights. STRIPED is the
    modulo baseline it is measured against: nearly everything moves, weights are ignored. INDEX
    takes the least used disk, whatever the name: a file has no owner, only a place.
    """

    RENDEZVOUS = "rendezvous"
    INDEX = "index"
    STRIPED = "striped"

    @property
    def has_owners(self) -> bool:
        """Whether a name has an owner: without, a file is at home wherever it is."""
        return self is not Policy.INDEX


class Load(NamedTuple):
    """How full a disk is: *used_bytes* of *capacity_bytes*, and *reserved_bytes* on their way."""

    disk_id: str
    used_bytes: int
    capacity_bytes: int
    reserved_bytes: int


def least_used(loads: Sequence[Load], turn: int) -> tuple[str, ...]:
    """Return the disks of *loads*, least used first; what is reserved counts as used.

    Disks whose use differs by less than about 1/``LEVELS`` of their capacity are equal: the next
    one is first at each *turn*, so that a burst is spread over all of them.
    """
    ranked = sorted((_level(load), load.disk_id) for load in loads)
    order: list[str] = []
    for _, equals in groupby(ranked, key=lambda pair: pair[0]):
        ids = [disk_id for _, disk_id in equals]
        first = turn % len(ids)
        order += ids[first:] + ids[:first]
    return tuple(order)


def _level(load: Load) -> int:
    if load.capacity_bytes <= 0:
        return LEVELS + 1  # nothing fits; still better than no candidate
    taken_bytes = load.used_bytes + load.reserved_bytes
    return min(LEVELS, taken_bytes * LEVELS // load.capacity_bytes)


def candidates(routing: bytes, members: Sequence[Member], policy: Policy) -> tuple[str, ...]:
    """Return the ids of *members*, best first; the first is the owner of *routing*.

    The order of *members* does not matter. Empty when there are none.

    Raises:
        ValueError: *policy* has no owners.
    """
    if not policy.has_owners:
        raise ValueError(f"placement {policy.value} has no owners")
    if not members:
        return ()
    if policy is Policy.STRIPED:
        return _striped(routing, members)
    return _rendezvous(routing, members)


def _rendezvous(routing: bytes, members: Sequence[Member]) -> tuple[str, ...]:
    framed = _framed(routing)
    if len({member.weight for member in members}) == 1:
        # Whole numbers where they suffice: no logarithm, whose last bit differs between libraries.
        ranked = [(-_hash64(framed + _framed_id(m.disk_id)), m.disk_id) for m in members]
        return tuple([disk_id for _, disk_id in sorted(ranked)])
    scored = [
        (-_score(_hash64(framed + _framed_id(m.disk_id)), m.weight), m.disk_id) for m in members
    ]
    return tuple([disk_id for _, disk_id in sorted(scored)])


def _striped(routing: bytes, members: Sequence[Member]) -> tuple[str, ...]:
    ids = sorted(member.disk_id for member in members)
    first = _hash64(_framed(routing)) % len(ids)
    return (*ids[first:], *ids[:first])


def _score(hashed: int, weight: float) -> float:
    return -weight / math.log(min((hashed + 0.5) / _SPAN, _BELOW_ONE))


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(length=8), "big")


def _framed(data: bytes) -> bytes:
    # Its length in front: no two (name, id) pairs give the same bytes.
    return len(data).to_bytes(4, "little") + data


@lru_cache(maxsize=1024)
def _framed_id(disk_id: str) -> bytes:
    return _framed(disk_id.encode())
