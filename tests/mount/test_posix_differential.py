"""The same steps on the mount and on a native directory: results, errno and what is left behind."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.differences import DIFFERENCES, difference_for
from tests.mount.steps.registry import STEPS
from tests.mount.steps.runner import run_apart
from tests.mounting import PROJECT, SETUPS, Mounted

Outcomes = Callable[[str], object]

pytestmark = pytest.mark.timeout(300)


class _Batches:
    """The outcomes of steps below one directory, run group by group when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._outcomes: dict[str, object] = {}

    def __call__(self, step_id: str) -> object:
        if step_id not in self._outcomes:
            group = step_id.partition(".")[0]
            ids = [other for other in STEPS if other.partition(".")[0] == group]
            self._outcomes |= run_apart(self._root, ids)
        return self._outcomes[step_id]


@pytest.fixture(scope="module")
def native_outcome(native: Path) -> Outcomes:
    """Return what a step does on a native directory."""
    root = native / "first"
    root.mkdir()
    return _Batches(root)


@pytest.fixture(scope="module")
def mount_outcome(mounted: Mounted) -> Outcomes:
    """Return what a step does on the mount."""
    root = mounted.path / "steps"
    root.mkdir()
    return _Batches(root)


@pytest.mark.parametrize("step_id", STEPS)
def test_a_step_does_the_same_on_the_mount(
    step_id: str, setup: str, native_outcome: Outcomes, mount_outcome: Outcomes
) -> None:
    """A step gives the result, errno and tree that ext4 gives, unless the table says otherwise."""
    wanted, found = native_outcome(step_id), mount_outcome(step_id)

    difference = difference_for(step_id, setup)
    if difference is None:
        assert found == wanted
        return
    assert found != wanted, f"no longer different, strike it from the table: {difference.reason}"
    if difference.instead is not None:
        assert isinstance(found, list)
        assert found[0] == difference.instead, difference.reason


def test_the_steps_themselves_are_sound(native: Path, native_outcome: Outcomes) -> None:
    """Two native directories never differ, and no step raises anything but OSError."""
    again = native / "second"
    again.mkdir()
    second = run_apart(again, list(STEPS))

    for step_id in STEPS:
        outcome = native_outcome(step_id)
        assert outcome == second[step_id], step_id
        assert isinstance(outcome, list), f"{step_id}: {outcome}"
        assert "raised" not in repr(outcome), f"{step_id}: {outcome}"


def test_every_wanted_difference_matches_a_step() -> None:
    """No entry of the table is left over from a step that is gone."""
    for difference in DIFFERENCES:
        for setup in difference.setups:
            assert setup in SETUPS
            assert any(difference.covers(step_id, setup) for step_id in STEPS), difference.pattern


def test_the_document_lists_exactly_the_wanted_differences() -> None:
    """``docs/semantics.md`` has one row for each difference, with its drivers and its reason."""
    text = (PROJECT / "docs" / "semantics.md").read_text()
    section = text.partition("## Wanted differences")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", section, re.MULTILINE)
    table = [(d.pattern, setups_text(d.setups), d.reason) for d in DIFFERENCES]

    assert rows == table


def setups_text(setups: tuple[str, ...]) -> str:
    """Return *setups* as the document writes them."""
    return "all" if set(setups) == set(SETUPS) else ", ".join(setups)
