"""A server may die at any moment: clients see a pause, no error, and lose nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultdisk import FaultDisk
from tests.mounting import PROJECT, Mounted, runnable_setups

LOAD = Path(__file__).with_name("restart_load.py")
SECONDS = float(os.environ.get("KVFUSE_TEST_RESTART_S", "8"))
CLIENTS = 8
WAIT_S = 60.0
HOT = ["direct", "direct-nopass"]
pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(240 + 2 * int(SECONDS))]


def wait_until(condition, timeout_s: float = WAIT_S) -> None:
    """Wait until *condition* holds; fail when it does not within *timeout_s*."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.01)


@pytest.fixture(params=HOT)
def mounted(
    request: pytest.FixtureRequest, filesystems: list[Path], tmp_path: Path
) -> Iterator[Mounted]:
    """A pool over two filesystems, with a server that can be followed."""
    obstacle = runnable_setups()[request.param]
    if obstacle is not None:
        pytest.skip(f"{request.param}: {obstacle}")
    disks = [filesystem / tmp_path.name for filesystem in filesystems[1:]]
    with Mounted(tmp_path, disks, setup=request.param) as mount:
        yield mount


class Load:
    """Clients at work, each in a directory of its own."""

    def __init__(self, mount: Mounted, clients: int = CLIENTS) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(LOAD), str(mount.path / f"client{number}"), str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            )
            for number in range(clients)
        ]  # fmt: skip
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"

    def end(self) -> list[dict]:
        """Let them end; return what each has to tell."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=120)[0]) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def check(told: list[dict]) -> None:
    """Every client has worked and met nothing that it must not meet."""
    failures = [failure for client in told for failure in client["failures"]]
    assert not failures, f"{len(failures)} failures, the first: {failures[0]}"
    assert all(client["steps"] > 10 for client in told)


def server(mount: Mounted) -> int:
    """Return the pid of the server that is ready."""
    found: list[int] = []

    def is_there() -> bool:
        ledgers = list((mount.base / "run").glob("*/supervisor.json"))
        facts = json.loads(ledgers[0].read_text()) if ledgers else {}
        if facts.get("server") and facts["server"]["ready"]:
            found.append(facts["server"]["pid"])
        return bool(found)

    wait_until(is_there)
    return found[0]


def test_a_server_killed_every_second_under_load_fails_no_call(mounted: Mounted) -> None:
    """Every kind of call, long-lived and unlinked files, while the server is killed again."""
    load = Load(mounted)
    kills = 0
    try:
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            time.sleep(0.7)
            os.kill(server(mounted), signal.SIGKILL)
            kills += 1
        told = load.end()
    finally:
        load.kill()

    check(told)
    processes = mounted.status()["processes"]
    assert processes["server"]["restarts"] == kills
    assert processes["server"]["pid"] == server(mounted)


def test_an_upgrade_under_load_fails_no_call(mounted: Mounted) -> None:
    """Three in a row, each answered with the versions and the pause."""
    load = Load(mounted, 4)
    try:
        for number in range(3):
            before = server(mounted)
            answer = mounted.command("upgrade", str(mounted.path))
            assert answer["result"] == "done"
            assert answer["number"] == number + 1
            assert server(mounted) != before
        told = load.end()
    finally:
        load.kill()

    check(told)


def test_upgrades_at_once_get_an_answer_each(mounted: Mounted) -> None:
    """Those that ask together may share one; who asks while one is under way gets a later one."""

    def ask() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvfuse", "upgrade", str(mounted.path), "--json"], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=PROJECT,
        )  # fmt: skip

    load = Load(mounted, 2)
    asking = [ask(), ask()]
    try:
        wait_until(lambda: upgrade(mounted).get("result") in ("checking", "running"))
        under_way = upgrade(mounted)["number"]
        asking += [ask(), ask(), ask()]  # the second of them finds the first's already begun
        answers = [process.communicate(timeout=WAIT_S) for process in asking]
        told = load.end()
    finally:
        load.kill()
        for process in asking:
            process.kill()

    check(told)
    assert all(process.returncode == 0 for process in asking), answers
    assert {error for _, error in answers} == {""}
    said = [json.loads(output) for output, _ in answers]
    assert all(answer["result"] == "done" for answer in said)
    assert upgrade(mounted)["result"] == "done"
    assert all(answer["number"] > under_way for answer in said[2:])


def upgrade(mount: Mounted) -> dict:
    """Return what the supervisor tells of the last upgrade; nothing when there was none."""
    (path,) = (mount.base / "run").glob("*/supervisor.json")
    return json.loads(path.read_text())["upgrade"] or {}


def test_open_descriptors_do_not_grow_with_restarts(mounted: Mounted) -> None:
    """Neither the server's nor the supervisor's, nor the open files of the pool."""

    def use() -> None:
        for number in range(20):
            path = mounted.path / f"file{number}"
            path.write_bytes(b"x")
            assert path.read_bytes() == b"x"
            path.unlink()

    def restart() -> None:
        before = server(mounted)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: server(mounted) != before)
        use()

    def counts() -> tuple[int, int, int]:
        os.sync()
        return (
            len(os.listdir(f"/proc/{mounted.pid}/fd")),
            len(os.listdir(f"/proc/{server(mounted)}/fd")),
            mounted.status()["open_files"],
        )

    use()
    restart()
    wait_until(lambda: counts()[2] == 0)
    before = counts()
    for _ in range(4):
        restart()

    wait_until(lambda: counts()[2] == 0)
    after = counts()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 8  # threads and what they hold come and go


def test_the_next_server_serves_the_other_disks_when_one_hangs(tmp_path: Path) -> None:
    """A thread of the dead server is stuck on it: it is fenced, and comes back when it wakes."""
    if (obstacle := runnable_setups()["direct"]) is not None:
        pytest.skip(obstacle)
    for name in ("backing", "bad", "good"):
        (tmp_path / name).mkdir()
    with (
        FaultDisk(tmp_path / "backing", tmp_path / "bad") as bad,
        Mounted(tmp_path / "pool", [tmp_path / "bad", tmp_path / "good"], setup="direct") as mount,
    ):
        for number in range(40):
            (mount.path / f"file{number}").write_bytes(b"data")
        on_bad = [f"file{n}" for n in range(40) if (tmp_path / "backing" / f"file{n}").exists()]
        on_good = [f"file{n}" for n in range(40) if (tmp_path / "good" / f"file{n}").exists()]
        before = server(mount)
        bad.hang("*")
        opener = subprocess.Popen(
            [sys.executable, "-c", f"open({str(mount.path / on_bad[0])!r}).read()"],
            stderr=subprocess.DEVNULL,
        )
        try:
            bad.wait_hanging()
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: server(mount) != before)
            for name in on_good:
                assert (mount.path / name).read_bytes() == b"data"
            states = {row["path"]: row["state"] for row in mount.status()["disks"]}
            assert states[str(tmp_path / "good")] == "HEALTHY"
            assert states[str(tmp_path / "bad")] != "HEALTHY"
        finally:
            bad.release()
            opener.wait(WAIT_S)
        wait_until(lambda: all(row["state"] == "HEALTHY" for row in mount.status()["disks"]))
        for name in on_bad:
            assert (mount.path / name).read_bytes() == b"data"


def test_a_mount_that_cannot_be_resumed_comes_back_empty_handed(
    filesystems: list[Path], tmp_path: Path
) -> None:
    """With pyfuse3 open files are lost; the mount is there again, with what was stored."""
    disks = [filesystem / tmp_path.name for filesystem in filesystems[1:]]
    with Mounted(tmp_path, disks, setup="pyfuse3") as mount:
        temporary = mount.path / "file.tmp"
        temporary.write_bytes(b"data")
        temporary.rename(mount.path / "file")
        before = server(mount)
        os.kill(before, signal.SIGKILL)
        devices: set[int] = set()

        def is_back() -> bool:
            # a client that makes its directory whenever it is not there
            with contextlib.suppress(OSError):
                (mount.path / "gap").mkdir(parents=True, exist_ok=True)
                with (mount.path / "gap" / "file").open("wb") as file:
                    devices.add(os.fstat(file.fileno()).st_dev)
            return server(mount) != before

        wait_until(is_back)
        wait_until(lambda: (mount.path / "file").exists())

        assert (mount.path / "file").read_bytes() == b"data"
        assert mount.status()["processes"]["server"]["restarts"] == 1
        assert tmp_path.stat().st_dev not in devices, "stored below the mount, while it was away"
    assert not list(mount.path.iterdir())
