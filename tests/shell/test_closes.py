"""The last close of a new temp: left to its rename, else settled soon, each disk by itself."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from kvfuse.core.records import LABEL_PENDING, ROOT_ID, State, unpack_label
from kvfuse.disks.disk import Disk
from kvfuse.pool.pool import Pool
from tests.shell.pools import CALLER, boxed

WAIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def begin(pool: Pool, name: bytes) -> tuple[int, int, int]:
    """Write a new temp; return its id, its disk and its handle."""
    node, fh = pool.create(ROOT_ID, name, os.O_WRONLY | os.O_EXCL, 0o644, CALLER)
    pool.write(fh, 0, b"data")
    return node.id, node.disk, fh


def is_settled(pool: Pool, node_id: int) -> bool:
    """Whether record and label say that the file is whole."""
    with pool._state.catalog.read() as txn:
        node = txn.node(node_id)
    carriers = pool._state.carriers[node.disk]
    value = carriers.at(node.parent, lambda fd: carriers.disk.read_label_at(fd, node.name))
    return node.state == State.COMMITTED and not unpack_label(value).flags & LABEL_PENDING


def test_temp_that_nobody_renames_is_settled_soon():
    """At first its close writes nothing; a moment later record and label say that it is whole."""
    with boxed() as box:
        pool = box.open()
        node_id, _, fh = begin(pool, b"a.bin.tmp")
        pool.release(fh)
        assert not is_settled(pool, node_id)
        assert pool.getattr(node_id).size == 4
        until(lambda: is_settled(pool, node_id))
        assert pool.getattr(node_id).size == 4
        box.check()


def test_clean_end_settles_all():
    """No file of a pool that was unmounted is half written."""
    with boxed() as box:
        pool = box.open()
        node_id, _, fh = begin(pool, b"a.bin.tmp")
        pool.release(fh)
        box.close()
        assert is_settled(box.open(), node_id)


def test_disk_that_hangs_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch):
    """Closes on the other disk are settled meanwhile, and its own when it answers again."""
    answers = threading.Event()
    with boxed() as box:
        pool = box.open()
        begun = [begin(pool, b"%d.bin.tmp" % number) for number in range(16)]
        sick = begun[0][1]
        assert {disk for _, disk, _ in begun} == set(pool._state.carriers), "one disk has none"
        hung, write_label = pool._state.carriers[sick].disk, Disk.write_label

        def hanging(disk: Disk, fd: int, value: bytes) -> None:
            assert disk is not hung or answers.wait(WAIT_S)
            write_label(disk, fd, value)

        monkeypatch.setattr(Disk, "write_label", hanging)
        for _, _, fh in begun:
            pool.release(fh)
        well = [node_id for node_id, disk, _ in begun if disk != sick]
        until(lambda: all(is_settled(pool, node_id) for node_id in well))
        pool._state.accesses.note(well[0], time.time_ns())
        until(lambda: pool._state.accesses.get(well[0]) is None)  # the catalog's upkeep goes on
        assert not is_settled(pool, begun[0][0])

        answers.set()
        until(lambda: all(is_settled(pool, node_id) for node_id, _, _ in begun))
        box.check()
