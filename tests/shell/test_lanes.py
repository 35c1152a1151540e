"""How many threads may wait for a disk, and who waits for such a thread."""

from kvfuse.drivers.direct.abi import Opcode
from kvfuse.drivers.direct.lanes import THREADS_MAX, WAITING_MAX, Lanes, Waiting
from kvfuse.drivers.direct.protocol import Request

DISK, OTHER = 3, 4


def request(unique: int, opcode: Opcode = Opcode.OPEN) -> Request:
    return Request(opcode, unique, 1, 0, 0, 0, None)


def full() -> Lanes:
    """Return lanes where every place of DISK is taken."""
    lanes = Lanes()
    for _ in range(THREADS_MAX):
        assert lanes.enter(DISK)
    return lanes


def test_a_disk_has_a_bounded_number_of_places():
    """When they are taken the next one must wait; other disks have their own."""
    lanes = full()

    assert not lanes.enter(DISK)
    assert lanes.enter(OTHER)
    assert lanes.enter(None)


def test_who_leaves_takes_the_next_in_the_queue_in_order():
    """A place goes from request to request, and is free when the queue is empty."""
    lanes = full()
    for unique in (1, 2):
        assert lanes.wait(DISK, Waiting(request(unique), 0.0))

    assert lanes.next_or_leave(DISK) == request(1)
    assert lanes.next_or_leave(DISK) == request(2)
    assert not lanes.enter(DISK)
    assert lanes.next_or_leave(DISK) is None
    assert lanes.enter(DISK)


def test_a_full_queue_refuses_everything_but_a_release():
    """A RELEASE has to happen: refused, its handle would never be closed."""
    lanes = full()
    for unique in range(WAITING_MAX):
        assert lanes.wait(DISK, Waiting(request(unique), 0.0))

    assert not lanes.wait(DISK, Waiting(request(9999), 0.0))
    assert lanes.wait(DISK, Waiting(request(9999, Opcode.RELEASE), 0.0))
    assert lanes.wait(OTHER, Waiting(request(9999), 0.0))


def test_what_stands_too_long_is_taken_out_but_a_release():
    """Who waits is answered; what must happen stays in its place."""
    lanes = full()
    lanes.wait(DISK, Waiting(request(1), 0.0))
    lanes.wait(DISK, Waiting(request(2, Opcode.RELEASE), 0.0))
    lanes.wait(DISK, Waiting(request(3), 5.0))
    lanes.wait(OTHER, Waiting(request(4), 0.0))

    assert {late.unique for late in lanes.expired(before_s=1.0)} == {1, 4}
    assert lanes.expired(before_s=1.0) == []
    assert lanes.next_or_leave(DISK) == request(2, Opcode.RELEASE)
    assert lanes.next_or_leave(DISK) == request(3)


def test_a_request_nobody_waits_for_any_more_is_withdrawn_once():
    """Only from a queue: what is being executed is not there."""
    lanes = full()
    lanes.wait(DISK, Waiting(request(1), 0.0))

    assert lanes.withdraw(1)
    assert not lanes.withdraw(1)
    assert lanes.next_or_leave(DISK) is None


def test_a_disk_is_slow_while_a_request_outside_its_lane_is_kept_by_it():
    """That request takes a place, even one too many, until it is back."""
    lanes = full()

    lanes.slow_down(DISK)
    assert lanes.any_slow
    assert lanes.is_slow(DISK)
    assert not lanes.is_slow(OTHER)

    lanes.speed_up(DISK)
    assert not lanes.any_slow
    assert lanes.next_or_leave(DISK) is None
    assert not lanes.enter(DISK)
