"""The fault disk itself: a good disk until told otherwise, and as bad as told."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.faultdisk import FaultDisk

pytestmark = pytest.mark.fuse


@pytest.fixture
def disk(tmp_path: Path):
    """A fault disk over an empty directory."""
    backing, mountpoint = tmp_path / "backing", tmp_path / "disk"
    backing.mkdir()
    mountpoint.mkdir()
    with FaultDisk(backing, mountpoint) as disk:
        yield disk


def _errno_of(call, *args) -> int:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what is looked at
        call(*args)
    return caught.value.errno


def test_what_is_written_lies_in_the_backing_directory(disk: FaultDisk) -> None:
    """Content, mode, links, symlinks and attributes pass through, also trusted ones."""
    directory = disk.mountpoint / "a" / "b"
    directory.mkdir(parents=True)
    path = directory / "f"
    path.write_bytes(b"x" * 300_000)
    path.chmod(0o640)
    os.link(path, directory / "hard")
    (directory / "soft").symlink_to("f")
    os.setxattr(path, "trusted.test", b"value")
    os.utime(path, ns=(1, 2))

    backing = disk.backing / "a" / "b"
    assert (backing / "hard").read_bytes() == b"x" * 300_000
    assert (backing / "f").stat().st_mtime_ns == 2
    assert (backing / "f").stat().st_mode & 0o7777 == 0o640
    assert os.readlink(directory / "soft") == "f"
    assert os.getxattr(backing / "f", "trusted.test") == b"value"
    assert sorted(os.listdir(directory)) == ["f", "hard", "soft"]
    assert os.statvfs(disk.mountpoint).f_blocks == os.statvfs(disk.backing).f_blocks


def test_an_unlinked_open_file_is_still_read(disk: FaultDisk) -> None:
    """An inode lives as long as a handle."""
    path = disk.mountpoint / "f"
    path.write_bytes(b"still here")
    with path.open("rb") as file:
        path.unlink()

        assert file.read() == b"still here"
        assert os.fstat(file.fileno()).st_nlink == 0


def test_a_thousand_names_are_listed_and_removed(disk: FaultDisk) -> None:
    """A listing longer than one request holds each name once."""
    for number in range(1000):
        (disk.mountpoint / str(number)).touch()

    names = os.listdir(disk.mountpoint)
    assert len(names) == len(set(names)) == 1000
    for name in names:
        (disk.mountpoint / name).unlink()
    assert os.listdir(disk.mountpoint) == []


def test_an_operation_fails_as_often_as_told(disk: FaultDisk) -> None:
    """Two creates answer ENOSPC, the third works."""
    disk.fail("create", "ENOSPC", 2)

    assert _errno_of((disk.mountpoint / "a").touch) == errno.ENOSPC
    assert _errno_of((disk.mountpoint / "b").touch) == errno.ENOSPC
    (disk.mountpoint / "c").touch()
    assert disk.status()["failed"] == 2


def test_a_read_only_disk_still_reads(disk: FaultDisk) -> None:
    """While all changes answer EROFS, what is there can be read."""
    path = disk.mountpoint / "f"
    path.write_bytes(b"kept")
    disk.fail("changes", "EROFS")

    assert path.read_bytes() == b"kept"
    assert _errno_of(path.write_bytes, b"new") == errno.EROFS
    assert _errno_of(path.unlink) == errno.EROFS
    disk.release()
    path.unlink()


def test_a_dead_disk_answers_nothing_but_its_error(disk: FaultDisk) -> None:
    """With ``*`` every request fails, also looking up a name that was there."""
    (disk.mountpoint / "f").touch()
    disk.fail("*", "EIO")

    assert _errno_of(os.stat, disk.mountpoint / "f") == errno.EIO
    assert _errno_of(os.listdir, disk.mountpoint) == errno.EIO


def test_a_hung_operation_is_answered_after_release(disk: FaultDisk) -> None:
    """A read waits while reads hang; other operations do not; then it reads what is there."""
    path = disk.mountpoint / "f"
    path.write_bytes(b"late")
    disk.hang("read")
    result: list[bytes] = []
    reader = threading.Thread(target=lambda: result.append(path.read_bytes()))
    reader.start()
    disk.wait_hanging()

    (disk.mountpoint / "other").touch()
    assert result == []
    disk.release()
    reader.join()
    assert result == [b"late"]


def test_who_waits_is_released_when_the_disk_is_taken_away(tmp_path: Path) -> None:
    """At the end of the block nothing hangs, and nothing is mounted."""
    backing, mountpoint = tmp_path / "backing", tmp_path / "disk"
    backing.mkdir()
    mountpoint.mkdir()
    with FaultDisk(backing, mountpoint) as disk:
        disk.hang("*")
        asker = threading.Thread(target=os.path.exists, args=(mountpoint / "f",))
        asker.start()
        disk.wait_hanging()

    asker.join()
    assert not os.path.ismount(mountpoint)


def test_a_killed_disk_answers_at_once(disk: FaultDisk) -> None:
    """When its process dies, who hangs is answered, and who asks later is refused."""
    disk.hang("lookup")
    outcome: list[int] = []
    path = disk.mountpoint / "f"
    asker = threading.Thread(target=lambda: outcome.append(_errno_of(os.stat, path)))
    asker.start()
    disk.wait_hanging()

    disk.kill()
    asker.join()
    assert outcome[0] in (errno.ECONNABORTED, errno.ENOTCONN)
    assert _errno_of(os.stat, path) == errno.ENOTCONN


def test_an_unknown_operation_is_refused(disk: FaultDisk) -> None:
    """A typing error in a test does not pass for a fault."""
    with pytest.raises(ValueError, match="no such operation"):
        disk.fail("wirte", "EIO")
