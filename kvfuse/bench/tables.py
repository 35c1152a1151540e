"""What was measured, as a table for people."""

from collections.abc import Sequence

from kvfuse.bench.results import Line, Spread

_KILO = 1000
_GIB = 1 << 30


def headers(targets: Sequence[str], base: str) -> list[str]:
    """Return the headers of `rows`."""
    return ["job", f" {base}", *(f" {target}" for target in targets if target != base)]


def rows(lines: Sequence[Line], targets: Sequence[str], base: str) -> list[list[str]]:
    """Return a row for each job: the rate of *base*, then what multiple of it each target does."""
    return [
        [
            line.job.name,
            rate(line, base),
            *(ratio(line, target, base) for target in targets if target != base),
        ]
        for line in lines
    ]


def rate(line: Line, target: str) -> str:
    """Return the median rate of a target in its unit."""
    spread = line.rate(target)
    if spread is None:
        return "failed" if target in line.failures else "-"
    if line.job.kind.is_data:
        return f"{spread.median / _GIB:.2f} GiB/s"
    if spread.median >= 10 * _KILO:
        return f"{spread.median / _KILO:.0f} k/s"
    return f"{spread.median / _KILO:.2f} k/s"


def ratio(line: Line, target: str, base: str) -> str:
    """Return the median ratio with its lowest and highest value."""
    spread = line.ratio(target, base)
    if spread is None:
        return "failed" if target in line.failures else "-"
    return _shown(spread)


def _shown(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
