"""``kvfuse tasks``."""

from datetime import datetime
from typing import Any

import click

from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.output import human_bytes, json_option, show_json, show_table
from kvfuse.system.mounts import mountpoint_of


@click.command(
    epilog="""\b
Examples:
  kvfuse tasks
  kvfuse tasks 1796118535420580258 --json

\b
Triggers: watermark (a disk was above its high watermark), full (a file found no room), manual,
stale, temp (a temporary file nobody renamed). Results: queued, running, done, short (all that
may go has gone, and that was not enough), failed.
"""
)
@click.argument("task_id", required=False, type=int, metavar="[ID]")
@click.option("--mountpoint", metavar="DIR", help="Which mount, when there are several.")
@json_option
def command(task_id: int | None, mountpoint: str | None, as_json: bool) -> None:
    """Show what a mounted pool removes, and has removed, by itself."""
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    tasks = call(entry, "tasks", {"id": task_id})
    if as_json:
        show_json({"tasks": tasks})
    else:
        show_tasks(tasks)


def show_tasks(tasks: list[dict[str, Any]]) -> None:
    """Write a table of tasks."""
    show_table(
        ["task", "disk", "trigger", "selection", "result", " files", " bytes", "began", "reason"],
        [
            [
                str(task["id"]),
                str(task["disk"])[:8],
                str(task["trigger"]),
                str(task["selection"]) + (" (dry run)" if task["dry_run"] else ""),
                str(task["result"]),
                f"{task['files']:,}",
                human_bytes(task["bytes"]),
                datetime.fromtimestamp(task["created"]).astimezone().strftime("%H:%M:%S"),
                str(task["reason"])
                or ", ".join(f"{count} {why}" for why, count in task["skipped"].items()),
            ]
            for task in tasks
        ],
    )
