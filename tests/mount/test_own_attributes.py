"""What the mount tells of itself, and what of it stays on the disks only."""

import errno
import os
import time
from pathlib import Path

import pytest

from tests.mounting import Mounted

OWN = ("disk", "disk_path", "owner", "state")


@pytest.fixture
def stored(mounted: Mounted, request: pytest.FixtureRequest) -> Path:
    """A file on the mount."""
    path = mounted.path / f"{request.node.originalname}.bin"
    path.write_bytes(b"content")
    return path


def became_committed(path: Path) -> bool:
    """Wait until the mount has heard of the last writer's close, which ``close`` does not."""
    deadline_s = time.monotonic() + 30
    while os.getxattr(path, "user.kvfuse.state") != b"committed":
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_a_file_says_where_and_what_it_is(stored: Path, mounted: Mounted) -> None:
    """``user.kvfuse.*`` tell the disk, the path there, the owner and the state."""
    told = {name: os.getxattr(stored, f"user.kvfuse.{name}").decode() for name in OWN}
    disks = {disk["id"]: disk["path"] for disk in mounted.status()["disks"]}

    assert told["disk"] == told["owner"]
    assert told["disk_path"] == f"{disks[told['disk']]}/{stored.name}"
    assert Path(told["disk_path"]).read_bytes() == b"content"
    assert became_committed(stored)


def test_a_file_being_written_says_so(mounted: Mounted) -> None:
    """A file with a writer is pending, and visible all the same."""
    path = mounted.path / "being-written"
    with path.open("wb"):
        assert os.getxattr(path, "user.kvfuse.state") == b"pending"
        assert path.exists()


def test_the_mountpoint_tells_its_pool(mounted: Mounted) -> None:
    """``user.kvfuse.pool`` on the mountpoint is the id that ``status`` tells."""
    told = os.getxattr(mounted.path, "user.kvfuse.pool").decode()

    assert told == mounted.status()["pool"]["id"]


def test_own_attributes_are_not_listed_nor_set(stored: Path) -> None:
    """Tools that copy attributes do not meet them; setting or removing one is EPERM."""
    os.setxattr(stored, "user.mine", b"1")

    assert os.listxattr(stored) == ["user.mine"]
    for name in (*OWN, "anything"):
        with pytest.raises(PermissionError):
            os.setxattr(stored, f"user.kvfuse.{name}", b"x")
        with pytest.raises(PermissionError):
            os.removexattr(stored, f"user.kvfuse.{name}")


def test_an_unknown_own_attribute_is_absent(stored: Path) -> None:
    """A name of kvfuse's that means nothing is ENODATA."""
    with pytest.raises(OSError, match="No data") as caught:
        os.getxattr(stored, "user.kvfuse.nothing")
    assert caught.value.errno == errno.ENODATA


def test_the_label_of_a_file_is_on_its_disk_only(stored: Path, mounted: Mounted) -> None:
    """``trusted.kvfuse`` is there on the disk and not to be seen on the mount."""
    on_disk = mounted.disk_of(stored.name) / stored.name

    assert "trusted.kvfuse" in os.listxattr(on_disk)
    assert "trusted.kvfuse" not in os.listxattr(stored)
    with pytest.raises(OSError, match="No data"):
        os.getxattr(stored, "trusted.kvfuse")


def test_what_belongs_to_the_disks_is_not_on_the_mount(mounted: Mounted) -> None:
    """``.kvfuse`` and ``lost+found`` are neither shown nor to be made at the top."""
    assert not {".kvfuse", "lost+found"} & set(os.listdir(mounted.path))
    for name in (".kvfuse", "lost+found"):
        assert not (mounted.path / name).exists()
        with pytest.raises(PermissionError):
            (mounted.path / name).mkdir()
    (mounted.path / "below").mkdir()
    (mounted.path / "below" / "lost+found").mkdir()


def test_making_directories_touches_no_disk(mounted: Mounted) -> None:
    """A directory is a catalog record until a file needs it."""
    (mounted.path / "only" / "in" / "catalog").mkdir(parents=True)
    assert not any((disk / "only").exists() for disk in mounted.disks)

    (mounted.path / "only" / "in" / "catalog" / "file").write_bytes(b"x")

    assert len([disk for disk in mounted.disks if (disk / "only").exists()]) == 1


def test_files_lie_at_their_path_with_mode_and_owner(mounted: Mounted) -> None:
    """On its disk a file has the name, mode and owner it has on the mount."""
    path = mounted.path / "plain" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.chmod(path, 0o640)
    os.chown(path, 1234, 5678)
    on_disk = os.stat(mounted.disk_of("plain/file") / "plain" / "file")

    assert (on_disk.st_mode & 0o7777, on_disk.st_uid, on_disk.st_gid) == (0o640, 1234, 5678)


def test_two_hard_links_lie_on_one_disk(stored: Path, mounted: Mounted) -> None:
    """Links are links on the disk too."""
    other = stored.with_name(f"{stored.name}.other")
    os.link(stored, other)

    assert os.path.samefile(stored, other)
    disk = mounted.disk_of(stored.name)
    assert os.path.samefile(disk / stored.name, disk / other.name)


def test_everything_is_there_after_a_remount(setup: str, tmp_path: Path) -> None:
    """Files, links, attributes, empty directories and their modes survive a clean restart."""
    with Mounted(tmp_path, 3, setup=setup) as mount:
        top = mount.path / "top"
        (top / "empty").mkdir(parents=True)
        os.chmod(top / "empty", 0o750)
        for number in range(20):
            (top / f"{number}.bin").write_bytes(b"%d" % number)
        os.link(top / "0.bin", top / "hard")
        os.symlink("1.bin", top / "soft")
        os.setxattr(top / "2.bin", "user.crc", b"abc")
        os.setxattr(top, "user.note", b"def")
        numbers = {name: os.lstat(top / name).st_ino for name in os.listdir(top)}

        mount.restart()

        assert {name: os.lstat(top / name).st_ino for name in os.listdir(top)} == numbers
        assert [(top / f"{n}.bin").read_bytes() for n in range(20)] == [
            b"%d" % n for n in range(20)
        ]
        assert os.path.samefile(top / "0.bin", top / "hard")
        assert os.readlink(top / "soft") == "1.bin"
        assert os.getxattr(top / "2.bin", "user.crc") == b"abc"
        assert os.getxattr(top, "user.note") == b"def"
        assert os.stat(top / "empty").st_mode & 0o7777 == 0o750
