"""What all tests share: the way to the package, the drivers a mount is tried with."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.disks import loop_disks
from tests.mounting import SETUPS, Mounted, runnable_setups

_GIB = 1 << 30

# A run nobody watches draws the same cases every time; elsewhere the search goes on.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        action="append",
        choices=list(SETUPS),
        help="Try mounts with this driver only; may be given again. Default: all.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setup" not in metafunc.fixturenames:
        return
    reasons = runnable_setups()
    chosen = metafunc.config.getoption("--driver")
    # All of them: one that cannot run here is skipped and told, and scripts/test fails for it.
    names = chosen or list(reasons)
    marks = {
        name: [pytest.mark.skip(reason=f"{name}: {reason}")] if (reason := reasons[name]) else []
        for name in names
    }
    metafunc.parametrize(
        "setup",
        [pytest.param(name, marks=[pytest.mark.fuse, *marks[name]]) for name in names],
        scope="session",
    )


@pytest.fixture(scope="session")
def filesystems() -> Iterator[list[Path]]:
    """Three ext4 filesystems of their own: one to compare with, two to be disks of a pool."""
    with loop_disks() as (disks, _):
        yield [disks.add("ext4", _GIB) for _ in range(3)]


@pytest.fixture(scope="session")
def native(filesystems: list[Path]) -> Path:
    """An empty directory on ext4."""
    path = filesystems[0] / "native"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def mounted(
    setup: str, filesystems: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    """A pool over two ext4 filesystems, mounted once for each driver and test module."""
    base = tmp_path_factory.mktemp("pool")
    disks = [filesystem / base.name for filesystem in filesystems[1:]]
    with Mounted(base, disks, setup=setup) as mount:
        yield mount
