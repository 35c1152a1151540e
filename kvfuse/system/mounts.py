"""What is mounted where: the kernel's mount table, dead mounts, and who keeps one busy.

Nothing here touches the file system behind a mount unless it says so: a mount whose daemon hangs
would hang the caller as well.
"""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfuse.core.errors import BusyError, ConfigError, KvfuseError
from kvfuse.system.syscalls import MS_NODEV, MS_NOSUID, MS_RDONLY, mount, umount

FSTYPE = "fuse.kvfuse"
COVER = "kvfuse-cover"
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

ANSWER_TIMEOUT_S = 5.0
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
_HOLDERS_MAX = 20
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table. *device* is "major:minor"."""

    mountpoint: str
    device: str
    fstype: str
    source: str

    @property
    def is_kvfuse(self) -> bool:
        """Whether a kvfuse pool is, or was, mounted here."""
        return self.fstype == FSTYPE


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps a mount busy, and by what."""

    pid: int
    command: str
    path: str


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in the text of a mountinfo file, in the order they were made."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        tail = fields.index("-", 6)
        mounts.append(
            Mount(_unescape(fields[4]), fields[2], fields[tail + 1], _unescape(fields[tail + 2]))
        )
    return mounts


def read_mounts() -> list[Mount]:
    """Return the mounts this process sees, in the order they were made."""
    raw = Path("/proc/self/mountinfo").read_bytes()
    return parse_mountinfo(os.fsdecode(raw))


def mount_at(path: str) -> Mount | None:
    """Return the mount that is visible at exactly *path*, None when there is none."""
    found = [mount for mount in read_mounts() if mount.mountpoint == path]
    return found[-1] if found else None


def mountpoint_of(argument: str) -> str:
    """Return the absolute path of a mountpoint that was typed as *argument*.

    Symbolic links above it are followed, the mountpoint itself is not touched.

    Raises:
        ConfigError: it is empty.
    """
    if not argument:
        raise ConfigError("MOUNTPOINT: the path is empty; name a directory")
    path = os.path.abspath(argument)
    parent, name = os.path.split(path)
    return os.path.join(os.path.realpath(parent), name) if name else path


def stat_error(path: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
    """Return 0 when *path* answers a stat, else the errno; ETIMEDOUT when it does not answer."""
    result = [errno.ETIMEDOUT]

    def ask() -> None:
        try:
            os.statvfs(path)
            os.stat(path)
            result[0] = 0
        except OSError as exc:
            result[0] = exc.errno or errno.EIO

    # A stat of a hung mount cannot be interrupted; a daemon thread does not keep the process.
    thread = threading.Thread(target=ask, daemon=True, name="stat")
    thread.start()
    thread.join(timeout_s)
    return result[0]


def is_dead(mountpoint: str) -> bool:
    """Whether a kvfuse mount is at *mountpoint* that nobody serves any more. Asks the mount."""
    mount = mount_at(mountpoint)
    return mount is not None and mount.is_kvfuse and stat_error(mountpoint) in _DEAD


def clear_dead(mountpoint: str) -> bool:
    """Detach dead kvfuse mounts from *mountpoint*; return whether there was one.

    Raises:
        KvfuseError: it cannot be detached.
    """
    cleared = False
    while (found := mount_at(mountpoint)) and found.is_kvfuse:
        if stat_error(mountpoint) not in _DEAD:
            break
        try:
            umount(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW)
        except OSError as exc:
            raise KvfuseError(
                f"{mountpoint}: a dead kvfuse mount cannot be cleared: {exc.strerror}; "
                f"as root, run: umount -l {mountpoint}"
            ) from exc
        cleared = True
    return cleared


def cover(mountpoint: str) -> None:
    """Hide the bare directory while a mount on it may come and go.

    What clients stored there in between would fill the wrong disk and be hidden by the next mount.
    An empty file system that cannot be written lies over it; without the privilege nothing does.
    """
    if is_covered(mountpoint):
        return
    with contextlib.suppress(OSError):
        mount(
            COVER, mountpoint, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV,
            "size=4k,nr_inodes=1,mode=0555",
        )  # fmt: skip


def is_covered(mountpoint: str) -> bool:
    """Whether a cover, and nothing above it, is mounted at *mountpoint*."""
    found = mount_at(mountpoint)
    return found is not None and found.source == COVER


def uncover(mountpoint: str) -> bool:
    """Take the cover away; return whether there was one."""
    found = False
    while is_covered(mountpoint):
        try:
            umount(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW)
        except OSError:
            break
        found = True
    return found


def check_mountpoint(mountpoint: str) -> None:
    """Check that a pool can be mounted at *mountpoint*: an empty directory, nothing mounted on it.

    Raises:
        BusyError: something is mounted there.
        ConfigError: it is missing, not a directory, not empty, or cannot be read.
    """
    found = mount_at(mountpoint)
    if found is not None and found.is_kvfuse:
        raise BusyError(
            f"{mountpoint}: a kvfuse pool is mounted here already; "
            f"look: kvfuse status {mountpoint}, end it: kvfuse umount {mountpoint}"
        )
    if found is not None and found.source != COVER:
        raise BusyError(
            f"{mountpoint}: {found.source} ({found.fstype}) is mounted here; "
            f"unmount it or choose another mountpoint"
        )
    try:
        names = os.listdir(mountpoint)
    except FileNotFoundError:
        raise ConfigError(f"{mountpoint}: no such directory; make it: mkdir {mountpoint}") from None
    except NotADirectoryError:
        raise ConfigError(f"{mountpoint}: not a directory; a mountpoint must be one") from None
    except OSError as exc:
        raise ConfigError(f"{mountpoint}: cannot be read: {exc.strerror}") from exc
    if names:
        what = "1 entry" if len(names) == 1 else f"{len(names)} entries"
        raise ConfigError(
            f"{mountpoint}: not empty ({what}); mounting would hide them: "
            f"empty it or choose another mountpoint"
        )


def holders(mountpoint: str) -> list[Holder]:
    """Return processes with a file, a mapping or their working directory below *mountpoint*.

    At most 20 are returned. Only links under /proc are read, the mount is not asked.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        path = _held_by(entry, mountpoint)
        if path is not None:
            found.append(Holder(int(entry.name), _command(entry), path))
            if len(found) == _HOLDERS_MAX:
                break
    found.extend(
        Holder(0, "mount", mount.mountpoint)
        for mount in read_mounts()
        if mount.mountpoint.startswith(mountpoint + "/")
    )
    return found


def describe(holder: Holder) -> str:
    """Return *holder* for a sentence: its command and pid, and what it holds."""
    if holder.pid == 0:
        return f"a mount at {holder.path}"
    return f"{holder.command} (pid {holder.pid}: {holder.path})"


def _held_by(process: Path, mountpoint: str) -> str | None:
    for path in _paths_of(process):
        if path == mountpoint or path.startswith(mountpoint + "/"):
            return path
    return None


def _paths_of(process: Path) -> Iterator[str]:
    for name in ("cwd", "root", "exe"):
        with contextlib.suppress(OSError):
            yield os.readlink(process / name)
    with contextlib.suppress(OSError):
        for link in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(link.path)
    with contextlib.suppress(OSError):
        for line in os.fsdecode((process / "maps").read_bytes()).splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                yield fields[5]


def _command(process: Path) -> str:
    try:
        raw = (process / "comm").read_bytes()
    except OSError:
        return "?"
    return raw.decode(errors="backslashreplace").strip()


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo; a name need not be UTF-8."""
    if "\\" not in field:
        return field
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
