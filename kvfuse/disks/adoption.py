"""Making a directory a disk: what must not become one, and what is written to one that may."""

import contextlib
import errno
import os
import pwd
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvfuse.core.errors import DiskRefusedError
from kvfuse.core.records import FORMAT
from kvfuse.disks.candidates import is_empty
from kvfuse.disks.disk import Disk
from kvfuse.disks.identity import (
    LOCK_FILE,
    MARK,
    NOT_OF_THE_POOL,
    DiskIdentity,
    lock,
    make_mark,
    read_identity,
    remove_mark,
    write_identity,
)

_PROBE_LABEL = b"probe"
_DEFAULT_ACL = b"system.posix_acl_default"


class Survey(NamedTuple):
    """What a directory holds: regular files, and the bytes they occupy."""

    files: int
    used_bytes: int


def survey(path: str) -> Survey:
    """Count what adopting *path* would put at kvfuse's disposal.

    Foreign things (symlinks out, devices, other mounts) are not followed and not counted.

    Raises:
        DiskRefusedError: another disk lies below.
        OSError: the directory cannot be read.
    """
    disk = Disk.open_root(path)
    try:
        return _survey(disk)
    finally:
        disk.close()


def init_disk(
    path: str,
    *,
    adopt: bool,
    pool_id: str | None = None,
    new_uuid: Callable[[], str] = lambda: str(uuid.uuid4()),
    now_ns: Callable[[], int] = time.time_ns,
) -> DiskIdentity:
    """Make the directory *path* a disk, of *pool_id* or of the pool it is first mounted with.

    With *adopt* it may hold files: they become files of the pool, which deletes them when it needs
    room. The root becomes 0700 and this user's.

    Raises:
        DiskRefusedError: it must not be one; nothing was written.
        BusyError: another process does the same.
    """
    try:
        disk = Disk.open_root(path)
    except NotADirectoryError as e:
        raise DiskRefusedError(f"{path}: not a directory: name the disk's directory") from e
    except OSError as e:
        raise DiskRefusedError(f"{path}: {e.strerror}: mount the disk there first") from e
    with contextlib.closing(disk), failures_as_refusal(path):
        identity = read_identity(disk)
        if identity is not None:
            pool = identity.pool_id or "no pool yet"
            raise DiskRefusedError(
                f"{path}: already a disk, {identity.disk_id} of {pool}: mount it"
            )
        refuse_new(disk)
        if not is_empty(disk):
            if not adopt:
                raise DiskRefusedError(f"{path}: holds files: use --adopt to make them the pool's")
            _survey(disk)  # refuses a disk below
        return mark_new(disk, pool_id=pool_id, new_uuid=new_uuid, now_ns=now_ns)


@contextlib.contextmanager
def failures_as_refusal(path: str) -> Iterator[None]:
    """Turn an ``OSError`` on the way to a new disk at *path* into the refusal of it."""
    try:
        yield
    except OSError as e:
        raise DiskRefusedError(
            f"{path}: cannot become a disk: {e.strerror or e}: check the file system there"
        ) from e


def refuse_place(disk: Disk) -> None:
    """Refuse a directory that no one can mean as a disk, because of where it is. Writes nothing.

    Raises:
        DiskRefusedError: the root, a home, or a top directory of the root file system.
        OSError: the disk fails.
    """
    path = os.path.realpath(disk.path)
    if path == "/":
        raise DiskRefusedError(f"{disk.path}: the root directory is no disk: name another")
    if path in {os.path.realpath(user.pw_dir) for user in pwd.getpwall()}:
        raise DiskRefusedError(f"{disk.path}: a home directory is no disk: name another")
    if os.path.dirname(path) == "/" and disk.device == os.stat("/").st_dev:
        raise DiskRefusedError(
            f"{disk.path}: a top directory of the root file system is no disk: is it mounted?"
        )


def refuse_new(disk: Disk) -> None:
    """Refuse a directory that cannot become a disk, whatever it holds.

    Raises:
        DiskRefusedError: a place that ``refuse_place`` names or in another disk, one that takes no
            writes, hands its ACL down or keeps no labels.
        OSError: the disk fails.
    """
    refuse_place(disk)
    above = _disk_above(os.path.realpath(disk.path))
    if above is not None:
        raise DiskRefusedError(f"{disk.path}: inside the disk {above}: use another directory")
    if disk.is_read_only():
        raise DiskRefusedError(f"{disk.path}: mounted read-only: remount it read-write")
    try:
        disk.get_xattr(disk.root_fd, _DEFAULT_ACL)
    except OSError as e:
        if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
    else:
        raise DiskRefusedError(
            f"{disk.path}: has a default ACL, which files would inherit: setfacl -k {disk.path}"
        )
    if not disk.keeps_labels():
        raise _no_labels(disk)


def mark_new(
    disk: Disk,
    *,
    pool_id: str | None,
    new_uuid: Callable[[], str],
    now_ns: Callable[[], int],
) -> DiskIdentity:
    """Write a new identity to a directory that was found fit, and close it to other users.

    Raises:
        DiskRefusedError: the file system keeps no labels; what was made is removed again.
        BusyError: another process does the same.
        OSError: the disk fails.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_ns() // 1_000_000_000))
    identity = DiskIdentity(
        format=FORMAT, disk_id=new_uuid(), pool_id=pool_id, created=created, session=0
    )
    try:
        make_mark(disk)
        lock_fd = lock(disk)
    except OSError:
        remove_mark(disk)
        raise
    try:
        _check_labels(disk)
        disk.set_owner(disk.root_fd, os.geteuid(), os.getegid())
        disk.set_mode(disk.root_fd, 0o700)
        write_identity(disk, identity)
    except BaseException:
        remove_mark(disk)
        raise
    finally:
        os.close(lock_fd)
    return identity


def _check_labels(disk: Disk) -> None:
    mark_fd = disk.open_dir(MARK)
    try:
        disk.write_label_at(mark_fd, LOCK_FILE, _PROBE_LABEL)
        kept = disk.read_label_at(mark_fd, LOCK_FILE) == _PROBE_LABEL
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            raise
        kept = False
    finally:
        os.close(mark_fd)
    if not kept:
        raise _no_labels(disk)


def _no_labels(disk: Disk) -> DiskRefusedError:
    return DiskRefusedError(
        f"{disk.path}: the file system ({disk.filesystem}) does not keep the attribute"
        f" {disk.label_name}: use ext4, XFS or btrfs"
    )


def _disk_above(path: str) -> str | None:
    """Return the disk that *path* lies in, None when it lies in none."""
    while path != "/":
        path = os.path.dirname(path)
        if os.path.lexists(os.path.join(path, ".kvfuse", "disk.json")):
            return path
    return None


def _survey(disk: Disk) -> Survey:
    files, used_bytes = 0, 0
    pending = [b""]
    while pending:
        path = pending.pop()
        try:
            dir_fd = disk.open_dir(path, readable=True)
        except (NotADirectoryError, FileNotFoundError):
            continue  # another mount, or gone meanwhile: foreign
        try:
            for item in disk.list_fd(dir_fd):
                if not path and item.name in NOT_OF_THE_POOL:
                    continue
                if item.type_bits == stat.S_IFDIR:
                    if item.name == MARK:
                        below = os.path.join(disk.path, os.fsdecode(path))
                        raise DiskRefusedError(f"{disk.path}: has a disk in it, {below}: move it")
                    pending.append(path + b"/" + item.name if path else item.name)
                elif item.type_bits == stat.S_IFREG:
                    files += 1
                    used_bytes += disk.stat(dir_fd, item.name).st_blocks * 512
        finally:
            os.close(dir_fd)
    return Survey(files, used_bytes)
