"""``kvfuse fsck``."""

import click

from kvfuse.cli.paths import absolute
from kvfuse.cli.resolve import resolve
from kvfuse.core.errors import EXIT_FAILED, ConfigError
from kvfuse.output import json_option, note, printable, say, show_json, show_table


@click.command(
    epilog="""\b
Examples:
  kvfuse fsck --disk /mnt/nvme0 --disk /mnt/nvme1
  kvfuse fsck --config /etc/kvfuse/kvcache.toml --json

\b
The pool must not be mounted. Changes nothing on the disks. Kinds of findings:
  catalog      the catalog contradicts itself
  missing      a file of the catalog is not on its disk
  different    a file is not as the catalog says
  orphan       a file of kvfuse's that the catalog does not know
  unreadable   the disk did not answer
and, which are no faults: owner (clients see the catalog's), unfinished (done at the
next mount, or when a disk is back), foreign (not kvfuse's, never served).
Exit codes: 1 when there are faults, 4 when a disk is refused, 5 when one is mounted.
"""
)
@click.option("--disk", "disks", multiple=True, metavar="DIR", help="A disk; once for each disk.")
@click.option("--config", "config_file", metavar="FILE", help="Look at the disks of FILE.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, disks: tuple[str, ...], config_file: str | None, as_json: bool
) -> None:
    """Compare the catalog of a pool that is not mounted with its disks, both ways."""
    from kvfuse.pool import fsck

    paths = [absolute(disk, "--disk") for disk in disks]
    pool = resolve(config_file, {"pool.disks": paths or None}).config.pool
    if not pool.disks:
        raise ConfigError("no disk is named: use --disk DIR for each, or --config FILE")
    examined = fsck.examine(
        [disk.path for disk in pool.disks], state_dir=pool.state_dir, run_dir=pool.run_dir
    )
    if as_json:
        show_json(
            {
                "pool": examined.pool_id,
                "catalog": printable(examined.catalog),
                "disks": [{"id": i, "path": printable(p)} for i, p in examined.disks.items()],
                "absent": examined.absent,
                "faults": len(examined.faults),
                "findings": [
                    {
                        "kind": found.kind.value,
                        "disk": printable(found.disk),
                        "path": printable(found.path),
                        "text": printable(found.text),
                    }
                    for found in examined.findings
                ],
            }
        )
    else:
        for disk_id in examined.absent:
            note(f"disk {disk_id} was not looked at")
        if examined.findings:
            show_table(
                ["kind", "disk", "path", "what"],
                [
                    [found.kind.value, found.disk or "-", printable(found.path), found.text]
                    for found in examined.findings
                ],
            )
        say(f"{len(examined.disks)} disks, {len(examined.faults)} faults")
    if examined.faults:
        ctx.exit(EXIT_FAILED)
