"""What was measured, as a picture. Takes matplotlib: the optional extra ``bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfuse.bench.results import Line
from kvfuse.core.errors import KvfuseError

_DPI = 110
_BAR_WIDTH = 0.8


def draw(lines: Sequence[Line], targets: Sequence[str], base: str, path: Path, title: str) -> None:
    """Write a PNG of the ratios of every target to *base*, on a logarithmic axis.

    Raises:
        KvfuseError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise KvfuseError(
            f"{path}: no plot without matplotlib; pip install 'kvfuse[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    groups = [
        ("names and small files", [line for line in lines if not line.job.kind.is_data]),
        ("whole files", [line for line in lines if line.job.kind.is_data]),
    ]
    groups = [(name, group) for name, group in groups if group]
    others = [target for target in targets if target != base]
    figure, axes = pyplot.subplots(
        1, len(groups), squeeze=False, layout="constrained",
        figsize=(6.5 * len(groups), 1 + 0.24 * max(len(group) for _, group in groups)),
    )  # fmt: skip
    for axis, (name, group) in zip(axes[0], groups, strict=True):
        drawn = [target for target in others if any(target in line.rates for line in group)]
        for number, target in enumerate(drawn):
            _dots(axis, group, target, base, (number - (len(drawn) - 1) / 2) / len(drawn))
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_yticks(range(len(group)), [line.job.name for line in group], fontsize=7)
        axis.invert_yaxis()
        axis.grid(axis="x", which="both", linewidth=0.3)
        axis.set_title(name, fontsize=9)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def _dots(
    axis: Any,  # noqa: ANN401 - its types are not there without the extra
    group: Sequence[Line],
    target: str,
    base: str,
    shift: float,
) -> None:
    """Draw the median of each line with its spread."""
    places, medians, below, above = [], [], [], []
    for place, line in enumerate(group):
        spread = line.ratio(target, base)
        if spread is None:
            continue
        places.append(place + shift * _BAR_WIDTH)
        medians.append(spread.median)
        below.append(spread.median - spread.low)
        above.append(spread.high - spread.median)
    axis.errorbar(
        medians, places, xerr=[below, above], fmt="o", markersize=3, linewidth=0.8, label=target
    )
