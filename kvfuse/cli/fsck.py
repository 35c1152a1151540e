"""``kvfuse fsck``."""

import time
from typing import Any

import click

from kvfuse.cli.paths import absolute
from kvfuse.cli.resolve import resolve
from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.core.config import Config
from kvfuse.core.errors import EXIT_FAILED, ConfigError, KvfuseError
from kvfuse.output import json_option, note, printable, say, show_json, show_table
from kvfuse.system.mounts import mountpoint_of

_POLL_S = 0.2
_QUIET_S = 1.0
_IDLE_S = 180.0  # three times as long as the server waits for a process that compares
_TOLD_S = 2.0  # between two lines of progress


@click.command(
    epilog="""\b
Examples:
  kvfuse fsck /kvcache
  kvfuse fsck --disk /mnt/nvme0 --disk /mnt/nvme1
  kvfuse fsck --config /etc/kvfuse/kvcache.toml --repair

\b
With MOUNTPOINT the pool may be in use; with --disk or --config it must not be mounted.
Without --repair nothing is changed. Kinds of findings:
  catalog      the catalog contradicts itself
  missing      a file of the catalog is not on its disk
  different    a file is not as the catalog says
  orphan       a file of kvfuse's that the catalog does not know
  unreadable   the disk did not answer
and, which are no faults: owner (clients see the catalog's), unfinished (done at the
next mount, or when a disk is back), foreign (not kvfuse's, never served), aside (what
stood in the way, kept in .kvfuse/aside for you to look at).

\b
--repair counts and orders anew, forgets names and records that lead to no file, takes in
files nobody knew or removes them when there is a newer one, and writes lost labels. Never
touched: what is foreign, what lies aside, a file of another size than noted.
Exit codes: 0 nothing is wrong, or all of it was repaired; 1 faults are left; 2 bad usage;
3 not mounted; 4 a disk is refused; 5 a disk is in use, or the pool cannot be compared now.
"""
)
@click.argument("mountpoint", required=False)
@click.option("--disk", "disks", multiple=True, metavar="DIR", help="A disk; once for each disk.")
@click.option("--config", "config_file", metavar="FILE", help="Look at the disks of FILE.")
@click.option("--repair", is_flag=True, help="Mend what can be mended without guessing.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    mountpoint: str | None,
    disks: tuple[str, ...],
    config_file: str | None,
    repair: bool,
    as_json: bool,
) -> None:
    """Compare the catalog of a pool with its disks, both ways."""
    if mountpoint is not None:
        if disks or config_file is not None:
            raise ConfigError("name a MOUNTPOINT, or disks with --disk or --config; not both")
        result = _online(mountpoint, repair=repair)
    else:
        paths = [absolute(disk, "--disk") for disk in disks]
        config = resolve(config_file, {"pool.disks": paths or None}).config
        if not config.pool.disks:
            raise ConfigError(
                "nothing is named: a MOUNTPOINT, --disk DIR for each disk, or --config FILE"
            )
        result = _offline(config, repair=repair)
    if as_json:
        show_json(_printable(result))
    else:
        _show(result, repair=repair)
    if result["faults"]:
        ctx.exit(EXIT_FAILED)


class _Progress:
    """Lines for people, when it takes longer than a moment."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _QUIET_S
        self._compared = 0

    def tell(self, text: str) -> None:
        """Say how far it is, now and then."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _TOLD_S
            note(text)

    def tick(self, compared: int) -> None:
        """Count what was compared."""
        self._compared += compared
        self.tell(f"{self._compared} rows and names compared")


def _online(mountpoint: str, *, repair: bool) -> dict[str, Any]:
    """Let the server compare, and wait for it."""
    entry = choose(mountpoint_of(mountpoint))
    progress = _Progress()
    result = call(entry, "fsck", {"repair": repair})
    while result["state"] == "running":
        if result["idle_s"] > _IDLE_S:
            raise KvfuseError(
                f"{entry.mountpoint}: nothing was compared for {_IDLE_S:g} s at {result['step']}:"
                " its disk hangs; kvfuse status tells"
            )
        time.sleep(_POLL_S)
        result = call(entry, "findings", {"id": result["id"]})
        progress.tell(
            f"{result['compared']} rows and names compared, {result['faults']} faults;"
            f" now: {result['step']}"
        )
    if result["state"] != "done":
        raise KvfuseError(f"{entry.mountpoint}: {result['error']}")
    return {"pool": entry.pool_id, **result}


def _offline(config: Config, *, repair: bool) -> dict[str, Any]:
    from kvfuse.pool import fsck

    progress = _Progress()
    if repair:
        return fsck.repair(config, progress.tell)
    return fsck.examine(
        [disk.path for disk in config.pool.disks],
        state_dir=config.pool.state_dir,
        run_dir=config.pool.run_dir,
        tick=progress.tick,
    ).result()


def _printable(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return *value* with names in it as people can read them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(below) for key, below in value.items()}
    return [_printable(below) for below in value] if isinstance(value, list) else value


def _show(result: dict[str, Any], *, repair: bool) -> None:
    for disk_id in result["absent"]:
        note(f"disk {disk_id} was not looked at")
    findings = result["findings"]
    if findings:
        headers = ["kind", "disk", "path", "what"]
        rows = [
            [found["kind"], found["disk"] or "-", found["path"], found["text"]]
            for found in findings
        ]
        if repair:
            headers.append("repair")
            rows = [
                [*row, found["repair"] or "-"] for row, found in zip(rows, findings, strict=True)
            ]
        show_table(headers, rows)
    for kind, count in result["omitted"].items():
        note(f"{count} more of kind {kind} are not shown")
    repaired = sum(1 for found in findings if found["repair"])
    told = f", {repaired} repaired" if repair else ""
    say(f"{len(result['disks'])} disks, {result['faults']} faults{told}")
