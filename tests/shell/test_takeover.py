"""Whether installed code may go on where a running server stopped is known before that stops."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvfuse.core.errors import KvfuseError
from kvfuse.supervision.takeover import check, formats

PROJECT = Path(__file__).resolve().parents[2]


def test_a_server_of_the_same_formats_can_be_followed() -> None:
    """Whatever its version."""
    check(formats())


@pytest.mark.parametrize("name", sorted(formats()))
def test_another_format_is_refused_by_name(name: str) -> None:
    """Newer, or not there."""
    with pytest.raises(KvfuseError, match=f"the format of {name} is 999"):
        check({**formats(), name: 999})
    with pytest.raises(KvfuseError, match=f"the format of {name} is None"):
        check({key: value for key, value in formats().items() if key != name})


def test_something_unknown_that_was_left_is_refused() -> None:
    """An older version does not know what a newer one leaves."""
    with pytest.raises(KvfuseError, match="the format of novelty is 1"):
        check({**formats(), "novelty": 1})


@pytest.mark.parametrize(("novelty", "code"), [({}, 0), ({"novelty": 1}, 1)])
def test_the_command_for_the_supervisor_answers_by_its_exit_code(novelty: dict, code: int) -> None:
    """And in its last line, when it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "kvfuse", "takeover-check", json.dumps({**formats(), **novelty})],
        capture_output=True, text=True, check=False, cwd=PROJECT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("unmount and mount to upgrade" in done.stderr) == (code != 0)
