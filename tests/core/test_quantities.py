"""Sizes, durations and percentages: what is read, what is refused, and back again."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfuse.core.quantities import (
    SIZE_BYTES_MAX,
    format_duration,
    format_percentage,
    format_size,
    parse_duration,
    parse_percentage,
    parse_size,
    show,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), (4096, 4096), ("4K", 4096), ("64M", 64 << 20), ("1.5G", 3 << 29),
     ("2T", 2 << 40), ("0.001K", 1), (SIZE_BYTES_MAX, SIZE_BYTES_MAX)],
)  # fmt: skip
def test_sizes(text, size_bytes):
    """A size is bytes, or a number and a power of 1024."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("10s", 10), ("5m", 300), ("1h", 3600), ("0s", 0), ("1.5s", 1.5)],
)
def test_durations(text, seconds):
    """A duration is a number and its unit."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "ratio"), [("90%", 0.9), ("0%", 0), ("100%", 1), ("2.5%", 0.025)])
def test_percentages(text, ratio):
    """A percentage becomes a ratio."""
    assert parse_percentage(text) == ratio


GARBAGE = [
    "", " ", "x", "-1", "-1K", "-5s", "-2%", "+1", "nan", "NaN", "inf", "1e3", "1e3s", "1 K", " 1K",
    "1K ", "1k", "1KB", "1KiB", "1P", ".5K", "1.K", "1..2K", "1,5G", "0x10", "1_000", "\u0661K",
    "5", "5S", "5sec", "5 s", "1d", "5%%", "% 5", "1\n", "1K\n", "5s\n", "5%\n", "9" * 21,
    "9" * 5000, "\uff15s",
    None, True, False, 1.5, float("nan"), float("inf"), -1, [], {}, b"1K", object(),
]  # fmt: skip


@pytest.mark.parametrize("value", GARBAGE, ids=lambda v: show(v)[:20])
@pytest.mark.parametrize("parse", [parse_size, parse_duration, parse_percentage])
def test_garbage_is_refused(parse, value):
    """Nothing but the written forms is read, and the message is one short line with the remedy."""
    if parse is parse_size and value == "5":
        assert parse(value) == 5
        return
    with pytest.raises(ValueError, match="write") as caught:
        parse(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_size, SIZE_BYTES_MAX + 1),
        (parse_size, "99999999999999999999"),
        (parse_size, "8388608T"),
        (parse_duration, "99999999999999999999h"),
        (parse_percentage, "100.000001%"),
        (parse_percentage, "101%"),
    ],
)
def test_overflow_is_refused(parse, value):
    """What is too large is said to be, not wrapped or cut."""
    with pytest.raises(ValueError, match="out of range"):
        parse(value)


@given(st.integers(0, SIZE_BYTES_MAX))
def test_sizes_are_read_back(size_bytes):
    """What is shown as a size is read as the same one."""
    assert parse_size(format_size(size_bytes)) == size_bytes


@example(3599_999_999, "s", 1)
@example(0, "ms", 1)
@given(st.integers(0, 10**10), st.sampled_from(["ms", "s", "m", "h"]), st.integers(0, 999))
def test_durations_are_read_back(number, unit, thousandths):
    """What is shown as a duration is read as the same one."""
    try:
        seconds = parse_duration(f"{number}.{thousandths:03}{unit}")
    except ValueError:
        return
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 10**8))
def test_percentages_are_read_back(millionths):
    """What is shown as a percentage is read as the same one."""
    ratio = parse_percentage(f"{millionths // 10**6}.{millionths % 10**6:06}%")
    assert parse_percentage(format_percentage(ratio)) == ratio


def test_shown_in_the_largest_unit():
    """People see what they would write."""
    assert [format_size(n) for n in (0, 1, 1025, 4096, 3 << 29)] == [
        "0",
        "1",
        "1025",
        "4K",
        "1536M",
    ]
    shown = [format_duration(s) for s in (0, 0.25, 5, 90, 300, 3600)]
    assert shown == ["0s", "250ms", "5s", "90s", "5m", "1h"]
    assert [format_percentage(r) for r in (0.02, 0.9, 0.025, 1)] == ["2%", "90%", "2.5%", "100%"]
