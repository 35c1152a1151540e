"""Disks that are away, come back, hold what is not ours; names that stay gone."""

import errno
import os
import stat
import subprocess

import pytest

from kvfuse.core.intents import RenameDir, Unlink
from kvfuse.core.records import ROOT_ID, carrier_bit
from kvfuse.disks.carrier import Ground
from kvfuse.heart.chores import do_chore
from kvfuse.pool.check import Kind
from kvfuse.pool.pool import RENAME_EXCHANGE
from tests.disks import loop_disks
from tests.shell.pools import (
    CALLER,
    Box,
    boxed,
    commit,
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
)  # fmt: skip
from tests.shell.verbs import name_on


def test_files_of_a_disk_that_is_away_are_misses_and_hit_again():
    """ENOENT while it is away, the same bytes when it is back; the other disk notices nothing."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        here, there = (name_on(pool, n, "f", "d") for n in (0, 1))
        for path in (here, there):
            commit(pool, path, path.encode())
        inode = node_of(pool, there).id
        box.close()
        pool = box.open([box.paths[0]])
        assert find(pool, there) is None
        with pytest.raises(OSError, match="gone") as gone:
            pool.getattr(inode)
        assert gone.value.errno == errno.ESTALE
        assert read(pool, here) == here.encode()
        assert os.fsdecode(here) not in [e.name for e in pool.readdir(node_of(pool, "d").id, 0, 9)]
        box.close()
        pool = box.open()
        assert tree(pool) == {"d": None, here: here.encode(), there: there.encode()}
        assert node_of(pool, there).id == inode
        box.check()


@pytest.mark.parametrize("restart", ["clean", "killed"])
@pytest.mark.parametrize("change", ["overwrite", "rename directory", "rmdir", "file in its place"])
def test_what_is_done_while_a_disk_is_away_holds_when_it_returns(change, restart):
    """A name that was replaced, renamed or removed never comes back with the disk."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d/e")
        there, other = name_on(pool, 1, "f", "d/e"), name_on(pool, 1, "g")
        for path in (there, other):
            commit(pool, path, b"old")
        box.close()
        pool = box.open([box.paths[0]])
        if change == "overwrite":
            commit(pool, there, b"new")
            unlink(pool, there)
        elif change == "rename directory":
            rename(pool, "d", "moved")
        else:
            pool.rmdir(*ids(pool, "d/e"))
            pool.rmdir(*ids(pool, "d"))
            if change == "file in its place":
                put(pool, "d", b"a file now")
        if restart == "clean":
            box.close()
            pool = box.open()
        else:
            pool = box.reopen()
        moved = there.replace("d/", "moved/", 1)
        wanted = {
            "overwrite": {"d": None, "d/e": None},
            "rename directory": {"moved": None, "moved/e": None, moved: b"old"},
            "rmdir": {},
            "file in its place": {"d": b"a file now"},
        }[change]  # fmt: skip
        assert tree(pool) == wanted | {other: b"old"}
        box.check()


def test_disk_that_was_away_when_the_catalog_was_lost_is_stale_twice():
    """Its old copies do not come back with the next loss of the catalog either."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        mkdir(pool, "gone")
        path, lost = name_on(pool, 1, "f", "d"), name_on(pool, 1, "f", "gone")
        commit(pool, path, b"old")
        commit(pool, lost, b"old")
        commit(pool, name_on(pool, 0, "k", "d"), b"kept")
        box.close()
        pool = box.open([box.paths[0]])
        commit(pool, path, b"new")
        unlink(pool, path)
        pool.rmdir(*ids(pool, "gone"))
        box.drop()
        box.lose_catalog()
        box.open([box.paths[0]])
        box.close()
        pool = box.open()
        wanted = tree(pool)
        assert path not in wanted
        assert "gone" not in wanted
        box.check()
        box.drop()
        box.lose_catalog()
        pool = box.open()
        assert tree(pool) == wanted
        box.check()


def test_order_of_disks_means_nothing():
    """The same pool whatever the order in which its disks are named."""
    with boxed(3) as box:
        pool = box.open()
        for number in range(12):
            commit(pool, f"f{number}.bin", b"%d" % number)
        seen = tree(pool)
        box.close()
        pool = box.open(box.paths[::-1])
        assert tree(pool) == seen
        box.check()
        box.drop()
        box.lose_catalog()
        pool = box.open([box.paths[1], box.paths[2], box.paths[0]])
        assert tree(pool) == seen
        box.check()


# -- carriers


def test_file_stays_found_below_a_directory_that_had_no_carrier():
    """Carriers above a renamed directory are known: the next rename moves them too."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        mkdir(pool, "p")
        mkdir(pool, "q")
        commit(pool, "q/f.bin", b"x")
        rename(pool, "q", "p/q")
        rename(pool, "p", "r")
        pool = box.reopen(upkeep=False)
        assert tree(pool) == {"r": None, "r/q": None, "r/q/f.bin": b"x"}
        box.check()


def test_file_exchanged_into_a_directory_that_had_no_carrier():
    """As with a rename: the way to the new place is known to the catalog."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        mkdir(pool, "p/q/d")
        commit(pool, "f.bin", b"x")
        rename(pool, "f.bin", "p/q/d", RENAME_EXCHANGE)
        rename(pool, "p", "r")
        pool = box.reopen(upkeep=False)
        assert tree(pool) == {"f.bin": None, "r": None, "r/q": None, "r/q/d": b"x"}
        box.check()


def test_new_file_does_not_stand_in_the_way_of_an_old_chore():
    """A directory was renamed twice; a file takes its name in between before the disk followed."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        mkdir(pool, "a")
        commit(pool, name_on(pool, 0, "f", "a"), b"in it")
        commit(pool, "root-is-open.bin")
        rename(pool, "a", "b.bin")
        rename(pool, "b.bin", "c")
        put(pool, "b.bin", b"new")
        assert read(pool, "b.bin") == b"new"
        pool = box.reopen(upkeep=False)
        assert read(pool, "b.bin") == b"new"
        assert len(files(tree(pool))) == 3
        box.check()


def test_directory_renamed_while_its_carrier_is_made():
    """A rename between reading a path and making the carrier there is noticed."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        mkdir(pool, "d")
        (carriers,) = [c for c in pool._state.carriers.values() if c.number == 0]
        chain_of, raced = carriers._chain, []

        def chain_and_rename(dir_id):
            chain = chain_of(dir_id)
            if not raced:
                raced.append(True)
                rename(pool, "d", "e")
            return chain

        carriers._chain = chain_and_rename
        path = name_on(pool, 0, "f", "d")
        parent, name = ids(pool, path)
        _, fh = pool.create(parent, name, os.O_RDWR, 0o644, CALLER)
        pool.release(fh)
        assert raced
        pool = box.reopen()
        assert list(files(tree(pool))) == [path.replace("d/", "e/")]
        box.check()


def test_more_disks_than_carrier_bits():
    """Disks from the 64th on share a bit: directories are renamed and removed there too."""
    with boxed(66) as box:
        pool = box.open(upkeep=False)
        mkdir(pool, "d")
        last = [name_on(pool, number, "f", "d") for number in (63, 64, 65)]
        for path in last:
            commit(pool, path, path.encode())
        assert node_of(pool, "d").ino & carrier_bit(65)
        mkdir(pool, "to/there")
        rename(pool, "d", "to/there/d")
        rename(pool, "to", "e")
        box.check()
        pool = box.reopen(upkeep=False)
        assert sorted(files(tree(pool)).values()) == sorted(path.encode() for path in last)
        for path in last:
            unlink(pool, path.replace("d/", "e/there/d/"))
        pool.rmdir(*ids(pool, "e/there/d"))
        box.check()
        assert not any((path / "e/there/d").exists() for path in box.paths)


def test_chores_wait_for_a_disk_that_is_away():
    """The backlog of an absent disk is kept in order, and done when it is back."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        commit(pool, name_on(pool, 1, "f", "d"), b"x")
        box.close()
        pool = box.open([box.paths[0]])
        for new in ("e", "f", "g"):
            rename(pool, {"e": "d", "f": "e", "g": "f"}[new], new)
        with pool._state.catalog.read() as txn:
            assert [type(chore) for _, chore in txn.chores(1, 9)] == [RenameDir] * 3
        pool = box.reopen()
        assert list(files(tree(pool)).values()) == [b"x"]
        box.check()


# -- what is not ours


def test_foreign_things_are_neither_served_nor_touched():
    """Files, FIFOs, symlinks, directories without a label stay, and are no part of the pool."""
    with boxed(1) as box:
        pool = box.open()
        commit(pool, "ours.bin", b"ours")
        disk = box.paths[0]
        (disk / "foreign.bin").write_bytes(b"foreign")
        os.mkfifo(disk / "fifo")
        (disk / "link").symlink_to("/etc/passwd")
        (disk / "dir").mkdir()
        (disk / "dir" / "file").write_bytes(b"below")
        for _ in range(2):
            pool = box.reopen()
            assert tree(pool) == {"ours.bin": b"ours"}
            box.check(allowed=(Kind.FOREIGN,))
            box.drop()
            box.lose_catalog()
            pool = box.open()
        assert (disk / "foreign.bin").read_bytes() == b"foreign"
        assert (disk / "dir" / "file").read_bytes() == b"below"
        assert stat.S_ISFIFO((disk / "fifo").stat().st_mode)


@pytest.mark.parametrize("kind", ["file", "fifo", "symlink", "directory"])
def test_foreign_thing_makes_way_for_a_file(kind):
    """A name clients do not see can be made; what was there is set aside, not deleted."""
    with boxed(1) as box:
        pool = box.open()
        place = box.paths[0] / "f.bin"
        {
            "file": lambda: place.write_bytes(b"foreign"),
            "fifo": lambda: os.mkfifo(place),
            "symlink": lambda: place.symlink_to("/etc/passwd"),
            "directory": place.mkdir,
        }[kind]()
        commit(pool, "f.bin", b"ours")
        assert read(pool, "f.bin") == b"ours"
        assert len(list((box.paths[0] / ".kvfuse" / "aside").iterdir())) == 1
        unlink(pool, "f.bin")
        mkdir(pool, "g")
        (box.paths[0] / "g").write_bytes(b"foreign, where a carrier goes")
        commit(pool, "g/f.bin", b"ours")
        assert read(pool, "g/f.bin") == b"ours"
        box.check()


def test_other_file_system_below_a_disk_is_foreign():
    """A mount in the tree of a disk is not entered, and no EXDEV comes of it."""
    with loop_disks(2) as (loops, (disk, other)):
        box = Box(loops.base, [disk])
        pool = box.open()
        (disk / "mounted").mkdir()
        loops.umount(other)
        image = next(loops.base.glob("1.*"))
        subprocess.run(["mount", "-o", "loop", image, disk / "mounted"], check=True)
        try:
            mkdir(pool, "mounted")
            with pytest.raises(OSError) as refused:  # noqa: PT011 - which error matters, below
                put(pool, "mounted/f.bin", b"x")
            assert refused.value.errno != errno.EXDEV
            box.drop()
            box.lose_catalog()
            pool = box.open()
            assert "mounted" not in tree(pool)
        finally:
            box.drop()
            subprocess.run(["umount", disk / "mounted"], check=True)


def test_file_moved_behind_our_back():
    """It is not served where it was; a scan finds it where it is, as older than any other."""
    with boxed(1) as box:
        pool = box.open()
        commit(pool, "a.bin", b"moved")
        os.rename(box.paths[0] / "a.bin", box.paths[0] / "b.bin")
        with pytest.raises(OSError, match="gone") as lost:
            pool.open(node_of(pool, "a.bin").id, os.O_RDONLY)
        assert lost.value.errno == errno.ESTALE
        assert find(pool, "a.bin") is None
        assert find(pool, "b.bin") is None
        box.drop()
        box.lose_catalog()
        pool = box.open()
        assert tree(pool) == {"b.bin": b"moved"}
        assert node_of(pool, "b.bin").generation == 0
        box.check()


def test_file_deleted_behind_our_back_is_a_miss_and_can_be_made_again():
    """The open says ESTALE, then it is gone; O_CREAT makes it anew without waiting."""
    with boxed(1) as box:
        pool = box.open()
        commit(pool, "a.bin", b"one")
        commit(pool, "b.bin", b"two")
        (box.paths[0] / "a.bin").unlink()
        (box.paths[0] / "b.bin").unlink()
        with pytest.raises(OSError, match="gone"):
            pool.open(node_of(pool, "a.bin").id, os.O_RDONLY)
        put(pool, "a.bin", b"again")
        parent, name = ids(pool, "b.bin")
        node, fh = pool.create(parent, name, os.O_RDWR, 0o644, CALLER)
        pool.release(fh)
        assert node.size == 0
        assert tree(pool) == {"a.bin": b"again", "b.bin": b""}
        box.check()


def test_file_of_another_length_is_never_served():
    """A committed file that was cut or grown on the disk is a miss."""
    with boxed(1) as box:
        pool = box.open()
        for name in ("cut.bin", "grown.bin"):
            commit(pool, name, b"whole")
        os.truncate(box.paths[0] / "cut.bin", 2)
        os.truncate(box.paths[0] / "grown.bin", 200)
        for name in ("cut.bin", "grown.bin"):
            with pytest.raises(OSError, match="gone"):
                pool.open(node_of(pool, name).id, os.O_RDONLY)
        assert tree(pool) == {}
        box.check()


def test_chore_spares_a_new_file_with_the_inode_number_of_the_old():
    """ext4 gives a freed inode number to the next file, which has no label for a moment."""
    with loop_disks(1) as (loops, paths):
        box = Box(loops.base, paths)
        pool = box.open(upkeep=False)
        commit(pool, "f.bin", b"old")
        node = node_of(pool, "f.bin")
        unlink(pool, "f.bin")
        fresh = paths[0] / "f.bin"
        fresh.touch()
        assert fresh.stat().st_ino == node.ino, "the file system did not reuse the number"
        ground = Ground(pool._state.carriers[0].disk)
        do_chore(ground, Unlink(b"f.bin", node.id, node.ino, node.blocks))
        assert fresh.exists()
        box.drop()


def test_names_of_the_disks_cannot_be_made():
    """The names the disks keep for themselves cannot be made by clients."""
    with boxed(1) as box:
        pool = box.open()
        for name in (b".kvfuse", b"lost+found"):
            with pytest.raises(OSError, match="belongs to the disks") as refused:
                pool.mkdir(ROOT_ID, name, 0o755, CALLER)
            assert refused.value.errno == errno.EPERM
        mkdir(pool, "d")
        assert pool.mkdir(node_of(pool, "d").id, b".kvfuse", 0o755, CALLER)
        box.check()


# -- a file that will not go


def _hold(path, how: str) -> None:
    subprocess.run(["chattr", how, path], check=True)


def test_file_that_cannot_be_unlinked_holds_up_nobody(caplog):
    """It is parked with one line in the log; other files go; it follows its directory, and goes."""
    with boxed(1) as box:
        pool = box.open()
        for number in range(3):
            mkdir(pool, "d")
            commit(pool, f"d/{number}.bin", b"x" * 5000)
        held = box.paths[0] / "d/0.bin"
        _hold(held, "+i")
        try:
            unlink(pool, "d/0.bin")
            for number in (1, 2):
                unlink(pool, f"d/{number}.bin")
            kinds = [(found.kind, found.path) for found in box.findings()]
            assert kinds == [(Kind.UNFINISHED, b"d/0.bin")]
            assert os.listdir(box.paths[0] / "d") == ["0.bin"]
            (line,) = [text for text in caplog.messages if "cannot be removed" in text]
            assert str(box.paths[0]) in line
            assert "d/0.bin" in line
            (row,) = pool.status()["disks"]
            assert row["stale_files"] == 1
            assert row["stale_bytes"] >= 5000
            rename(pool, "d", "e")
            commit(pool, "e/3.bin", b"new")
            held = box.paths[0] / "e/0.bin"
            assert [found.path for found in box.findings()] == [b"e/0.bin"]
            pool = box.reopen()
            assert [found.path for found in box.findings()] == [b"e/0.bin"]
            commit(pool, "e/4.bin", b"new")
        finally:
            _hold(held, "-i")
        pool = box.reopen()
        box.check()
        assert sorted(os.listdir(box.paths[0] / "e")) == ["3.bin", "4.bin"]
        assert pool.status()["disks"][0]["stale_files"] == 0
