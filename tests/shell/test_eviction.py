"""Eviction on real pools without FUSE: what goes, what stays, in which order, across restarts."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvfuse.cleaning.evictor import Evictor
from kvfuse.cleaning.selection import WAITING_MAX
from kvfuse.core.records import ROOT_ID
from kvfuse.pool.pool import AttrChanges, Pool
from kvfuse.space.tasks import Result, Trigger
from tests.disks import MIB, loop_disks
from tests.shell.pools import CALLER, Box

SIZE = MIB
DISK = 32 * MIB
WAIT_S = 30.0


def put(pool: Pool, name: bytes, size: int = SIZE, parent: int = ROOT_ID) -> int:
    """Store a file as connectors do: a temp, written past the pool, renamed."""
    temp = name + b".tmp" if b"." not in name else name.rpartition(b".")[0] + b".tmp"
    node, fh = pool.create(parent, temp, os.O_WRONLY | os.O_EXCL, 0o644, CALLER)
    os.pwrite(pool.fd(fh), b"k" * size, 0)
    pool.release(fh)
    pool.rename(parent, temp, parent, name, 0)
    return node.id


def there(pool: Pool, name: bytes) -> bool:
    """Whether a file is in the catalog, without asking for it as a client does."""
    with pool._state.catalog.read() as txn:
        return txn.child(ROOT_ID, name) is not None


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def evictor_of(pool: Pool) -> Evictor:
    (evictor,) = pool._upkeep.evictors.values()
    return evictor


def fill_of(pool: Pool) -> float:
    (number,) = pool._state.carriers
    pool._state.measure_room(number)
    usage = pool._state.rooms.usage(number)
    assert usage is not None
    return usage.used_bytes / usage.capacity_bytes


@contextlib.contextmanager
def small_pool(
    filesystem: str = "ext4", size_bytes: int = DISK, **space: object
) -> Iterator[tuple[Box, Pool]]:
    """Give a pool of one small disk; with a short lease, and nobody who keeps answers."""
    with loop_disks() as (made, _):
        box = Box(made.base, [made.add(filesystem, size_bytes)])
        box.space = {"reserve": "2%", "lease_ttl": "200ms", **space}
        try:
            yield box, box.open()
        finally:
            box.drop()


def test_ten_times_the_capacity_fits():
    """Stores go on for ever, the disk ends between its watermarks, and usage is right."""
    with small_pool() as (box, pool):
        for number in range(10 * DISK // SIZE // 2):
            put(pool, b"f%d" % number, 2 * SIZE)
        until(lambda: fill_of(pool) <= 0.9 and evictor_of(pool)._task is None)
        assert fill_of(pool) > 0.6
        assert there(pool, b"f%d" % (10 * DISK // SIZE // 2 - 1))
        assert not there(pool, b"f0")
        assert pool.status()["space"]["rejected"] == 0
        box.check()


def test_what_was_used_last_stays_also_across_a_restart():
    """The order is of uses, not of names or births, and it outlives the daemon."""
    with small_pool() as (box, pool):
        ids = [put(pool, b"f%d" % number) for number in range(8)]
        for number in (3, 1):
            pool.release(pool.open(ids[number], os.O_RDONLY))
        pool.setattr(ids[0], AttrChanges(atime_ns=time.time_ns()))
        pool._state.accesses.flush()
        box.close()
        pool = box.open()
        with pool._state.catalog.read() as txn:
            (number,) = pool._state.carriers
            order = [node_id for _, node_id in txn.recent(number)]
        assert order == [ids[i] for i in (2, 4, 5, 6, 7, 3, 1, 0)]


def test_what_is_open_pinned_or_young_stays():
    """Files in use, pinned ones, and temps that are still to be renamed survive a flood."""
    with small_pool(pin=["keep*"]) as (_, pool):
        held = put(pool, b"held")
        fh = pool.open(held, os.O_RDONLY)
        put(pool, b"keep1")
        node, temp = pool.create(ROOT_ID, b"x_1.tmp", os.O_WRONLY, 0o644, CALLER)
        pool.release(temp)
        put(pool, b"small.json", 100)
        for number in range(3 * DISK // SIZE):
            put(pool, b"f%d" % number)
        assert all(there(pool, name) for name in (b"held", b"keep1", b"x_1.tmp", b"small.json"))
        assert pool.read(fh, 0, 4) == b"kkkk"
        pool.release(fh)
        assert pool.getattr(node.id).size == 0


def test_a_scan_does_not_push_out_what_is_used_with_s3fifo():
    """With the scan-resistant policy files used again outlive a scan that lru does not survive."""
    kept = {}
    for policy in ("lru", "s3fifo"):
        with small_pool(eviction=policy) as (box, pool):
            used = [put(pool, b"u%d" % number) for number in range(8)]
            for _ in range(3):
                for node_id in used:
                    pool.release(pool.open(node_id, os.O_RDONLY))
                pool._state.accesses.flush()
            for number in range(3 * DISK // SIZE):
                put(pool, b"s%d" % number)
                # Asked for, as all are: what nobody asked for may go without a wait, before them.
                assert pool.lookup(ROOT_ID, b"s%d" % number) is not None
                time.sleep(0.03)  # were all that is new leased, the main queue would have to give
                until(lambda: fill_of(pool) <= 0.9)
            kept[policy] = sum(there(pool, b"u%d" % number) for number in range(8))
            box.check()
    assert kept["lru"] == 0
    assert kept["s3fifo"] >= 7


def test_a_file_asked_for_each_moment_is_spared_three_times():
    """Lookups alone do not keep a file for ever; opens do."""
    with small_pool() as (_, pool):
        put(pool, b"looked")
        opened = put(pool, b"opened")
        stop = threading.Event()

        def ask() -> None:
            while not stop.wait(0.05):
                pool.lookup(ROOT_ID, b"looked")
                pool.release(pool.open(opened, os.O_RDONLY))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            deadline_s = time.monotonic() + WAIT_S
            number = 0
            while there(pool, b"looked"):
                put(pool, b"f%d" % number)
                number += 1
                assert time.monotonic() < deadline_s
            assert there(pool, b"opened")
        finally:
            stop.set()
            thread.join()


def test_pairs_go_together():
    """X never stays without X.metadata, nor the reverse."""
    with small_pool() as (_, pool):
        for number in range(2 * DISK // SIZE):
            put(pool, b"p%d.data" % number)
            put(pool, b"p%d.data.metadata" % number, 1000)
        until(lambda: evictor_of(pool)._task is None)
        pairs = [
            (there(pool, b"p%d.data" % n), there(pool, b"p%d.data.metadata" % n))
            for n in range(2 * DISK // SIZE)
        ]
        assert all(one == other for one, other in pairs)
        assert not all(one for one, _ in pairs)


def test_inodes_run_out_like_bytes():
    """Small files until no inode is left: the oldest go, none is refused."""
    with small_pool(lease_ttl="50ms") as (_, pool):
        (number,) = pool._state.carriers
        usage = pool._state.rooms.usage(number)
        assert usage is not None
        for count in range(usage.inodes_total + 500):
            put(pool, b"f%d" % count, 10)
        assert pool.status()["space"]["rejected"] == 0
        assert not there(pool, b"f0")


def test_a_file_larger_than_the_disk_is_refused_before_it_is_written():
    """fallocate and truncate say ENOSPC at once; what is there stays, later stores succeed."""
    with small_pool() as (_, pool):
        put(pool, b"other")
        _, fh = pool.create(ROOT_ID, b"huge", os.O_WRONLY, 0o644, CALLER)
        with pytest.raises(OSError, match="smaller"):
            pool.fallocate(fh, 0, 0, 2 * DISK)
        with pytest.raises(OSError, match="smaller"):
            pool.setattr(pool._state.handles.file(fh).id, AttrChanges(size=2 * DISK), fh)
        pool.release(fh)
        assert there(pool, b"other")
        put(pool, b"later")


def test_a_write_that_finds_no_room_has_some_made():
    """The file that outgrows its estimate is written all the same."""
    with small_pool(high_watermark="97%", low_watermark="50%") as (_, pool):
        for number in range(24):
            put(pool, b"f%d" % number)
        _, fh = pool.create(ROOT_ID, b"grows", os.O_WRONLY, 0o644, CALLER)
        block = b"g" * MIB
        for number in range(20):
            assert pool.write(fh, number * MIB, block) == MIB
        pool.release(fh)
        assert pool.lookup(ROOT_ID, b"grows").size == 20 * MIB


def test_a_second_cleanup_joins_the_first():
    """Of two asked for at once one runs, and it ends at the low watermark within one file."""
    with small_pool(high_watermark="95%", low_watermark="30%", lease_ttl="500ms") as (_, pool):
        for number in range(20):
            put(pool, b"f%d" % number)
            assert pool.lookup(ROOT_ID, b"f%d" % number) is not None
        (first,) = pool.clean()
        (second,) = pool.clean()
        assert first["id"] == second["id"]
        until(lambda: pool.tasks(first["id"])[0]["result"] == Result.DONE)
        (task,) = pool.tasks(first["id"])
        assert task["trigger"] == Trigger.MANUAL
        assert task["files"] > 0
        low = 0.3 * pool.status()["disks"][0]["capacity_bytes"]
        assert low - SIZE - 65536 <= fill_of(pool) / 0.3 * low <= low


@pytest.mark.parametrize(("filesystem", "size_mib"), [("ext4", 256), ("xfs", 320), ("btrfs", 256)])
def test_a_cleanup_ends_at_the_low_watermark_wherever_room_comes_back_late(filesystem, size_mib):
    """Within one file, by what it removed: nothing is removed twice while it still counts."""
    marks = {"high_watermark": "95%", "low_watermark": "50%"}
    with small_pool(filesystem, size_mib * MIB, **marks) as (_, pool):
        for number in range(38):
            put(pool, b"f%d" % number, 4 * MIB)
        os.sync()
        capacity_bytes = pool.status()["disks"][0]["capacity_bytes"]
        too_much_bytes = (fill_of(pool) - 0.5) * capacity_bytes
        assert too_much_bytes > 16 * MIB
        (task,) = pool.clean()
        until(lambda: pool.tasks(task["id"])[0]["result"] == Result.DONE)
        more_bytes = pool.tasks(task["id"])[0]["bytes"] - too_much_bytes
        assert -2 * MIB < more_bytes < 6 * MIB  # a file, and what the file system keeps beside it


def test_the_task_says_what_a_dry_run_would_remove():
    """A dry run names files and removes none."""
    with small_pool() as (_, pool):
        for number in range(4):
            put(pool, b"f%d" % number)
        (task,) = pool.clean(regex="f[12]$", dry_run=True)
        until(lambda: pool.tasks(task["id"])[0]["result"] == Result.DONE)
        (task,) = pool.tasks(task["id"])
        assert sorted(task["keys"]) == ["f1", "f2"]
        assert all(there(pool, b"f%d" % number) for number in range(4))


def test_a_cleanup_by_hand_takes_pairs_and_spares_them():
    """A pattern that fits one of a pair takes both; one that is open or pinned keeps both."""
    with small_pool(pin=["kept*"]) as (_, pool):
        ids = {}
        for name in (b"a.data", b"b.data", b"kept.data", b"last.data"):
            ids[name] = put(pool, name)
            put(pool, name + b".metadata", 1000)
        fh = pool.open(ids[b"b.data"], os.O_RDONLY)
        (dry,) = pool.clean(regex="(a|b|kept).data.metadata$", dry_run=True)
        (task,) = pool.clean(regex="(a|b|kept).data.metadata$")
        until(lambda: pool.tasks(task["id"])[0]["result"] == Result.DONE)
        (dry,), (task,) = pool.tasks(dry["id"]), pool.tasks(task["id"])
        assert sorted(dry["keys"]) == ["a.data", "a.data.metadata"]
        assert (dry["files"], dry["bytes"]) == (task["files"], task["bytes"])
        assert task["skipped"] == {"in use": 1, "pinned": 1}
        assert not there(pool, b"a.data")
        assert all(there(pool, name) for name in (b"b.data", b"b.data.metadata", b"kept.data"))
        pool.release(fh)
        (task,) = pool.clean(everything=True)
        until(lambda: pool.tasks(task["id"])[0]["result"] == Result.DONE)
        assert pool.tasks(task["id"])[0]["files"] == 4
        assert pool.tasks(task["id"])[0]["skipped"] == {"pinned": 2}


def test_many_files_are_cleaned_a_bounded_number_at_a_time():
    """More than may wait at once, asked for by pattern: all go, none is counted twice."""
    with small_pool() as (_, pool):
        for number in range(WAITING_MAX + 200):
            put(pool, b"f%d" % number, 10)
        (task,) = pool.clean(regex="^f")
        until(lambda: pool.tasks(task["id"])[0]["result"] == Result.DONE)
        assert pool.tasks(task["id"])[0]["files"] == WAITING_MAX + 200
        assert pool.lookup(ROOT_ID, b"f0") is None


def test_what_is_pinned_is_not_said_to_be_evictable():
    """Neither in the room clients are told of nor in the status."""
    with small_pool(pin=["kept*"]) as (_, pool):
        put(pool, b"kept", 4 * MIB)
        other = put(pool, b"other", MIB)
        blocks = pool.getattr(other).blocks
        until(lambda: pool.status()["space"]["evictable_bytes"] == blocks * 512)
        found = pool.statfs()
        assert (found.f_bavail - found.f_bfree) * found.f_frsize <= blocks * 512


def test_abandoned_temps_go_and_open_ones_stay():
    """A temp nobody has open goes after its age; one that is open never does."""
    with small_pool(temp_max_age="1s") as (_, pool):
        _, gone = pool.create(ROOT_ID, b"a_1.tmp", os.O_WRONLY, 0o644, CALLER)
        pool.release(gone)
        kept = put(pool, b"b_2.tmp")
        fh = pool.open(kept, os.O_RDONLY)
        put(pool, b"file")
        until(lambda: not there(pool, b"a_1.tmp"))
        assert there(pool, b"b_2.tmp")
        assert there(pool, b"file")
        pool.release(fh)


def test_stale_files_go_first():
    """What is at the wrong disk by now goes before any live file, however lately it was used."""
    with loop_disks() as (made, _):
        disks = [made.add("ext4", DISK) for _ in range(2)]
        box = Box(made.base, disks)
        box.space = {"reserve": "2%", "lease_ttl": "200ms"}
        box.serve_displaced = False
        try:
            pool = box.open(disks[:1])
            for number in range(20):
                put(pool, b"old%d" % number)
            box.close()
            pool = box.open(disks)
            stale = [b"old%d" % n for n in range(20) if pool.lookup(ROOT_ID, b"old%d" % n) is None]
            live = [b"old%d" % n for n in range(20) if b"old%d" % n not in stale]
            assert stale
            assert live
            number = 0
            while any(there(pool, name) for name in stale):
                assert all(there(pool, name) for name in live)
                put(pool, b"new%d" % number)
                number += 1
                assert number < 200
        finally:
            box.drop()


def test_an_evictor_that_fails_comes_back(monkeypatch):
    """A step that raises, whatever it is, is taken again; nothing is lost but what was to go."""
    from kvfuse.cleaning import removal

    real = removal.remove
    failures = iter(range(3))

    def failing(*args):
        if next(failures, None) is not None:
            raise RuntimeError("broken")
        return real(*args)

    monkeypatch.setattr(removal, "remove", failing)
    with small_pool() as (box, pool):
        for number in range(2 * DISK // SIZE):
            with contextlib.suppress(OSError):
                put(pool, b"f%d" % number)
        until(lambda: fill_of(pool) <= 0.9)
        box.check()
