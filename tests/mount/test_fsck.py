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

# Puts, replaces, reads and unlinks files as connectors do, moves their directories, and leaves
# some behind, so that others are evicted.
CLIENT = """
import errno, os, sys
base, done = sys.argv[1], 0

def put(path, size):
    with open(f"{path}_{os.getpid()}.tmp", "wb") as file:
        file.write(b"k" * size)
    os.rename(f"{path}_{os.getpid()}.tmp", path)

def a_round(directory):
    os.makedirs(directory, exist_ok=True)
    for number in range(8):
        put(f"{directory}/{number}.bin", 1000)
        put(f"{directory}/{number}.bin", 70000)
        with open(f"{directory}/{number}.bin", "rb") as file:
            assert len(file.read()) == 70000
        put(f"{base}-left-{done}-{number}.bin", 100000)
    os.link(f"{directory}/0.bin", f"{directory}/link.bin")
    with open(f"{directory}/1.bin", "r+b") as file:
        file.write(b"in place")
    os.chmod(f"{directory}/2.bin", 0o600)
    os.rename(directory, f"{directory}-moved")
    for name in os.listdir(f"{directory}-moved"):
        os.unlink(f"{directory}-moved/{name}")
    os.rmdir(f"{directory}-moved")

while True:
    try:
        a_round(f"{base}-{done}")
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOSPC, errno.ENOTEMPTY):
            raise
    done += 1
    print(done, flush=True)
"""
SETTINGS = {"space": {"lease_ttl": "100ms"}}


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
    """Two clients put and unlink, files are evicted: not one finding, with or without --repair."""
    with (
        loop_disks(2) as (_, disks),
        Mounted(tmp_path, disks, setup=setup, settings=SETTINGS) as mount,
    ):
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
            assert "(watermark): removed" in mount.log.read_text()
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
