"""Random operations on one file, against bytes in memory."""

from pathlib import Path

import pytest

from tests.mount.fsx import Features, Fsx
from tests.mounting import Mounted

FEATURES = {
    "pyfuse3": Features(fallocate=False),
    "direct": Features(),
    "direct-nopass": Features(),
}
SEEDS = range(6)
OPERATIONS = 1500


@pytest.mark.parametrize("seed", SEEDS)
def test_a_native_file_is_what_the_model_says(seed: int, native: Path) -> None:
    """The program itself is right."""
    directory = native / f"fsx-{seed}"
    directory.mkdir()

    Fsx(directory, seed, Features()).run(OPERATIONS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_on_the_mount_is_what_the_model_says(
    seed: int, setup: str, mounted: Mounted
) -> None:
    """No operation in any order loses, moves or invents a byte."""
    directory = mounted.path / f"fsx-{seed}"
    directory.mkdir()

    Fsx(directory, seed, FEATURES[setup]).run(OPERATIONS)
