"""Where files go: golden vectors, balance, and what moves when the disks change."""

import itertools
import random
import uuid
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.core.placement import LEVELS, Load, Policy, candidates, least_used
from kvfuse.core.topology import Member

KEYS = 100_000
GOLDEN_DISKS = (
    "0000abc0-0123-4567-890a-bcdef1234567",
    "0000abc0-0246-8acf-1215-79bde2468ace",
    "0000abc0-0369-d036-9b20-369cd369d035",
    "0000abc0-048d-159e-242a-f37bc48d159c",
)
# Orders as digits: two equal disks, four equal, weights 1 2 0.5 4, four striped.
GOLDEN = [
    (b"a", "01", "3201", "3012", "1230"),
    (b"", "01", "0132", "0312", "3012"),
    (b"ab12", "10", "1203", "1302", "1230"),
    (b"m_r0/b18/ef_g0/b18efa84", "10", "1320", "3102", "1230"),
    (b"meta-llama-SEP-Llama@1@0@b18e@bfloat16", "01", "0213", "3012", "1230"),
    (b"x" * 255, "01", "2031", "3120", "3012"),
    (b"\xff\xfe", "01", "0312", "3012", "3012"),
    (b"a/b", "10", "3102", "3102", "1230"),
    (b"config", "01", "2301", "2310", "0123"),
    (b"\xc3\xa9", "01", "0213", "3102", "2301"),
    (b".tmpAb3dE9", "01", "3021", "3012", "0123"),
    (b"key0", "10", "1023", "1302", "1230"),
    (b"key1", "10", "1230", "1320", "3012"),
    (b"key2", "10", "2310", "3120", "0123"),
    (b"key3", "10", "1203", "1302", "3012"),
    (b"key4", "10", "1230", "3102", "3012"),
    (b"key5", "10", "1302", "1302", "3012"),
    (b"key6", "10", "3210", "3120", "1230"),
    (b"key7", "10", "1203", "1320", "0123"),
    (b"key8", "01", "0231", "0312", "2301"),
]
WITH_OWNERS = [policy for policy in Policy if policy.has_owners]
EQUAL = [Member(disk, 1.0) for disk in GOLDEN_DISKS]
WEIGHTED = [Member(d, w) for d, w in zip(GOLDEN_DISKS, (1.0, 2.0, 0.5, 4.0), strict=True)]


def order(name: bytes, members: list[Member], policy: Policy = Policy.RENDEZVOUS) -> str:
    return "".join(str(GOLDEN_DISKS.index(d)) for d in candidates(name, members, policy))


@pytest.mark.parametrize(("name", "two", "four", "weighted", "striped"), GOLDEN)
def test_golden_orders_never_change(name, two, four, weighted, striped):
    """A changed order here would lose every file of every pool: it needs a new format number."""
    assert order(name, EQUAL[:2]) == two
    assert order(name, EQUAL) == four
    assert order(name, WEIGHTED) == weighted
    assert order(name, EQUAL, Policy.STRIPED) == striped


def disks(count: int, seed: int = 7) -> list[Member]:
    draw = random.Random(seed)
    return [Member(str(uuid.UUID(int=draw.getrandbits(128), version=4))) for _ in range(count)]


def owners(members: list[Member], policy: Policy = Policy.RENDEZVOUS) -> list[str]:
    return [candidates(b"model/%d" % i, members, policy)[0] for i in range(KEYS)]


@pytest.fixture(scope="module")
def nine() -> list[Member]:
    return disks(9)


@pytest.fixture(scope="module")
def of_eight(nine) -> list[str]:
    return owners(nine[:8])


@pytest.fixture(scope="module")
def of_nine(nine) -> list[str]:
    return owners(nine)


def moved(before: list[str], after: list[str]) -> float:
    return sum(a != b for a, b in zip(before, after, strict=True)) / KEYS


def chi_squared(counts: Counter[str], shares: dict[str, float]) -> float:
    return sum((counts[d] - KEYS * s) ** 2 / (KEYS * s) for d, s in shares.items())


def test_ninth_disk_takes_a_ninth(nine, of_eight, of_nine):
    """A disk added to eight takes 11.1 % of the keys, and none moves between the old ones."""
    assert moved(of_eight, of_nine) == pytest.approx(1 / 9, abs=0.005)
    assert all(new in (old, nine[8].disk_id) for old, new in zip(of_eight, of_nine, strict=True))


def test_striped_moves_nearly_all(nine):
    """The modulo baseline moves 88.9 % of the keys at the same change."""
    before, after = owners(nine[:8], Policy.STRIPED), owners(nine, Policy.STRIPED)
    assert moved(before, after) == pytest.approx(8 / 9, abs=0.005)


def test_removed_disk_moves_only_its_own(nine, of_nine):
    """Without one disk its keys go to their second candidate, all others stay."""
    gone = nine[3].disk_id
    after = owners([m for m in nine if m.disk_id != gone])
    for i, (old, new) in enumerate(zip(of_nine, after, strict=True)):
        if old != gone:
            assert new == old
        elif i % 50 == 0:
            assert candidates(b"model/%d" % i, nine, Policy.RENDEZVOUS)[1] == new


def test_equal_disks_get_equal_shares(nine, of_nine):
    """Chi-squared with 8 degrees of freedom stays under its 99.9 % quantile, 26.1."""
    assert chi_squared(Counter(of_nine), {m.disk_id: 1 / 9 for m in nine}) < 26.1


def test_share_follows_weight():
    """Disks of weight 1, 2, 0.5 and 4 own keys in that ratio (99.9 % quantile of 3: 16.3)."""
    shares = {m.disk_id: m.weight / 7.5 for m in WEIGHTED}
    assert chi_squared(Counter(owners(WEIGHTED)), shares) < 16.3


def test_raised_weight_only_attracts():
    """A disk that becomes heavier takes keys; none moves between the others."""
    heavier = [Member(m.disk_id, m.weight * (3 if i == 2 else 1)) for i, m in enumerate(WEIGHTED)]
    for i in range(5000):
        name = b"k%d" % i
        before = candidates(name, WEIGHTED, Policy.RENDEZVOUS)[0]
        assert candidates(name, heavier, Policy.RENDEZVOUS)[0] in (before, GOLDEN_DISKS[2])


@given(st.binary(max_size=300), st.sampled_from(WITH_OWNERS), st.sampled_from([EQUAL, WEIGHTED]))
def test_order_of_members_is_irrelevant(name, policy, members):
    """All permutations give the same candidates, each disk once."""
    wanted = candidates(name, members, policy)
    assert sorted(wanted) == sorted(GOLDEN_DISKS)
    for permuted in itertools.permutations(members):
        assert candidates(name, permuted, policy) == wanted


@given(st.binary(max_size=100), st.floats(0.001, 1000))
def test_equal_weights_rank_alike_whatever_they_are(name, weight):
    """Only ratios matter: all disks at one weight are ranked as all at 1."""
    same = [Member(disk, weight) for disk in GOLDEN_DISKS]
    assert order(name, same) == order(name, EQUAL)


def test_no_members_give_no_candidates():
    """Without a schedulable disk there is none to prefer, and that is no error."""
    assert candidates(b"a", [], Policy.RENDEZVOUS) == ()
    assert candidates(b"a", [], Policy.STRIPED) == ()


def test_largest_hashes_divide_by_nothing(monkeypatch):
    """Hashes that round to 2**64 tie, and ties go by id."""
    monkeypatch.setattr("kvfuse.core.placement._hash64", lambda _data: (1 << 64) - 1)
    members = [Member(GOLDEN_DISKS[1], 2.0), Member(GOLDEN_DISKS[0], 2.0), Member("z", 1.0)]
    assert candidates(b"a", members, Policy.RENDEZVOUS) == (*GOLDEN_DISKS[:2], "z")
    monkeypatch.setattr("kvfuse.core.placement._hash64", lambda _data: 0)
    assert candidates(b"a", EQUAL[::-1], Policy.RENDEZVOUS) == GOLDEN_DISKS


def test_index_has_no_owners():
    """Asking for the owner under a policy without any is a mistake of the caller."""
    with pytest.raises(ValueError, match="no owners"):
        candidates(b"a", EQUAL, Policy.INDEX)


def test_least_used_disk_is_first():
    """Disks are ranked by their used share, not by bytes, and full ones come last."""
    loads = [Load("full", 10, 10, 0), Load("big", 400, 1000, 0), Load("small", 50, 100, 0)]
    assert least_used(loads, 0) == ("big", "small", "full")


def test_reserved_bytes_count_as_used():
    """A burst of files that are being written goes to the emptiest disk only until it is level."""
    used = {"a": 0, "b": 500}
    reserved = dict.fromkeys(used, 0)
    order = []
    for turn in range(100):
        loads = [Load(disk, used[disk], 1000, reserved[disk]) for disk in used]
        order.append(least_used(loads, turn)[0])
        reserved[order[-1]] += 10
    assert set(order[:49]) == {"a"}
    assert Counter(order[52:]) == pytest.approx({"a": 24, "b": 24}, abs=2)


def test_equally_used_disks_take_turns():
    """Disks within one level of each other are used round robin, the others not at all."""
    capacity = 1000 * LEVELS
    loads = [Load(name, number, capacity, 0) for number, name in enumerate("abc")]
    loads.append(Load("d", 2 * 1000, capacity, 0))
    firsts = [least_used(loads, turn)[0] for turn in range(30)]
    assert Counter(firsts) == {"a": 10, "b": 10, "c": 10}


def test_disk_of_unknown_capacity_is_the_last_resort():
    """A disk nobody measured yet, or without any room, is still a candidate."""
    assert least_used([Load("x", 0, 0, 0), Load("y", 9, 10, 99)], 5) == ("y", "x")
    assert least_used([], 1) == ()
