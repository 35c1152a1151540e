"""``requirements.lock``, which gets installed, holds all that ``pyproject.toml`` asks for."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def canonical(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_the_lock_has_every_dependency():
    """With hashes required, one that is missing would not be installed at all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {canonical(line) for line in project["project"]["dependencies"]}
    for group in project["dependency-groups"].values():
        wanted |= {canonical(line) for line in group if isinstance(line, str)}
    lock = (ROOT / "requirements.lock").read_text()
    locked = {canonical(line) for line in lock.splitlines() if line and not line.startswith(" ")}

    assert wanted <= locked


def test_the_lock_names_no_address():
    """A lock with addresses works behind one mirror only."""
    assert "://" not in (ROOT / "requirements.lock").read_text()
