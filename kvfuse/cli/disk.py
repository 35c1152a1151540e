"""``kvfuse disk``."""

import sys

import click

from kvfuse.cli.paths import absolute
from kvfuse.cli.status import show_disks
from kvfuse.control.client import call
from kvfuse.control.registry import choose
from kvfuse.core.errors import ConfigError
from kvfuse.output import human_bytes, json_option, note, printable, say, show_json
from kvfuse.system.mounts import mountpoint_of


@click.group()
def command() -> None:
    """Make directories disks of a pool, and list the disks of a mounted one."""


@command.command(
    name="init",
    epilog="""\b
Examples:
  kvfuse disk init /mnt/nvme0 /mnt/nvme1
  kvfuse disk init /mnt/old --adopt           its files become files of the pool

\b
A directory becomes owned by root with mode 0700. It joins the pool that it is first
mounted with. Exit code 4 when a directory is refused; nothing is written to it then.
""",
)
@click.argument("directories", nargs=-1, required=True, metavar="DIR...")
@click.option("--adopt", is_flag=True, help="Accept a directory that holds files.")
@click.option("--yes", is_flag=True, help="Do not ask before files are adopted.")
@json_option
def init(directories: tuple[str, ...], adopt: bool, yes: bool, as_json: bool) -> None:
    """Make each DIR a disk: an empty directory, best the root of a file system of its own."""
    from kvfuse.disks.adoption import init_disk

    if yes and not adopt:
        raise ConfigError("--yes answers the question of --adopt; use both, or none")
    paths = [absolute(directory, "DIR") for directory in directories]
    if adopt and not yes:
        _ask_for_all(paths)
    made = []
    for path in paths:
        identity = init_disk(path, adopt=adopt)
        made.append({"path": printable(path), "id": identity.disk_id})
        if not as_json:
            say(f"{path}: disk {identity.disk_id}")
    if as_json:
        show_json({"disks": made})


@command.command(
    name="list",
    epilog="""\b
Examples:
  kvfuse disk list
  kvfuse disk list /kvcache --json
""",
)
@click.argument("mountpoint", required=False)
@json_option
def list_(mountpoint: str | None, as_json: bool) -> None:
    """List the disks of a mounted pool. MOUNTPOINT may be left out when one is mounted."""
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    disks = call(entry, "disks")
    if as_json:
        show_json({"disks": disks})
    else:
        show_disks(disks)


def _ask_for_all(paths: list[str]) -> None:
    """Say what adopting *paths* means and ask; without a terminal, refuse.

    Raises:
        ConfigError: nobody can be asked.
        click.Abort: the answer is no.
    """
    from kvfuse.disks.adoption import survey

    for path in paths:
        found = survey(path)
        if not found.files:
            continue
        note(f"{path} holds files: {found.files}, {human_bytes(found.used_bytes)}")
        note("kvfuse will delete these files when it needs room; everybody else loses access")
        if not sys.stdin.isatty():
            raise ConfigError("no terminal to ask on; adopt them with --adopt --yes")
        click.confirm("Adopt them?", abort=True, err=True)
