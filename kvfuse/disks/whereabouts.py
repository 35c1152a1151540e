"""Where this host last saw each disk of a pool, so that a missing one can be told by its path.

One small file per pool in ``state_dir``. A hint, never an authority: losing it costs a message.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

_FILE = "disks.json"
_FILE_BYTES_MAX = 1 << 20


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A directory a disk was seen at, and whether something was mounted exactly there."""

    path: str
    is_mountpoint: bool


def is_mountpoint(path: str) -> bool:
    """Whether a file system begins at the directory *path*."""
    return os.stat(path).st_dev != os.stat(os.path.join(path, "..")).st_dev


def recall(state_dir: str, pool_id: str) -> dict[str, Place]:
    """Return the last place of each disk id of a pool; empty when that is not known."""
    return _read(Path(state_dir) / pool_id / _FILE)


def recall_all(state_dir: str) -> dict[str, dict[str, Place]]:
    """Return the last places of the disks of every pool this host knows, by pool."""
    return {file.parent.name: _read(file) for file in Path(state_dir).glob(f"*/{_FILE}")}


def remember(state_dir: str, pool_id: str, places: Mapping[str, Place]) -> None:
    """Replace what is known of a pool.

    Raises:
        OSError: it cannot be written.
    """
    directory = Path(state_dir) / pool_id
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = directory / f"{_FILE}.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(dict(places))) + b"\n")
    temporary.replace(directory / _FILE)


def pair_missing(
    missing: Iterable[str], paths: Iterable[str], places: Mapping[str, Place]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Tell which disk is the missing one at each configured path that has none.

    Returns (path by disk id, paths that belong to no disk of the pool, ids that have left the
    configuration). First by memory; then the paths left over are given to disks whose place is
    not known, then to ones that were elsewhere. A disk has left when no path is left for it and
    its place is known, or when every path is accounted for.
    """
    ids, free = sorted(missing), list(dict.fromkeys(paths))
    paired: dict[str, str] = {}
    for disk_id in ids:
        place = places.get(disk_id)
        if place is not None and place.path in free:
            paired[disk_id] = place.path
            free.remove(place.path)
    if not free:
        return paired, [], [disk_id for disk_id in ids if disk_id not in paired]
    rest = sorted((i for i in ids if i not in paired), key=lambda i: (i in places, i))
    for disk_id, path in zip(rest, list(free), strict=False):
        paired[disk_id] = path
        free.remove(path)
    for disk_id in rest:
        if disk_id not in paired and disk_id not in places:
            paired[disk_id] = ""  # it may be one of them: kept, until its place is known
    return paired, free, [disk_id for disk_id in ids if disk_id not in paired]


def _read(file: Path) -> dict[str, Place]:
    with (
        contextlib.suppress(OSError, msgspec.DecodeError, RecursionError),
        file.open("rb") as opened,
    ):
        return msgspec.json.decode(opened.read(_FILE_BYTES_MAX), type=dict[str, Place])
    return {}
