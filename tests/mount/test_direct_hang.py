"""The direct driver while a disk hangs: the others are served, and nobody waits for ever."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfuse.drivers.direct.session import can_run
from tests.directmount import DirectMount
from tests.faultdisk import FaultDisk

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(can_run() is not None, reason=str(can_run())),
]

SICK, WELL = 0, 1
LONG_S = 60.0
LANE_THREADS = 16  # of one disk


class Client(threading.Thread):
    """Does one thing to the mount in a thread of its own; *outcome* is "ok" or an errno's name."""

    def __init__(self, verb, *args) -> None:
        super().__init__(daemon=True)
        self._verb, self._args = verb, args
        self.outcome: str | None = None
        self.start()

    def run(self) -> None:
        try:
            self._verb(*self._args)
        except OSError as exc:
            self.outcome = errno.errorcode[exc.errno or 0]
        else:
            self.outcome = "ok"

    def result(self) -> str | None:
        """Return the outcome once there is one."""
        self.join(LONG_S)
        return self.outcome


class Sick:
    """A pool of a disk that hangs on command and one that never does."""

    def __init__(self, disk: FaultDisk, mounted: DirectMount) -> None:
        self.disk, self.mounted = disk, mounted

    def put(self, number: int, prefix: str) -> Path:
        """Return a new file with data on disk *number*."""
        path = self.mounted.path / self.mounted.name_on(number, prefix)
        path.write_bytes(b"data")
        return path


@contextlib.contextmanager
def sick_pool(tmp_path: Path, op_timeout_s: float, **options: object) -> Iterator[Sick]:
    backing, front, well = (tmp_path / name for name in ("backing", "front", "well"))
    for directory in (backing, front, well):
        directory.mkdir()
    with (
        FaultDisk(backing, front) as disk,
        DirectMount(
            tmp_path / "pool", [front, well], op_timeout_s=op_timeout_s, **options
        ) as mounted,
    ):
        try:
            yield Sick(disk, mounted)
        finally:
            disk.release()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Sick]:
    """Nobody is given up on while a test runs."""
    with sick_pool(tmp_path, LONG_S) as sick:
        yield sick


def read(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("op", ["open", "create", "unlink", "rename", "setattr"])
def test_other_disks_are_served_while_a_request_hangs(patient: Sick, op: str):
    """Whatever it is that hangs, it keeps one thread, not the mount.

    In another directory: the kernel itself lets nobody change the one where a change is unanswered.
    """
    path = patient.put(SICK, "sick")
    fresh = patient.mounted.path / patient.mounted.name_on(SICK, "fresh")
    (patient.mounted.path / "d").mkdir()
    well = [patient.put(WELL, f"d/well{turn}-") for turn in range(20)]
    verbs = {
        "open": lambda: path.read_bytes(),
        "create": lambda: fresh.write_bytes(b"x"),
        "unlink": lambda: os.unlink(path),
        "rename": lambda: os.rename(path, str(path) + ".final"),
        "setattr": lambda: os.truncate(path, 1),
    }

    patient.disk.hang(op)
    client = Client(verbs[op])
    patient.disk.wait_hanging()
    for other in well:
        assert other.read_bytes() == b"data"
        os.rename(other, str(other) + ".final")
        os.unlink(str(other) + ".final")
    served_meanwhile = client.outcome is None
    patient.disk.release()

    assert client.result() == "ok"
    assert served_meanwhile


def test_a_request_beyond_its_deadline_is_answered_and_undone_when_it_returns(tmp_path: Path):
    """The client gets EIO, the pool hears which disk it was, and no handle is left."""
    with sick_pool(tmp_path, 0.5) as sick:
        path = sick.put(SICK, "sick")
        other = sick.put(WELL, "well")
        sick.disk.hang("open")

        assert Client(read, path).result() == "EIO"
        _until(lambda: sick.mounted.ask("timeouts") != [])  # told after the client was answered
        assert other.read_bytes() == b"data"

        sick.disk.release()
        _until_closed(sick.mounted)


def _until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not so within 10 s")


def _until_closed(mounted: DirectMount) -> None:
    _until(lambda: mounted.ask("ids")["open"] == 0)


def test_a_crowd_before_a_hung_disk_keeps_nobody_else_waiting(patient: Sick):
    """More clients than threads: they queue for the sick disk, and all are served in the end."""
    paths = [patient.put(SICK, f"sick{number}-") for number in range(3 * LANE_THREADS)]
    other = patient.put(WELL, "well")

    patient.disk.hang("open")
    clients = [Client(read, path) for path in paths]
    patient.disk.wait_hanging()
    for _ in range(50):
        assert other.read_bytes() == b"data"
    served_meanwhile = all(client.outcome is None for client in clients)
    patient.disk.release()

    assert {client.result() for client in clients} == {"ok"}
    assert served_meanwhile
    _until_closed(patient.mounted)


def test_a_client_that_queues_for_a_hung_disk_can_be_killed(patient: Sick):
    """What nobody has begun to execute is taken back when its client is interrupted."""
    paths = [patient.put(SICK, f"sick{number}-") for number in range(LANE_THREADS + 1)]
    patient.disk.hang("open")
    clients = [Client(read, path) for path in paths[:-1]]
    patient.disk.wait_hanging(LANE_THREADS)

    late = subprocess.Popen([sys.executable, "-c", f"open({str(paths[-1])!r})"])
    with contextlib.suppress(subprocess.TimeoutExpired):
        late.wait(1.5)  # by now it waits
    late.send_signal(signal.SIGKILL)
    assert late.wait(LONG_S / 2) == -signal.SIGKILL
    assert all(client.outcome is None for client in clients)

    patient.disk.release()
    assert {client.result() for client in clients} == {"ok"}


def test_data_moved_by_the_server_hangs_alone(tmp_path: Path):
    """Without passthrough a read of a hung disk keeps its own threads only."""
    with sick_pool(tmp_path, LONG_S, passthrough=False) as sick:
        path, other = sick.put(SICK, "sick"), sick.put(WELL, "well")
        with path.open("rb", buffering=0) as file:
            sick.disk.hang("read")
            client = Client(file.read)
            sick.disk.wait_hanging()
            for _ in range(20):
                assert other.read_bytes() == b"data"
            served_meanwhile = client.outcome is None
            sick.disk.release()
            assert client.result() == "ok"

    assert served_meanwhile
