"""``kvfuse fsck`` of a real mount on loop-mounted disks, while clients go on, and its repair."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disks import loop_disks
from tests.mounting import PROJECT, Mounted

pytestmark = pytest.mark.timeout(300)
CLIENTS = 2
ROUNDS = 4

# Puts, replaces, reads and unlinks files as connectors do, and moves their directories.
CLIENT = """
import os, sys
base, done = sys.argv[1], 0
while True:
    directory = f"{base}-{done % 3}"
    os.makedirs(directory, exist_ok=True)
    for number in range(8):
        for length in (1000, 70000):
            with open(f"{directory}/{number}.bin_{os.getpid()}.tmp", "wb") as file:
                file.write(b"k" * length)
            os.rename(f"{directory}/{number}.bin_{os.getpid()}.tmp", f"{directory}/{number}.bin")
        with open(f"{directory}/{number}.bin", "rb") as file:
            assert len(file.read()) == 70000
    os.rename(directory, f"{directory}-moved")
    for number in range(8):
        os.unlink(f"{directory}-moved/{number}.bin")
    os.rmdir(f"{directory}-moved")
    done += 1
    print(done, flush=True)
"""


def fsck(mount: Mounted, *arguments: str) -> tuple[int, dict]:
    """Return exit code and answer of ``kvfuse fsck`` of the mount."""
    done = subprocess.run(
        [sys.executable, "-m", "kvfuse", "fsck", str(mount.path), *arguments, "--json"],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_nothing_is_wrong_while_clients_go_on(setup: str, tmp_path: Path) -> None:
    """Two clients put and unlink: not one finding, with and without --repair, and no error."""
    with loop_disks(2) as (_, disks), Mounted(tmp_path, disks, setup=setup) as mount:
        for number in range(200):
            (mount.path / f"{number}.bin").write_bytes(b"x" * number)
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(mount.path / f"client{number}")],
                stdout=subprocess.PIPE, text=True,
            )
            for number in range(CLIENTS)
        ]  # fmt: skip
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline(), "a client has failed"
            for number in range(ROUNDS):
                code, told = fsck(mount, *(("--repair",) if number % 2 else ()))
                assert (code, told["findings"]) == (0, [])
                assert told["compared"] > 200
            assert all(client.poll() is None for client in clients), "a client has failed"
        finally:
            for client in clients:
                client.kill()
                client.communicate()


def test_repair_while_mounted(setup: str, tmp_path: Path) -> None:
    """What is gone is a miss, what nobody knew is there; clients see both at once."""
    with loop_disks(2) as (_, disks), Mounted(tmp_path, disks, setup=setup) as mount:
        for name in ("gone.bin", "kept.bin"):
            (mount.path / name).write_bytes(name.encode())
        kept, gone = mount.disk_of("kept.bin"), mount.disk_of("gone.bin")
        assert os.stat(mount.path / "gone.bin").st_size == 8
        (gone / "gone.bin").unlink()
        subprocess.run(["cp", "-a", kept / "kept.bin", kept / "copy.bin"], check=True)
        (kept / "foreign.bin").write_bytes(b"?")
        code, told = fsck(mount)
        assert code == 1
        assert told["faults"] == 2
        code, told = fsck(mount, "--repair")
        assert code == 0
        assert {found["path"]: found["repair"] for found in told["findings"]} == {
            "gone.bin": "forgotten", "copy.bin": "taken in", "foreign.bin": "",
        }  # fmt: skip
        wait_for_misses_to_expire()
        assert sorted(os.listdir(mount.path)) == ["copy.bin", "kept.bin"]
        assert not (mount.path / "gone.bin").exists()
        assert (mount.path / "copy.bin").read_bytes() == b"kept.bin"
        assert (kept / "foreign.bin").read_bytes() == b"?"
        assert fsck(mount)[0] == 0


def wait_for_misses_to_expire() -> None:
    """The kernel may remember for a second that there is no such name."""
    time.sleep(1.5)
