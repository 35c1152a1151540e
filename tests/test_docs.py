"""The pages say what there is: every key, command and option; and every link leads somewhere."""

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvfuse.cli.group import COMMANDS
from kvfuse.control.service import ControlService, MountFacts
from kvfuse.core.config import Config
from kvfuse.core.settings import DiskSettings
from kvfuse.space.tasks import Tasks, Trigger
from tests.shell.pools import Box, commit, mkdir

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
_ON_EVERY_COMMAND = {"--json", "--help"}  # said once, above the table


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def documented_commands() -> dict[str, set[str]]:
    """Return the long options that the table of commands names, by command."""
    found = {}
    for row in re.findall(r"^\| `(kvfuse .*)` \|", REFERENCE, re.MULTILINE):
        words = re.match(r"(?:[a-z]+ ?)+", row).group().split()
        found[" ".join(words)] = set(re.findall(r"--[a-z-]+", row))
    return found


def actual_commands() -> dict[str, set[str]]:
    """Return the long options of every command that ``--help`` lists."""
    found = {}
    for name in COMMANDS:
        command = importlib.import_module(f"kvfuse.cli.{name}").command
        is_group = isinstance(command, click.Group)
        pairs = commands(command, f"kvfuse {name}") if is_group else [(f"kvfuse {name}", command)]
        for path, each in pairs:
            options = {text for parameter in each.params for text in parameter.opts}
            found[path] = {text for text in options if text.startswith("--")} - _ON_EVERY_COMMAND
    return found


def test_reference_names_the_commands_there_are():
    """Every command is in the table with every option of it, and nothing else is."""
    assert documented_commands() == actual_commands()


def test_reference_names_the_configuration_keys_there_are():
    """Every key is in the table, those of a disk table too, and no other."""
    keys = {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields
    }
    keys |= {f"disk.{key}" for key in DiskSettings.model_fields}
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", section("Configuration file"), re.MULTILINE)
    assert set(rows) == keys


class Idle:
    """A driver that has not been asked anything."""

    name, reason, passthrough_obstacle = "direct", "", None

    def counters(self) -> dict[str, object]:
        return {}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ControlService]:
    """What answers the command line, over a pool with one file."""
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    box = Box(tmp_path, disks)
    pool = box.open()
    mkdir(pool, "model")
    commit(pool, "model/block.bin")
    facts = MountFacts(mountpoint="/kv", owner_uid=os.geteuid(), log="", config=[])
    yield ControlService(pool, Idle(), facts, stop=lambda: None)
    box.close()


def section(title: str) -> str:
    return REFERENCE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def fields(status: dict[str, object]) -> set[str]:
    """Return the names of two levels, of the disks as those of one of them."""
    found = set()
    for name, value in status.items():
        if isinstance(value, list):
            found |= {f"{name}[].{below}" for below in value[0]}
        elif isinstance(value, dict) and value:
            found |= {f"{name}.{below}" for below in value}
        else:
            found.add(name)
    return found


def documented_fields() -> set[str]:
    """Return the names in the first column of the table; one that begins with a dot goes on."""
    found = set()
    for row in re.findall(r"^\| (`.*?) \|", section("Status"), re.MULTILINE):
        above = ""
        for name in re.findall(r"`([^`]+)`", row):
            above = above if name.startswith(".") else name.rpartition(".")[0]
            found.add(above + name if name.startswith(".") else name)
    return found


def test_reference_names_the_fields_of_a_status_there_are(service):
    """Every field of a status is in the table, and no other; that of a supervisor is not asked."""
    of_a_supervisor = {"processes.supervisor"}
    assert documented_fields() - of_a_supervisor == fields(service.status())


def test_reference_names_the_fields_of_files_and_tasks(service):
    """Every field of ``locate`` and of a task is told below the status."""
    (found,) = service.locate([b"model/block.bin"])
    task = Tasks(1).make(0, Trigger.MANUAL).to_json("disk")
    named = set(re.findall(r"`([a-z_]+)`", section("Status")))
    assert {*found, *task} <= named


def test_reference_names_the_verbs_of_the_socket_that_only_read(service):
    """The table of verbs has those that everybody may call who may ask."""
    rows = re.findall(r"^\| (`.*?) \|", section("Control socket"), re.MULTILINE)
    named = {verb for row in rows for verb in re.findall(r"`([a-z]+)`", row)}
    assert named - {"verb", "args"} == service.READING_VERBS | {"clean", "fsck", "stop"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """The file behind every relative link exists, and the heading it names."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in anchors, f"{page.name}: {link}"


def test_every_page_is_linked_from_another():
    """No page of docs is one that nobody finds."""
    linked = {
        link.partition("#")[0].rpartition("/")[2]
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {page.name for page in PAGES} - {"README.md"} <= linked
