"""Which files go when a disk needs room, and how much has to go. Pure.

Amounts are bytes and inodes, never numbers of files. A policy orders the files of a disk in two
queues, which the catalog keeps: a file's *place* is a number that grows, with ``MAIN`` set in the
second queue; *hits* counts what a policy wants to remember of its uses, at most ``HITS_MAX``.

Concurrency: the caller's matter.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

MAIN = 1 << 63  # in a place: the second queue
HITS_MAX = 3
SMALL_BYTES = 64 << 10  # of what is kept beside the blocks, as a model's configuration
_ASIDE = (b".json", b".yaml", b".yml", b".toml", b".txt", b".md")

# -- how much


class Usage(NamedTuple):
    """What a disk holds, its file system's own reserve left out; *inodes_total* 0: unbounded."""

    capacity_bytes: int
    used_bytes: int
    inodes_total: int = 0
    inodes_used: int = 0


class Need(NamedTuple):
    """What has to go; true while anything has."""

    size_bytes: int = 0
    inodes: int = 0

    def __bool__(self) -> bool:
        return self.size_bytes > 0 or self.inodes > 0

    def less(self, size_bytes: int, inodes: int) -> "Need":
        """Return what is left when so much has gone."""
        return Need(max(0, self.size_bytes - size_bytes), max(0, self.inodes - inodes))


class Watermarks(NamedTuple):
    """Above *high* a disk is cleaned down to *low*; ratios of its capacity."""

    high: float
    low: float

    def exceeded(self, usage: Usage, promised_bytes: int = 0) -> bool:
        """Return whether a disk is to be cleaned, with *promised_bytes* about to be written."""
        return bool(_above(usage, self.high, promised_bytes))

    def need(self, usage: Usage, promised_bytes: int = 0) -> Need:
        """Return what has to go until the low watermark is reached."""
        return _above(usage, self.low, promised_bytes)


def _above(usage: Usage, ratio: float, promised_bytes: int) -> Need:
    used_bytes = usage.used_bytes + promised_bytes
    inodes = usage.inodes_used - int(ratio * usage.inodes_total) if usage.inodes_total else 0
    return Need(max(0, used_bytes - int(ratio * usage.capacity_bytes)), max(0, inodes))


# -- what is protected


class Protection(StrEnum):
    """Why a file stays."""

    ABSENT = "absent"  # no record, or another file by now
    UNCOMMITTED = "uncommitted"  # being written
    GOING = "going"  # somebody removes it already
    LEASED = "leased"  # a client was told that it is there
    MOVING = "moving"  # being renamed or moved
    IN_USE = "in use"  # open or mapped
    PINNED = "pinned"


class Pins:
    """Patterns (as the shell's) of what is never evicted.

    One with a slash is held against the key, any other against the last part of it.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._names = _any_of([pattern for pattern in patterns if "/" not in pattern])
        self._keys = _any_of([pattern.lstrip("/") for pattern in patterns if "/" in pattern])

    @property
    def need_keys(self) -> bool:
        """Whether :meth:`hold` looks at more than the last part of a key."""
        return self._keys is not None

    def hold(self, key: bytes) -> bool:
        """Return whether *key*, a path below the mountpoint, is pinned."""
        if self._names is not None and self._names.match(key.rpartition(b"/")[2]):
            return True
        return self._keys is not None and self._keys.match(key) is not None


def _any_of(patterns: Sequence[str]) -> re.Pattern[bytes] | None:
    if not patterns:
        return None
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns).encode())


def goes_last(name: bytes, size_bytes: int) -> bool:
    """Return whether a file is one of the few small ones beside the blocks: it goes last."""
    return size_bytes <= SMALL_BYTES and name.endswith(_ASIDE)


def partners(name: bytes) -> tuple[bytes, ...]:
    """Return the names of files that are worth nothing without *name*, nor it without them."""
    if name.endswith(b".metadata"):
        return (name[: -len(b".metadata")],)
    if name.endswith(b".bucket"):
        return (name[: -len(b".bucket")] + b".meta", name + b".metadata")
    if name.endswith(b".meta"):
        return (name[: -len(b".meta")] + b".bucket", name + b".metadata")
    return (name + b".metadata",)


# -- which


class Entry(NamedTuple):
    """One file in the order of a disk."""

    id: int
    place: int
    size_bytes: int
    hits: int = 0

    @property
    def is_main(self) -> bool:
        """Whether it is in the second queue."""
        return bool(self.place & MAIN)


class Verdict(NamedTuple):
    """What becomes of the first file of a queue: it goes, or to the end of the second queue."""

    evict: bool
    hits: int = 0


_EVICT = Verdict(evict=True)


class Policy(Protocol):
    """The order in which files go. *uses_ghosts*: it wants to know of names that went lately."""

    name: str
    uses_ghosts: bool

    def committed(self, number: int, *, was_ghost: bool) -> int:
        """Return the place of a new file; *number* is higher than all before."""
        ...

    def accessed(self, place: int, hits: int, number: int) -> tuple[int, int]:
        """Return the place and hits of a file that was used."""
        ...

    def takes_main(self, first_bytes: int, main_bytes: int) -> bool:
        """Return whether the next victim is looked for in the second queue."""
        ...

    def judge(self, entry: Entry) -> Verdict:
        """Return what becomes of the first file of its queue."""
        ...


class Lru:
    """The least recently used goes first."""

    name = "lru"
    uses_ghosts = False

    def committed(self, number: int, *, was_ghost: bool) -> int:
        """Return the end of the queue."""
        return number

    def accessed(self, place: int, hits: int, number: int) -> tuple[int, int]:
        """Move the file to the end."""
        return number, 0

    def takes_main(self, first_bytes: int, main_bytes: int) -> bool:
        """The second queue has only what another policy left there; it counts as used last."""
        return first_bytes <= 0

    def judge(self, entry: Entry) -> Verdict:
        """Evict it."""
        return _EVICT


class S3Fifo:
    """Scan-resistant: what is used once passes through a tenth of the disk and goes.

    Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): a small queue for
    what is new, a main queue for what was used again, and the names of what went from the small one
    lately. A use moves nothing.
    """

    name = "s3fifo"
    uses_ghosts = True
    SMALL_RATIO = 0.1

    def committed(self, number: int, *, was_ghost: bool) -> int:
        """Return the end of the small queue, or of the main one when it had gone too early."""
        return number | MAIN if was_ghost else number

    def accessed(self, place: int, hits: int, number: int) -> tuple[int, int]:
        """Count."""
        return place, min(HITS_MAX, hits + 1)

    def takes_main(self, first_bytes: int, main_bytes: int) -> bool:
        """Keep the small queue small."""
        return main_bytes > 0 and first_bytes <= self.SMALL_RATIO * (first_bytes + main_bytes)

    def judge(self, entry: Entry) -> Verdict:
        """What was used stays: from the small queue it moves up, in the main one it goes round."""
        if entry.hits == 0:
            return _EVICT
        return Verdict(evict=False, hits=entry.hits - 1 if entry.is_main else 0)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Lru(), S3Fifo())}


def victims(
    entries: Iterable[Entry], need: Need, protection: Callable[[Entry], Protection | None]
) -> list[Entry]:
    """Return the first of *entries* that suffice for *need*, those under protection left out."""
    found: list[Entry] = []
    for entry in entries:
        if not need:
            break
        if protection(entry) is None:
            found.append(entry)
            need = need.less(entry.size_bytes, 1)
    return found
