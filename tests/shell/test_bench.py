"""The bench: what it measures on a directory, how it compares, what it says when it cannot."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfuse.bench import lab, rounds, tables, workload
from kvfuse.bench.__main__ import main
from kvfuse.bench.clients import JobFailedError, measure
from kvfuse.bench.jobs import MIB, Bounds, Job, Kind, Sample, all_jobs, chosen, quick_jobs, together
from kvfuse.bench.results import Line
from kvfuse.core.errors import ConfigError
from tests.mounting import Mounted, runnable_setups

PROJECT = Path(__file__).resolve().parents[2]
SHORT = Bounds(seconds=0.01, operations=8, bytes=2 * MIB)
PUT = Job(kind=Kind.PUT, clients=1)
EVERY_KIND = [
    *(Job(kind=kind, clients=2) for kind in Kind if not kind.is_data),
    Job(kind=Kind.READ, clients=2, size_bytes=MIB),
    Job(kind=Kind.READ, clients=1, size_bytes=MIB, cold=True),
    Job(kind=Kind.READ, clients=1, size_bytes=MIB, direct=True),
    Job(kind=Kind.WRITE, clients=2, size_bytes=MIB),
    Job(kind=Kind.WRITE, clients=1, size_bytes=MIB, direct=True),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[rounds.Target]:
    """Two furnished directories on one file system."""
    base = tmp_path_factory.mktemp("places")
    targets = [rounds.Target(name, base / name) for name in ("native", "pool")]
    for target in targets:
        target.base.mkdir()
    return targets


@pytest.fixture(scope="module")
def lines(places: list[rounds.Target]) -> list[Line]:
    """Every kind of job, measured twice on both directories."""
    jobs = [job for job in EVERY_KIND if rounds.may_forget() or not job.cold]
    said: list[str] = []
    found = list(rounds.run(jobs, places, bounds=SHORT, rounds=2, progress=said.append))
    assert len(said) == len(places) + len(jobs)
    return found


def files(base: Path) -> set[str]:
    return {os.path.join(where, name) for where, _, names in os.walk(base) for name in names}


def test_every_kind_of_job_is_measured_in_every_round(lines):
    """A job gives a rate for each round on each directory, and none fails."""
    for line in lines:
        assert not line.failures, line.job.name
        assert {name: len(rates) for name, rates in line.rates.items()} == {"native": 2, "pool": 2}
        assert all(rate > 0 for rates in line.rates.values() for rate in rates)
        assert bool(line.data) == line.job.kind.is_data


def test_a_run_leaves_only_what_it_was_furnished_with(lines, places):
    """Files a job makes are gone after it."""
    standing = workload.STANDING_FILES + workload.LISTED_FILES
    assert [len(files(place.base)) for place in places] == [standing, standing]


def test_lines_become_a_row_and_json(lines):
    """Each line is shown with its ratio to the native directory, and is complete in JSON."""
    names = ["native", "pool"]
    shown = tables.rows(lines, names, "native")
    assert [row[0] for row in shown] == [line.job.name for line in lines]
    assert all(len(row) == len(tables.headers(names, "native")) for row in shown)
    told = json.loads(json.dumps([line.to_json("native") for line in lines]))
    assert all(line["targets"]["native"]["ratio"]["median"] == 1.0 for line in told)


def test_ratios_are_paired_by_round():
    """A round that was slow for both does not change the ratio."""
    line = Line(PUT, rates={"native": [100.0, 10.0, 50.0], "pool": [50.0, 5.0, 20.0]})
    ratio = line.ratio("pool", "native")
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.4, 0.5)


def test_what_was_not_measured_has_no_ratio():
    """A target that failed is shown as failed, one that is missing by a dash."""
    line = Line(PUT, rates={"native": [1.0]}, failures={"pool": "no"})
    assert line.ratio("pool", "native") is None
    assert tables.rows([line], ["native", "pool", "other"], "native")[0][2:] == ["failed", "-"]


def test_clients_together_take_from_the_first_begin_to_the_last_end():
    """Rates of clients at the same time count the time of all."""
    samples = [
        Sample(operations=10, bytes=0, begin_ns=0, end_ns=10**9),
        Sample(operations=30, bytes=0, begin_ns=10**9, end_ns=2 * 10**9),
    ]
    assert together(samples).rate(PUT) == 20.0


def test_a_call_that_fails_is_a_failed_job(tmp_path):
    """A system call that fails on a target is told with its errno and path."""
    with pytest.raises(JobFailedError, match=r"put x1: No such file or directory"):
        measure(tmp_path / "missing", PUT, SHORT, lambda: None)


def test_a_target_that_cannot_do_a_job_leaves_the_others(tmp_path, monkeypatch):
    """The others are measured in all rounds, and the line says why one is missing."""
    targets = [rounds.Target(name, tmp_path / name) for name in ("native", "broken")]

    def fails_on_broken(base, job, bounds, settle):
        if base.name == "broken":
            raise JobFailedError(f"{job.name}: {os.strerror(errno.EIO)}")
        return Sample(operations=1, bytes=0, begin_ns=0, end_ns=1)

    monkeypatch.setattr(rounds, "measure", fails_on_broken)
    monkeypatch.setattr(workload, "furnish", lambda base, kinds: None)
    (line,) = rounds.run([PUT], targets, bounds=SHORT, rounds=3, progress=lambda text: None)
    assert len(line.rates["native"]) == 3
    assert line.failures == {"broken": "put x1: Input/output error"}


def test_names_of_jobs_are_unique():
    """A line is found by its name, and the quick jobs are among all."""
    names = [job.name for job in all_jobs()]
    assert len(set(names)) == len(names)
    assert {job.name for job in quick_jobs()} <= set(names)


@pytest.mark.parametrize("only", ["(", "nothing is called so"])
def test_a_pattern_that_chooses_nothing_is_refused(only):
    """A bad --only is one clear line."""
    with pytest.raises(ConfigError, match="--only"):
        chosen(quick_jobs(), only)


def test_an_unknown_system_is_refused():
    """--systems names those there are."""
    result = CliRunner().invoke(main, ["--systems", "nfs"])
    assert isinstance(result.exception, ConfigError)
    assert "mergerfs" in str(result.exception)


def test_a_system_that_is_not_installed_is_left_out(monkeypatch):
    """What is not there is told as an obstacle, not a failure."""
    monkeypatch.setattr(lab.shutil, "which", lambda name: None)
    assert lab.obstacle("mergerfs") == "mergerfs is not installed"
    assert lab.obstacle("kvfuse") is None


fuse = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        runnable_setups()["direct"] is not None, reason=str(runnable_setups()["direct"])
    ),
]


@pytest.mark.parametrize("marks", [pytest.param("", marks=fuse)])
def test_the_command_measures_a_mounted_pool(marks, tmp_path):
    """`kvfuse bench` compares a pool with its first disk, and leaves nothing on either."""
    with Mounted(tmp_path / "pool", 2, setup="direct") as mounted:
        told = mounted.command(
            "bench", str(mounted.path), "--only", "^(put|unlink) x1$", "--rounds", "2",
            "--seconds", "0.02",
        )  # fmt: skip
        assert [line["job"] for line in told["lines"]] == ["put x1", "unlink x1"]
        assert all(line["targets"]["pool"]["ratio"]["median"] > 0 for line in told["lines"])
        assert os.listdir(mounted.path) == []
        assert not list(tmp_path.rglob("kvfuse-bench.*"))


@pytest.mark.parametrize("marks", [pytest.param("", marks=fuse)])
def test_the_command_refuses_to_compare_a_pool_with_itself(marks, tmp_path):
    """--against must be a native directory that is there."""
    with Mounted(tmp_path / "pool", 2, setup="direct") as mounted:
        for against, said in ((mounted.path, "the pool itself"), (tmp_path / "no", "no such")):
            done = subprocess.run(
                [sys.executable, "-m", "kvfuse", "bench", mounted.path, "--against", against],
                env={**os.environ, "PYTHONPATH": str(PROJECT)},
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode == 2
            assert said in done.stderr
