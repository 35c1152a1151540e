"""Which files go and how much: amounts, protections, policies, without a disk."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.bench.queues import Queues
from kvfuse.core import eviction
from kvfuse.core.eviction import (
    HITS_MAX,
    MAIN,
    POLICIES,
    Entry,
    Need,
    Pins,
    Protection,
    Usage,
    Watermarks,
    victims,
)
from kvfuse.core.records import HITS_BITS, hits_of, with_hits

MARKS = Watermarks(0.9, 0.8)
sizes = st.integers(0, 1 << 40)
entries = st.lists(
    st.builds(Entry, st.integers(1, 1 << 20), st.integers(1, MAIN - 1), st.integers(0, 1 << 30)),
    unique_by=lambda entry: entry.id,
)


def test_a_disk_is_cleaned_above_high_down_to_low():
    """Between the watermarks nothing begins; what has begun goes on to the low one."""
    assert not MARKS.exceeded(Usage(1000, 900))
    assert MARKS.exceeded(Usage(1000, 901))
    assert MARKS.exceeded(Usage(1000, 800), promised_bytes=101)
    assert MARKS.need(Usage(1000, 901)) == Need(101, 0)
    assert not MARKS.need(Usage(1000, 800))


def test_inodes_count_like_bytes():
    """A disk whose inodes run out is cleaned, however few bytes it holds."""
    assert MARKS.exceeded(Usage(1000, 0, 100, 91))
    assert MARKS.need(Usage(1000, 0, 100, 91)) == Need(0, 11)
    assert not MARKS.exceeded(Usage(1000, 0, 0, 91))


@given(entries, sizes, st.integers(0, 50), st.sets(st.integers(1, 1 << 20)))
def test_victims_suffice_within_one_file_and_spare_what_is_protected(found, size, inodes, kept):
    """The first unprotected files in order, as many as needed and not one more."""
    need = Need(size, inodes)

    def protection(entry: Entry) -> Protection | None:
        return Protection.PINNED if entry.id in kept or entry.id % 7 == 0 else None

    chosen = victims(found, need, protection)
    free = [entry for entry in found if protection(entry) is None]
    assert chosen == free[: len(chosen)]
    gone = need.less(sum(entry.size_bytes for entry in chosen), len(chosen))
    assert not gone or chosen == free
    if chosen:
        before = chosen[:-1]
        assert need.less(sum(entry.size_bytes for entry in before), len(before))


@pytest.mark.parametrize(
    ("patterns", "key", "is_pinned"),
    [
        (["config.json"], b"a/b/config.json", True),
        (["config.json"], b"a/b/xconfig.json", False),
        (["config.json"], b"config.json/x", False),
        (["*.cfg"], b"a/\xff.cfg", True),
        (["models/*/keep.bin"], b"models/x/keep.bin", True),
        (["/models/k"], b"models/k", True),
        (["models/k"], b"other/models/k", False),
        ([], b"config.json", False),
        (["a(b"], b"a(b", True),
    ],
)
def test_pins(patterns, key, is_pinned):
    """A pattern without a slash is of the name, one with a slash of the whole key."""
    assert Pins(patterns).hold(key) is is_pinned


@pytest.mark.parametrize(
    ("name", "together"),
    [
        (b"x.safetensors", {b"x.safetensors.metadata"}),
        (b"x.safetensors.metadata", {b"x.safetensors"}),
        (b"7.bucket", {b"7.meta", b"7.bucket.metadata"}),
        (b"7.meta", {b"7.bucket", b"7.meta.metadata"}),
    ],
)
def test_pairs_go_together(name, together):
    """A file and its description are worth nothing without each other."""
    assert set(eviction.partners(name)) == together


def test_small_files_beside_the_blocks_go_last():
    """Small configuration goes last; blocks of any size, and large files of any name, do not."""
    assert eviction.goes_last(b"generation.json", 4096)
    assert not eviction.goes_last(b"generation.json", 1 << 20)
    assert not eviction.goes_last(b"block.data", 4096)


@given(st.integers(0, 255), st.integers(0, HITS_MAX))
def test_hits_lie_in_the_flags_and_change_no_other(flags, hits):
    """What a policy counts does not touch what the flags say otherwise."""
    changed = with_hits(flags, hits)
    assert hits_of(changed) == hits
    assert changed & ~HITS_BITS == flags & ~HITS_BITS


class Cache:
    """A cache of so many files, whose victims a policy chooses."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.queues = Queues(policy)
        self.capacity = capacity

    def __contains__(self, key: int) -> bool:
        return key in self.queues

    def __len__(self) -> int:
        return len(self.queues)

    def ask(self, key: int) -> bool:
        if key in self.queues:
            self.queues.used(key)
            return True
        while len(self.queues) >= self.capacity:
            self.queues.evict()
        self.queues.stored(key, 1)
        return False


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 12))
def test_lru_is_lru(keys, capacity):
    """The policy lru keeps exactly what was used last."""
    cache, model = Cache("lru", capacity), OrderedDict()
    for key in keys:
        assert cache.ask(key) is (key in model)
        model[key] = None
        model.move_to_end(key)
        while len(model) > capacity:
            model.popitem(last=False)
    assert len(cache) == len(model)
    assert all(key in cache for key in model)


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.integers(0, 40), max_size=300))
def test_every_policy_ends_and_keeps_the_capacity(policy, keys):
    """Whatever is asked, an eviction ends, and what was just stored is there."""
    cache = Cache(policy, 8)
    for key in keys:
        cache.ask(key)
        assert key in cache
        assert len(cache) <= 8


def test_s3fifo_keeps_what_is_used_again_through_a_scan():
    """A scan of ten times the capacity pushes lru's working set out, and not s3fifo's."""
    hits = {}
    for policy in POLICIES:
        cache = Cache(policy, 100)
        for _ in range(3):
            for key in range(50):
                cache.ask(key)
        for key in range(1000, 2000):
            cache.ask(key)
        hits[policy] = sum(cache.ask(key) for key in range(50))
    assert hits["lru"] == 0
    assert hits["s3fifo"] >= 45
