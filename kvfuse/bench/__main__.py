"""``python -m kvfuse.bench``, what ``scripts/bench`` runs: the bench on file systems of its own."""

import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from kvfuse import __version__
from kvfuse.bench import lab, rounds, tables
from kvfuse.bench.jobs import Bounds, all_jobs, chosen, quick_jobs
from kvfuse.bench.results import Line
from kvfuse.core.errors import ConfigError, KvfuseError
from kvfuse.output import note, show_table

_QUICK_SYSTEMS = ("kvfuse", "kvfuse owner", "mergerfs")
_RIVAL = "mergerfs"


def chosen_systems(quick: bool, names: str | None) -> list[str]:
    """Return the systems to mount, without those that cannot run here, which are told.

    Raises:
        ConfigError: one is unknown.
    """
    wanted = list(_QUICK_SYSTEMS if quick else lab.SYSTEMS)
    if names is not None:
        wanted = [name.strip() for name in names.split(",")]
    able = []
    for name in wanted:
        if name not in lab.SYSTEMS:
            known = ", ".join(lab.SYSTEMS)
            raise ConfigError(f"--systems {name}: unknown; there are {known}")
        obstacle = lab.obstacle(name)
        if obstacle:
            note(f"without {name}: {obstacle}")
        else:
            able.append(name)
    return able


def show(lines: Sequence[Line], targets: Sequence[str]) -> None:
    """Write the tables for people."""
    everything = tables.rows(lines, targets, lab.NATIVE)
    show_table(tables.headers(targets, lab.NATIVE), everything, title="multiples of native")
    about_names = [line for line in lines if not line.job.kind.is_data]
    if _RIVAL in targets and about_names:
        others = [target for target in targets if target != lab.NATIVE]
        show_table(
            tables.headers(others, _RIVAL),
            tables.rows(about_names, others, _RIVAL),
            title=f"multiples of {_RIVAL}",
        )
    for line in lines:
        for target, reason in line.failures.items():
            note(f"{target}: {reason}")


def report(lines: Sequence[Line], filesystem: str, settings: dict[str, object]) -> bytes:
    """Return everything measured as JSON."""
    facts = {
        "version": __version__,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "filesystem": filesystem,
        **settings,
        "lines": [line.to_json(lab.NATIVE) for line in lines],
    }
    return msgspec.json.format(msgspec.json.encode(facts), indent=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--fs", type=click.Choice(["ext4", "xfs"]), default="ext4", show_default=True,
              help="File system of the disks.")  # fmt: skip
@click.option("--quick", is_flag=True, help="One to two minutes: fewer jobs, systems and rounds.")
@click.option("--only", metavar="REGEX", help="Only jobs whose name it matches.")
@click.option("--systems", metavar="NAME,...", help="Only these, beside the native directory.")
@click.option("--rounds", "count", type=click.IntRange(1), help="Default 7, with --quick 3.")
@click.option("--seconds", type=click.FloatRange(0.01), default=0.3, show_default=True,
              help="Time for one measurement.")  # fmt: skip
@click.option("--images", type=click.Path(file_okay=False, exists=True, path_type=Path),
              help="Where image files are made; default memory if it has room.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
              help="Write every value there.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw the ratios there (PNG); takes matplotlib.")  # fmt: skip
def main(  # noqa: PLR0913, PLR0917 - the options of a command
    fs: str, quick: bool, only: str | None, systems: str | None, count: int | None,
    seconds: float, images: Path | None, json_file: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Compare kvfuse with a native directory and other union file systems.

    Makes two file systems, gives every system directories on them, and measures each job on all in
    turn. The tables show medians of paired ratios with the lowest and highest.
    """
    jobs = chosen(quick_jobs() if quick else all_jobs(), only)
    names = chosen_systems(quick, systems)
    bounds = Bounds(seconds=seconds)
    total = count or (3 if quick else 7)
    called = [lab.NATIVE, *names]
    lines: list[Line] = []
    try:
        with rounds.ended_by_signals(), lab.Lab(fs, images) as place:
            targets = [place.native(), *(place.mount(name) for name in names)]
            for line in rounds.run(jobs, targets, bounds=bounds, rounds=total, progress=note):
                lines.append(line)  # noqa: PERF402 - what is measured is kept when it ends early
    except KeyboardInterrupt:
        note(f"interrupted after {len(lines)} of {len(jobs)} jobs")
        if not lines:
            raise
    show(lines, called)
    if json_file is not None:
        settings: dict[str, object] = {"rounds": total, "seconds": seconds}
        json_file.write_bytes(report(lines, fs, settings))
    if plot is not None:
        from kvfuse.bench.plot import draw

        draw(lines, called, lab.NATIVE, plot, title=f"multiples of native {fs}")


if __name__ == "__main__":
    try:
        main(prog_name="scripts/bench")
    except KvfuseError as exc:
        note(str(exc))
        sys.exit(exc.exit_code)
