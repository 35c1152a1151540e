"""A mount that is written several times over: nothing fails, nothing torn, nothing leased goes."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.disks import MIB, loop_disks
from tests.mount.flood import Flood
from tests.mounting import Mounted

pytestmark = pytest.mark.fuse

SPACE = {"lease_ttl": "1s"}


def fills(disks: Sequence[Path]) -> list[float]:
    """Return how full disks are, as kvfuse counts it."""
    found = []
    for disk in disks:
        space = os.statvfs(disk)
        capacity = space.f_blocks - (space.f_bfree - space.f_bavail)
        found.append(1 - space.f_bavail / capacity)
    return found


def write_all(file: BinaryIO | io.FileIO, data: bytes, times: int) -> None:
    """Write *data* so many times."""
    for _ in range(times):
        file.write(data)


def settled(disks: Sequence[Path], high: float = 0.9) -> list[float]:
    """Return how full disks are when they are below the high watermark, or after some seconds."""
    deadline_s = time.monotonic() + 20
    while max(fills(disks)) > high and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return fills(disks)


@pytest.mark.parametrize(
    ("filesystem", "sizes_mib", "total_mib"),
    [
        ("ext4", (96, 96, 96, 96), 1000),
        ("ext4", (64, 96, 128, 160), 900),
        ("xfs", (320, 320), 1200),
        ("btrfs", (768, 768), 2400),
    ],
)
def test_several_times_the_capacity(tmp_path, filesystem, sizes_mib, total_mib):
    """Eight clients write, others read: no ENOSPC, no wrong byte, no broken lease."""
    with loop_disks() as (made, _):
        disks = [made.add(filesystem, size * MIB) for size in sizes_mib]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            flood = Flood(mount.path, total_mib * MIB, largest_bytes=4 * MIB, lease_s=1.0)
            flood.run()
            assert not flood.failures, flood.failures[:5]
            assert flood.reads > 20
            found = settled(disks)
            assert max(found) <= 0.9
            assert min(found) > 0.6
            status = mount.status()
            assert status["space"]["rejected"] == 0


def test_one_disk_full_of_foreign_files(tmp_path):
    """The pool goes on with the other disks, and what is not kvfuse's is not touched."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 96 * MIB) for _ in range(3)]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            foreign = disks[0] / ".kvfuse" / "foreign"
            with foreign.open("wb") as file:
                file.write(b"f" * (76 * MIB))
            flood = Flood(mount.path, 500 * MIB, largest_bytes=4 * MIB, lease_s=1.0)
            flood.run()
            assert not flood.failures, flood.failures[:5]
            assert foreign.stat().st_size == 76 * MIB
            foreign.unlink()


def test_a_file_larger_than_a_disk(tmp_path):
    """It gets ENOSPC; stores that begin later succeed, and nothing else is lost."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 64 * MIB) for _ in range(2)]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            names = [f"before{number}" for number in range(8)]
            for name in names:
                (mount.path / name).write_bytes(name.encode() * 1000)
            where = {name: mount.disk_of(name) for name in names}
            with (mount.path / "huge").open("wb", buffering=0) as file:
                lost = mount.disk_of("huge")
                with pytest.raises(OSError, match="No space left"):
                    write_all(file, b"h" * MIB, 200)
            os.unlink(mount.path / "huge")
            for name in names:
                if where[name] != lost:
                    assert (mount.path / name).read_bytes() == name.encode() * 1000
            for number in range(20):
                (mount.path / f"later{number}").write_bytes(b"l" * MIB)
                assert (mount.path / f"later{number}").stat().st_size == MIB


def test_a_file_much_larger_than_its_siblings(tmp_path):
    """It outgrows what was promised for it by far: its disk is cleaned while it is written."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 96 * MIB) for _ in range(2)]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            for number in range(140):
                (mount.path / f"small{number}.data").write_bytes(b"s" * MIB)
            for number in range(4):
                data = bytes([number]) * (40 * MIB)
                with (mount.path / f"large{number}.data").open("wb", buffering=0) as file:
                    for offset in range(0, len(data), MIB):
                        assert file.write(data[offset : offset + MIB]) == MIB
                assert (mount.path / f"large{number}.data").read_bytes() == data


_MAPPED = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
sys.exit(0 if view[:] == b"m" * len(view) else 1)
"""


@pytest.fixture
def mapper() -> Iterator[list[subprocess.Popen[str]]]:
    """Give a list of processes that are ended afterwards."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def test_what_is_mapped_or_read_again_and_again_stays(tmp_path, mapper):
    """A mapping outlives its close; a file read each second survives all other writes."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 96 * MIB) for _ in range(2)]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            (mount.path / "mapped").write_bytes(b"m" * MIB)
            (mount.path / "hot").write_bytes(b"h" * MIB)
            reader = subprocess.Popen(
                [sys.executable, "-c", _MAPPED, str(mount.path / "mapped")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            mapper.append(reader)
            assert reader.stdout is not None
            assert reader.stdout.readline() == "mapped\n"
            flood = Flood(mount.path, 450 * MIB, largest_bytes=4 * MIB, lease_s=1.0)
            flood.also = lambda: (mount.path / "hot").read_bytes() == b"h" * MIB
            flood.run()
            assert not flood.failures, flood.failures[:5]
            assert (mount.path / "mapped").exists()
            reader.communicate("")
            assert reader.returncode == 0


def test_a_server_killed_under_eviction(tmp_path):
    """It comes back, goes on evicting, and usage is right."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 96 * MIB) for _ in range(2)]
        with Mounted(tmp_path, disks, setup="direct", settings={"space": SPACE}) as mount:
            flood = Flood(mount.path, 500 * MIB, largest_bytes=4 * MIB, lease_s=1.0)
            killed: list[int] = []

            def kill() -> bool:
                if flood.written_bytes > (len(killed) + 1) * 140 * MIB and len(killed) < 3:
                    for pid in mount.servers():
                        os.kill(pid, 9)
                        killed.append(pid)
                return True

            flood.also = kill
            flood.run()
            assert killed
            assert not flood.failures, flood.failures[:5]
            assert max(settled(disks)) <= 0.9
            status = mount.status()
            listed = sum(
                (mount.path / directory / name).stat().st_blocks * 512
                for directory in os.listdir(mount.path)
                for name in os.listdir(mount.path / directory)
            )
            assert status["space"]["used_bytes"] == listed


def test_clean_and_tasks_on_the_command_line(tmp_path):
    """What is asked for goes, what is open or pinned stays, and the tasks tell of it."""
    with Mounted(tmp_path, 1, setup="direct", settings={"space": {"lease_ttl": "100ms"}}) as mount:
        for name in ("a1", "a2", "b1", "config.json"):
            (mount.path / name).write_bytes(b"x" * 5000)
        path = str(mount.path)
        (dry,) = mount.command("clean", path, "--regex", "^a", "--dry-run")["tasks"]
        assert sorted(dry["keys"]) == ["a1", "a2"]
        with (mount.path / "a2").open("rb"):
            (task,) = mount.command("clean", path, "--regex", "^a")["tasks"]
            assert (task["files"], task["skipped"]) == (1, {"in use": 1})
        (one,) = mount.command("clean", path, "--key", "b1")["tasks"]
        assert one["files"] == 1
        mount.command("clean", path, "--all")
        assert os.listdir(mount.path) == ["config.json"]
        shown = mount.command("tasks", "--mountpoint", path)["tasks"]
        assert [task["trigger"] for task in shown] == ["manual"] * len(shown)
        assert mount.command("tasks", str(one["id"]), "--mountpoint", path)["tasks"] == [one]


def test_statfs_says_what_can_be_had(tmp_path):
    """Evictable bytes are available by default, and not in mode physical."""
    for mode, counts in (("evictable", True), ("physical", False)):
        with loop_disks() as (made, _):
            disks = [made.add("ext4", 64 * MIB)]
            space = {"statfs": mode}
            base = tmp_path / mode
            with Mounted(base, disks, setup="direct", settings={"space": space}) as mount:
                (mount.path / "file").write_bytes(b"x" * 8 * MIB)
                found = os.statvfs(mount.path)
                used = (found.f_blocks - found.f_bfree) * found.f_frsize
                assert 8 * MIB <= used <= 8 * MIB + 65536
                assert (found.f_bavail - found.f_bfree >= 8 * MIB // 4096) is counts
