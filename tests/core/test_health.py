"""Disk health: every state, every event, and the facts behind them."""

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.core.health import (
    ERRORS_TO_FAIL,
    ERRORS_WINDOW_S,
    TRANSITIONS,
    DiskState,
    Event,
    Health,
    Mode,
    RuntimeState,
)

NOW_S = 1000.0
GONE = [errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN]

# Each verb with an event of every kind; the key is what the table below calls it.
VERBS = {
    "EIO": lambda h, t: h.on_error(errno.EIO, now_s=t, what="read"),
    "ENODEV": lambda h, t: h.on_error(errno.ENODEV, now_s=t),
    "ENOSPC": lambda h, t: h.on_error(errno.ENOSPC, now_s=t),
    "EDQUOT": lambda h, t: h.on_error(errno.EDQUOT, now_s=t),
    "EROFS": lambda h, t: h.on_error(errno.EROFS, now_s=t),
    "EINVAL": lambda h, t: h.on_error(errno.EINVAL, now_s=t),
    "ENOENT": lambda h, t: h.on_error(errno.ENOENT, now_s=t),
    "success": lambda h, t: h.on_success(now_s=t),
    "timeout": lambda h, t: h.on_timeout(now_s=t),
    "unstuck": lambda h, t: h.on_unstuck(now_s=t),
    "full": lambda h, t: h.on_full(now_s=t),
    "room": lambda h, t: h.on_room(now_s=t),
    "read_only": lambda h, t: h.on_read_only(now_s=t),
    "registered": lambda h, t: h.registered(now_s=t),
    "enable": lambda h, t: h.enable(now_s=t),
    "disable": lambda h, t: h.disable(now_s=t),
    "drain": lambda h, t: h.drain(now_s=t),
    "fail": lambda h, t: h.fail(now_s=t),
    "readmit": lambda h, t: h.readmit(now_s=t),
}

healthy = Health.healthy(now_s=0)
STATES = {
    DiskState.REGISTERING: Health.registering(now_s=0),
    DiskState.HEALTHY: healthy,
    DiskState.DEGRADED: healthy.on_error(errno.EIO, now_s=NOW_S - 1),
    DiskState.DRAINING: healthy.drain(now_s=0),
    DiskState.DISABLED: healthy.disable(now_s=0),
    DiskState.FAILED: Health.failed("missing", now_s=0),
    DiskState.FULL: healthy.on_full(now_s=0),
}

# What each event makes of each state; a pair that is not here keeps its state.
SERVING = {
    DiskState.HEALTHY,
    DiskState.DEGRADED,
    DiskState.DRAINING,
    DiskState.DISABLED,
    DiskState.FULL,
}
EXPECTED = {
    (DiskState.REGISTERING, "registered"): DiskState.HEALTHY,
    (DiskState.HEALTHY, "EIO"): DiskState.DEGRADED,
    (DiskState.FULL, "EIO"): DiskState.DEGRADED,
    (DiskState.HEALTHY, "ENOSPC"): DiskState.FULL,
    (DiskState.HEALTHY, "EDQUOT"): DiskState.FULL,
    (DiskState.HEALTHY, "full"): DiskState.FULL,
    (DiskState.FULL, "room"): DiskState.HEALTHY,
    (DiskState.HEALTHY, "EROFS"): DiskState.DEGRADED,
    (DiskState.HEALTHY, "read_only"): DiskState.DEGRADED,
    (DiskState.FULL, "EROFS"): DiskState.DEGRADED,
    (DiskState.FULL, "read_only"): DiskState.DEGRADED,
    (DiskState.DISABLED, "enable"): DiskState.HEALTHY,
    (DiskState.DRAINING, "enable"): DiskState.HEALTHY,
    (DiskState.FAILED, "readmit"): DiskState.REGISTERING,
    **{(s, "disable"): DiskState.DISABLED for s in SERVING},
    **{(s, "drain"): DiskState.DRAINING for s in SERVING},
    **{(s, e): DiskState.FAILED for s in DiskState for e in ("ENODEV", "timeout", "fail")},
}


@pytest.mark.parametrize("state", DiskState)
@pytest.mark.parametrize("verb", VERBS)
def test_each_event_in_each_state(state, verb):
    """All pairs of state and event, one by one."""
    before = STATES[state]
    assert before.state is state
    after = VERBS[verb](before, NOW_S)
    assert after.state is EXPECTED.get((state, verb), state)
    assert after.since_s == (before.since_s if after.state is state else NOW_S)


@pytest.mark.parametrize(
    ("state", "runtime", "readable", "writable", "schedulable"),
    [
        (DiskState.REGISTERING, RuntimeState.ENABLED, False, False, False),
        (DiskState.HEALTHY, RuntimeState.ENABLED, True, True, True),
        (DiskState.DEGRADED, RuntimeState.ENABLED, True, True, True),
        (DiskState.DRAINING, RuntimeState.DISABLED_BY_CONFIG, True, True, False),
        (DiskState.DISABLED, RuntimeState.DISABLED_BY_CONFIG, True, True, False),
        (DiskState.FAILED, RuntimeState.DISABLED_BY_FAILURE, False, False, False),
        (DiskState.FULL, RuntimeState.DISABLED_BY_CAPACITY, True, True, False),
    ],
)
def test_what_each_state_allows(state, runtime, readable, writable, schedulable):
    """Files are read and changed where a disk serves; new ones go only where nothing is wrong."""
    health = STATES[state]
    assert health.runtime is runtime
    assert (health.readable, health.writable, health.schedulable) == (
        readable,
        writable,
        schedulable,
    )


@given(st.lists(st.tuples(st.sampled_from(list(VERBS)), st.floats(0, 100)), max_size=30))
def test_no_sequence_of_events_gives_a_contradiction(steps):
    """Whatever happens in whatever order, what operators see agrees with what is allowed."""
    health, now_s = Health.registering(now_s=0), 0.0
    for verb, pause_s in steps:
        now_s += pause_s
        before, health = health, VERBS[verb](health, now_s)
        assert health.errors >= before.errors
        assert health.since_s <= now_s
        if health.state is not before.state:
            assert health.since_s == now_s
        assert not health.schedulable or (health.writable and health.readable)
        assert health.readable is (health.state not in (DiskState.FAILED, DiskState.REGISTERING))
        assert health.schedulable is (health.readable and health.runtime is RuntimeState.ENABLED)
        assert (health.mode is Mode.FAILED) is (health.is_stuck or health.is_broken)
        if health.state is DiskState.HEALTHY:
            assert health.reason == ""
        elif health.state is not DiskState.REGISTERING:
            assert health.reason
        assert len(health.recent_errors_s) < ERRORS_TO_FAIL or health.mode is Mode.FAILED


def test_third_error_within_the_window_fails():
    """EIO degrades at once and fails at the third within 60 s."""
    health = healthy
    for now_s, state in [(1, "DEGRADED"), (30, "DEGRADED"), (59, "FAILED")]:
        health = VERBS["EIO"](health, float(now_s))
        assert health.state == state
    assert health.reason == "3 errors within 60 s, last EIO on read"
    assert health.errors == 3


def test_slow_errors_do_not_fail():
    """Errors further apart than the window never add up."""
    health = healthy
    for i in range(20):
        health = VERBS["EIO"](health, i * (ERRORS_WINDOW_S / 2 + 1))
        assert health.state is DiskState.DEGRADED
    assert health.errors == 20


def test_degraded_is_forgiven_after_the_window():
    """A success heals only what is older than the window."""
    health = VERBS["EIO"](healthy, 100.0)
    assert health.on_success(now_s=100 + ERRORS_WINDOW_S - 1).state is DiskState.DEGRADED
    healed = health.on_success(now_s=100 + ERRORS_WINDOW_S)
    assert (healed.state, healed.reason, healed.errors) == (DiskState.HEALTHY, "", 1)


@pytest.mark.parametrize("code", GONE)
def test_lost_device_fails_at_once(code):
    """One error that says the device is away is enough, and is named."""
    health = healthy.on_error(code, now_s=NOW_S, what="open")
    assert health.state is DiskState.FAILED
    assert health.reason == f"{errno.errorcode[code]} on open"


def test_load_and_bugs_are_no_failures():
    """No errno outside the list changes anything, EINVAL and unknown numbers included."""
    for code in set(range(4096)) - {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, *GONE}:
        assert healthy.on_error(code, now_s=NOW_S) is healthy


def test_fenced_disk_returns_through_a_scan():
    """A timeout fails the disk; once every stuck call is back it registers, then serves."""
    fenced = healthy.on_timeout(now_s=10, what="unlink")
    assert (fenced.state, fenced.reason) == (
        DiskState.FAILED,
        "fenced: unlink did not return in time",
    )
    assert fenced.readmit(now_s=11) is fenced
    back = fenced.on_unstuck(now_s=12)
    assert back.state is DiskState.REGISTERING
    assert not back.readable
    assert back.registered(now_s=13) == Health.healthy(now_s=13)


def test_fenced_and_broken_disk_waits_for_the_operator():
    """A stuck call that returns with ENODEV does not bring the disk back; readmit then does."""
    fenced = healthy.on_timeout(now_s=10).on_error(errno.ENODEV, now_s=11)
    free = fenced.on_unstuck(now_s=12)
    assert (free.state, free.reason) == (DiskState.FAILED, "ENODEV on I/O")
    assert free.readmit(now_s=13).state is DiskState.REGISTERING


def test_dead_disk_with_a_stuck_call_keeps_its_reason():
    """The first reason tells most, and a readmit still waits for the call."""
    dead = Health.failed("missing", now_s=0).on_timeout(now_s=1)
    assert dead.reason == "missing"
    assert dead.readmit(now_s=2) is dead


def test_what_the_operator_wanted_outlives_a_fence():
    """A draining disk that was fenced drains again after its scan; a readmitted one is in use."""
    fenced = healthy.drain(now_s=1).on_timeout(now_s=2)
    assert fenced.on_unstuck(now_s=3).registered(now_s=4).state is DiskState.DRAINING
    failed = healthy.drain(now_s=1).fail(now_s=2)
    assert failed.readmit(now_s=3).registered(now_s=4).state is DiskState.HEALTHY


def test_read_only_disk_is_read():
    """EROFS stops writes and keeps reads; readmit looks again."""
    health = healthy.on_error(errno.EROFS, now_s=NOW_S, what="create")
    assert health.state is DiskState.DEGRADED
    assert health.runtime is RuntimeState.DISABLED_BY_FAILURE
    assert (health.readable, health.writable, health.schedulable) == (True, False, False)
    assert health.reason == "EROFS on create"
    again = health.fail(now_s=NOW_S).readmit(now_s=NOW_S).registered(now_s=NOW_S)
    assert again.writable


def test_disk_of_mode_ro_is_healthy_and_never_written():
    """Read-only by configuration is no fault, and survives failure and readmission."""
    health = Health.healthy(now_s=0, read_only=True)
    for each in (health, health.fail(now_s=1).readmit(now_s=2).registered(now_s=3)):
        assert each.state is DiskState.HEALTHY
        assert each.runtime is RuntimeState.DISABLED_BY_CONFIG
        assert (each.readable, each.writable, each.schedulable) == (True, False, False)


def test_facts_outlive_a_disabling():
    """A full disk that is disabled and enabled is full, with a reason, until it has room."""
    health = healthy.on_full(now_s=1).disable(now_s=2).enable(now_s=3)
    assert (health.state, health.reason) == (DiskState.FULL, "no room")
    assert health.on_room(now_s=4) == Health.healthy(now_s=4)


def test_table_names_only_pairs_that_exist():
    """The table holds modes and events, and every mode can be left."""
    assert set(TRANSITIONS) <= set(itertools.product(Mode, Event))
    for mode in Mode:
        assert any(m is mode and after is not mode for (m, _), after in TRANSITIONS.items())
