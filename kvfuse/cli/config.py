"""``kvfuse config``."""

import click

from kvfuse.cli.output import json_option, say, show_json, show_table
from kvfuse.cli.resolve import resolve, resolve_file


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
  kvfuse config show                           the defaults, and KVFUSE_... of the environment
  kvfuse config show --config /etc/kvfuse/kvcache.toml --json
"""
)
@click.option("--config", "config_file", metavar="FILE", help="Configuration file (TOML).")
@json_option
def show(config_file: str | None, as_json: bool) -> None:
    """Show every key, its value, and where the value came from."""
    rows = resolve(config_file, {}).rows()
    if as_json:
        show_json({row.key: {"value": row.value, "origin": row.origin} for row in rows})
        return
    show_table(
        ["key", "value", "from"], [[row.key, _written(row.value), row.origin] for row in rows]
    )


def _written(value: object) -> str:
    """Return *value* the way it is written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_written(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)
