"""What is believed after a restart, a boot, and the loss or damage of the catalog."""

import os
import shutil
import struct
import subprocess
import uuid
from pathlib import Path

import pytest

from kvfuse.catalog.catalog import MAP_BYTES
from kvfuse.disks import durability
from kvfuse.disks.diskset import init_disk
from kvfuse.pool.check import Kind
from kvfuse.pool.pool import AttrChanges
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
)
from tests.shell.verbs import name_on


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch):
    """Give what starts the machine again: another boot id, and no tmpfs."""

    def start(box: Box) -> None:
        name = str(uuid.uuid4())
        monkeypatch.setattr(durability, "boot_id", lambda: name)
        shutil.rmtree(box.base / "run", ignore_errors=True)

    return start


def fill(box: Box) -> dict[str, bytes | str | None]:
    """Make some of everything, and return the tree."""
    pool = box.open()
    mkdir(pool, "d/e", 0o750)
    mkdir(pool, "empty")
    for number in range(8):
        commit(pool, f"d/e/f{number}.bin", b"%d" % number * 50)
    pool.symlink(*ids(pool, "d/link"), b"e/f0.bin", CALLER)
    pool.link(node_of(pool, "d/e/f1.bin").id, *ids(pool, "d/hard.bin"))
    put(pool, "d/inplace.bin", b"in place")
    pool.setxattr(node_of(pool, "d/e/f2.bin").id, b"user.crc", b"7", 0)
    pool.setattr(node_of(pool, "d/e").id, AttrChanges(mode=0o2775, gid=7))
    box.check()
    return tree(pool)


def test_clean_stop_is_believed_after_a_boot(boot):
    """Nothing is scanned: empty directories and directory xattrs are there, too."""
    with boxed() as box:
        seen = fill(box)
        box.close()
        boot(box)
        pool = box.open()
        assert tree(pool) == seen
        assert pool.status()["recovery"]["disks"] == {}
        box.check()


def test_unclean_boot_believes_what_was_synced(boot):
    """A file newer than the last sync of its disk is a miss; older ones are there."""
    with boxed() as box:
        seen = fill(box)
        assert box.pool is not None
        box.pool.sync()
        commit(box.pool, "d/late.bin", b"may be zeros")
        commit(box.pool, "d/e/f3.bin", b"written again")
        box.drop()
        boot(box)
        pool = box.open()
        wanted = files(seen)
        del wanted["d/e/f3.bin"]
        assert files(tree(pool)) == wanted
        box.check()


def test_disk_that_missed_the_boot_is_asked_when_it_is_back(boot):
    """What it had not synced is a miss also where the catalog was kept by a clean stop."""
    with boxed() as box:
        pool = box.open()
        path, other = name_on(pool, 1, "f"), name_on(pool, 0, "f")
        commit(pool, path, b"synced")
        pool.sync()
        late = name_on(pool, 1, "late")
        commit(pool, late, b"not synced")
        commit(pool, other, b"here")
        box.drop()
        box.open([box.paths[0]])
        box.close()
        boot(box)
        box.open([box.paths[0]])
        box.close()
        pool = box.open()
        assert tree(pool) == {path: b"synced", other: b"here"}
        box.check()


def _used_pages(data: Path) -> int:
    """Return how many pages LMDB uses of a file that is as large, and as sparse, as its map."""
    with data.open("rb") as file:
        head = file.read(8192)
    return 1 + max(struct.unpack_from("<Q", head, offset + 136)[0] for offset in (0, 4096))


def _cut(data: Path) -> None:
    os.truncate(data, _used_pages(data) // 2 * 4096)


def _noise(data: Path) -> None:
    with data.open("r+b") as file:
        file.write(os.urandom(_used_pages(data) * 4096))


def _copy(catalog: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--sparse=always", catalog, target], check=True)


def _empty(data: Path) -> None:
    data.write_bytes(b"")


def _gone(data: Path) -> None:
    shutil.rmtree(data.parent)


@pytest.mark.parametrize("damage", [_cut, _noise, _empty, _gone])
def test_damaged_catalog_is_rebuilt_from_the_disks(damage):
    """The same files, links, owners and modes; the same ids."""
    with boxed() as box:
        seen = fill(box)
        assert box.pool is not None
        kept = {path: node_of(box.pool, path) for path in seen if path != "empty"}
        box.drop()
        for catalog in box.catalogs():
            damage(catalog / "data.mdb")
        pool = box.open()
        del seen["empty"]  # it lay on no disk
        assert tree(pool) == seen
        for path, node in kept.items():
            now = node_of(pool, path)
            assert (now.id, now.mode, now.uid, now.gid, now.nlink) == (
                node.id, node.mode, node.uid, node.gid, node.nlink,
            ), path  # fmt: skip
        assert node_of(pool, "d/hard.bin").id == node_of(pool, "d/e/f1.bin").id
        assert pool.getxattr(node_of(pool, "d/e/f2.bin").id, b"user.crc") == b"7"
        box.check()


def _spoil(data: Path) -> None:
    """Noise over the second half only: where LMDB begins all looks well."""
    pages = _used_pages(data)
    with data.open("r+b") as file:
        file.seek(pages // 2 * 4096)
        file.write(os.urandom((pages - pages // 2) * 4096))


def _first_pages(data: Path) -> None:
    """Noise where LMDB begins."""
    with data.open("r+b") as file:
        file.write(os.urandom(2 * 4096))


def _last_page_number(data: Path) -> None:
    """A catalog that claims gigabytes of a file that is that large, and empty there."""
    with data.open("r+b") as file:
        for offset in (0, 4096):
            file.seek(offset + 136)
            file.write(struct.pack("<Q", (MAP_BYTES >> 12) - 1))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("damage", [_first_pages, _last_page_number])
def test_noise_at_the_beginning_is_noticed(damage, clean):
    """After a clean end and after a death; and nothing is allocated for what noise claims."""
    with boxed() as box:
        seen = fill(box)
        box.close() if clean else box.drop()
        for catalog in box.catalogs():
            damage(catalog / "data.mdb")
        pool = box.open()
        assert files(tree(pool)) == files(seen)
        assert pool.status()["recovery"]["files"] > 0, "nothing was read"
        assert pool.status()["catalog"]["bytes"] < 1 << 28
        box.check()


@pytest.mark.parametrize("clean", [True, False])
def test_noise_in_the_middle_is_noticed(clean):
    """After a clean end by the digest; after a death because reading it through fails."""
    with boxed() as box:
        seen = fill(box)
        box.close() if clean else box.drop()
        for catalog in box.catalogs():
            _spoil(catalog / "data.mdb")
        pool = box.open()
        assert files(tree(pool)) == files(seen)
        assert pool.status()["recovery"]["files"] > 0, "nothing was read"
        box.check()


def test_catalog_of_another_format_is_rebuilt():
    """A format this version does not know is as good as none."""
    with boxed() as box:
        seen = fill(box)
        assert box.pool is not None
        with box.pool._state.catalog.write() as txn:
            txn.put_meta(b"format", b"999")
        box.drop()
        pool = box.open()
        assert files(tree(pool)) == files(seen)
        box.check()


def test_catalog_of_an_earlier_mount_is_not_believed():
    """A copy of the catalog put back from before the last mount does not bring names back."""
    with boxed() as box:
        fill(box)
        box.drop()
        (live,) = box.catalogs()
        saved = box.base / "saved"
        _copy(live, saved)
        pool = box.open()
        unlink(pool, "d/e/f0.bin")
        box.drop()
        shutil.rmtree(live)
        _copy(saved, live)
        pool = box.open()
        assert find(pool, "d/e/f0.bin") is None
        box.check()


def test_file_being_written_is_gone_after_a_death():
    """Unless its label says it was whole: it was just closed, or its writer had not begun."""
    with boxed() as box:
        pool = box.open()
        commit(pool, "kept.bin", b"whole")
        parent, name = ids(pool, "torn.bin")
        _, fh = pool.create(parent, name, os.O_RDWR, 0o644, CALLER)
        pool.write(fh, 0, b"half")
        commit(pool, "again.bin", b"whole")
        pool.open(node_of(pool, "again.bin").id, os.O_RDWR)
        assert find(pool, "torn.bin") is not None
        pool = box.reopen()
        assert tree(pool) == {"kept.bin": b"whole"}
        box.check()
        assert not any((path / "torn.bin").exists() for path in box.paths)


def test_unlinked_open_file_leaves_nothing():
    """The bytes of a file without a name go with the process that had it open."""
    with boxed(1) as box:
        pool = box.open()
        parent, name = ids(pool, "f.bin")
        node, fh = pool.create(parent, name, os.O_RDWR, 0o644, CALLER)
        pool.write(fh, 0, b"alive")
        unlink(pool, "f.bin")
        assert pool.read(fh, 0, 9) == b"alive"
        assert pool.getattr(node.id).nlink == 0
        assert pool.getattr(node.id).size == 5
        pool = box.reopen()
        assert tree(pool) == {}
        box.check()


def test_ids_are_never_given_twice():
    """Not after a death, not without a catalog: an old id is ESTALE for ever."""
    with boxed(1) as box:
        seen: set[int] = set()
        for how in ("kept", "lost", "kept", "lost"):
            pool = box.open()
            for number in range(20):
                put(pool, f"f{number}.bin")
                node = node_of(pool, f"f{number}.bin")
                assert node.id not in seen
                seen.add(node.id)
                unlink(pool, f"f{number}.bin")
            box.drop()
            if how == "lost":
                box.lose_catalog()


def test_links_of_a_file_that_loses_one_name_to_a_newer_file():
    """After a scan the other names still show the file, and count right."""
    with boxed() as box:
        pool = box.open(upkeep=False)
        path = name_on(pool, 0, "f")
        commit(pool, path, b"linked")
        for name in ("l1.bin", "l2.bin"):
            pool.link(node_of(pool, path).id, *ids(pool, name))
        source = name_on(pool, 1, "g")
        commit(pool, source, b"newer")
        rename(pool, source, path)
        box.drop()
        box.lose_catalog()
        pool = box.open()
        assert tree(pool) == {path: b"newer", "l1.bin": b"linked", "l2.bin": b"linked"}
        assert node_of(pool, "l1.bin").nlink == 2
        box.check()


def test_adopted_disk_brings_its_files():
    """Each becomes a file of the pool, older than any other; labels of another pool say nothing."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        commit(pool, "d/mine.bin", b"mine")
        commit(pool, "d/other.bin", b"other")
        box.close()
        third = box.base / "third"
        shutil.copytree(box.paths[0] / "d", third / "d") if (box.paths[0] / "d").exists() else None
        (third / "d").mkdir(parents=True, exist_ok=True)
        (third / "d" / "mine.bin").write_bytes(b"not this one")
        (third / "d" / "new.bin").write_bytes(b"adopted")
        os.link(third / "d" / "new.bin", third / "second.bin")
        for label in ("trusted.kvfuse",):
            stolen = next(p for p in box.paths if (p / "d" / "mine.bin").exists()) / "d/mine.bin"
            os.setxattr(third / "d" / "new.bin", label, os.getxattr(stolen, label))
        init_disk(str(third), adopt=True)
        pool = box.open([*box.paths, third])
        assert read(pool, "d/mine.bin") == b"mine"
        assert read(pool, "d/new.bin") == b"adopted"
        assert read(pool, "second.bin") == b"adopted"
        assert node_of(pool, "second.bin").id == node_of(pool, "d/new.bin").id
        assert node_of(pool, "second.bin").id != node_of(pool, "d/mine.bin").id
        box.check(allowed=(Kind.FOREIGN, Kind.ORPHAN))
        pool = box.reopen([*box.paths, third])
        assert read(pool, "d/new.bin") == b"adopted"


def test_scan_that_is_killed_goes_on_at_the_next_mount(monkeypatch):
    """What was taken in stays, what was not is scanned; nothing is taken for an old copy."""
    from kvfuse.scan.arrivals import Arrivals

    with boxed() as box:
        seen = fill(box)
        box.drop()
        box.lose_catalog()
        real, calls = Arrivals.read, []

        def read_directory(self, number, dir_id):
            calls.append(dir_id)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return real(self, number, dir_id)

        monkeypatch.setattr(Arrivals, "read", read_directory)
        with pytest.raises(KeyboardInterrupt):
            box.open()
        monkeypatch.setattr(Arrivals, "read", real)
        pool = box.open()
        assert files(tree(pool)) == files(seen)
        box.check()
