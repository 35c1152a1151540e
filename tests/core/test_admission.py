"""What a file will take: the largest of late of its kind."""

import pytest

from kvfuse.core.admission import KINDS_MAX, UNKNOWN_BYTES, WINDOW, Kind, Sizes, kind_of


@pytest.mark.parametrize(
    ("directory", "name", "kind"),
    [
        (b"", b"a.bin", Kind(b"", b".bin")),
        (b"m/a/b", b"a.bin", Kind(b"m", b".bin")),
        (b"m", b"a.bin_77.tmp", Kind(b"m", b".bin")),
        (b"m", b"abc", Kind(b"m", b"")),
        (b"m", b"stem.tmp", Kind(b"m", None)),
        (b"m", b".tmpAb3dE9", Kind(b"m", None)),
    ],
)
def test_kind_of_a_name(directory, name, kind):
    """Top directory and final extension, as far as the name tells."""
    assert kind_of(directory, name) == kind


def test_estimate_asks_the_nearest_first():
    """Kind, then extension, then the pool, then 64 MiB."""
    sizes = Sizes()
    assert sizes.estimate(Kind(b"m", b".bin")) == UNKNOWN_BYTES
    sizes.note(Kind(b"m", b".bin"), 10)
    sizes.note(Kind(b"n", b".bin"), 20)
    sizes.note(Kind(b"n", b".data"), 30)
    assert sizes.estimate(Kind(b"m", b".bin")) == 10
    assert sizes.estimate(Kind(b"x", b".bin")) == 20
    assert sizes.estimate(Kind(b"x", b".other")) == 30
    assert sizes.estimate(Kind(b"m", None)) == 30


def test_largest_size_of_late_counts():
    """A large file is remembered for one window at least, and forgotten after two."""
    kind, sizes = Kind(b"m", b".bin"), Sizes()
    sizes.note(kind, 1000)
    for _ in range(WINDOW):
        assert sizes.estimate(kind) == 1000
        sizes.note(kind, 10)
    for _ in range(WINDOW):
        sizes.note(kind, 10)
    assert sizes.estimate(kind) == 10


def test_kinds_are_bounded():
    """A pool with a million top directories keeps the kinds of late only."""
    sizes = Sizes()
    for number in range(2 * KINDS_MAX):
        sizes.note(Kind(b"%d" % number, b".bin"), number)
    assert len(sizes._by_kind) == KINDS_MAX
    assert sizes.estimate(Kind(b"%d" % (2 * KINDS_MAX - 1), b".bin")) == 2 * KINDS_MAX - 1


def test_empty_files_are_known_sizes():
    """Nothing is a size too."""
    sizes = Sizes()
    sizes.note(Kind(b"m", None), 0)
    assert sizes.estimate(Kind(b"m", b".bin")) == 0
