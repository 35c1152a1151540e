"""What the pyfuse3 driver adds to the pool: deadlines, lanes for each disk, a peaceful end."""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultdisk import FaultDisk
from tests.mounting import Mounted

pytestmark = pytest.mark.fuse

FILES = [f"file{number}" for number in range(24)]
CONTENT = b"x" * 5000


class Trial:
    """A mount of three disks; the first can be told to hang. *there* and *elsewhere* are files."""

    def __init__(self, mount: Mounted, disk: FaultDisk) -> None:
        self.mount = mount
        self.disk = disk
        for name in FILES:
            (mount.path / name).write_bytes(CONTENT)
        on_disk = {name for name in FILES if (disk.backing / name).exists()}
        self.there = [mount.path / name for name in sorted(on_disk)]
        self.elsewhere = [mount.path / name for name in sorted(set(FILES) - on_disk)]
        assert len(self.there) > 1, "24 files reach each of three disks"
        assert self.elsewhere


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """A pool whose first disk obeys; requests have a second."""
    backing, sick = tmp_path / "backing", tmp_path / "sick"
    disks = [sick, tmp_path / "good1", tmp_path / "good2"]
    for path in (backing, *disks):
        path.mkdir()
    settings = {"health": {"op_timeout": "1s"}}
    with (
        FaultDisk(backing, sick) as disk,
        Mounted(tmp_path / "pool", disks, setup="pyfuse3", settings=settings) as mount,
    ):
        yield Trial(mount, disk)
        disk.release()


def test_a_file_on_a_disk_that_hangs_is_a_miss(trial: Trial) -> None:
    """The open is given up at its deadline, and the file is then not there: no error, no wait."""
    trial.disk.hang("open")

    with pytest.raises(FileNotFoundError):
        trial.there[0].read_bytes()
    assert not trial.there[1].exists()


def test_the_other_disks_do_not_notice(trial: Trial) -> None:
    """While an open hangs, what lies elsewhere is found, read, listed and made."""
    trial.disk.hang("open")
    opener = threading.Thread(target=_try_to_read, args=(trial.there[0],))
    opener.start()
    trial.disk.wait_hanging()

    for path in trial.elsewhere:
        assert path.read_bytes() == CONTENT
    (trial.mount.path / "directory").mkdir()
    assert "directory" in os.listdir(trial.mount.path)
    opener.join()


def test_a_handle_on_a_disk_that_hangs_is_given_back(trial: Trial) -> None:
    """Reading fails at the deadline, closing does not, and the pool ends in peace."""
    with trial.there[0].open("rb", buffering=0) as file:
        trial.disk.hang("read")
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is looked at below
            file.read()

    assert caught.value.errno in (errno.EIO, errno.ESTALE)
    trial.disk.release()
    trial.mount.stop()


def test_a_create_that_came_late_leaves_no_file(trial: Trial) -> None:
    """Who was told that a create failed does not find an empty file when the disk is back."""
    trial.disk.hang("create")
    failed = []
    for number in range(12):
        path = trial.mount.path / f"late{number}"
        try:
            path.write_bytes(CONTENT)
        except OSError:
            failed.append(path)
            break

    assert failed, "12 files reach each of three disks"
    trial.disk.release()
    trial.mount.stop()
    trial.mount.start()
    assert not failed[0].exists()


def test_what_was_mapped_survives_a_stop_while_it_is_mapped(tmp_path: Path) -> None:
    """The daemon is told to stop while a client holds a changed page: the page is written back."""
    with Mounted(tmp_path, 2, setup="pyfuse3") as mount:
        path = mount.path / "mapped"
        path.write_bytes(bytes(8192))
        file = os.open(path, os.O_RDWR)
        pages = mmap.mmap(file, 8192)
        pages[5000:5003] = b"abc"
        mount.stop()
        pages.close()
        with contextlib.suppress(OSError):  # nobody answers the close any more
            os.close(file)

        mount.start()
        assert path.read_bytes()[5000:5003] == b"abc"


def test_a_listing_of_many_names_holds_each_once(tmp_path: Path) -> None:
    """Also when each name is removed as soon as it is listed."""
    with Mounted(tmp_path, 2, setup="pyfuse3") as mount:
        directory = mount.path / "many"
        directory.mkdir()
        for number in range(1000):
            (directory / str(number)).mkdir()

        seen = []
        with os.scandir(directory) as entries:
            for entry in entries:
                seen.append(entry.name)
                os.rmdir(entry.path)
        assert sorted(seen, key=int) == [str(number) for number in range(1000)]
        assert os.listdir(directory) == []


def _try_to_read(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError:
        return
