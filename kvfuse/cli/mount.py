"""``kvfuse mount``."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kvfuse.cli import handoff
from kvfuse.cli.group import nearest_of
from kvfuse.cli.paths import absolute
from kvfuse.cli.resolve import resolve
from kvfuse.control import registry
from kvfuse.core.config import Config, Resolved
from kvfuse.core.errors import ConfigError, KernelError
from kvfuse.output import json_option, note, say, show_json
from kvfuse.supervision.notify import kept_names
from kvfuse.system import mounts
from kvfuse.system.fdstore import FUSE

# What fstab, mount(8) and systemd write; each is either always so, or not for the daemon.
OPTIONS = (
    "rw", "nodev", "nosuid", "noatime", "allow_other", "default_permissions", "defaults", "_netdev",
    "nofail", "auto", "noauto", "nouser", "async",
)  # fmt: skip
_OPTION_PREFIXES = ("x-systemd.", "x-", "comment=")


@click.command(
    epilog="""\b
Examples:
  kvfuse mount /kvcache --disk /mnt/nvme0 --disk /mnt/nvme1 --init
  kvfuse mount --config /etc/kvfuse/kvcache.toml
  kvfuse mount /kvcache --disk /mnt/nvme0 --foreground

\b
Exit codes: 2 configuration or MOUNTPOINT cannot be used, 4 a disk is refused,
  5 something is in use, 6 /dev/fuse or a privilege is missing (kvfuse doctor).
"""
)
@click.argument("mountpoint", required=False)
@click.option("--disk", "disks", multiple=True, metavar="DIR", help="A disk; once for each disk.")
@click.option("--config", "config_file", metavar="FILE", help="Configuration file (TOML).")
@click.option(
    "--placement",
    type=click.Choice(["rendezvous", "index", "striped"]),
    help="Which disk a new file goes to.  [default: rendezvous]",
)
@click.option(
    "--driver",
    type=click.Choice(["auto", "direct", "pyfuse3"]),
    help="How requests are read.  [default: auto]",
)
@click.option("--init", is_flag=True, help="Make empty directories that are no disks yet disks.")
@click.option(
    "--require-all-disks",
    is_flag=True,
    default=None,
    help="Refuse to mount when a disk is missing or sick.",
)
@click.option("--foreground", is_flag=True, help="Stay, and log to stderr.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPT,...",
    help=f"Options of fstab, accepted without effect: {', '.join(OPTIONS)}.",
)
@json_option
def command(foreground: bool, init: bool, as_json: bool, **given: Any) -> None:  # noqa: ANN401 - click's
    """Mount a pool of disks at MOUNTPOINT.

    Returns when the mount answers; the daemon goes on in the background. MOUNTPOINT and the disks
    may come from the configuration file instead. A dead mount at MOUNTPOINT, left by a daemon that
    was killed, is cleared. A disk that is missing, dead or read-only does not hinder the others.
    """
    check_options(given["options"])
    resolved = _resolve(given)
    _check(resolved.config)
    if foreground:
        _stay(resolved, init=init, as_json=as_json)
    from kvfuse.cli.background import start

    warnings = start(resolved, init=init)
    report(resolved.config.pool.mountpoint, warnings, as_json=as_json)


def check_options(options: tuple[str, ...]) -> None:
    """Check the values of ``-o``.

    Raises:
        ConfigError: one is not known.
    """
    for option in ",".join(options).split(","):
        if not option or option in OPTIONS or option.startswith(_OPTION_PREFIXES):
            continue
        nearest = nearest_of(option, OPTIONS)
        hint = f"did you mean {nearest}?" if nearest else f"known are {', '.join(OPTIONS)}"
        raise ConfigError(f"-o {option}: unknown option; {hint}")


def _resolve(given: dict[str, Any]) -> Resolved:
    """Return the configuration; its mountpoint is the path that the mount table will show."""
    flags = _flags(given)
    resolved = resolve(given["config_file"], flags)
    mountpoint = resolved.config.pool.mountpoint
    if not mountpoint or mountpoint == mounts.mountpoint_of(mountpoint):
        return resolved
    return resolve(
        given["config_file"], {**flags, "pool.mountpoint": mounts.mountpoint_of(mountpoint)}
    )


def _flags(given: dict[str, Any]) -> dict[str, object]:
    mountpoint, disks = given["mountpoint"], given["disks"]
    return {
        "pool.mountpoint": None if mountpoint is None else mounts.mountpoint_of(mountpoint),
        "pool.disks": [absolute(path, "--disk") for path in disks] or None,
        "pool.placement": given["placement"],
        "pool.driver": given["driver"],
        "pool.require_all_disks": given["require_all_disks"],
    }


def _check(config: Config) -> None:
    """Refuse what is known to fail before anything is started, written or mounted."""
    from kvfuse.doctor import check_device, check_privilege

    mountpoint = config.pool.mountpoint
    if not mountpoint:
        raise ConfigError("no mountpoint; name one: kvfuse mount MOUNTPOINT, or pool.mountpoint")
    if not config.pool.disks:
        raise ConfigError("no disks; name them: --disk DIR, or pool.disks in the configuration")
    if FUSE in kept_names():
        return  # the mount is there and waits for its server: it must not be touched
    if mounts.clear_dead(mountpoint):
        mounts.cover(mountpoint)
        note(f"{mountpoint}: the dead mount of a daemon that was killed is cleared")
    mounts.check_mountpoint(mountpoint)
    checks = [check_privilege(), *check_device(Path("/dev/fuse"))]
    for check in checks:
        if check.level == "fail":
            raise KernelError(f"{check.name}: {check.text}; {check.remedy}")


def _stay(resolved: Resolved, *, init: bool, as_json: bool) -> NoReturn:
    """Become the supervisor of the mount: it has this process's pid, as a service manager wants."""
    task = handoff.task_fd(resolved, init=init, foreground=True, as_json=as_json)
    os.set_inheritable(task, True)
    handoff.raise_limits()
    sys.stdout.flush()
    words = handoff.command(task, -1, hangup_ends=os.isatty(0))
    os.chdir("/")
    os.execve(words[0], words, handoff.environment())  # noqa: S606 - our own interpreter


def report(mountpoint: str, warnings: list[str], *, as_json: bool) -> None:
    """Tell that the mount answers."""
    entry = registry.choose(mountpoint)
    if as_json:
        show_json(
            {
                "mountpoint": mountpoint,
                "pool": entry.pool_id,
                "pid": entry.pid,
                "log": entry.log,
                "warnings": warnings,
            }
        )
    else:
        say(f"{mountpoint}: mounted, pool {entry.pool_id[:8]}, daemon {entry.pid}")
