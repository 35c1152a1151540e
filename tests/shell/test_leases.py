"""Leases, with a clock of the test's own."""

import threading

import pytest

from kvfuse.space.leases import FRESH_MAX, SPARES_MAX, Leases

TTL_S = 10.0
KEPT_S = 1.0


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leases(clock):
    found = Leases(TTL_S, clock)
    found.answers_kept(KEPT_S, can_be_quiet=True)
    return found


def test_a_condemned_file_goes_after_silence(leases, clock):
    """Not before the lease and what the kernel answers by itself have passed."""
    assert leases.condemn(1)
    clock.now_s += TTL_S + KEPT_S
    assert not leases.claim([1])
    clock.now_s += 0.1
    assert leases.claim([1])
    assert not leases.asked(1)
    assert not leases.condemn(1)


def test_the_kernel_having_forgotten_the_name_shortens_the_wait(leases, clock):
    """Then only the lease is waited for, from that moment."""
    leases.condemn(1)
    clock.now_s += 0.2
    leases.expired(1)
    clock.now_s += TTL_S - 0.01
    assert not leases.claim([1])
    clock.now_s += 0.02
    assert leases.claim([1])


def test_a_lookup_spares_and_its_lease_is_kept(leases, clock):
    """A yes at the last moment holds for a whole lease more, cached answers included."""
    leases.condemn(1)
    clock.now_s += TTL_S + KEPT_S + 1
    assert leases.asked(1)
    assert not leases.claim([1])
    assert not leases.condemn(1)
    clock.now_s += TTL_S + KEPT_S
    assert not leases.condemn(1)


def test_lookups_alone_spare_three_times(leases, clock):
    """A crawler that stats everything for ever does not stop eviction."""
    for _ in range(SPARES_MAX):
        assert leases.condemn(1)
        clock.now_s += TTL_S
        assert leases.asked(1)
        clock.now_s += leases.silence_s + 0.1
        leases.prune()
    assert leases.condemn(1)
    clock.now_s += TTL_S
    assert leases.asked(1)
    clock.now_s += KEPT_S + 0.1
    assert leases.claim([1])


def test_an_access_resets_the_count(leases, clock):
    """Who opens the file begins anew."""
    for _ in range(3 * SPARES_MAX):
        assert leases.condemn(1)
        leases.asked(1)
        clock.now_s += leases.silence_s + 0.1
        leases.condemn(1)
        leases.accessed(1)
    leases.condemn(1)
    leases.asked(1)
    clock.now_s += leases.silence_s
    assert not leases.claim([1])


def test_what_nobody_asked_for_goes_at_once_when_the_kernel_was_quiet(leases, clock):
    """A new file goes without silence, if the kernel cannot have answered for it."""
    leases.committed(1)
    leases.be_quiet(on=True)
    leases.committed(2)  # its name may be kept from before
    clock.now_s += KEPT_S + 0.1
    leases.committed(3)
    for node_id in (1, 2, 3):
        assert leases.condemn(node_id)
    assert not leases.claim([1])
    assert not leases.claim([2])
    assert leases.claim([3])
    clock.now_s += TTL_S
    assert leases.claim([1])
    assert leases.claim([2])


def test_what_was_asked_for_once_is_not_new_any_more(leases, clock):
    """One lookup, and the file has to be condemned like any other."""
    leases.be_quiet(on=True)
    clock.now_s += KEPT_S + 0.1
    leases.committed(1)
    assert leases.asked(1)
    assert leases.condemn(1)
    assert not leases.claim([1])


def test_all_or_none_is_claimed(leases, clock):
    """One member of a pair that may not go keeps the other."""
    leases.condemn(1)
    clock.now_s += TTL_S + KEPT_S + 0.1
    leases.condemn(2)
    assert not leases.claim([1, 2])
    assert leases.asked(2)
    assert leases.claim([1])


def test_what_is_remembered_is_bounded(leases, clock):
    """New files, those that went and those that were spared are forgotten in the end."""
    for node_id in range(FRESH_MAX + 100):
        leases.committed(node_id)
    assert len(leases.watched) == FRESH_MAX
    for node_id in range(FRESH_MAX + 100):
        leases.accessed(node_id)
    for node_id in range(100):
        leases.condemn(node_id)
    clock.now_s += TTL_S + KEPT_S + 0.1
    for node_id in range(50):
        leases.claim([node_id])
    for node_id in range(50, 100):
        leases.asked(node_id)
    clock.now_s += 1000
    leases.prune()
    assert not leases.watched


def test_claim_and_spare_exclude_each_other():
    """Of a lookup and a claim at one moment exactly one wins: no yes for what goes."""
    leases = Leases(0.0)
    yes: set[int] = set()

    def ask() -> None:
        for node_id in range(2000):
            if leases.asked(node_id):
                yes.add(node_id)

    for node_id in range(2000):
        leases.condemn(node_id)
    ripe = leases.ripe_s(0)
    assert ripe is not None
    while not leases.claim([1999]):
        pass
    thread = threading.Thread(target=ask)
    thread.start()
    gone = {node_id for node_id in range(1999) if leases.claim([node_id])}
    thread.join()
    assert not gone & yes
