"""The sections of the configuration: keys, values, bounds, defaults. Pure.

A field is named as its key is in the file; durations are held in seconds, sizes in bytes. Dumped
as JSON each value is written as in the file, so that a dump can be validated again. A validator
says "what is wrong; what to write".
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
)

from kvfuse.core import quantities
from kvfuse.core.placement import Policy
from kvfuse.core.quantities import show
from kvfuse.core.routing import TempPattern, temp_pattern, with_patterns

PATH_BYTES_MAX = 4095
LIST_MAX = 256
OP_TIMEOUT_S_MIN, OP_TIMEOUT_S_MAX = 0.01, 3600.0
NEGATIVE_TTL_S_MAX = 86_400.0
LEASE_TTL_S_MAX = 3600.0
PIN_CHARS_MAX = 255
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
FILES_PER_S_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class Reserve:
    """Room that is never handed out: a ratio of each disk's capacity, or bytes of each disk."""

    ratio: float = 0.0
    size_bytes: int = 0

    def of(self, capacity_bytes: int) -> int:
        """Return the reserve of a disk of *capacity_bytes*, in bytes."""
        return min(capacity_bytes, self.size_bytes + math.ceil(self.ratio * capacity_bytes))


def _clean(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{show(text)} is not UTF-8; use a name that is") from None
    if any(not char.isprintable() for char in text):
        raise ValueError(f"{show(text)} holds a control character; use a name without")
    return text


def _path(text: str) -> str:
    _clean(text)
    if not text:
        raise ValueError("path is empty; write one from /")
    if not text.startswith("/"):
        raise ValueError(f"{show(text)} is not absolute; write it from /")
    if len(text.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"path of over {PATH_BYTES_MAX} bytes; use a shorter one")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{show(text)} holds '..'; write the path without")
    return "/" + "/".join(parts)


def _path_or_nothing(text: str) -> str:
    return _path(text) if text else ""


def _temp_dir(text: str) -> str:
    _clean(text)
    parts = [part for part in text.split("/") if part]
    if not parts or not {".", ".."}.isdisjoint(parts):
        raise ValueError(
            f"{show(text)} names no directory; write its name, or its path below the mountpoint"
        )
    if len(parts) == 1 and not text.startswith("/"):
        return parts[0]
    return "/" + "/".join(parts)


def _temp_pattern(text: str) -> str:
    try:
        temp_pattern(text)
    except ValueError as exc:
        raise ValueError(f"{exc}; write one like '(?P<final>.+)\\.part'") from exc
    return text


def _pin(text: str) -> str:
    _clean(text)
    if not text.strip("/"):
        raise ValueError(f"{show(text)} names no file; write a name or a path, * for any part")
    if len(text) > PIN_CHARS_MAX:
        raise ValueError(f"pattern of {len(text)} characters; use at most {PIN_CHARS_MAX}")
    return text


def _tuple(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError(f'{show(value)} is no list; write ["…", "…"]')  # noqa: TRY004
    if len(value) > LIST_MAX:
        raise ValueError(f"{len(value)} entries; write at most {LIST_MAX}")
    return tuple(value)


def _policy(value: object) -> object:
    if value not in (known := [policy.value for policy in Policy]):
        choice = f"{', '.join(known[:-1])} or {known[-1]}"
        raise ValueError(f"{show(value)} is unknown; write {choice}")
    return Policy(value)


def _disk(value: object) -> object:
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, dict | DiskSettings):
        raise ValueError(f"{show(value)} is no disk; write its directory")  # noqa: TRY004
    return value


def _reserve(value: object) -> Reserve:
    if isinstance(value, Reserve):
        return value
    if isinstance(value, str) and value.endswith("%"):
        ratio = quantities.parse_percentage(value)
        if ratio >= 1:
            raise ValueError(f"{show(value)} leaves no room; write less than 100%")
        return Reserve(ratio=ratio)
    try:
        return Reserve(size_bytes=quantities.parse_size(value))
    except ValueError as exc:
        raise ValueError(f"{exc}, or a percentage such as 2%") from exc


def _reserve_text(reserve: Reserve) -> str:
    if reserve.ratio:
        return quantities.format_percentage(reserve.ratio)
    return quantities.format_size(reserve.size_bytes)


def _within(low: float, high: float, text: Callable[[float], str]) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:  # NaN is within nothing
            raise ValueError(f"{text(value)} is out of range; write {text(low)} to {text(high)}")
        return value

    return AfterValidator(check)


def _number(value: float) -> str:
    return f"{value:g}"


AbsolutePath = Annotated[str, AfterValidator(_path)]
PathOrNothing = Annotated[str, AfterValidator(_path_or_nothing)]
Seconds = Annotated[
    float, BeforeValidator(quantities.parse_duration), PlainSerializer(quantities.format_duration)
]


Percentage = Annotated[
    float,
    BeforeValidator(quantities.parse_percentage),
    PlainSerializer(quantities.format_percentage, return_type=str),
]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True
    )


class DiskSettings(_Section):
    """One disk of the configuration: its directory, its share, and whether it may be written."""

    path: AbsolutePath
    weight: Annotated[float, _within(WEIGHT_MIN, WEIGHT_MAX, _number)] = 1.0
    mode: Literal["rw", "ro"] = "rw"


class PoolSettings(_Section):
    """What is mounted where. *mountpoint* is empty when nothing named one.

    Without *serve_displaced* a file whose owner is another disk by now is a miss.
    """

    mountpoint: PathOrNothing = ""
    disks: Annotated[
        tuple[Annotated[DiskSettings, BeforeValidator(_disk)], ...], BeforeValidator(_tuple)
    ] = ()
    placement: Annotated[Policy, BeforeValidator(_policy)] = Policy.RENDEZVOUS
    driver: Literal["auto", "direct", "pyfuse3"] = "auto"
    access: Literal["posix", "owner"] = "posix"
    state_dir: AbsolutePath = "/var/lib/kvfuse"
    run_dir: AbsolutePath = "/run/kvfuse"
    serve_displaced: bool = True
    require_all_disks: bool = False
    temp_dirs: Annotated[
        tuple[Annotated[str, AfterValidator(_temp_dir)], ...], BeforeValidator(_tuple)
    ] = ()
    temp_patterns: Annotated[
        tuple[Annotated[str, AfterValidator(_temp_pattern)], ...], BeforeValidator(_tuple)
    ] = ()
    allow_shared_device: bool = False

    def routing_dirs(self) -> frozenset[bytes]:
        """Return *temp_dirs* as ``routing.routing_name`` takes them."""
        return frozenset(name.encode() for name in self.temp_dirs)

    def routing_patterns(self) -> tuple[TempPattern, ...]:
        """Return *temp_patterns*, then the default ones. Keep the result: it compiles them."""
        return with_patterns([temp_pattern(regex) for regex in self.temp_patterns])


class SpaceSettings(_Section):
    """Room that is kept, what goes to make room, and what ``statfs`` calls available.

    Above *high_watermark* a disk is cleaned down to *low_watermark*; *lease_ttl* seconds is how
    long a lookup that said yes stays true; a temp that nobody has open goes after *temp_max_age*.
    """

    high_watermark: Percentage = 0.9
    low_watermark: Percentage = 0.8
    lease_ttl: Annotated[Seconds, _within(0, LEASE_TTL_S_MAX, quantities.format_duration)] = 10.0
    temp_max_age: Annotated[
        Seconds, _within(1, quantities.DURATION_S_MAX, quantities.format_duration)
    ] = 3600.0
    pin: Annotated[tuple[Annotated[str, AfterValidator(_pin)], ...], BeforeValidator(_tuple)] = (
        "config.json",
    )
    eviction: Literal["lru", "s3fifo"] = "lru"
    stale_first: bool = True
    reserve: Annotated[
        Reserve, BeforeValidator(_reserve), PlainSerializer(_reserve_text, return_type=str)
    ] = Reserve(ratio=0.02)
    statfs: Literal["evictable", "physical"] = "evictable"


class MetadataCacheSettings(_Section):
    """How long the kernel may remember that a name does not exist, in seconds."""

    negative_ttl_secs: Annotated[float, _within(0, NEGATIVE_TTL_S_MAX, _number)] = 1.0


class HealthSettings(_Section):
    """Patience with disks: *op_timeout* seconds for one request."""

    op_timeout: Annotated[
        Seconds, _within(OP_TIMEOUT_S_MIN, OP_TIMEOUT_S_MAX, quantities.format_duration)
    ] = 5.0


class RecoverySettings(_Section):
    """What is read beside clients: files of each disk a second, 0 without limit.

    *check_after* seconds catalog and disks are compared where nothing had to be read; 0: never.
    """

    scan_files_per_s: Annotated[int, _within(0, FILES_PER_S_MAX, _number)] = 0
    check_after: Annotated[
        Seconds, _within(0, quantities.DURATION_S_MAX, quantities.format_duration)
    ] = 300.0


class ControlSettings(_Section):
    """Where the command line finds the daemon; empty *socket*: in the pool's run directory."""

    socket: PathOrNothing = ""


def space_conflicts(space: SpaceSettings) -> list[tuple[str, str]]:
    """Return (key, problem) of watermarks and reserve that leave each other no room."""
    low, high = space.low_watermark, space.high_watermark
    shown = quantities.format_percentage
    found = []
    if not 0 < low < high:
        problem = f"{shown(low)} is not below the high watermark {shown(high)}; write less"
        found.append(("space.low_watermark", problem))
    if high + space.reserve.ratio > 1:
        problem = f"{shown(high)} and the reserve are more than the disk; write less"
        found.append(("space.high_watermark", problem))
    return found


def conflicts(pool: PoolSettings, control: ControlSettings) -> list[tuple[str, str]]:
    """Return (key, problem) of values that are each right but not together."""
    paths = [disk.path for disk in pool.disks]
    found = [("pool.disks", problem) for problem in _disk_conflicts(paths)]
    if not pool.serve_displaced and not pool.placement.has_owners:
        problem = f"false, but placement {pool.placement} has no owners; write true"
        found.append(("pool.serve_displaced", problem))
    # Everything is inside "/": that it was named is told once.
    paths = [path for path in dict.fromkeys(paths) if path != "/"]
    mountpoint = pool.mountpoint
    if mountpoint == "/":
        found.append(("pool.mountpoint", "'/' cannot be mounted over; name a directory"))
        mountpoint = ""
    if mountpoint:
        overlaps = (_overlap(path, mountpoint) for path in paths)
        found += [("pool.mountpoint", problem) for problem in overlaps if problem]
    own = {"pool.state_dir": pool.state_dir, "pool.run_dir": pool.run_dir}
    if control.socket:
        own["control.socket"] = control.socket
    for key, place in own.items():
        found += [
            (key, f"{place} is on disk {path}; put it elsewhere")
            for path in paths
            if _is_inside(place, path)
        ]
        if mountpoint and _is_inside(place, mountpoint):
            found.append((key, f"{place} is below the mountpoint; put it elsewhere"))
    return found


def _disk_conflicts(paths: list[str]) -> list[str]:
    if not paths:
        return ["none given; name at least one disk directory"]
    if "/" in paths:
        return ["'/' cannot be a disk; name a directory of a mounted disk"]
    distinct = list(dict.fromkeys(paths))
    problems = [
        f"{path} is listed {paths.count(path)} times; keep one"
        for path in distinct
        if paths.count(path) > 1
    ]
    problems += [
        f"{inner} is inside {outer}; disks must be apart"
        for outer, inner in itertools.permutations(distinct, 2)
        if _is_inside(inner, outer)
    ]
    return problems


def _overlap(disk: str, mountpoint: str) -> str | None:
    if disk == mountpoint:
        return f"{mountpoint} is a disk of the pool; mount elsewhere"
    if _is_inside(mountpoint, disk):
        return f"{mountpoint} is inside disk {disk}; mount elsewhere"
    if _is_inside(disk, mountpoint):
        return f"disk {disk} is inside {mountpoint}; mount elsewhere"
    return None


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
