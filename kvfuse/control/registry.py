"""The mounted pools of this host: one small file each, so that commands find the daemon.

A file is written when a mount answers and removed when its daemon ends; one left behind by a killed
daemon is told apart by its pid and start time, never by its age.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from kvfuse.core.errors import KvfuseError, NotMountedError
from kvfuse.system import mounts

REGISTRY_DIR = Path("/run/kvfuse/mounts")
_FILE_BYTES_MAX = 64 * 1024


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Where the daemon of one mount is reached. *started* is its start time in clock ticks."""

    mountpoint: str
    pool_id: str
    pid: int
    started: int
    socket: str
    log: str

    @property
    def is_alive(self) -> bool:
        """Whether the daemon that wrote this still runs."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """Return when *pid* started, in clock ticks since boot; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def register(entry: Registration, directory: Path = REGISTRY_DIR) -> None:
    """Write *entry*; it replaces one of the same mountpoint, and those of dead daemons go.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for old in directory.glob("*.json"):
        found = _read(old)
        if found is not None and not found.is_alive:
            old.unlink(missing_ok=True)
    _sweep(directory)
    path = _path(entry.mountpoint, directory)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(entry))
    os.rename(temporary, path)


def unregister(entry: Registration, directory: Path = REGISTRY_DIR) -> None:
    """Remove what *entry* wrote, unless another daemon has taken the mountpoint since."""
    current = _read(_path(entry.mountpoint, directory))
    if current is not None and (current.pid, current.started) == (entry.pid, entry.started):
        with contextlib.suppress(OSError):
            _path(entry.mountpoint, directory).unlink()


def registrations(directory: Path = REGISTRY_DIR) -> list[Registration]:
    """Return the registered mounts whose daemon is alive, by mountpoint."""
    found = [_read(path) for path in sorted(directory.glob("*.json"))]
    alive = [entry for entry in found if entry is not None and entry.is_alive]
    return sorted(alive, key=lambda entry: entry.mountpoint)


def registration(mountpoint: str, directory: Path = REGISTRY_DIR) -> Registration | None:
    """Return the registration of *mountpoint*, also of a daemon that is dead; None without one."""
    return _read(_path(mountpoint, directory))


def choose(mountpoint: str | None, directory: Path = REGISTRY_DIR) -> Registration:
    """Return the mount that a command is about: the one named, or the only one there is.

    Raises:
        NotMountedError: no such mount, or none, or several when none is named.
    """
    alive = registrations(directory)
    if mountpoint is not None:
        for entry in alive:
            if entry.mountpoint == mountpoint:
                return entry
        _refuse_dead([mountpoint])
        raise NotMountedError(
            f"{mountpoint}: no kvfuse pool is mounted here" + _others(alive, "; mounted are: ")
        )
    if not alive:
        _refuse_dead(mount.mountpoint for mount in mounts.read_mounts())
        raise NotMountedError("no kvfuse pool is mounted; mount one: kvfuse mount --help")
    if len(alive) > 1:
        raise NotMountedError("several pools are mounted, name one of them" + _others(alive, ": "))
    return alive[0]


def enclosing(path: str, directory: Path = REGISTRY_DIR) -> Registration:
    """Return the mount that *path*, absolute and normal, lies in: the innermost one.

    Raises:
        NotMountedError: it lies in none.
    """
    alive = registrations(directory)
    around = [
        entry
        for entry in alive
        if path == entry.mountpoint or path.startswith(entry.mountpoint.rstrip("/") + "/")
    ]
    innermost = max((entry.mountpoint for entry in around), key=len, default="")
    above = [os.fspath(above) for above in (Path(path), *Path(path).parents)]
    _refuse_dead(found for found in above if len(found) > len(innermost))
    if not around:
        raise NotMountedError(
            f"{path}: not below a mounted kvfuse pool" + _others(alive, "; mounted are: ")
        )
    return max(around, key=lambda entry: len(entry.mountpoint))


def wait_for_end(entry: Registration, *, timeout_s: float) -> bool:
    """Wait until the daemon of *entry* has ended; return whether it has within *timeout_s*."""
    deadline_s = time.monotonic() + timeout_s
    while entry.is_alive:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)
    return True


def require_directory(path: Path) -> None:
    """Make *path* a directory of root that others may enter, not write.

    Raises:
        KvfuseError: it cannot be made, or belongs to somebody else.
    """
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as exc:
        raise KvfuseError(f"{path}: cannot be made: {exc.strerror}") from exc
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise KvfuseError(f"{path}: others may write here; chown root and chmod 755 it")


def _refuse_dead(mountpoints: Iterable[str]) -> None:
    """Raise NotMountedError when a kvfuse mount is at one of *mountpoints* and its daemon is gone.

    For mountpoints without a living daemon in the registry.
    """
    for mountpoint in mountpoints:
        if mounts.is_dead(mountpoint):
            raise NotMountedError(
                f"{mountpoint}: a dead mount, its daemon is gone; mount the pool again (kvfuse "
                f"mount) or clear it: kvfuse umount {mountpoint}"
            )


def _sweep(directory: Path) -> None:
    """Remove what processes left behind that were killed while they registered."""
    for temporary in directory.glob("*.tmp"):
        pid = temporary.name.split(".")[-2]
        if pid.isascii() and pid.isdigit() and start_time(int(pid)) is None:
            temporary.unlink(missing_ok=True)


def _others(alive: list[Registration], introduction: str) -> str:
    return introduction + ", ".join(entry.mountpoint for entry in alive) if alive else ""


def _path(mountpoint: str, directory: Path) -> Path:
    # The path itself with slashes escaped can pass 255 bytes; a hash of it never does.
    digest = blake3(os.fsencode(mountpoint)).hexdigest(length=16)
    return directory / f"{digest}.json"


def _read(path: Path) -> Registration | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=Registration)
    except (OSError, msgspec.MsgspecError):
        return None
