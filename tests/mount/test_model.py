"""A directory of the mount is the dictionary model, whatever is called in whatever order."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model import FileSystemMachine, Target
from tests.mount.directory_target import DirectoryTarget
from tests.mounting import Mounted

BUDGET = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def machine_in(parent: Path) -> type[FileSystemMachine]:
    """Return a machine whose every run has a new directory below *parent*."""

    class Machine(FileSystemMachine):
        runs = 0

        def make_target(self) -> Target:
            Machine.runs += 1
            root = parent / f"run{Machine.runs}"
            root.mkdir()
            return DirectoryTarget(root)

    return Machine


def test_the_model_is_a_native_directory(native: Path) -> None:
    """The model says what ext4 does."""
    parent = native / "model"
    parent.mkdir()

    run_state_machine_as_test(machine_in(parent), settings=BUDGET)


@pytest.mark.timeout(300)
def test_a_directory_of_the_mount_is_the_model(setup: str, mounted: Mounted) -> None:
    """Names, data, links, attributes and open handles agree after every sequence of calls."""
    parent = mounted.path / "model"
    parent.mkdir()

    run_state_machine_as_test(machine_in(parent), settings=BUDGET)
