"""Sizes, durations and percentages as people write them, to numbers and back. Pure.

Every parser raises ValueError with one line: what is wrong, and what to write. What a formatter
returns, its parser reads back to the same number.
"""

import re
from fractions import Fraction

SIZE_BYTES_MAX = (1 << 63) - 1
DURATION_S_MAX = 100 * 366 * 86400

# ASCII digits and bounded: no locale's digits, no signs, no exponents, no numbers of a megabyte.
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,6})?)"
_SIZE = re.compile(_NUMBER + r"([KMGT]?)")
_DURATION = re.compile(_NUMBER + r"(ms|s|m|h)")
_PERCENTAGE = re.compile(_NUMBER + "%")
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION_UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}


def parse_size(value: object) -> int:
    """Return bytes: of a whole number, or of text such as ``64M`` or ``1.5G`` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        size_bytes = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{show(value)} is no size; write bytes, or a number and K, M, G or T")
        size_bytes = int(Fraction(match[1]) * _SIZE_UNITS[match[2]])
    if not 0 <= size_bytes <= SIZE_BYTES_MAX:
        raise ValueError(f"{show(value)} is out of range; write a size of 0 to {SIZE_BYTES_MAX}")
    return size_bytes


def parse_duration(value: object) -> float:
    """Return seconds, of text such as ``250ms``, ``10s``, ``5m`` or ``1h``."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{show(value)} is no duration; write a number and ms, s, m or h")
    seconds = Fraction(match[1]) * _DURATION_UNITS[match[2]]
    if seconds > DURATION_S_MAX:
        raise ValueError(f"{show(value)} is out of range; write at most {DURATION_S_MAX // 3600}h")
    return float(seconds)


def parse_percentage(value: object) -> float:
    """Return the ratio, 0 to 1, of text such as ``90%``."""
    match = _PERCENTAGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{show(value)} is no percentage; write a number and %")
    ratio = Fraction(match[1]) / 100
    if ratio > 1:
        raise ValueError(f"{show(value)} is out of range; write 0% to 100%")
    return float(ratio)


def format_size(size_bytes: int) -> str:
    """Return *size_bytes* in the largest unit that divides it."""
    for unit in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % _SIZE_UNITS[unit] == 0:
            return f"{size_bytes // _SIZE_UNITS[unit]}{unit}"
    return str(size_bytes)


def format_duration(seconds: float) -> str:
    """Return *seconds* in the largest unit that divides it."""
    exact = Fraction(repr(float(seconds)))  # the shortest decimal that is this float
    for unit in ("h", "m", "s", "ms"):
        number = exact / _DURATION_UNITS[unit]
        if number and number.denominator == 1:
            return f"{number}{unit}"
    whole, millionths = divmod(round(exact * 10**9), 10**6)
    return f"{whole}.{millionths:06}".rstrip("0") + "ms" if exact else "0s"


def format_percentage(ratio: float) -> str:
    """Return *ratio*, 0 to 1, as a percentage."""
    digits = f"{ratio * 100:.6f}".rstrip("0").rstrip(".")
    return f"{digits}%"


def show(value: object) -> str:
    """Return *value* in one short line for a message, quotes and control characters escaped."""
    text = ascii(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."
