"""Measures every job on every target in turn, several rounds: what disturbs one disturbs all."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfuse.bench import workload
from kvfuse.bench.clients import JobFailedError, measure
from kvfuse.bench.jobs import Bounds, Job, Kind
from kvfuse.bench.results import Line

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGES = "1"
_NAMES = "2"


@dataclass(frozen=True, slots=True)
class Target:
    """An empty directory that clients use, and what it is called."""

    name: str
    base: Path


def run(
    jobs: Sequence[Job],
    targets: Sequence[Target],
    *,
    bounds: Bounds,
    rounds: int,
    progress: Callable[[str], None],
) -> Iterator[Line]:
    """Yield what was measured of each job. *progress* is told each job as it begins.

    A target that cannot do a job misses in its line, with the reason.

    Raises:
        OSError: a target cannot be prepared.
    """
    for target in targets:
        progress(f"preparing {target.name}")
        workload.furnish(target.base, {job.kind for job in jobs})
    for number, job in enumerate(jobs, 1):
        progress(f"{number}/{len(jobs)} {job.name}")
        yield _measured(job, targets, bounds, rounds)


def _measured(job: Job, targets: Sequence[Target], bounds: Bounds, rounds: int) -> Line:
    line = Line(job)
    able = list(targets)
    try:
        for target in targets:
            if job.kind is Kind.READ:
                workload.furnish_whole(target.base, job)
        for _ in range(rounds):
            for target in list(able):
                try:
                    sample = measure(target.base, job, bounds, lambda: settle(job))
                except JobFailedError as exc:
                    line.failures[target.name] = str(exc)
                    line.rates.pop(target.name, None)
                    able.remove(target)
                    continue
                line.rates.setdefault(target.name, []).append(sample.rate(job))
                data_rate = sample.data_rate(job)
                if data_rate is not None:
                    line.data.setdefault(target.name, []).append(data_rate)
    finally:
        for target in targets:
            if job.kind.is_data:
                with contextlib.suppress(OSError):
                    workload.clear_whole(target.base, job)
    return line


def settle(job: Job) -> None:
    """Let the kernel forget what *job* must not find: names, or bytes of files. Takes root."""
    if job.forgets_names:
        _drop(_NAMES)
    elif job.cold:
        os.sync()
        _drop(_PAGES)


def may_forget() -> bool:
    """Whether this process can make the kernel forget names and bytes."""
    return os.access(_DROP_CACHES, os.W_OK)


def _drop(what: str) -> None:
    _DROP_CACHES.write_text(what, encoding="ascii")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that it cleans up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
