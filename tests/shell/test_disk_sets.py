"""Disks come, go, return and change places, by configuration and restart, on real directories."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.core.records import BLOCK_BYTES, ROOT_ID
from kvfuse.pool.pool import Pool
from tests.disks import loop_disks
from tests.shell.pools import (
    CALLER,
    Box,
    boxed,
    commit,
    disk_path,
    files,
    find,
    ids,
    mkdir,
    node_of,
    put,
    read,
    rename,
    tree,
    unlink,
)

FILES = 20_000
NINTH = 1 / 9
STRICT = ["striped", "rendezvous"]


def name_of(number: int) -> bytes:
    return b"block-%d.bin" % number


def fill(pool: Pool, first: int, count: int) -> None:
    """Make *count* files of one byte in the directory m."""
    directory = mkdir(pool, "m").id
    for number in range(first, first + count):
        _, fh = pool.create(directory, name_of(number), os.O_WRONLY, 0o644, CALLER)
        pool.write(fh, 0, b"x")
        pool.release(fh)


def misses(pool: Pool, count: int, first: int = 0) -> set[int]:
    directory = node_of(pool, "m").id
    return {
        number
        for number in range(first, first + count)
        if pool.lookup(directory, name_of(number)) is None
    }


def disks_of(pool: Pool, count: int, first: int = 0) -> list[int]:
    """Return the number of the disk of each file, all of which must be there."""
    directory = node_of(pool, "m").id
    found = [pool.lookup(directory, name_of(number)) for number in range(first, first + count)]
    return [node.disk for node in found if node is not None]


def number_of(pool: Pool, path: Path) -> int:
    return next(n for n, slot in pool._state.slots.items() if slot.path == str(path))


def row_of(pool: Pool, path: Path) -> dict:
    return next(row for row in pool.status()["disks"] if row["path"] == str(path))


@contextlib.contextmanager
def sized(count: int, of: int, placement: str) -> Iterator[Box]:
    """Give a box with *of* disks that mounts the first *count* until told otherwise."""
    with boxed(of, placement=placement) as box:
        every, box.paths = box.paths, box.paths[:count]
        box.every = every
        yield box


def again(box: Box, paths: list[Path] | None = None) -> Pool:
    """Restart cleanly with these disks from now on."""
    box.close()
    if paths is not None:
        box.paths = paths
    return box.open()


# -- adding and removing


def test_ninth_disk_costs_no_miss_with_rendezvous():
    """All 20 000 files hit with a ninth disk; a ninth of the new ones goes there."""
    with sized(8, 9, "rendezvous") as box:
        fill(box.open(), 0, FILES)
        pool = again(box, box.every)
        assert misses(pool, FILES) == set()
        fill(pool, FILES, 3600)
        new = disks_of(pool, 3600, FILES).count(number_of(pool, box.every[8]))
        assert new / 3600 == pytest.approx(NINTH, abs=0.021)  # four standard deviations

        # 9 -> 8: only what is on the disk that left; and all of that is back with it.
        gone = number_of(pool, box.every[3])
        everything = FILES + 3600
        on_it = {i for i, disk in enumerate(disks_of(pool, everything)) if disk == gone}
        pool = again(box, box.every[:3] + box.every[4:])
        assert misses(pool, everything) == on_it
        pool = again(box, box.every)
        assert misses(pool, everything) == set()
        box.check()


def test_ninth_disk_costs_a_ninth_with_strict_rendezvous():
    """Served only at their owners, 11.1 % of 20 000 files are stale with a ninth disk."""
    with sized(8, 9, "rendezvous") as box:
        box.serve_displaced = False
        fill(box.open(), 0, FILES)
        pool = again(box)
        assert misses(pool, FILES) == set()  # a restart alone costs nothing
        pool = again(box, box.every)
        missed = misses(pool, FILES)
        assert len(missed) / FILES == pytest.approx(NINTH, abs=0.007)
        assert row_of(pool, box.every[8])["files"] == 0
        assert sum(row["stale_files"] for row in pool.status()["disks"]) == len(missed)

        # A rewritten one has its owner's disk, and its old copy is gone.
        fill(pool, 0, 500)
        assert misses(pool, 500) == set()
        box.check()
        rewritten = {number for number in missed if number < 500}
        assert row_of(pool, box.every[8])["files"] == len(rewritten)

        pool = again(box, box.every[:8])
        assert misses(pool, FILES) == rewritten
        pool = again(box, box.every)
        assert misses(pool, FILES) == missed - rewritten
        box.check()


def test_ninth_disk_costs_nearly_all_with_the_baseline():
    """The modulo placement, strict: 88.9 % of 20 000 files are misses with a ninth disk."""
    with sized(8, 9, "striped") as box:
        box.serve_displaced = False
        fill(box.open(), 0, FILES)
        pool = again(box, box.every)
        assert len(misses(pool, FILES)) / FILES == pytest.approx(8 / 9, abs=0.007)
        pool = again(box, box.every[:8])
        assert misses(pool, FILES) == set()
        box.serve_displaced = True
        pool = again(box, box.every)
        assert misses(pool, FILES) == set()
        box.check()


def test_ninth_disk_costs_no_miss_with_index():
    """Files stay, and new ones go to the new disk until it is as full as the others."""
    with sized(8, 9, "index") as box:
        pool = box.open()
        fill(pool, 0, 1600)
        shares = [disks_of(pool, 1600).count(number) for number in range(8)]
        assert max(shares) - min(shares) <= 8
        pool = again(box, box.every)
        assert misses(pool, 1600) == set()
        gone = number_of(pool, box.every[0])
        on_it = {i for i, disk in enumerate(disks_of(pool, 1600)) if disk == gone}
        pool = again(box, box.every[1:])
        assert misses(pool, 1600) == on_it
        pool = again(box, box.every)
        assert misses(pool, 1600) == set()
        box.check()


def test_index_levels_a_new_disk_with_the_others(tmp_path):
    """On file systems of their own: new files go to the empty disk until all are equally full."""
    with loop_disks(3) as (_, every):
        box = Box(tmp_path, every, placement="index")
        pool = box.open(every[:2])
        directory = mkdir(pool, "m").id

        def store(first: int, count: int) -> None:
            for number in range(first, first + count):
                _, fh = pool.create(directory, name_of(number), os.O_WRONLY, 0o644, CALLER)
                pool.write(fh, 0, bytes(128 << 10))
                pool.release(fh)

        store(0, 64)
        box.paths = every
        box.close()
        pool = box.open()
        assert misses(pool, 64) == set()
        new = number_of(pool, every[2])
        store(64, 24)
        assert set(disks_of(pool, 24, 64)) == {new}
        store(88, 24)
        used = [row["used_bytes"] for row in pool.status()["disks"]]
        assert max(used) - min(used) <= 2 * (128 << 10)
        box.check()
        box.close()


@pytest.mark.parametrize("placement", ["rendezvous", "index"])
def test_two_disks_at_once(placement):
    """Two come and two go in one restart: only the files of those that go are misses."""
    with sized(3, 5, placement) as box:
        fill(box.open(), 0, 300)
        pool = again(box, box.every)
        assert misses(pool, 300) == set()
        fill(pool, 300, 300)
        left = {number_of(pool, path) for path in box.every[:2]}
        on_them = {i for i, disk in enumerate(disks_of(pool, 600)) if disk in left}
        pool = again(box, box.every[2:])
        assert misses(pool, 600) == on_them
        pool = again(box, box.every)
        assert misses(pool, 600) == set()
        box.check()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("placement", STRICT)
def test_order_and_mountpoints_do_not_matter(placement, strict):
    """Disks in another order, or at each other's paths, are the same disks: no miss."""
    with boxed(4, placement=placement) as box:
        box.serve_displaced = not strict
        fill(box.open(), 0, 400)
        pool = again(box, box.paths[::-1])
        assert misses(pool, 400) == set()
        box.close()
        first, second, *_ = box.paths
        os.rename(first, box.base / "aside")
        os.rename(second, first)
        os.rename(box.base / "aside", second)
        pool = box.open()
        assert misses(pool, 400) == set()
        assert {Path(disk_path(pool, "m/" + name_of(i).decode())).parent for i in range(400)} == {
            path / "m" for path in box.paths
        }
        box.check()


# -- what happened while a disk was away


@pytest.fixture(params=["clean", "killed", "no catalog"])
def end(request) -> str:
    """How each mount but the first ends."""
    return request.param


def end_and_open(box: Box, end: str, paths: list[Path]) -> Pool:
    if end == "clean":
        box.close()
    else:
        box.drop()
    return box.open(paths)


@pytest.mark.parametrize("placement", ["rendezvous", "index", "striped"])
def test_what_went_while_a_disk_was_away_stays_so(placement, end):
    """Removed, replaced and renamed names do not come back with the disk; the others do."""
    with boxed(3, placement=placement) as box:
        pool = box.open()
        for path in ("kept", "moved", "removed"):
            mkdir(pool, path)
            for number in range(24):
                commit(pool, f"{path}/{number}.bin", b"old %d" % number)
        away = box.paths[2]
        there = {
            path: {i for i in range(24) if disk_path(pool, f"{path}/{i}.bin").is_relative_to(away)}
            for path in ("kept", "moved", "removed")
        }
        assert all(there.values()), "each directory has files on the disk that goes"

        pool = end_and_open(box, end, box.paths[:2])
        replaced = sorted(there["kept"])[::2]
        for number in replaced:
            assert find(pool, f"kept/{number}.bin") is None
            commit(pool, f"kept/{number}.bin", b"new %d" % number)
        rename(pool, "moved", "elsewhere")
        for name in [entry.name for entry in pool.readdir(node_of(pool, "removed").id, 0, 99)]:
            pool.unlink(node_of(pool, "removed").id, name)
        pool.rmdir(*ids(pool, "removed"))

        if end == "no catalog":
            box.findings()  # the disks that are there are done with it
            box.drop()
            box.lose_catalog()
            pool = box.open()
        else:
            pool = end_and_open(box, end, box.paths)
        seen = tree(pool)
        wanted = {f"kept/{i}.bin": b"old %d" % i for i in range(24)}
        wanted |= {f"kept/{i}.bin": b"new %d" % i for i in replaced}
        wanted |= {f"elsewhere/{i}.bin": b"old %d" % i for i in range(24)}
        if end == "no catalog":  # then nothing on a disk that missed a mount is believed
            lost = {f"kept/{i}.bin" for i in there["kept"]} - {f"kept/{i}.bin" for i in replaced}
            lost |= {f"elsewhere/{i}.bin" for i in there["moved"]}
            wanted = {path: data for path, data in wanted.items() if path not in lost}
        assert files(seen) == wanted
        assert seen.keys() & {"moved", "removed"} == set()
        box.check()


def test_stale_copies_of_a_replaced_file_are_shown():
    """``locate`` names the disk that is away and has still to remove its copy."""
    with boxed(3) as box:
        pool = box.open()
        commit(pool, "a.bin")
        away = disk_path(pool, "a.bin").parent
        disk_id = pool.locate(b"a.bin")["disk"]
        assert pool.locate(b"a.bin")["stale_copies"] == []
        box.close()
        pool = box.open([path for path in box.paths if path != away])
        commit(pool, "a.bin", b"new")
        assert pool.locate(b"a.bin")["stale_copies"] == [disk_id]
        pool = again(box, box.paths)
        assert pool.locate(b"a.bin")["stale_copies"] == []
        assert read(pool, "a.bin") == b"new"
        assert not (away / "a.bin").exists()


# -- serving only what is at its owner


@contextlib.contextmanager
def strict_box() -> Iterator[tuple[Box, Pool, list[str]]]:
    """Give a strict pool that got a third disk, and the paths of the files it made stale."""
    with sized(2, 3, "rendezvous") as box:
        box.serve_displaced = False
        pool = box.open()
        mkdir(pool, "d")
        paths = [f"d/{number}.bin" for number in range(40)]
        for path in paths:
            commit(pool, path, b"data")
        pool = again(box, box.every)
        stale = [path for path in paths if find(pool, path) is None]
        assert 0 < len(stale) < 40
        yield box, pool, stale


def stale_count(pool: Pool) -> tuple[int, int]:
    rows = pool.status()["disks"]
    return sum(row["stale_files"] for row in rows), sum(row["stale_bytes"] for row in rows)


def test_stale_file_is_a_miss_everywhere():
    """Not looked up, not listed, not opened, not counted as used; counted as stale."""
    with strict_box() as (box, pool, stale):
        listed = {entry.name.decode() for entry in pool.readdir(node_of(pool, "d").id, 0, 99)}
        assert listed == {f"{i}.bin" for i in range(40)} - {path[2:] for path in stale}
        records = {}
        with pool._state.catalog.read() as txn:
            for path in stale:
                records[path] = txn.child(*ids(pool, path))
        for path, node in records.items():
            for act in (pool.getattr, lambda node_id: pool.open(node_id, os.O_RDONLY)):
                with pytest.raises(OSError, match="gone") as raised:
                    act(node.id)
                assert raised.value.errno == errno.ESTALE, path
            with pytest.raises(FileNotFoundError):
                rename(pool, path, "d/other")
        blocks = sum(node.blocks for node in records.values())
        assert stale_count(pool) == (len(stale), blocks * BLOCK_BYTES)
        assert sum(row["files"] for row in pool.status()["disks"]) == 40 - len(stale)
        box.check()


def test_locate_shows_a_stale_file():
    """Operators see where it lies, where it belongs, and that it is not served."""
    with strict_box() as (_, pool, stale):
        found = pool.locate(stale[0].encode())
        assert (found["why"], found["state"], found["at_home"]) == ("stale", "stale", False)
        assert found["stale_copies"] == [found["disk"]] != [found["owner"]]


@pytest.mark.parametrize("how", ["create", "rename", "link", "symlink", "mkdir"])
def test_new_file_takes_the_place_of_a_stale_one(how):
    """Whatever is made at its name removes the stale copy from its disk."""
    with strict_box() as (box, pool, stale):
        path = stale[0]
        old = Path(pool.locate(path.encode())["disk_path"])
        inode = old.stat().st_ino
        put(pool, "source")
        match how:
            case "create":
                put(pool, path, b"new")
            case "rename":
                rename(pool, "source", path)
            case "link":
                pool.link(node_of(pool, "source").id, *ids(pool, path))
            case "symlink":
                pool.symlink(*ids(pool, path), b"target", CALLER)
            case "mkdir":
                pool.mkdir(*ids(pool, path), 0o755, CALLER)
        assert find(pool, path) is not None
        box.check()
        assert stale_count(pool)[0] == len(stale) - 1
        assert not old.exists() or old.stat().st_ino != inode
        if how == "create":
            assert disk_path(pool, path).is_relative_to(box.every[2])


def test_stale_file_goes_with_its_name_or_directory():
    """Unlink says that there is nothing, and sees to it; rmdir finds the directory empty."""
    with strict_box() as (box, pool, stale):
        with pytest.raises(FileNotFoundError):
            unlink(pool, stale[0])
        box.check()
        assert stale_count(pool)[0] == len(stale) - 1
        for entry in pool.readdir(node_of(pool, "d").id, 0, 99):
            pool.unlink(node_of(pool, "d").id, entry.name)
        pool.rmdir(ROOT_ID, b"d")
        box.check()
        assert stale_count(pool) == (0, 0)
        assert not any(path.is_file() for disk in box.every for path in disk.glob("d/*"))


def test_stale_files_survive_the_loss_of_the_catalog_as_such():
    """What a scan finds is judged like what was known."""
    with strict_box() as (box, pool, stale):
        box.drop()
        box.lose_catalog()
        pool = box.open()
        assert [f"d/{i}.bin" for i in range(40) if find(pool, f"d/{i}.bin") is None] == stale
        box.serve_displaced = True
        pool = again(box)
        assert all(read(pool, path) == b"data" for path in stale)
        assert stale_count(pool) == (0, 0)
        box.check()


def test_file_of_a_temp_name_that_said_nothing_is_at_home_where_it_is():
    """It was written where its temp name belonged: found after the rename, and for ever."""
    with sized(2, 3, "rendezvous") as box:
        box.serve_displaced = False
        pool = box.open()
        for number in range(40):
            put(pool, f".tmpAb3dE{number % 10}")
            rename(pool, f".tmpAb3dE{number % 10}", f"{number}.safetensors")
        assert len(files(tree(pool))) == 40
        whys = {pool.locate(b"%d.safetensors" % number)["why"] for number in range(40)}
        assert whys == {"owner", "resident"}
        pool = again(box, box.every)
        assert len(files(tree(pool))) == 40
        box.drop()
        box.lose_catalog()
        pool = box.open()
        assert len(files(tree(pool))) == 40
        box.check()


def test_judging_goes_on_where_it_was_killed(monkeypatch):
    """A mount that dies while it compares files with their owners is no worse for it."""
    with sized(2, 3, "rendezvous") as box:
        box.serve_displaced = False
        pool = box.open()
        for number in range(30):
            put(pool, f"{number}.bin")
        box.close()
        with monkeypatch.context() as patch:
            patch.setattr("kvfuse.heart.homes._BATCH", 4)
            patch.setattr("kvfuse.heart.homes._judged", _dying(12))
            with pytest.raises(RuntimeError):
                box.open(box.every)
        box.pool = box.disks = None
        pool = box.open(box.every)
        owners = [pool._state.owner(ROOT_ID, b"%d.bin" % number) for number in range(30)]
        new = pool._state.slots[number_of(pool, box.every[2])].disk_id
        seen = [find(pool, f"{number}.bin") is not None for number in range(30)]
        assert seen == [owner != new for owner in owners]
        box.check()


def _dying(after: int):
    from kvfuse.heart.homes import _judged as judged

    left = iter(range(after))

    def dying(*arguments):
        if next(left, None) is None:
            raise RuntimeError("killed")
        return judged(*arguments)

    return dying


# -- reservations


def test_burst_of_large_files_is_spread_before_a_byte_is_written():
    """What is being written counts: open files of a known size are dealt out evenly."""
    with boxed(4, placement="index") as box:
        pool = box.open()
        handles = []
        for number in range(40):
            node, fh = pool.create(ROOT_ID, b"%d.bin" % number, os.O_WRONLY, 0o644, CALLER)
            handles.append((node.disk, fh))
        disks = [disk for disk, _ in handles]
        assert {disks.count(disk) for disk in set(disks)} == {10}
        assert all(row["reserved_bytes"] for row in pool.status()["disks"])
        for _, fh in handles:
            pool.release(fh)
        assert not any(row["reserved_bytes"] for row in pool.status()["disks"])


@pytest.mark.parametrize("how", ["release", "rename", "unlink", "create fails"])
def test_reservation_ends(how):
    """However a file ends to be written, nothing stays reserved."""
    with boxed(1, placement="index") as box:
        pool = box.open()
        reserved = pool._state.reservations.on_disk
        if how == "create fails":
            blocked = box.paths[0] / "d"
            directory = mkdir(pool, "d").id
            blocked.symlink_to("/nowhere")
            with contextlib.suppress(OSError):
                _, fh = pool.create(directory, b"x" * 200, os.O_WRONLY, 0o644, CALLER)
                pool.release(fh)
            assert reserved(0) == 0
            return
        _, fh = pool.create(ROOT_ID, b"a.bin_1.tmp", os.O_WRONLY, 0o644, CALLER)
        assert reserved(0) == 64 << 20
        pool.write(fh, 0, b"x" * 8192)
        if how == "rename":
            rename(pool, "a.bin_1.tmp", "a.bin")
            assert 0 < reserved(0) <= (64 << 20) - 8192
        if how == "unlink":
            unlink(pool, "a.bin_1.tmp")
            assert reserved(0) == 64 << 20  # it still takes room, and may grow
        pool.release(fh)
        assert reserved(0) == 0


def test_driver_is_told_the_disk_a_file_will_be_made_on():
    """The disk named for a creation is the one it is made on, also when others come between."""
    with boxed(4, placement="index") as box:
        pool = box.open()
        named = [pool.disk_of_create(ROOT_ID, b"%d" % number) for number in range(12)]
        assert {named.count(disk) for disk in named} == {3}
        for number in reversed(range(12)):
            assert put(pool, f"{number}").disk == named[number]
