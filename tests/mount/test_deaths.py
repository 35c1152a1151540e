"""A server dies after the syscall and before the reply: clients see neither of them twice."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.test_restart import HOT, Load, check, server, wait_until
from tests.mounting import PROJECT, Mounted, runnable_setups

BUILD = PROJECT / "tests" / "builds" / "mortal"
CLIENTS = 3
DEATHS = 2  # the second of them mostly meets the request that the first one left unanswered
LIFE_S = 0.6  # shorter lives, many in a row, are what a crash loop is made of

MUTATING = [
    "CREATE", "MKNOD", "MKDIR", "SYMLINK", "LINK", "UNLINK", "RMDIR", "RENAME", "RENAME2",
    "OPEN", "RELEASE", "SETATTR", "SETXATTR", "REMOVEXATTR", "FALLOCATE",
]  # fmt: skip
# With data through the server these are other code; the rest is what it was.
OPCODES = {
    "direct": MUTATING,
    "direct-nopass": ["CREATE", "OPEN", "RELEASE", "SETATTR", "WRITE", "COPY_FILE_RANGE"],
}
pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(params=HOT)
def mounted(
    request: pytest.FixtureRequest, filesystems: list[Path], tmp_path: Path
) -> Iterator[Mounted]:
    """A pool over two filesystems, with servers that die as they are told."""
    obstacle = runnable_setups()[request.param]
    if obstacle is not None:
        pytest.skip(f"{request.param}: {obstacle}")
    fates(tmp_path).mkdir()
    disks = [filesystem / tmp_path.name for filesystem in filesystems[1:]]
    with Mounted(
        tmp_path, disks, setup=request.param, build=BUILD,
        environment={"KVFUSE_TEST_FATES": str(fates(tmp_path))},
    ) as mount:  # fmt: skip
        yield mount


def fates(base: Path) -> Path:
    return base / "fates"


def tell(mount: Mounted, fate: str, deaths: int) -> None:
    """Let *deaths* servers meet *fate*, and wait until they have and another one is ready."""
    path = fates(mount.base) / fate
    count = restarts(mount) + deaths
    fresh = path.with_suffix(".new")
    fresh.write_text(str(deaths))
    fresh.rename(path)
    wait_until(lambda: restarts(mount) == count)
    assert not path.exists()
    server(mount)


def restarts(mount: Mounted) -> int:
    """Return how many servers were followed until now."""
    (path,) = (mount.base / "run").glob("*/supervisor.json")
    return json.loads(path.read_text())["restarts"]


def open_descriptors(mount: Mounted) -> int:
    return len(os.listdir(f"/proc/{mount.pid}/fd"))


def compare(mount: Mounted) -> list[dict]:
    """Return what kvfuse fsck finds between the catalog and the disks of an ended mount."""
    done = subprocess.run(
        [sys.executable, "-m", "kvfuse", "fsck", "--config", mount.base / "kvfuse.toml", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    return json.loads(done.stdout)["findings"]


def test_a_server_that_dies_before_it_answers_fails_no_call(mounted: Mounted) -> None:
    """After each mutating opcode in turn, twice in a row; nothing is done twice, lost or left."""
    descriptors = open_descriptors(mounted)
    deaths = 0
    load = Load(mounted, CLIENTS)
    try:
        for opcode in OPCODES[mounted.setup.name]:
            tell(mounted, opcode, DEATHS)
            deaths += DEATHS
            time.sleep(LIFE_S)
        told = load.end()
    finally:
        load.kill()

    check(told)
    assert mounted.status()["processes"]["server"]["restarts"] == deaths
    wait_until(lambda: mounted.status()["open_files"] == 0)
    wait_until(lambda: open_descriptors(mounted) <= descriptors + 2)  # the spare server's
    mounted.stop()
    assert "is lost" not in mounted.log.read_text()  # no open file
    assert compare(mounted) == []


def test_a_file_without_a_name_closed_in_a_last_moment_is_held_by_nobody(mounted: Mounted) -> None:
    """A server dies between the note that it is closed and all else: its room comes back."""

    def held() -> list[str]:
        links = []
        for pid in (mounted.pid, server(mounted)):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        disks = tuple(map(str, mounted.disks))
        return [link for link in links if link.startswith(disks) and link.endswith(" (deleted)")]

    with (mounted.path / "file").open("wb") as file:
        file.write(b"data")
        file.flush()
        (mounted.path / "file").unlink()
        wait_until(held)
        path = fates(mounted.base) / "closing"
        path.write_text("1")
    wait_until(lambda: restarts(mounted) == 1)
    wait_until(lambda: not held())
    assert mounted.status()["open_files"] == 0


def test_a_file_that_lost_its_name_while_a_server_died_is_there_or_missing(
    mounted: Mounted,
) -> None:
    """Opened, unlinked by another client, and nobody was told: one came before the other."""
    (mounted.path / "file").write_bytes(b"data")
    path = fates(mounted.base) / "opened"
    path.write_text("1")
    try:
        found = (mounted.path / "file").read_bytes()
    except FileNotFoundError:
        found = b"data"

    assert restarts(mounted) == 1
    assert found == b"data"
    assert not (mounted.path / "file").exists()
    wait_until(lambda: mounted.status()["open_files"] == 0)


@pytest.mark.parametrize("thread", ["watchdog", "lead"])
def test_a_server_that_lost_a_thread_it_cannot_be_without_is_followed(
    mounted: Mounted, thread: str
) -> None:
    """It beats no longer, although all its other threads live; what it had read is asked again."""
    load = Load(mounted, CLIENTS)
    try:
        tell(mounted, thread, 1)
        time.sleep(LIFE_S)
        told = load.end()
    finally:
        load.kill()

    check(told)
    (death,) = mounted.status()["processes"]["server"]["last_restarts"]
    assert "no heartbeat" in death["reason"]
