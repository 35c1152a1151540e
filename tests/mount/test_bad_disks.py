"""One disk of the pool fails, fills up, turns read-only or hangs: a miss, never an outage."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faultdisk import FaultDisk
from tests.mounting import Mounted

FILES = 30
PATIENCE_S = 40.0  # far beyond op_timeout: only a hang takes that long
OP_TIMEOUT = "1s"
DATA = b"block " * 3000

pytestmark = pytest.mark.timeout(240)


def bounded(function: Callable[[], Any]) -> Any:
    """Return what *function* returns, or the errno it raises; fail when it does not come back."""
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(function())
        except OSError as exc:
            answers.append(errno.errorcode[exc.errno or 0])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert answers, f"no answer within {PATIENCE_S} s"
    return answers[0]


@dataclass
class Trial:
    """A pool of three disks, of which the first fails on command, and files on all of them."""

    mount: Mounted
    bad: FaultDisk
    on_bad: list[Path]
    elsewhere: list[Path]

    def check_elsewhere(self) -> None:
        """Files on the other disks are read, listed and stored as ever."""
        for path in self.elsewhere:
            assert bounded(path.read_bytes) == DATA
        assert len(bounded(lambda: os.listdir(self.mount.path))) >= len(self.elsewhere)
        assert bounded(lambda: os.statvfs(self.mount.path).f_blocks) > 0

    def store(self, prefix: str) -> list[str]:
        """Store files, of which some belong on the bad disk; return the errnos of failures."""
        failures = []
        for number in range(FILES):
            temp = self.mount.path / f"{prefix}{number}.bin_1.tmp"
            final = self.mount.path / f"{prefix}{number}.bin"
            answer = bounded(lambda temp=temp: temp.write_bytes(DATA))
            if answer == len(DATA):
                answer = bounded(lambda temp=temp, final=final: os.rename(temp, final))
            if isinstance(answer, str):
                failures.append(answer)
            else:
                assert bounded(final.read_bytes) == DATA
        return failures

    def state(self) -> str:
        """Return the state of the bad disk, as the command line tells it."""
        disks = self.mount.status()["disks"]
        return next(d["state"] for d in disks if d["path"] == str(self.bad.mountpoint))


def wait_until_closed(mount: Mounted) -> None:
    """Wait for the last close: the server hears of it after the client was let go."""
    deadline_s = time.monotonic() + 30
    while mount.status()["open_files"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def trial(setup: str, filesystems: list[Path], tmp_path: Path) -> Iterator[Trial]:
    """Give a pool with files on every disk, nothing failing yet."""
    backing, mountpoint = filesystems[0] / tmp_path.name, tmp_path / "bad"
    for path in (backing, mountpoint):
        path.mkdir(exist_ok=True)
    good = [filesystem / f"{tmp_path.name}-good" for filesystem in filesystems[1:]]
    settings = {"health": {"op_timeout": OP_TIMEOUT}}
    with (
        FaultDisk(backing, mountpoint) as bad,
        Mounted(tmp_path / "pool", [mountpoint, *good], setup=setup, settings=settings) as mount,
    ):
        paths = [mount.path / f"file{number}.bin" for number in range(FILES)]
        for path in paths:
            path.write_bytes(DATA)
        wait_until_closed(mount)
        on_bad = [path for path in paths if mount.disk_of(path.name) == mountpoint]
        elsewhere = [path for path in paths if path not in on_bad]
        assert on_bad, "no file went to the bad disk"
        assert elsewhere, "every file went to the bad disk"
        try:
            yield Trial(mount, bad, on_bad, elsewhere)
        finally:
            bad.release()


def test_a_disk_that_fails_is_a_miss(trial: Trial) -> None:
    """EIO from a disk: its files become ENOENT, the others and new ones do not notice."""
    trial.bad.fail("*", "EIO")
    for path in trial.on_bad:
        bounded(path.read_bytes)

    answers = {bounded(path.read_bytes) for path in trial.on_bad}

    assert answers == {"ENOENT"}
    assert trial.state() == "FAILED"
    trial.check_elsewhere()
    assert trial.store("new") == []


def test_a_full_disk_is_passed_over(trial: Trial) -> None:
    """ENOSPC at create sends the file to another disk; what is on the full one is read."""
    for operation in ("create", "mknod", "mkdir"):
        trial.bad.fail(operation, "ENOSPC")

    assert trial.store("new") == []

    for path in trial.on_bad:
        assert bounded(path.read_bytes) == DATA
    trial.check_elsewhere()
    trial.bad.release()


def test_a_write_to_a_full_disk_says_so(trial: Trial) -> None:
    """ENOSPC in the middle of a write reaches the writer, and nobody else."""
    trial.bad.fail("write", "ENOSPC")

    failures = trial.store("new")

    assert set(failures) <= {"ENOSPC"}
    trial.check_elsewhere()


def test_a_read_only_disk_is_read_and_not_written(trial: Trial) -> None:
    """EROFS: reads go on, new files go elsewhere, changes of what is there are refused."""
    trial.bad.fail("changes", "EROFS")

    assert trial.store("new") == []
    for path in trial.on_bad:
        assert bounded(path.read_bytes) == DATA
    assert bounded(lambda: os.truncate(trial.on_bad[0], 1)) == "EROFS"
    trial.check_elsewhere()


def test_a_hung_disk_is_bounded_and_the_others_do_not_notice(trial: Trial) -> None:
    """A disk that never answers: each request ends with an error, the mount goes on answering."""
    trial.bad.hang("*")

    answers = [bounded(path.read_bytes) for path in trial.on_bad[:3]]

    assert {answer for answer in answers if isinstance(answer, str)} == set(answers)
    trial.check_elsewhere()
    assert set(trial.store("new")) <= {"EIO", "ENOENT", "ETIMEDOUT"}
    trial.check_elsewhere()


def test_the_daemon_ends_although_a_disk_failed(trial: Trial) -> None:
    """A failed disk does not keep the daemon from a clean end, nor from a new start."""
    trial.bad.fail("*", "EIO")
    for path in trial.on_bad:
        bounded(path.read_bytes)

    trial.mount.stop()
    trial.bad.release()
    trial.mount.start()

    for path in (*trial.on_bad, *trial.elsewhere):
        assert bounded(path.read_bytes) == DATA
