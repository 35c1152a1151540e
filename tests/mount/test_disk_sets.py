"""Disks come, go and change places under a real mount, by configuration and restart."""

import os
from pathlib import Path

import pytest

from tests.mounting import Mounted

FILES = 90


def fill(mount: Mounted, first: int, count: int) -> None:
    """Store files as connectors do: under a temp name, then renamed."""
    directory = mount.path / "m"
    directory.mkdir(exist_ok=True)
    for number in range(first, first + count):
        temp = directory / f"{number}.bin_{os.getpid()}.tmp"
        temp.write_bytes(b"block %d" % number)
        temp.rename(directory / f"{number}.bin")


def hits(mount: Mounted, count: int = FILES) -> set[int]:
    """Return the files that are there, which must be whole and exactly those that are listed."""
    directory = mount.path / "m"
    found = set()
    for number in range(count):
        try:
            data = (directory / f"{number}.bin").read_bytes()
        except FileNotFoundError:
            continue
        assert data == b"block %d" % number
        found.add(number)
    listed = {int(name.removesuffix(".bin")) for name in os.listdir(directory)}
    assert found == {number for number in listed if number < count}
    return found


def remount(mount: Mounted, disks: list[Path]) -> None:
    mount.stop()
    mount.disks = disks
    mount.start()


def made(base: Path, count: int) -> list[Path]:
    disks = [base / f"disk{number}" for number in range(count)]
    for disk in disks:
        disk.mkdir()
    return disks


@pytest.mark.parametrize("placement", ["rendezvous", "index"])
def test_changed_disks_cost_no_miss(setup, placement, tmp_path):
    """One more, another order, one less and back: only what is on the one away is missed."""
    every = made(tmp_path, 4)
    settings = {"pool": {"placement": placement}}
    with Mounted(tmp_path, every[:3], setup=setup, settings=settings) as mount:
        fill(mount, 0, FILES)
        assert hits(mount) == set(range(FILES))
        remount(mount, every[::-1])
        assert hits(mount) == set(range(FILES))
        fill(mount, FILES, FILES)
        assert any((every[3] / "m").iterdir())
        away = {int(path.name.removesuffix(".bin")) for path in (every[0] / "m").iterdir()}
        remount(mount, every[1:])
        assert hits(mount, 2 * FILES) == set(range(2 * FILES)) - away
        remount(mount, every)
        assert hits(mount, 2 * FILES) == set(range(2 * FILES))


@pytest.mark.parametrize("placement", ["rendezvous", "striped"])
def test_strict_pool_serves_only_owners(setup, placement, tmp_path):
    """A file whose owner is another disk by now is a miss, is written anew, and then hits."""
    every = made(tmp_path, 4)
    settings = {"pool": {"placement": placement, "serve_displaced": False}}
    with Mounted(tmp_path, every[:3], setup=setup, settings=settings) as mount:
        fill(mount, 0, FILES)
        assert hits(mount) == set(range(FILES))
        remount(mount, every)
        stale = set(range(FILES)) - hits(mount)
        assert stale
        if placement == "rendezvous":
            assert len(stale) < FILES // 2
        status = mount.status()
        assert sum(disk["stale_files"] for disk in status["disks"]) == len(stale)
        number = min(stale)
        located = mount.command("locate", str(mount.path / "m" / f"{number}.bin"))[0]
        assert (located["why"], located["state"]) == ("stale", "stale")
        assert located["stale_copies"] == [located["disk"]]
        fill(mount, number, 1)
        assert hits(mount) == set(range(FILES)) - stale | {number}
        located = mount.command("locate", str(mount.path / "m" / f"{number}.bin"))[0]
        assert (located["why"], located["disk"]) == ("owner", located["owner"])
