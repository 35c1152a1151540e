"""``kvfuse clean``."""

import os
import time
from typing import Any

import click

from kvfuse.cli.tasks import show_tasks
from kvfuse.control.client import call
from kvfuse.control.registry import Registration, choose
from kvfuse.core.errors import ConfigError
from kvfuse.output import json_option, note, say, show_json
from kvfuse.system.mounts import mountpoint_of

_POLL_S = 0.2
_OVER = ("done", "short", "failed")


@click.command(
    epilog="""\b
Examples:
  kvfuse clean --lru                              each disk, down to its low watermark
  kvfuse clean --regex '^old-model/' --dry-run    what would go
  kvfuse clean --key old-model/block-1.bin --key old-model/block-2.bin
  kvfuse clean --disk /mnt/nvme0 --all

\b
Files that are open, pinned, or were asked for within space.lease_ttl stay. A pattern is RE2
syntax and is searched in paths below the mountpoint. Returns when the tasks are over, unless
--no-wait.
"""
)
@click.argument("mountpoint", required=False)
@click.option("--disk", metavar="DISK", help="One disk: its id, a prefix of that, or its path.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A path below the mountpoint.")
@click.option("--regex", metavar="RE", help="All files whose path this is found in.")
@click.option("--all", "everything", is_flag=True, help="All files.")
@click.option("--lru", is_flag=True, help="The least recently used, down to the low watermark.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; say what would go.")
@click.option("--no-wait", is_flag=True, help="Return when the tasks have begun.")
@json_option
def command(  # noqa: PLR0913, PLR0917 - one for each option
    mountpoint: str | None,
    disk: str | None,
    keys: tuple[str, ...],
    regex: str | None,
    everything: bool,
    lru: bool,
    dry_run: bool,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Remove files from a mounted pool. MOUNTPOINT may be left out when one is mounted."""
    if sum((bool(keys), regex is not None, everything, lru)) != 1:
        raise ConfigError("say what to remove: one of --key, --regex, --all, --lru")
    if disk == "":
        raise ConfigError("--disk: it is empty; name a disk, or leave the option out for all")
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    args = {
        "disk": disk, "keys": [os.fsencode(key) for key in keys], "regex": regex,
        "everything": everything, "dry_run": dry_run,
    }  # fmt: skip
    tasks = call(entry, "clean", args)
    if not no_wait:
        tasks = _wait(entry, tasks)
    if as_json:
        show_json({"tasks": tasks})
        return
    show_tasks(tasks)
    for task in tasks:
        for key in task["keys"]:
            say(f"  {key}")


def _wait(entry: Registration, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told_s = time.monotonic()
    while any(task["result"] not in _OVER for task in tasks):
        time.sleep(_POLL_S)
        tasks = [call(entry, "tasks", {"id": task["id"]})[0] for task in tasks]
        if time.monotonic() - told_s > 5:
            told_s = time.monotonic()
            removed = sum(task["files"] for task in tasks)
            note(f"{removed} files removed; the rest waits until nobody has asked for a while")
    return tasks
