"""The configured disks as they are found, and the reasons not to use them. Writes nothing.

``look_at`` opens each, however dead it is; the ``refuse_*`` functions hold what was found against
the rules, each with one line: what, where, what to do.
"""

import errno
import fcntl
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import NamedTuple

from kvfuse.core.errors import DiskRefusedError
from kvfuse.core.topology import Topology
from kvfuse.disks.disk import Disk
from kvfuse.disks.identity import (
    NOT_OF_THE_POOL,
    DamagedDiskError,
    DiskIdentity,
    lock,
    read_identity,
    read_topology,
)

LOOK_TIMEOUT_S = 10.0

_BTRFS_FS_INFO = 0x8400941F  # _IOR(0x94, 31, 1024 bytes): max_id, num_devices, fsid[16], ...
_BTRFS_FS_INFO_BYTES = 1024


class DiskSpec(NamedTuple):
    """A disk as configured: its directory, its share, and ``rw`` or ``ro``."""

    path: str
    weight: float = 1.0
    mode: str = "rw"


@dataclass(slots=True)
class Candidate:
    """A configured directory and what was found there; *reason* says why it has no *disk*.

    With *damage* its identity cannot be read, and there is no *disk*, or its topology cannot.
    """

    spec: DiskSpec
    real_path: str
    disk: Disk | None = None
    identity: DiskIdentity | None = None
    topology: Topology | None = None
    is_empty: bool = False
    filesystem_key: object = None  # equal for two disks of one file system
    mode: int = 0o700  # of the root
    read_only: str = ""  # why, when it is
    reason: str = ""
    damage: DamagedDiskError | None = None
    lock_fd: int = -1

    @property
    def path(self) -> str:
        """The directory as configured."""
        return self.spec.path

    @property
    def is_new(self) -> bool:
        """Whether the directory is there and carries no identity."""
        return self.disk is not None and self.identity is None

    def take_lock(self) -> None:
        """Lock the disk; BusyError when somebody else has it."""
        if self.disk is not None and self.lock_fd < 0:
            self.lock_fd = lock(self.disk)

    def fail(self, reason: str) -> None:
        """Give the disk up, for *reason*."""
        self.close()
        self.reason = reason

    def close(self) -> None:
        """Give back what is held."""
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def look_at(specs: Sequence[DiskSpec], timeout_s: float = LOOK_TIMEOUT_S) -> list[Candidate]:
    """Open every disk, all at once; one that does not answer in *timeout_s* counts as dead.

    Raises:
        DiskRefusedError: one is there and must not be used; nothing stays open.
    """
    futures = [_start_look(spec) for spec in specs]
    candidates: list[Candidate] = []
    refused: DiskRefusedError | None = None
    for spec, future in zip(specs, futures, strict=True):
        try:
            candidates.append(future.result(timeout_s))
        except FutureTimeoutError:
            future.add_done_callback(_close_late)
            reason = f"does not answer within {timeout_s:g} s"
            candidates.append(Candidate(spec, os.path.abspath(spec.path), reason=reason))
        except DiskRefusedError as e:
            refused = refused or e
    if refused:
        for candidate in candidates:
            candidate.close()
        raise refused
    return candidates


def _start_look(spec: DiskSpec) -> Future[Candidate]:
    future: Future[Candidate] = Future()

    def run() -> None:
        try:
            future.set_result(_look(spec))
        except BaseException as e:  # noqa: BLE001 - whoever waits is told
            future.set_exception(e)

    # not an executor's thread: those are waited for at exit, and a dead disk holds its thread
    threading.Thread(target=run, name=f"look {spec.path}", daemon=True).start()
    return future


def _close_late(future: Future[Candidate]) -> None:
    if future.exception() is None:
        future.result().close()


def _look(spec: DiskSpec) -> Candidate:
    candidate = Candidate(spec, os.path.realpath(spec.path))
    try:
        disk = candidate.disk = Disk.open_root(spec.path)
        candidate.identity = read_identity(disk)
        if candidate.identity is not None:
            try:
                candidate.topology = read_topology(disk)
            except DamagedDiskError as e:
                candidate.damage = e
        else:
            candidate.is_empty = is_empty(disk)
        candidate.mode = stat.S_IMODE(disk.fstat(disk.root_fd).st_mode)
        candidate.filesystem_key = _filesystem_key(disk)
        if spec.mode == "ro":
            candidate.read_only = "configured with mode ro"
        elif disk.is_read_only():
            candidate.read_only = "mounted read-only"
    except DamagedDiskError as e:
        candidate.damage = e
        candidate.fail(str(e).removeprefix(f"{spec.path}/"))
    except FileNotFoundError:
        candidate.fail("no such directory")
    except NotADirectoryError as e:
        candidate.close()
        raise DiskRefusedError(f"{spec.path}: not a directory: name the disk's directory") from e
    except OSError as e:
        candidate.fail(e.strerror or str(e))
    except BaseException:
        candidate.close()
        raise
    return candidate


def is_empty(disk: Disk) -> bool:
    """Whether the root of a disk holds nothing that could be somebody's."""
    return all(item.name in NOT_OF_THE_POOL for item in disk.list_dir(b""))


def is_below(path: str, directory: str) -> bool:
    """Whether *path* is *directory* or lies below it; both absolute and resolved."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def resolve_mountpoint(path: str) -> str:
    """Return *path* with symlinks above its last part resolved; the mount itself is not asked."""
    above, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(above), name) if name else above


def refuse_places(
    candidates: Sequence[Candidate], mountpoint: str, own_dirs: Iterable[str]
) -> None:
    """Refuse disks that lie in each other, in the mount or around it; state within any of these.

    Raises:
        DiskRefusedError: the first of these.
    """
    mount = resolve_mountpoint(mountpoint)
    for number, one in enumerate(candidates):
        if one.real_path == "/":
            raise DiskRefusedError(f"{one.path}: the root directory is no disk: name another")
        for other in candidates[:number]:
            _refuse_pair(other, one)
        if is_below(mount, one.real_path):
            raise DiskRefusedError(
                f"{mountpoint}: mountpoint inside the disk {one.path}: mount elsewhere"
            )
        if is_below(one.real_path, mount):
            raise DiskRefusedError(
                f"{one.path}: disk inside the mountpoint {mountpoint}: mount elsewhere"
            )
    for own in own_dirs:
        real = os.path.realpath(own)
        for where in (mount, *(c.real_path for c in candidates)):
            if is_below(real, where):
                raise DiskRefusedError(
                    f"{own}: kvfuse's own state lies in {where}, which it must outlive:"
                    " set pool.state_dir and pool.run_dir to another place"
                )


def _refuse_pair(one: Candidate, other: Candidate) -> None:
    if one.real_path == other.real_path:
        raise DiskRefusedError(f"{other.path}: the same directory as {one.path}: name it once")
    if is_below(other.real_path, one.real_path):
        raise DiskRefusedError(f"{other.path}: inside the disk {one.path}: use one of them")
    if is_below(one.real_path, other.real_path):
        raise DiskRefusedError(f"{one.path}: inside the disk {other.path}: use one of them")


def refuse_shared_filesystems(candidates: Sequence[Candidate]) -> None:
    """Refuse two disks on one file system: they fill and fail together.

    Raises:
        DiskRefusedError: the first two that do.
    """
    seen: dict[object, Candidate] = {}
    for one in candidates:
        if one.disk is None:
            continue
        other = seen.setdefault(one.filesystem_key, one)
        if other is not one:
            raise DiskRefusedError(
                f"{one.path}: on the same file system as {other.path}: give each disk its own,"
                " or set pool.allow_shared_device for a trial"
            )


def _filesystem_key(disk: Disk) -> object:
    if disk.filesystem == "btrfs":  # each subvolume has its own st_dev
        info = bytearray(_BTRFS_FS_INFO_BYTES)
        try:
            fcntl.ioctl(disk.root_fd, _BTRFS_FS_INFO, info)
        except OSError as e:
            if e.errno not in (errno.ENOTTY, errno.EPERM):
                raise
        else:
            return bytes(info[16:32])
    return disk.device


def refuse_identities(candidates: Sequence[Candidate]) -> str | None:
    """Refuse two disks of one id, and disks of two pools; return the pool, None for a new one.

    Raises:
        DiskRefusedError: either of these.
    """
    by_id: dict[str, Candidate] = {}
    by_pool: dict[str, list[str]] = defaultdict(list)
    for one in candidates:
        if one.identity is None:
            continue
        other = by_id.setdefault(one.identity.disk_id, one)
        if other is not one:
            raise DiskRefusedError(
                f"{one.path}: has the disk id of {other.path}, {one.identity.disk_id}:"
                " one is a copy of the other: leave it out, or empty it and initialise it again"
            )
        pools = {one.identity.pool_id, one.topology.pool_id if one.topology else None}
        for pool_id in pools - {None}:
            by_pool[str(pool_id)].append(one.path)
    if len(by_pool) > 1:
        (pool, kept), (another, others) = sorted(by_pool.items(), key=lambda p: (-len(p[1]), p))[:2]
        if others[0] in kept:
            raise DiskRefusedError(
                f"{others[0]}: its disk.json and its topology.json name two pools, {pool} and"
                f" {another}: restore the one that is wrong, or leave it out of the list of disks"
            )
        raise DiskRefusedError(
            f"{others[0]}: disk of another pool, {another}, than {kept[0]}, which is of {pool}:"
            " mount it with its own pool, or empty it and initialise it again"
        )
    return next(iter(by_pool), None)


def unwise(candidates: Sequence[Candidate], state_dir: str) -> list[str]:
    """Return a line for each thing that is allowed and should not be."""
    directory = os.path.realpath(state_dir)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    device = os.stat(directory).st_dev
    notes = []
    for candidate in candidates:
        if candidate.disk is None or candidate.is_new:
            continue
        if candidate.mode & 0o077:
            notes.append(
                f"{candidate.path}: mode {candidate.mode:04o} lets other users in past the mount's"
                f" permissions: chmod 0700 {candidate.path}"
            )
        if candidate.disk.device == device:
            notes.append(
                f"{state_dir}: on the file system of the disk {candidate.path},"
                " which it should outlive: set pool.state_dir to another"
            )
    return notes
