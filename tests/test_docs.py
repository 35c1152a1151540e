"""The pages say what there is: every key, command and option; and every link leads somewhere."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvfuse.cli.group import COMMANDS
from kvfuse.config import Config
from kvfuse.settings import DiskSettings

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
    table = REFERENCE.partition("## Configuration file")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", table, re.MULTILINE)) == keys


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
