"""``kvfuse config``."""

from typing import Any

import click

from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.core.errors import ConfigError
from kvfuse.output import json_option, say, show_json, show_table
from kvfuse.system.mounts import mountpoint_of


@click.group()
def command() -> None:
    """Check a configuration file, or show what is in force."""


@command.command(
    epilog="""\b
Example:
  kvfuse config check /etc/kvfuse/kvcache.toml
"""
)
@click.argument("file")
@json_option
def check(file: str, as_json: bool) -> None:
    """Check FILE; every mistake is shown, and how to mend it. Exit code 2 when there is one.

    Only the file is read: not the environment, not the disks (kvfuse doctor looks at them).
    """
    from kvfuse.cli.resolve import resolve_file

    config = resolve_file(file).config
    if as_json:
        show_json({"file": file, "ok": True})
        return
    count = len(config.pool.disks)
    disks = "no disks" if not count else "1 disk" if count == 1 else f"{count} disks"
    say(f"{file}: ok; {config.pool.mountpoint or 'no mountpoint'}, {disks}")


@command.command(
    epilog="""\b
Examples:
  kvfuse config show                           what the mounted pool runs with
  kvfuse config show --config /etc/kvfuse/kvcache.toml --json

\b
With --config: what a mount with this file would run with, KVFUSE_... of the environment included.
"""
)
@click.argument("mountpoint", required=False)
@click.option("--config", "config_file", metavar="FILE", help="Configuration file (TOML).")
@json_option
def show(mountpoint: str | None, config_file: str | None, as_json: bool) -> None:
    """Show every key, its value, and where the value came from.

    Of the pool at MOUNTPOINT, which may be left out when one is mounted, or of a file.
    """
    rows = _rows(mountpoint, config_file)
    if as_json:
        show_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
        return
    show_table(
        ["key", "value", "from"], [[key, _written(value), origin] for key, value, origin in rows]
    )


def _rows(mountpoint: str | None, config_file: str | None) -> list[tuple[str, Any, str]]:
    if config_file is None:
        entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
        return [(key, value, origin) for key, value, origin in call(entry, "config")]
    if mountpoint is not None:
        raise ConfigError("MOUNTPOINT and --config are two questions; use one of them")
    from kvfuse.cli.resolve import resolve

    return [(row.key, row.value, row.origin) for row in resolve(config_file, {}).rows()]


def _written(value: object) -> str:
    """Return *value* the way it is written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_written(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)
