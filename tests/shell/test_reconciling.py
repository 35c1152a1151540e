"""After a start that believed its catalog, catalog and disks are compared once."""

import time
from typing import Any

import pytest

from kvfuse.pool.pool import Pool
from tests.shell.pools import Box, boxed, commit, disk_path, find, mkdir, read

_END_S = 60.0


@pytest.fixture
def box():
    """A pool of two disks with some files, closed cleanly."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        for number in range(6):
            commit(pool, f"d/{number}.bin", b"%d" % number)
        yield box


def compared(pool: Pool) -> dict[str, Any]:
    """Wait until the comparison has ended; return what ``status`` says of it."""
    until_s = time.monotonic() + _END_S
    while time.monotonic() < until_s:
        check: dict[str, Any] = pool.status()["recovery"]["check"]
        if check["state"] not in ("waiting", "running"):
            return check
        time.sleep(0.02)
    raise AssertionError(f"not compared: {check}")


def reopened(box: Box) -> Pool:
    box.recovery = {"check_after": "10ms"}
    return box.open()


def test_what_was_lost_on_a_disk_meanwhile_becomes_a_miss(box):
    pool = box.pool
    lost = disk_path(pool, "d/3.bin")
    box.close()
    lost.unlink()
    check = compared(reopened(box))
    assert (check["state"], check["faults"]) == ("done", 0)
    assert check["mended"] >= 1
    pool = box.pool
    assert find(pool, "d/3.bin") is None
    assert read(pool, "d/4.bin") == b"4"
    box.check()


def test_a_pool_without_fault_is_told_to_be_so(box):
    box.close()
    check = compared(reopened(box))
    assert (check["state"], check["faults"], check["mended"]) == ("done", 0, 0)
    assert check["compared"] > 6
    assert [read(box.pool, f"d/{number}.bin") for number in range(6)] == [
        b"%d" % number for number in range(6)
    ]


def test_nothing_is_compared_after_a_scan_or_when_it_is_not_wanted(box):
    box.close()
    box.lose_catalog()
    pool = reopened(box)
    assert pool.status()["recovery"]["check"] == {"state": "off"}
    box.close()
    box.recovery = {"check_after": "0s"}
    assert box.open().status()["recovery"]["check"] == {"state": "off"}


def test_a_pool_can_be_closed_while_it_waits_to_compare(box):
    box.close()
    box.recovery = {"check_after": "1h"}
    assert box.open().status()["recovery"]["check"] == {"state": "waiting"}
    box.close()
    assert find(box.open(), "d/1.bin") is not None
