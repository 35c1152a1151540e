"""Room on disks: who waits for it and how long, and what comes back late; without a mount."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfuse.cleaning.evictor import Evictor
from kvfuse.core.admission import Kind
from kvfuse.core.eviction import Watermarks
from kvfuse.core.records import ROOT_ID
from kvfuse.disks.disk import Disk, Space
from kvfuse.space.reservations import Reservations
from kvfuse.space.returning import PATIENCE_S, Returning
from kvfuse.space.room import TIGHT_BYTES, Rooms
from tests.disks import MIB, loop_disks
from tests.shell.pools import CALLER, Box

KIND = Kind(b"", b"data")
LONG_S = 60.0
FULL, EMPTY = Space(1 << 30, 1 << 30, 0, 0, 0), Space(1 << 30, 0, 1 << 30, 0, 0)


def rooms_of(*spaces: Space) -> Rooms:
    """Return the rooms of disks 1, 2, ... that were measured now."""
    rooms = Rooms(Reservations(), lambda _capacity_bytes: 0, Watermarks(0.9, 0.8))
    for number, space in enumerate(spaces, 1):
        rooms.measured(number, space, "ext4", time.monotonic())
    return rooms


def fill_up(disk: Path) -> None:
    """Put a file on a disk that is not kvfuse's, and takes all that is left."""
    foreign = disk / ".kvfuse" / "foreign"
    with contextlib.suppress(OSError), foreign.open("wb", buffering=0) as file:
        while file.write(b"f" * MIB):
            pass


def in_thread(act: Callable[[], int | None]) -> tuple[threading.Thread, list[int | None]]:
    """Begin *act*; return its thread, and a list that will have its result."""
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    return thread, found


def test_whoever_waits_takes_the_first_disk_that_has_room():
    """All disks are waited for together, not one after the other."""
    rooms = rooms_of(FULL, FULL)
    thread, found = in_thread(lambda: rooms.promise(7, [1, 2], KIND, wait_s=LONG_S))
    rooms.measured(2, EMPTY, "ext4", time.monotonic())
    thread.join(LONG_S / 2)
    assert found == [2]


def test_nobody_waits_in_vain_and_nobody_gives_up_too_early():
    """A disk of which nothing may go is not waited for, unless something may in time."""
    rooms = rooms_of(FULL)
    rooms.give_up(1, time.monotonic() + 2 * LONG_S)
    thread, found = in_thread(lambda: rooms.promise(7, [1], KIND, wait_s=LONG_S))
    thread.join(LONG_S / 2)
    assert found == [None]
    rooms.give_up(1, time.monotonic() + LONG_S / 2)
    thread, found = in_thread(lambda: rooms.promise(7, [1], KIND, wait_s=LONG_S))
    while not rooms.short(1):
        time.sleep(0.001)
    rooms.give_up(1, time.monotonic() + LONG_S / 2)
    rooms.measured(1, EMPTY, "ext4", time.monotonic())
    thread.join(LONG_S / 2)
    assert found == [1]


def test_an_older_measurement_does_not_hide_a_newer_one():
    """Of two that ask a disk at once the later one is believed, whoever is back first."""
    rooms = rooms_of(EMPTY)
    rooms.measured(1, FULL, "ext4", time.monotonic() - 1)
    assert rooms.promise(7, [1], KIND) == 1


def test_two_measurements_cover_an_ended_file_once():
    """What ended after both began stays reserved."""
    reservations = Reservations()
    ends = []
    for node_id in (1, 2):
        assert reservations.begin(node_id, 1, KIND)
        reservations.end(node_id)
        ends.append(reservations.ended(1))
    for _ in range(2):
        reservations.measured(1, ends[0])
    assert reservations.unwritten(1) == ends[1] - ends[0] > 0


def test_writers_are_mediated_before_a_disk_can_be_full():
    """By what is left, however far the watermark is, and by how fast it is written."""
    used_bytes = (1 << 40) - 2 * TIGHT_BYTES
    rooms = Rooms(Reservations(), lambda _capacity_bytes: 0, Watermarks(0.99999, 0.8))
    rooms.measured(1, Space(1 << 40, used_bytes, 2 * TIGHT_BYTES, 0, 0), "ext4", time.monotonic())
    assert not rooms.is_tight(1)
    rooms.written(1, 100 * TIGHT_BYTES)
    assert rooms.is_tight(1)
    rooms.written(1, 0)
    left_bytes = TIGHT_BYTES - 1
    rooms.measured(
        1, Space(1 << 40, (1 << 40) - left_bytes, left_bytes, 0, 0), "", time.monotonic()
    )
    assert rooms.is_tight(1)


def test_what_comes_back_late_is_not_removed_twice():
    """What was removed counts until the disk shows it as free, beside what is written."""
    returning = Returning()
    returning.measured(0.0, 1000, 0, 0)
    returning.removed(300)
    assert returning.still_bytes(0.0) == 300
    returning.measured(0.1, 1000, 0, 0)  # nothing is back yet
    assert returning.still_bytes(0.1) == 300
    returning.measured(0.2, 900, 100, 100)  # 200 are back, 100 were written
    assert returning.still_bytes(0.2) == 100
    returning.measured(0.3, 800, 100, 100)
    assert returning.still_bytes(0.3) == 0


def test_what_does_not_come_back_is_given_up():
    """Who waits for room believes in it for a moment, the watermark somewhat longer."""
    returning = Returning()
    returning.measured(0.0, 1000, 0, 0)
    returning.removed(300)
    for tenth in range(1, 12):
        returning.measured(tenth / 10, 1000, 0, 0)
    assert returning.still_bytes(1.1) == 300
    assert returning.still_bytes(1.1, 1.0) == 0
    returning.measured(1.2 + PATIENCE_S, 1000, 0, 0)
    assert returning.still_bytes(1.2 + PATIENCE_S) == 0


def test_room_that_others_took_is_not_promised(monkeypatch):
    """A disk is asked when the file is made: who is not of the pool writes there, too."""
    monkeypatch.setattr(Evictor, "tick", lambda _self: 1.0)  # nobody else measures
    with loop_disks() as (made, _):
        disks = [made.add("ext4", 32 * MIB) for _ in range(2)]
        box = Box(made.base, disks)
        pool = box.open()
        try:
            fill_up(disks[0])
            for number in range(8):
                name = b"f%d.data" % number
                _, fh = pool.create(ROOT_ID, name, os.O_WRONLY, 0o644, CALLER)
                os.pwrite(pool.fd(fh), b"k" * MIB, 0)
                pool.release(fh)
                assert (disks[1] / name.decode()).exists()
        finally:
            box.drop()


def test_a_write_is_tried_until_there_is_room(monkeypatch):
    """Others may take the room that was made; what a disk takes part-way is gone on with."""
    real, refusals = Disk.write, iter(range(3))

    def write(disk: Disk, fd: int, data: memoryview, offset: int) -> int:
        if next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, "full")
        return real(disk, fd, data[: max(1, len(data) // 2)], offset)

    with loop_disks() as (made, _):
        box = Box(made.base, [made.add("ext4", 32 * MIB)])
        pool = box.open()
        try:
            monkeypatch.setattr(Disk, "write", write)
            _, fh = pool.create(ROOT_ID, b"file", os.O_WRONLY, 0o644, CALLER)
            data = os.urandom(1 << 16)
            assert pool.write(fh, 0, data) == len(data)
            assert os.pread(pool.fd(fh), 1 << 17, 0) == data
            pool.release(fh)
        finally:
            box.drop()


def test_a_disk_that_others_fill_does_not_begin_a_task_again_and_again(monkeypatch):
    """One says that nothing may go; the next begins when something may."""
    real, ticks = Evictor.tick, []

    def tick(evictor: Evictor) -> float:
        ticks.append(1)
        real(evictor)
        return 0.01

    monkeypatch.setattr(Evictor, "tick", tick)
    with loop_disks() as (made, _):
        disk = made.add("ext4", 32 * MIB)
        box = Box(made.base, [disk])
        pool = box.open()
        try:
            fill_up(disk)
            deadline_s = time.monotonic() + LONG_S
            while len(ticks) < 100:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            with pytest.raises(OSError, match="no disk has room"):
                pool.create(ROOT_ID, b"file", os.O_WRONLY, 0o644, CALLER)
            assert [task["result"] for task in pool.tasks()] == ["short"]
        finally:
            box.drop()
