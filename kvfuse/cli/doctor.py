"""``kvfuse doctor``."""

from dataclasses import asdict

import click

from kvfuse import doctor
from kvfuse.cli.paths import absolute
from kvfuse.cli.resolve import resolve_file
from kvfuse.core.errors import EXIT_KERNEL
from kvfuse.output import json_option, say, show_json


@click.command(
    epilog="""\b
Examples:
  kvfuse doctor
  kvfuse doctor --config /etc/kvfuse/kvcache.toml     look at its disks too
"""
)
@click.option("--config", "config_file", metavar="FILE", help="Also look at the disks of FILE.")
@click.option("--disk", "disks", multiple=True, metavar="DIR", help="Also look at this disk.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, config_file: str | None, disks: tuple[str, ...], as_json: bool
) -> None:
    """Tell what this machine lacks to mount a pool, and how to mend it.

    Changes nothing. Exit code 6 when a mount is not possible.
    """
    paths = [absolute(disk, "--disk") for disk in disks]
    if config_file is not None:
        paths += [disk.path for disk in resolve_file(config_file).config.pool.disks]
    checks = doctor.examine(paths)
    if as_json:
        show_json({"can_mount": doctor.can_mount(checks), "checks": [asdict(c) for c in checks]})
    else:
        for check in checks:
            say(f"{check.level:4}  {check.name}: {check.text}")
            if check.remedy and check.level != "ok":
                say(f"      -> {check.remedy}")
    if not doctor.can_mount(checks):
        ctx.exit(EXIT_KERNEL)
