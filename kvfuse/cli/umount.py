"""``kvfuse umount``."""

import errno

import click

from kvfuse.control import registry
from kvfuse.control.client import call
from kvfuse.core.errors import BusyError, KernelError, KvfuseError, NotMountedError
from kvfuse.output import json_option, note, say, show_json
from kvfuse.system import mounts
from kvfuse.system.syscalls import umount

END_TIMEOUT_S = 60.0


@click.command(
    epilog="""\b
Examples:
  kvfuse umount /kvcache
  kvfuse umount /kvcache --lazy      even if programs have files open there
"""
)
@click.argument("mountpoint", required=False)
@click.option(
    "--lazy",
    is_flag=True,
    help="Unmount although it is in use. Files that are open there fail from then on; with "
    "passthrough they go on working until they are closed, but what is written then may be lost.",
)
@json_option
def command(mountpoint: str | None, lazy: bool, as_json: bool) -> None:
    """Unmount a pool and wait until its daemon has ended.

    MOUNTPOINT may be left out when one pool is mounted. A dead mount, left by a daemon that was
    killed, is cleared. Exit code 3 when nothing is mounted there, 5 when it is in use: the message
    names the processes.
    """
    path = registry.choose(None).mountpoint if mountpoint is None else _path(mountpoint)
    entry = registry.registration(path)
    cleared = mounts.clear_dead(path)
    if (entry is None or not entry.is_alive) and mounts.uncover(path):
        cleared = True
    mount = None if mounts.is_covered(path) else mounts.mount_at(path)
    if mount is not None and not mount.is_kvfuse:
        raise NotMountedError(f"{path}: {mount.fstype} is mounted here, not a kvfuse pool")
    if mount is None and not cleared and (entry is None or not entry.is_alive):
        raise NotMountedError(f"{path}: no kvfuse pool is mounted here")
    if mount is not None:
        _unmount(path, lazy=lazy)
    if entry is not None:
        _end(entry, lazy=lazy)
    if as_json:
        show_json({"mountpoint": path, "cleared": cleared})
    elif cleared:
        say(f"{path}: the dead mount of a daemon that was killed is cleared")


def _path(argument: str) -> str:
    return mounts.mountpoint_of(argument)


def _unmount(path: str, *, lazy: bool) -> None:
    flags = mounts.UMOUNT_NOFOLLOW | (mounts.MNT_DETACH if lazy else 0)
    try:
        umount(path, flags)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            raise BusyError(_busy(path)) from exc
        if exc.errno == errno.EPERM:
            raise KernelError(f"{path}: only root may unmount; run it as root") from exc
        if exc.errno != errno.EINVAL:  # EINVAL: it was unmounted this moment
            raise KvfuseError(f"{path}: cannot be unmounted: {exc.strerror}") from exc


def _busy(path: str) -> str:
    who = [mounts.describe(holder) for holder in mounts.holders(path)]
    named = f"in use by {', '.join(who)}" if who else "in use"
    return f"{path}: {named}; end that, or: kvfuse umount {path} --lazy"


def _end(entry: registry.Registration, *, lazy: bool) -> None:
    """Wait for the daemon; ask it to end where open files keep it alive."""
    if lazy and entry.is_alive:
        try:
            call(entry, "stop")
        except KvfuseError as exc:
            if entry.is_alive:
                note(str(exc))
    if not registry.wait_for_end(entry, timeout_s=END_TIMEOUT_S):
        raise KvfuseError(
            f"{entry.mountpoint}: unmounted, but its daemon (pid {entry.pid}) has not ended within "
            f"{END_TIMEOUT_S:.0f} s; its log: {entry.log or 'the journal'}"
        )
    registry.unregister(entry)
