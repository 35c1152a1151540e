"""``kvfuse bench``."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvfuse.bench import rounds, tables
from kvfuse.bench.jobs import Bounds, Job, all_jobs, chosen, quick_jobs
from kvfuse.bench.rounds import ended_by_signals
from kvfuse.cli.paths import absolute
from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.core.errors import ConfigError, KernelError, KvfuseError
from kvfuse.output import json_option, note, say, show_json, show_table
from kvfuse.system.mounts import mountpoint_of

_NATIVE, _POOL = "native", "pool"
_PREFIX = "kvfuse-bench."


@click.command(
    epilog="""\b
Examples:
  kvfuse bench                                   a minute or two, on the one pool that is mounted
  kvfuse bench /kvcache --all --json > bench.json
  kvfuse bench --against /mnt/nvme2/trial --only 'get|put'

\b
The native directory is made below the first healthy disk, where the pool has its own files; give
another with --against, on the same kind of disk. Both directories are removed afterwards.
"""
)
@click.argument("mountpoint", required=False)
@click.option("--against", metavar="DIR", help="Compare with this native directory.")
@click.option("--all", "everything", is_flag=True, help="Every job, not the few that show most.")
@click.option("--only", metavar="REGEX", help="Only jobs whose name it matches.")
@click.option("--rounds", "count", type=click.IntRange(1), default=5, show_default=True,
              help="How often each job is measured.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.01), default=0.3, show_default=True,
              help="Time for one measurement.")  # fmt: skip
@json_option
def command(  # noqa: PLR0913, PLR0917 - the options of a command
    mountpoint: str | None, against: str | None, everything: bool, only: str | None, count: int,
    seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Do what KV caches do on a mounted pool and on a native directory, in turn.

    Writes up to 256 MiB and some thousand small files to each. Best on an idle pool.
    """
    jobs = chosen(all_jobs() if everything else quick_jobs(), only)
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    able = _able(jobs)
    with (
        ended_by_signals(),
        _scratch(Path(entry.mountpoint)) as ours,
        _scratch(_native(call(entry, "status"), against)) as theirs,
    ):
        targets = [rounds.Target(_NATIVE, theirs), rounds.Target(_POOL, ours)]
        bounds = Bounds(seconds=seconds)
        lines = list(rounds.run(able, targets, bounds=bounds, rounds=count, progress=note))
    if as_json:
        show_json(
            {
                "mountpoint": entry.mountpoint,
                "against": str(theirs.parent),
                "rounds": count,
                "lines": [line.to_json(_NATIVE) for line in lines],
            }
        )
    else:
        names = [_NATIVE, _POOL]
        say(f"{entry.mountpoint} as a multiple of {theirs.parent}: median (lowest-highest)")
        show_table(tables.headers(names, _NATIVE), tables.rows(lines, names, _NATIVE))
    for line in lines:
        for target, reason in line.failures.items():
            note(f"{target}: {reason}")
    if any(line.failures for line in lines):
        raise KvfuseError("some jobs could not be done; see above")


def _able(jobs: list[Job]) -> list[Job]:
    """Leave out the jobs for which this process cannot make the kernel forget."""
    if rounds.may_forget():
        return jobs
    able = [job for job in jobs if not (job.cold or job.forgets_names)]
    if not able:
        raise KernelError("these jobs begin with empty caches, and only root can empty them")
    if len(able) < len(jobs):
        note("without the jobs that begin with empty caches: only root can empty them")
    return able


def _native(status: dict[str, Any], against: str | None) -> Path:
    """Return the directory to compare with.

    Raises:
        ConfigError: it is not there, or lies on a kvfuse mount.
    """
    if against is not None:
        path = Path(absolute(against, "--against")).resolve()
        if not path.is_dir():
            raise ConfigError(f"--against {against}: no such directory; make it first")
        if path.stat().st_dev == os.stat(status["pool"]["mountpoint"]).st_dev:
            raise ConfigError(f"--against {against}: this is the pool itself; name a native one")
        return path
    for disk in status["disks"]:
        own = Path(disk["path"]) / ".kvfuse"
        if disk["state"] == "HEALTHY" and os.access(own, os.W_OK):
            return own
    raise ConfigError("no healthy disk this user can write to; name a directory by --against")


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Give a new directory in *parent*, removed with all that is in it."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
