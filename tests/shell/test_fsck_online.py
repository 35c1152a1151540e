"""``fsck`` of a pool that serves: each table damaged, found and mended; no false alarm."""

import errno
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfuse.catalog.transaction import Txn, order_key
from kvfuse.core import records
from kvfuse.core.errors import BusyError, KvfuseError
from kvfuse.pool import audit as audit_module
from kvfuse.pool.pool import Pool
from kvfuse.pool.tables import check_tables
from tests.shell.pools import (
    CALLER,
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
)  # fmt: skip

_END_S = 60.0


@pytest.fixture
def box():
    """A pool of two disks with some files, open."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d/e")
        for number in range(6):
            commit(pool, f"d/{number}.bin", b"%d" % number)
        commit(pool, "d/e/far.bin", b"far")
        link(pool, "d/5.bin", "d/link.bin")
        yield box


def link(pool: Pool, old: str, new: str) -> None:
    pool.link(node_of(pool, old).id, *ids(pool, new))


def fsck(pool: Pool, *, repair: bool = False) -> dict[str, Any]:
    """Compare, and return what was found."""
    number = pool.fsck(repair=repair)["id"]
    deadline_s = time.monotonic() + _END_S
    while (result := pool.findings(number))["state"] == "running":
        assert time.monotonic() < deadline_s, result
        time.sleep(0.01)
    assert result["state"] == "done", result
    return result


def kinds(result: dict[str, Any]) -> list[str]:
    return [found["kind"] for found in result["findings"]]


def damaged(pool: Pool, change: Callable[[Txn], object]) -> None:
    """Change tables behind the back of the pool."""
    with pool._state.catalog.write() as txn:
        change(txn)


def entry_of(pool: Pool, path: str) -> tuple[bytes, bytes]:
    """Return the key of a name and of its line in the listing."""
    parent, name = ids(pool, path)
    with pool._state.catalog.read() as txn:
        found = txn.entry(parent, name)
    assert found is not None
    return records.entry_key(parent, name), records.child_key(parent, found[1])


def without(table: bytes, key: bytes) -> Callable[[Txn], object]:
    return lambda txn: txn.cursor(table).pop(key)


def with_row(table: bytes, key: bytes, value: bytes = b"") -> Callable[[Txn], object]:
    return lambda txn: txn.cursor(table).put(key, value)


def of_record(pool: Pool, path: str, **changes: object) -> Callable[[Txn], object]:
    """Change a record, and nothing that hangs on it."""
    node = node_of(pool, path)
    changed = node.replace(**changes)
    return with_row(b"nodes", records.pack_id(node.id), records.pack_node(changed))


def order_of(pool: Pool, path: str) -> bytes:
    key = order_key(node_of(pool, path))
    assert key is not None
    return key


# What is damaged, and what is left of the names below "d".
DAMAGES: dict[str, Callable[[Pool], Callable[[Txn], object]]] = {
    "no place in the order": lambda pool: without(b"recency", order_of(pool, "d/0.bin")),
    "a place of nobody": lambda pool: with_row(b"recency", records.recency_key(0, 7, 1 << 40)),
    "another place": lambda pool: with_row(
        b"recency", records.recency_key(0, 7, node_of(pool, "d/0.bin").id)
    ),
    "a place on a wrong disk": lambda pool: with_row(
        b"recency", records.recency_key(9, 7, node_of(pool, "d/1.bin").id)
    ),
    "written by nobody": lambda pool: with_row(
        b"pending", records.pack_id(node_of(pool, "d/0.bin").id)
    ),
    "pending without a record": lambda _: with_row(b"pending", records.pack_id(1 << 40)),
    "usage": lambda _: lambda txn: txn.add_usage(b"\0\0", 1, 8),
    "stale usage": lambda _: lambda txn: txn.add_usage(b"\0\1s", -2, 16),
    "usage of the second queue": lambda _: lambda txn: txn.add_usage(b"\0\0m", 3, 0),
    "usage of no disk": lambda _: with_row(b"usage", b"\0\x63", bytes(16)),
    "no line in the listing": lambda pool: without(b"children", entry_of(pool, "d/0.bin")[1]),
    "a line of no name": lambda pool: with_row(
        b"children",
        records.child_key(node_of(pool, "d").id, 1 << 40),
        records.pack_child(1 << 40, 0o100644, 0, b"ghost"),
    ),
    "a line with the wrong disk": lambda pool: with_row(
        b"children",
        entry_of(pool, "d/0.bin")[1],
        records.pack_child(
            node_of(pool, "d/0.bin").id, 0o100644, 1 - node_of(pool, "d/0.bin").disk, b"0.bin"
        ),
    ),
    "a name that is lost": lambda pool: without(b"entries", entry_of(pool, "d/0.bin")[0]),
    "a directory's name that is lost": lambda pool: without(b"entries", entry_of(pool, "d/e")[0]),
    "a name of no record": lambda pool: with_row(
        b"entries",
        records.entry_key(node_of(pool, "d").id, b"ghost"),
        records.pack_entry(1 << 40, 1 << 40, 0o100644),
    ),
    "a name its record does not know": lambda pool: with_row(
        b"entries",
        records.entry_key(node_of(pool, "d").id, b"ghost"),
        records.pack_entry(node_of(pool, "d/0.bin").id, 1 << 40, 0o100644),
    ),
    "a wrong type": lambda pool: with_row(
        b"entries",
        entry_of(pool, "d/0.bin")[0],
        records.pack_entry(
            node_of(pool, "d/0.bin").id, node_of(pool, "d/0.bin").id, 0o120777
        ),
    ),
    "a further name that is lost": lambda pool: without(
        b"links", records.pack_id(node_of(pool, "d/5.bin").id)
    ),
    "further names of nobody": lambda _: with_row(
        b"links", records.pack_id(1 << 40), records.entry_key(1, b"x")
    ),
    "an attribute of nobody": lambda _: with_row(
        b"xattrs", records.entry_key(1 << 40, b"user.x"), b"1"
    ),
    "kept, and has a name": lambda pool: lambda txn: txn.put_orphan(
        node_of(pool, "d/0.bin"), b""
    ),
    "a request in a wrong slot": lambda _: with_row(
        b"results", b"\0\x09", struct.pack("<QQQ", 8, 1, 2)
    ),
    "attempts that are none": lambda _: with_row(b"attempts", records.pack_id(5), b"?"),
    "a chore that cannot be read": lambda _: with_row(
        b"chores", struct.pack(">HQ", 77, 5), b"?"
    ),
    "a parked chore of no disk": lambda _: with_row(
        b"parked", struct.pack(">HQ", 77, 5), b"\x93?"
    ),
    "an intent that cannot be read": lambda _: with_row(b"intents", records.pack_id(3), b"?"),
    "still to be read": lambda _: with_row(b"todo", struct.pack(">HQ", 0, 1)),
    "was read": lambda _: with_row(b"scanned", records.pack_id(1), struct.pack("<Q", 1)),
    "gone while read": lambda _: with_row(b"gone", records.pack_id(1 << 40)),
}  # fmt: skip


def test_sound_pool_has_no_findings(box):
    """Nor has one with a file that is being written, or is open without a name."""
    assert box.pool is not None
    parent, name = ids(box.pool, "d/open.tmp")
    _, fh = box.pool.create(parent, name, os.O_RDWR, 0o644, CALLER)
    box.pool.write(fh, 0, b"half")
    unlinked = box.pool.open(node_of(box.pool, "d/0.bin").id, os.O_RDONLY)
    unlink(box.pool, "d/0.bin")
    result = fsck(box.pool)
    assert result["findings"] == []
    assert result["faults"] == 0
    assert result["compared"] > 30
    assert len(result["disks"]) == 2
    box.pool.release(fh)
    box.pool.release(unlinked)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_table_is_found_and_mended(box, damage):
    """Told, then mended; no name that clients see is lost by it."""
    pool = box.pool
    before = tree(pool)
    pool._state.accesses.flush()
    damaged(pool, DAMAGES[damage](pool))
    told = list(check_tables(pool._state.catalog))
    assert told
    assert all(pool._audits._mended(found).repair for found in told)
    box.check()
    assert tree(pool) == before


def test_damaged_tables_of_a_pool_that_serves(box):
    """Told without a change, then mended, each in one line; then there is nothing to tell."""
    pool = box.pool
    before = tree(pool)
    pool._state.accesses.flush()
    changes = [
        DAMAGES[name](pool)
        for name in (
            "no place in the order", "usage", "no line in the listing", "a name of no record",
            "an attribute of nobody", "still to be read",
        )
    ]  # fmt: skip
    changes.append(
        lambda txn: txn.put_orphan(node_of(pool, "d/0.bin").replace(id=1 << 40, nlink=0), b"")
    )
    for change in changes:
        damaged(pool, change)
    told = fsck(pool)
    assert len(told["findings"]) == told["faults"] == len(changes), told
    assert fsck(pool)["findings"] == told["findings"], "fsck alone has changed something"
    mended = fsck(pool, repair=True)
    assert mended["faults"] == 0, mended
    assert [(f["kind"], f["text"]) for f in mended["findings"]] == [
        (f["kind"], f["text"]) for f in told["findings"]
    ]
    assert fsck(pool)["findings"] == []
    box.check()
    assert tree(pool) == before


def test_records_without_files_are_forgotten_and_files_without_records_taken_in(box):
    """What is gone is a miss afterwards; what nobody knew is there; what is not ours stays."""
    pool = box.pool
    gone, torn, kept = (disk_path(pool, f"d/{number}.bin") for number in (0, 1, 2))
    gone.unlink()
    torn.write_bytes(b"longer than it was")
    shutil.copy2(kept, kept.with_name("copy.bin"))  # keeps the label
    kept.with_name("foreign.bin").write_bytes(b"?")
    told = fsck(pool)
    wanted = {
        ("missing", "d/0.bin"), ("different", "d/1.bin"), ("orphan", "d/copy.bin"),
        ("foreign", "d/foreign.bin"),
    }  # fmt: skip
    assert {(found["kind"], found["path"]) for found in told["findings"]} == wanted
    assert told["faults"] == 3
    assert kept.with_name("copy.bin").exists()
    mended = fsck(pool, repair=True)
    assert {(found["path"], found["repair"]) for found in mended["findings"]} == {
        ("d/0.bin", "forgotten"), ("d/1.bin", ""), ("d/copy.bin", "taken in"),
        ("d/foreign.bin", ""),
    }  # fmt: skip
    assert find(pool, "d/0.bin") is None
    assert read(pool, "d/copy.bin") == b"2"
    assert kept.with_name("foreign.bin").read_bytes() == b"?"
    assert {(found["kind"], found["path"]) for found in fsck(pool)["findings"]} == {
        ("different", "d/1.bin"), ("foreign", "d/foreign.bin"),
    }  # fmt: skip


def test_lost_branch_of_the_catalog_is_taken_in_with_all_below(box):
    """Records of a directory and of all in it are gone: its carriers and files say who they are."""
    pool = box.pool
    path = disk_path(pool, "d/e/far.bin")
    far, directory = node_of(pool, "d/e/far.bin"), node_of(pool, "d/e")

    def forget(txn: Txn) -> None:
        for node in (far, directory):
            txn.drop_entry(node.parent, node.name, node.id)
            txn.drop_node(node)

    damaged(pool, forget)
    assert find(pool, "d/e") is None
    assert sorted(kinds(fsck(pool))) == ["orphan", "orphan"]
    mended = fsck(pool, repair=True)
    assert [found["repair"] for found in mended["findings"]] == ["taken in", "taken in"]
    assert read(pool, "d/e/far.bin") == b"far"
    assert path.exists()
    assert fsck(pool)["findings"] == []
    box.check()


def test_label_that_is_lost_is_written_again(box):
    """A file without one would be foreign to a scan."""
    pool = box.pool
    path = disk_path(pool, "d/3.bin")
    for name in os.listxattr(path):
        os.removexattr(path, name)
    mended = fsck(pool, repair=True)
    assert [(f["kind"], f["repair"]) for f in mended["findings"]] == [
        ("different", "labelled anew")
    ]
    box.close()
    box.lose_catalog()
    assert files(tree(box.open()))["d/3.bin"] == b"3"


def test_what_stood_in_the_way_is_told_and_kept(box):
    """How many files, how many bytes, where; never a fault, never removed."""
    pool = box.pool
    for disk in box.paths:
        (disk / "way.bin").write_bytes(b"foreign" * 1000)
    commit(pool, "way.bin", b"ours")
    for repair in (False, True):
        result = fsck(pool, repair=repair)
        assert result["faults"] == 0
        (found,) = [each for each in result["findings"] if each["kind"] == "aside"]
        assert "1 files, 8192 bytes" in found["text"]
    (kept,) = [path for disk in box.paths for path in disk.glob(".kvfuse/aside/*")]
    assert kept.read_bytes() == b"foreign" * 1000
    rows = pool.status()["disks"]
    assert sorted((row["aside_files"], row["aside_bytes"]) for row in rows) == [(0, 0), (1, 8192)]


def test_nothing_is_wrong_while_clients_go_on(box):
    """Two clients put, replace, rename, unlink, move directories: not one finding, many times."""
    pool = box.pool
    ended = threading.Event()
    rounds = [0, 0]

    def client(number: int) -> None:
        while not ended.is_set():
            base = f"c{number}-{rounds[number] % 3}"
            mkdir(pool, base)
            for index in range(4):
                commit(pool, f"{base}/{index}.bin", b"x" * (index + 1))
                commit(pool, f"{base}/{index}.bin", b"y" * (index + 2))
                put(pool, f"{base}/{index}.direct", b"z")
            rename(pool, base, f"{base}-moved")
            for index in range(4):
                unlink(pool, f"{base}-moved/{index}.bin")
                unlink(pool, f"{base}-moved/{index}.direct")
            pool.rmdir(records.ROOT_ID, f"{base}-moved".encode())
            rounds[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in clients:
        thread.start()
    try:
        results = [fsck(pool, repair=number % 2 == 1) for number in range(8)]
    finally:
        ended.set()
        for thread in clients:
            thread.join()
    assert [found for result in results for found in result["findings"]] == []
    assert min(rounds) > 2
    box.check()


def test_one_at_a_time_and_an_equal_one_is_joined(box, monkeypatch):
    """Another kind is refused; what is not remembered is said so in one line."""
    pool = box.pool
    go = threading.Event()
    compare = audit_module.Audits._compare
    monkeypatch.setattr(
        audit_module.Audits, "_compare",
        lambda self, audit: (go.wait(_END_S), compare(self, audit))[1],
    )  # fmt: skip
    first = pool.fsck(repair=False)
    assert pool.fsck(repair=False)["id"] == first["id"]
    with pytest.raises(BusyError):
        pool.fsck(repair=True)
    go.set()
    assert fsck(pool)["id"] >= first["id"]
    with pytest.raises(KvfuseError, match="run it again"):
        pool.findings(first["id"] + 100)


def test_process_that_falls_silent_is_given_up(box, monkeypatch):
    """Its disk is said not to have been compared: a fault; the others were."""
    pool = box.pool
    monkeypatch.setattr(audit_module, "_SILENCE_S", 5.0)
    started = audit_module.Checker

    class Silent(started):
        """Stands still before it reads the second disk."""

        def __init__(self, catalog: Path, number: int, disk: Any) -> None:
            super().__init__(catalog, number, disk)
            if number == 1:
                self.process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(audit_module, "Checker", Silent)
    result = fsck(pool)
    (found,) = result["findings"]
    assert found["kind"] == "unreadable"
    assert found["disk"] == str(box.paths[1])
    assert result["faults"] == 1


def test_disk_that_takes_no_writes_is_not_wrong_for_being_behind(box):
    """It is compared, nothing on it is mended, and what it has still to do is told as that."""
    pool = box.pool
    commit(pool, "d/e/more.bin")
    gone = disk_path(pool, "d/0.bin")
    number = node_of(pool, "d/0.bin").disk
    pool._upkeep.stop(timeout_s=10)
    state = pool._state
    state.change_health(number, lambda health, now_s: health.on_error(errno.EROFS, now_s=now_s))
    assert not state.slots[number].health.writable
    gone.unlink()
    told = fsck(pool, repair=True)
    assert [(f["kind"], f["path"], f["repair"]) for f in told["findings"]] == [
        ("missing", "d/0.bin", "")
    ]
    rename(pool, "d", "moved")
    told = fsck(pool)
    assert {(f["kind"], f["disk"]) for f in told["findings"]} == {
        ("unfinished", str(box.paths[number]))
    }
