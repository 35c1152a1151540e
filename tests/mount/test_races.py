"""What comes right after a close meets the end of the file's last writer on the mount.

``close`` returns before the file system has heard of it (RELEASE is not waited for): whatever a
client does next runs beside it, and neither may undo the other.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.steps.registry import RENAME_EXCHANGE, renameat2
from tests.mounting import Mounted

ROUNDS = 200
DATA = b"data of a file"


def _rename(place: Path) -> Path:
    os.rename(place / "file", place / "other")
    return place / "other"


def _replace(place: Path) -> Path:
    os.rename(place / "file", place / "neighbour")
    return place / "neighbour"


def _link(place: Path) -> Path:
    os.link(place / "file", place / "other")
    assert os.stat(place / "file").st_nlink == 2
    return place / "other"


def _unlink_one_of_two(place: Path) -> Path:
    os.link(place / "file", place / "other")
    os.unlink(place / "file")
    assert os.stat(place / "other").st_nlink == 1
    return place / "other"


def _exchange_with_file(place: Path) -> Path:
    renameat2(str(place / "file"), str(place / "neighbour"), RENAME_EXCHANGE)
    assert (place / "file").read_bytes() == b"neighbour"
    return place / "neighbour"


def _exchange_with_directory(place: Path) -> Path:
    renameat2(str(place / "file"), str(place / "directory"), RENAME_EXCHANGE)
    assert (place / "file").is_dir()
    return place / "directory"


def _rename_parent(place: Path) -> Path:
    moved = place.with_name(f"{place.name}-moved")
    os.rename(place, moved)
    return moved / "file"


def _change_mode(place: Path) -> Path:
    os.chmod(place / "file", 0o600)
    assert os.stat(place / "file").st_mode & 0o777 == 0o600
    return place / "file"


def _change_times(place: Path) -> Path:
    os.utime(place / "file", ns=(10**18, 10**18 + 1))
    assert os.stat(place / "file").st_mtime_ns == 10**18 + 1
    return place / "file"


def _truncate(place: Path) -> Path:
    os.truncate(place / "file", 0)
    with open(place / "file", "ab") as stream:
        stream.write(DATA)
    return place / "file"


CHANGES = (
    _rename, _replace, _link, _unlink_one_of_two, _exchange_with_file, _exchange_with_directory,
    _rename_parent, _change_mode, _change_times, _truncate,
)  # fmt: skip
ADDED = {_replace: -1, _link: 1}


def _told(path: Path) -> tuple[object, ...]:
    status = os.lstat(path)
    return (path.read_bytes(), status.st_size, status.st_mode, status.st_nlink, status.st_mtime_ns)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_right_after_the_close_holds(
    change: Callable[[Path], Path], setup: str, mounted: Mounted
) -> None:
    """A file that is written, closed and changed at once has its data and the change, for good."""
    root = mounted.path / f"after-close{change.__name__}"
    root.mkdir()
    seen: dict[Path, tuple[object, ...]] = {}
    for number in range(ROUNDS):
        place = root / str(number)
        place.mkdir()
        (place / "directory").mkdir()
        (place / "neighbour").write_bytes(b"neighbour")
        (place / "file").write_bytes(DATA)
        path = change(place)
        seen[path] = _told(path)
        assert seen[path][:2] == (DATA, len(DATA)), number

    for path, told in seen.items():
        assert _told(path) == told, path
        assert len(os.listdir(path.parent)) == 3 + ADDED.get(change, 0), path
