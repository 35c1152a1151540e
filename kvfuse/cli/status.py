"""``kvfuse status``."""

from typing import Any

import click

from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.output import human_bytes, json_option, say, show_json, show_table
from kvfuse.system.mounts import mountpoint_of


@click.command(
    epilog="""\b
Examples:
  kvfuse status
  kvfuse status /kvcache --json | jq .space
"""
)
@click.argument("mountpoint", required=False)
@json_option
def command(mountpoint: str | None, as_json: bool) -> None:
    """Show a mounted pool: its disks, their space and state.

    MOUNTPOINT may be left out when one pool is mounted. Exit code 3 when none answers.
    """
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    status = call(entry, "status")
    if as_json:
        show_json(status)
        return
    _show_pool(status)
    show_disks(status["disks"])
    for disk in status["disks"]:
        if disk.get("aside_files"):
            say(
                f"{disk['path']}/.kvfuse/aside: {disk['aside_files']} files, "
                f"{human_bytes(disk['aside_bytes'])}, that stood in the way; look, and remove them"
            )


def show_disks(disks: list[dict[str, Any]]) -> None:
    """Write the table of disks."""
    show_table(
        ["disk", "path", "filesystem", "state", " files", " used", " free", " capacity", "reason"],
        [
            [
                str(disk["id"])[:8],
                str(disk["path"]),
                str(disk.get("filesystem") or "-"),
                str(disk["state"]),
                _number(disk.get("files")),
                _size(disk.get("used_bytes")),
                _size(disk.get("free_bytes")),
                _size(disk.get("capacity_bytes")),
                str(disk.get("reason") or ""),
            ]
            for disk in disks
        ],
    )


def _show_pool(status: dict[str, Any]) -> None:
    pool, space, recovery = status["pool"], status["space"], status["recovery"]
    passthrough = (
        "passthrough on"
        if pool["passthrough"]
        else f"passthrough off: {pool['passthrough_obstacle']}"
    )
    say(
        f"{pool['mountpoint']}: pool {str(pool['id'])[:8]}, epoch {pool['epoch']}, "
        f"{pool['placement']}, driver {pool['driver']} ({passthrough}), kvfuse {pool['version']}"
    )
    if pool.get("driver_reason"):
        say(f"  driver {pool['driver']}: {pool['driver_reason']}")
    say(
        f"  space: {human_bytes(space['used_bytes'])} used of "
        f"{human_bytes(space['capacity_bytes'])}, "
        f"{human_bytes(space['available_bytes'])} available"
    )
    say(f"  recovery: {_recovery(recovery)}")
    pids = ", ".join(_process(name, facts) for name, facts in status["processes"].items())
    say(f"  processes: {pids}; log: {pool['log'] or 'the journal'}")


def _recovery(recovery: dict[str, Any]) -> str:
    parts = [f"{recovery['state']}, {recovery.get('files', 0):,} files"]
    if recovery["state"] == "scanning":
        share, seconds = recovery.get("share"), recovery.get("seconds", 0)
        done = "" if share is None else f"about {int(share * 100)} % "
        parts.append(f"{done}in {seconds:.0f} s")
    check = recovery.get("check", {"state": "off"})
    if check["state"] == "running":
        parts.append(f"catalog and disks are being compared: {check['compared']:,} rows and names")
    elif check["state"] == "done":
        parts.append(f"compared: {check['mended']} differences mended, {check['faults']} left")
    elif check["state"] == "failed":
        parts.append(f"not compared: {check['error']}")
    return "; ".join(parts)


def _process(name: str, facts: dict[str, Any] | None) -> str:
    if facts is None:
        return f"no {name}: when the server dies nothing restarts it"
    restarts = facts.get("restarts")
    return f"{name} {facts['pid']}" + (f" ({restarts} restarts)" if restarts else "")


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "-" if value is None else human_bytes(value)
