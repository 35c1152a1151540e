"""The disks of a mount: what comes up, what is refused, and that a refusal writes nothing."""

import gc
import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfuse.core.errors import BusyError, DiskRefusedError
from kvfuse.core.health import DiskState
from kvfuse.disks import candidates
from kvfuse.disks.candidates import look_at
from kvfuse.disks.diskset import DiskSet, DiskSpec, init_disk, open_disks
from kvfuse.disks.whereabouts import Place, pair_missing
from tests.disks import LoopDisks, loop_disks

MIB = 1 << 20


class Site:
    """Three file systems, and a place for a mount and its state."""

    def __init__(self, loops: LoopDisks, paths: list[Path]) -> None:
        self.loops, self.paths, self.base = loops, paths, loops.base
        self.mountpoint = self.base / "mnt"

    def specs(self, *paths: Path) -> list[DiskSpec]:
        return [DiskSpec(str(path)) for path in paths or self.paths]

    def open(self, *paths: Path, specs: list[DiskSpec] | None = None, **options) -> DiskSet:
        dirs = {
            "mountpoint": str(self.mountpoint),
            "state_dir": str(self.base / "state"),
            "run_dir": str(self.base / "run"),
        }
        return open_disks(specs or self.specs(*paths), **(dirs | options))

    def mount(self, *paths: Path, **options) -> DiskSet:
        """Open and close again, as a mount that ended."""
        disks = self.open(*paths, **options)
        disks.close()
        return disks

    def refused(self, says: str, *paths: Path, error=DiskRefusedError, **options) -> str:
        """Expect a refusal that writes nothing on any disk and keeps nothing open."""
        gc.collect()  # what other tests left to it must not be closed in between
        before, open_before = self.snapshot(), sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(error, match=says) as refusal:
            self.open(*paths, **options)
        assert self.snapshot() == before
        assert sorted(os.listdir("/proc/self/fd")) == open_before
        text = str(refusal.value)
        assert "\n" not in text
        return text

    def snapshot(self) -> dict[str, object]:
        return {
            str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, _content(path))
            for root in self.base.iterdir()
            for path in [root, *root.rglob("*")]
            if root.suffix not in (".ext4", ".xfs", ".btrfs")
        }


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and path.stat().st_size < MIB else b""


@pytest.fixture
def site() -> Iterator[Site]:
    with loop_disks(3) as (loops, paths):
        yield Site(loops, paths)


def identity(path: Path) -> dict:
    return json.loads((path / ".kvfuse" / "disk.json").read_text())


def rewrite(path: Path, name: str, **changes) -> None:
    file = path / ".kvfuse" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# -- coming up ----------------------------------------------------------------------------------


def test_a_new_pool_is_made_and_found_again(site: Site) -> None:
    """With init the empty directories become disks; without it they are found, in any order."""
    site.refused("--init")
    first = site.mount(init=True)
    assert [slot.is_new for slot in first.slots] == [True] * 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in site.paths)
    second = site.mount(*reversed(site.paths))
    assert second.pool_id == first.pool_id
    assert second.topology == first.topology
    assert second.warnings == []
    assert {s.disk_id: s.path for s in second.slots} == {s.disk_id: s.path for s in first.slots}
    assert [slot.number for slot in second.slots] == [0, 1, 2]
    assert all(slot.health.schedulable and not slot.is_new for slot in second.slots)


def test_the_session_grows_with_each_mount(site: Site) -> None:
    """Whatever the clock says; every disk has it; a slot says which it had before."""
    first = site.mount(init=True)
    assert first.last_session == 0
    second = site.mount(now_ns=lambda: 5)
    assert second.session == first.session + 1
    assert second.last_session == first.session
    assert [slot.session for slot in second.slots] == [first.session] * 3
    assert {identity(path)["session"] for path in site.paths} == {second.session}


def test_a_disk_that_was_away_shows_an_older_session(site: Site) -> None:
    """So that recovery without a catalog does not believe it."""
    site.mount(init=True)
    site.loops.umount(site.paths[2])
    site.paths[2].rmdir()
    away = site.mount()
    site.paths[2].mkdir()
    site.loops.mount(site.paths[2])
    back = site.mount()
    assert [slot.session == back.last_session for slot in back.slots] == [True, True, False]
    assert back.topology == away.topology


def test_a_prepared_disk_joins_without_init(site: Site) -> None:
    """A directory made a disk on purpose is a new member, and says that it is new."""
    before = site.mount(*site.paths[:2], init=True)
    made = init_disk(str(site.paths[2]), adopt=False)
    after = site.mount()
    assert after.topology.epoch == before.topology.epoch + 1
    assert after.topology.parent == before.topology.id
    assert [slot.is_new for slot in after.slots] == [False, False, True]
    assert after.slots[2].disk_id == made.disk_id
    assert identity(site.paths[2])["pool_id"] == before.pool_id


def test_weights_and_dropped_disks_change_the_topology(site: Site) -> None:
    """A disk left out of the configuration leaves; the same configuration changes nothing."""
    first = site.mount(init=True)
    specs = [DiskSpec(str(site.paths[0]), 2.0), DiskSpec(str(site.paths[1]))]
    second = site.mount(specs=specs)
    assert second.topology.epoch == first.topology.epoch + 1
    assert sorted(m.weight for m in second.topology.members) == [1.0, 2.0]
    assert site.mount(specs=specs).topology == second.topology
    again = site.mount()
    assert len(again.topology.members) == 3
    assert again.topology.epoch == first.topology.epoch + 2


def test_halves_mounted_apart_settle(site: Site) -> None:
    """Two topologies of one epoch become a new one with the members of both."""
    site.mount(init=True)
    one = site.mount(site.paths[0])
    other = site.mount(site.paths[1])
    assert one.topology.epoch == other.topology.epoch
    both = site.mount(*site.paths[:2])
    assert both.topology.epoch > one.topology.epoch
    assert {one.topology.id, other.topology.id} <= {entry[1] for entry in both.topology.history}
    assert len(both.topology.members) == 2


def test_numbers_come_from_the_catalog(site: Site) -> None:
    """The catalog knows disks by small numbers of its own."""
    disks = site.mount(init=True)
    disks.renumber({slot.disk_id: 10 + slot.number for slot in disks.slots})
    assert [slot.number for slot in disks.slots] == [10, 11, 12]


def test_the_state_directory_may_be_lost_or_unwritable(site: Site) -> None:
    """It holds hints: a mount goes on without it, with a warning when it cannot be written."""
    site.mount(init=True)
    shutil.rmtree(site.base / "state")
    (site.base / "state").touch()
    disks = site.mount()
    assert "could not be noted" in disks.warnings[-1]


# -- missing, dead, read-only -------------------------------------------------------------------


def test_a_missing_disk_stays_a_member(site: Site) -> None:
    """It comes up failed, with its id, path and a warning; require_all refuses."""
    first = site.mount(init=True)
    site.loops.umount(site.paths[1])
    site.paths[1].rmdir()
    site.refused("disk1: disk is unavailable: no such directory", require_all=True)
    disks = site.mount()
    assert disks.topology == first.topology
    slot = disks.slots[1]
    assert (slot.disk_id, slot.path) == (first.slots[1].disk_id, first.slots[1].path)
    assert slot.disk is None
    assert slot.health.state is DiskState.FAILED
    assert disks.warnings == [f"{site.paths[1]}: disk is unavailable: no such directory"]


def test_missing_disks_are_told_apart_without_memory(site: Site) -> None:
    """With the host's memory lost, a missing path still stands for a missing member."""
    first = site.mount(init=True)
    for path in site.paths[1:]:
        site.loops.umount(path)
        path.rmdir()
    shutil.rmtree(site.base / "state")
    disks = site.mount()
    assert {slot.disk_id for slot in disks.slots} == {slot.disk_id for slot in first.slots}
    assert disks.topology == first.topology


def test_a_path_of_no_disk_is_left_out_with_a_warning(site: Site) -> None:
    """A missing path beside a complete pool is no reason for an outage; in a new pool it is."""
    extra = [*site.specs(), DiskSpec(str(site.base / "nowhere"))]
    site.refused("nowhere: no such directory", specs=extra, init=True)
    site.mount(init=True)
    disks = site.mount(specs=extra)
    assert len(disks.slots) == 3
    assert disks.warnings == [f"{site.base}/nowhere: disk is unavailable: no such directory"]


def test_no_usable_disk_is_refused(site: Site) -> None:
    """Each with its reason."""
    specs = [DiskSpec("/nonexistent/a"), DiskSpec("/nonexistent/b")]
    text = site.refused("no disk is usable", specs=specs)
    assert "/nonexistent/a: no such directory; /nonexistent/b: no such directory" in text
    with pytest.raises(DiskRefusedError, match="no disk is configured"):
        open_disks([], mountpoint="/mnt/x", state_dir="/var/x", run_dir="/run/x")


def test_a_read_only_disk_serves_and_is_not_written(site: Site) -> None:
    """Mounted read-only it is degraded with a warning; configured so, without one."""
    site.mount(init=True)
    before = identity(site.paths[0])
    site.loops.remount(site.paths[0], "ro")
    disks = site.mount()
    assert disks.warnings == [f"{site.paths[0]}: disk is read-only: mounted read-only"]
    assert disks.slots[0].health.readable
    assert not disks.slots[0].health.writable
    site.refused("read-only", require_all=True)
    specs = [DiskSpec(str(site.paths[0]), mode="ro"), *site.specs(*site.paths[1:])]
    disks = site.mount(specs=specs, require_all=True)
    assert disks.warnings == []
    assert disks.slots[0].health.readable
    assert not disks.slots[0].health.writable
    assert identity(site.paths[0]) == before


def test_a_dead_disk_is_a_warning(site: Site, monkeypatch) -> None:
    """One that fails while its files are read or written comes up failed."""
    site.mount(init=True)
    victim = str(site.paths[1])
    for module, name in ((candidates, "read_identity"), (candidates, "lock")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing_on(victim, getattr(module, name)))
            disks = site.mount()
        assert disks.warnings == [f"{victim}: disk is unavailable: bad disk"]
        assert disks.slots[1].disk is None
        assert len(disks.topology.members) == 3


def failing_on(path: str, real: Callable) -> Callable:
    def fail(root, *args):
        if root.path == path:
            raise OSError(5, "bad disk")
        return real(root, *args)

    return fail


def test_a_disk_that_hangs_is_dead(site: Site, monkeypatch) -> None:
    """The look at it ends; what it opens when it wakes up is closed again."""
    site.mount(init=True)
    victim, awake, real = str(site.paths[1]), threading.Event(), candidates.read_identity

    def hang(root):
        if root.path == victim:
            awake.wait()
        return real(root)

    monkeypatch.setattr(candidates, "read_identity", hang)
    gc.collect()  # what other tests left to it must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    found = look_at(site.specs(), timeout_s=0.3)
    assert [c.reason for c in found] == ["", "does not answer within 0.3 s", ""]
    for candidate in found:
        candidate.close()
    awake.set()
    for thread in threading.enumerate():
        if thread.name == f"look {victim}":
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_comes_up(site: Site) -> None:
    """It must, to be cleaned."""
    site.mount(init=True)
    with (site.paths[0] / "filler").open("wb", buffering=0) as file:
        size_bytes = MIB
        while size_bytes >= 512:
            try:
                file.write(b"x" * size_bytes)
                os.fsync(file.fileno())
            except OSError:
                size_bytes //= 2
    disks = site.mount(*site.paths[:2])
    assert disks.slots[0].disk is None  # closed, but it was there:
    assert disks.slots[0].health.readable
    assert "full" in disks.warnings[0]
    assert identity(site.paths[0])["session"] == disks.session
    assert site.mount(*site.paths[:2]).topology == disks.topology


# -- refused ------------------------------------------------------------------------------------


def test_a_disk_in_use_is_busy(site: Site) -> None:
    """Until the other mount is over."""
    site.mount(init=True)
    held = site.open()
    site.refused("in use", error=BusyError)
    site.refused("in use", site.paths[2], error=BusyError)
    held.close()
    site.mount()


def test_an_unmarked_directory_with_files_is_refused(site: Site) -> None:
    """Also with init: adopting is a decision."""
    (site.paths[1] / "somebody's").write_text("work")
    site.refused("holds files.*--adopt", init=True)


def test_an_empty_directory_in_place_of_a_disk_is_refused(site: Site) -> None:
    """An unmounted disk is not replaced by its mount directory, with init or without."""
    site.mount(init=True)
    site.loops.umount(site.paths[1])
    for _ in range(2):
        for init in (False, True):
            text = site.refused("is it mounted", init=init)
            assert str(site.paths[1]) in text
        shutil.rmtree(site.base / "state", ignore_errors=True)


def test_a_whole_pool_that_is_not_mounted_is_not_made_anew(site: Site) -> None:
    """After a boot without its mounts, `--init` in a unit must not start a second pool."""
    site.mount(init=True)
    for path in site.paths:
        site.loops.umount(path)
    site.refused("is it mounted", init=True, allow_shared_device=True)


def test_a_new_disk_beside_a_missing_one_is_initialised(site: Site) -> None:
    """When the host remembers where the missing one was, and it was elsewhere."""
    site.mount(init=True)
    site.loops.umount(site.paths[1])
    site.paths[1].rmdir()
    new = site.loops.add()
    disks = site.mount(*site.paths, new, init=True)
    assert len(disks.topology.members) == 4
    assert disks.slots[3].is_new


def test_duplicate_and_foreign_disks_are_refused(site: Site) -> None:
    """A copy of a disk, and a disk of another pool, are named with what they clash with."""
    site.mount(init=True)
    copied = site.loops.add()
    shutil.copytree(site.paths[0] / ".kvfuse", copied / ".kvfuse")
    text = site.refused("has the disk id of", *site.paths, copied)
    assert str(site.paths[0]) in text
    other = site.loops.add()
    pool_id = site.mount(other, init=True).pool_id
    site.refused(f"{other}: disk of another pool, {pool_id}, than", *site.paths, other)
    site.refused(f"{other}: disk of another pool", other, *site.paths)


def test_two_disks_on_one_file_system_are_refused(site: Site) -> None:
    """Unless allowed for a trial; btrfs subvolumes are one file system."""
    pair = [site.paths[0] / "a", site.paths[0] / "b"]
    for path in pair:
        path.mkdir()
    site.refused("same file system", *pair, init=True)
    assert len(site.mount(*pair, init=True, allow_shared_device=True).slots) == 2
    btrfs = site.loops.add("btrfs")
    subvolumes = [btrfs / "a", btrfs / "b"]
    for path in subvolumes:
        command = ["btrfs", "-q", "subvolume", "create", str(path)]
        subprocess.run(command, check=True, capture_output=True)
    site.refused("same file system", *subvolumes, init=True)


def test_places_in_each_other_are_refused(site: Site) -> None:
    """Disks, mountpoint and state keep out of each other, symlinks or not."""
    disk = site.paths[0]
    inner = disk / "inner"
    inner.mkdir()
    link = site.base / "link"
    link.symlink_to(disk)
    site.refused("inside the disk", disk, inner, init=True)
    site.refused("inside the disk", inner, disk, init=True)
    site.refused("same directory", disk, link, init=True)
    site.refused("inside the mountpoint", disk, mountpoint=str(site.base), init=True)
    site.refused("mountpoint inside", disk, mountpoint=str(link / "inner"), init=True)
    site.refused("mountpoint inside", disk, mountpoint=str(disk), init=True)
    site.refused("must outlive", inner, state_dir=str(inner / "state"), init=True)
    site.refused("must outlive", inner, run_dir=str(site.mountpoint / "run"), init=True)
    site.refused("root directory", specs=[DiskSpec("/")], init=True)


def test_a_newer_or_damaged_format_is_refused(site: Site) -> None:
    """Nothing is guessed, and the other disks stay as they are; nobody vouches for the only one."""
    site.mount(init=True)
    rewrite(site.paths[1], "disk.json", format=99)
    site.refused("disk.json: format 99 is newer")
    rewrite(site.paths[1], "disk.json", format=1)
    rewrite(site.paths[2], "topology.json", format=99)
    site.refused("topology.json: format 99 is newer")
    rewrite(site.paths[2], "topology.json", format=1)
    site.mount()
    for path in site.paths:
        (path / ".kvfuse" / "topology.json").write_text("{")
    site.refused("topology.json: not JSON")
    for path in site.paths:
        (path / ".kvfuse" / "disk.json").write_text("{")
    text = site.refused("disk.json: not JSON")
    assert "or leave it out of the list of disks" in text


@pytest.mark.parametrize("content", [b"", b"\xff\0garbage", b'{"format": 1}'])
def test_a_disk_with_a_damaged_identity_is_failed(site: Site, content: bytes) -> None:
    """It comes up as one that is missing does, told by its remembered path, and is not written."""
    first = site.mount(init=True)
    file = site.paths[1] / ".kvfuse" / "disk.json"
    whole = file.read_bytes()
    file.write_bytes(content)
    assert "disk.json" in site.refused("disk is unavailable", require_all=True)
    for _ in range(2):
        disks = site.mount()
        assert disks.topology == first.topology
        slot = disks.slots[1]
        assert (slot.disk_id, slot.path) == (first.slots[1].disk_id, str(site.paths[1]))
        assert slot.disk is None
        assert slot.health.state is DiskState.FAILED
        assert slot.health.reason.startswith(".kvfuse/disk.json: ")
        (warning,) = disks.warnings
        assert warning.startswith(f"{site.paths[1]}: disk is unavailable: ")
        assert "or leave it out of the list of disks" in warning
        assert file.read_bytes() == content
    file.write_bytes(whole)
    assert site.mount().warnings == []


def test_a_damaged_disk_that_nobody_knows_is_refused(site: Site) -> None:
    """Beside a pool that is complete without it, and in a pool that is new."""
    site.mount(*site.paths[:2], init=True)
    strange = site.paths[2] / ".kvfuse"
    strange.mkdir()
    (strange / "disk.json").write_bytes(b"?")
    site.refused("disk.json: not JSON")
    site.refused("disk.json: not JSON", site.paths[2], site.loops.add(), init=True)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"format": 1, "pool_id": 5}'])
def test_a_damaged_topology_is_written_anew(site: Site, content: bytes) -> None:
    """Those of the other disks count; all disks are used."""
    first = site.mount(init=True)
    file = site.paths[0] / ".kvfuse" / "topology.json"
    whole = file.read_bytes()
    file.write_bytes(content)
    disks = site.mount(require_all=True)
    assert disks.topology == first.topology
    assert all(slot.health.state is DiskState.HEALTHY for slot in disks.slots)
    (warning,) = disks.warnings
    assert warning.startswith(f"{file}: ")
    assert file.read_bytes() == whole


def test_a_disk_that_names_two_pools_is_refused_with_both(site: Site) -> None:
    """Its own two files contradict each other: both pools are named, and what to do."""
    first = site.mount(init=True)
    other = "00000000-0000-4000-8000-000000000000"
    rewrite(site.paths[0], "topology.json", pool_id=other)
    text = site.refused("disk.json and its topology.json name two pools")
    assert first.pool_id in text
    assert other in text


def test_a_file_in_place_of_a_disk_is_refused(site: Site) -> None:
    """It is a mistake, not a missing disk."""
    file = site.base / "file"
    file.touch()
    site.refused("not a directory", *site.paths, file, init=True)


def test_new_disks_are_made_all_or_none(site: Site, monkeypatch) -> None:
    """When the last of three fails, the first two are directories again."""
    real = candidates.Disk.rename

    def fail(disk, *args):
        if disk.path == str(site.paths[2]):
            raise OSError(5, "bad disk")
        real(disk, *args)

    with monkeypatch.context() as patch:
        patch.setattr(candidates.Disk, "rename", fail)
        with pytest.raises(DiskRefusedError, match="bad disk"):
            site.open(init=True)
    assert not any((path / ".kvfuse").exists() for path in site.paths)
    site.mount(init=True)


def test_what_is_unwise_is_said(site: Site) -> None:
    """Not refused: a root open to others, state on the file system of a disk."""
    site.mount(init=True)
    site.paths[0].chmod(0o755)
    disks = site.mount(require_all=True)
    assert disks.warnings == [
        f"{site.paths[0]}: mode 0755 lets other users in past the mount's permissions:"
        f" chmod 0700 {site.paths[0]}"
    ]
    filesystem = site.loops.add()
    disk, state = filesystem / "disk", filesystem / "state"
    disk.mkdir()
    site.mount(disk, init=True)
    (warning,) = site.mount(disk, state_dir=str(state), require_all=True).warnings
    assert warning.startswith(f"{state}: on the file system of the disk {disk}")


@pytest.mark.parametrize(
    ("missing", "paths", "places", "paired", "strangers", "left"),
    [
        ("", "", {}, {}, "", ""),
        ("a", "", {}, {}, "", "a"),
        ("a", "1", {}, {"a": "1"}, "", ""),
        ("ab", "21", {"a": "1", "b": "2"}, {"a": "1", "b": "2"}, "", ""),
        ("ab", "2", {"b": "2"}, {"b": "2"}, "", "a"),
        ("ab", "1", {"a": "9"}, {"b": "1"}, "", "a"),
        ("a", "1", {"a": "9"}, {"a": "1"}, "", ""),
        ("ab", "1", {}, {"a": "1", "b": ""}, "", ""),
        ("a", "12", {"a": "2"}, {"a": "2"}, "1", ""),
    ],
)
def test_missing_disks_are_paired_with_paths(
    missing: str, paths: str, places: dict, paired: dict, strangers: str, left: str
) -> None:
    """By memory first, then by what is left; in doubt a disk stays."""
    known = {i: Place(path=path, is_mountpoint=True) for i, path in places.items()}
    assert pair_missing(missing, paths, known) == (paired, list(strangers), list(left))
