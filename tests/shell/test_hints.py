"""Copies of the catalog made while the pool serves: hints of last use, and of nothing else."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from kvfuse.core import records
from kvfuse.core.eviction import MAIN
from kvfuse.disks import durability
from kvfuse.pool.pool import Pool
from tests.shell.pools import (
    CALLER,
    Box,
    boxed,
    commit,
    find,
    ids,
    mkdir,
    node_of,
    read,
    rename,
    tree,
    unlink,
)

PATHS = (*(f"d/{number}.bin" for number in range(6)), "d/linked.bin", "d/link.bin")
USED = ("d/2.bin", "d/0.bin", "d/linked.bin")  # in this order, after all were made


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch):
    """Give what starts the machine again: another boot id, and no tmpfs."""

    def start(box: Box) -> None:
        name = str(uuid.uuid4())
        monkeypatch.setattr(durability, "boot_id", lambda: name)
        shutil.rmtree(box.base / "run", ignore_errors=True)

    return start


@pytest.fixture(params=["lru", "s3fifo"])
def box(request: pytest.FixtureRequest):
    """A pool with files that were used, synced, and a copy of its catalog."""
    with boxed() as box:
        box.space["eviction"] = request.param
        pool = box.open()
        mkdir(pool, "d")
        for number in range(6):
            commit(pool, f"d/{number}.bin", b"%d" % number)
        commit(pool, "d/linked.bin", b"linked")
        pool.link(node_of(pool, "d/linked.bin").id, *ids(pool, "d/link.bin"))
        for path in USED:
            read(pool, path)
            pool._state.accesses.flush()
        pool.sync()
        assert pool._snapshots.copy_if_changed()
        yield box


def order(pool: Pool, path: str) -> tuple[int, int, int]:
    """Return what eviction knows of a file: place, uses, and time of last use."""
    node = node_of(pool, path)
    return node.access, records.hits_of(node.flags), node.atime_ns


def lines(box: Box) -> dict[int, list[int]]:
    """Return the ids of all files of each disk in the order in which they would go."""
    assert box.pool is not None
    with box.pool._state.catalog.read() as txn:
        return {number: [i for _, i in txn.recent(number)] for number in box.pool._state.slots}


def main_usage(box: Box) -> dict[int, tuple[int, int]]:
    assert box.pool is not None
    with box.pool._state.catalog.read() as txn:
        return {number: txn.main_usage(number) for number in box.pool._state.slots}


@pytest.mark.parametrize("at_once", [False, True])
def test_order_of_last_use_outlives_an_unclean_boot(box, boot, at_once):
    """The disks are read: by the server itself, or by stewards; both take it over."""
    seen = {path: order(box.pool, path) for path in PATHS}
    kept, counted = lines(box), main_usage(box)
    box.drop()
    boot(box)
    pool = box.open(at_once=at_once)
    assert pool.wait_complete(30)
    assert pool.status()["recovery"]["disks"], "nothing was read: the copy was believed"
    assert {path: order(pool, path) for path in PATHS} == seen
    assert lines(box) == kept
    assert main_usage(box) == counted
    box.check()


def test_a_hint_brings_nothing_back(box, boot):
    """What was removed, replaced or renamed after the copy is as it was when the machine went."""
    pool = box.pool
    unlink(pool, "d/0.bin")
    commit(pool, "d/2.bin", b"new")
    rename(pool, "d/3.bin", "d/moved.bin")
    generation = node_of(pool, "d/2.bin").generation
    pool.sync()
    box.drop()
    boot(box)
    pool = box.open()
    assert find(pool, "d/0.bin") is None
    assert find(pool, "d/3.bin") is None
    assert read(pool, "d/moved.bin") == b"3"
    assert read(pool, "d/2.bin") == b"new"
    replaced = node_of(pool, "d/2.bin")
    assert replaced.generation == generation
    assert replaced.access & ~MAIN >= generation  # not that of the version before
    box.check()


@pytest.mark.parametrize("harm", ["noise", "cut", "gone"])
def test_a_damaged_copy_is_no_hint(box, boot, harm):
    seen = tree(box.pool)
    box.drop()
    boot(box)
    (copy,) = (box.base / "state").glob("*/catalog/data.mdb")
    damage(copy, harm)
    pool = box.open()
    assert tree(pool) == seen
    box.check()


def damage(path: Path, harm: str) -> None:
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(os.urandom(path.stat().st_size - 8192))


def test_copies_are_made_of_changes_only_and_not_while_disks_are_read(box):
    pool = box.pool
    assert not pool._snapshots.copy_if_changed()
    pool.mkdir(records.ROOT_ID, b"new", 0o755, CALLER)
    assert pool._snapshots.copy_if_changed()
    box.close()
    box.lose_catalog()
    box.recovery = {"scan_files_per_s": 1}
    pool = box.open(at_once=True)
    assert pool.status()["recovery"]["state"] == "scanning"
    assert not pool._snapshots.copy_if_changed()


def test_a_state_directory_without_room_costs_the_copy_only(box):
    pool = box.pool
    (state,) = (box.base / "state").iterdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", state], check=True)
    try:
        pool.mkdir(records.ROOT_ID, b"new", 0o755, CALLER)
        assert not pool._snapshots.copy_if_changed()
        assert not (state / "catalog" / "data.mdb").exists()
    finally:
        subprocess.run(["umount", state], check=True)
    assert pool._snapshots.copy_if_changed()
    box.close()
    assert read(box.open(), "d/1.bin") == b"1"
