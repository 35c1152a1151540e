"""What a disk says of itself: the files in ``<root>/.kvfuse``, and the lock on them.

Files are replaced whole (temporary, fsync, rename, fsync of the directory). Reading trusts nothing:
anything odd is refused with one line, and nothing is written.
"""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from kvfuse.core.errors import BusyError, DiskRefusedError
from kvfuse.core.records import FORMAT
from kvfuse.core.topology import Topology
from kvfuse.disks.disk import Disk
from kvfuse.disks.root import Root

MARK = b".kvfuse"
IDENTITY_FILE = b"disk.json"
TOPOLOGY_FILE = b"topology.json"
LOCK_FILE = b"lock"
QUARANTINE_DIR = b"quarantine"
NOT_OF_THE_POOL = frozenset((MARK, b"lost+found"))  # names in a root that are no files of the pool

_FILE_BYTES_MAX = 1 << 20
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_SESSION_MAX = (1 << 63) - 1
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DamagedDiskError(DiskRefusedError):
    """A file in which a disk says what it is cannot be believed: *where*, and *what* is wrong."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: {what}: restore the file, empty the disk and initialise it again, or leave"
            " it out of the list of disks"
        )
        self.where = where
        self.what = what


class DiskIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``disk.json``.

    *pool_id* is None on a disk that was prepared and joins the pool it is mounted with. *created*
    is UTC, ISO 8601. *session* grows with each mount that had this disk; 0 before the first.
    """

    format: int
    disk_id: str
    pool_id: str | None
    created: str
    session: int

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.format < 1:
            raise ValueError(f"format {self.format} does not exist")
        for value in (self.disk_id, self.pool_id):
            if value is not None and not _UUID.fullmatch(value):
                raise ValueError(f"{_show(value)} is not a UUID")
        if not _CREATED.fullmatch(self.created):
            raise ValueError(f"created {_show(self.created)} is not a UTC time")
        if not 0 <= self.session <= _SESSION_MAX:
            raise ValueError(f"session {self.session} is out of range")


def read_identity(root: Root) -> DiskIdentity | None:
    """Return the identity of a disk, None for a directory that is none (yet).

    Raises:
        DamagedDiskError: it cannot be believed.
        DiskRefusedError: a newer kvfuse wrote it.
        OSError: the disk fails.
    """
    content = _read_file(root, IDENTITY_FILE)
    if content is None:
        return None
    where = _where(root, IDENTITY_FILE)
    data = _decode(content, where)
    if not isinstance(data, dict):
        _damaged(where, "not an object")
    _refuse_newer(data, where)
    try:
        return msgspec.convert(data, DiskIdentity, strict=True)
    except (msgspec.ValidationError, ValueError) as e:
        _damaged(where, str(e))


def read_topology(root: Root) -> Topology | None:
    """Return the topology a disk remembers, None when it has none.

    Raises:
        DamagedDiskError: it cannot be believed.
        DiskRefusedError: a newer kvfuse wrote it.
        OSError: the disk fails.
    """
    content = _read_file(root, TOPOLOGY_FILE)
    if content is None:
        return None
    where = _where(root, TOPOLOGY_FILE)
    data = _decode(content, where)
    _refuse_newer(data, where)
    try:
        return Topology.from_json(data)
    except ValueError as e:
        _damaged(where, str(e))


def make_mark(disk: Disk) -> None:
    """Make ``.kvfuse`` and what it holds beside the two files; what is there already, stays."""
    uid, gid = os.geteuid(), os.getegid()
    with contextlib.suppress(FileExistsError):
        disk.make_dir(disk.root_fd, MARK, mode=0o700, uid=uid, gid=gid)
    with _mark(disk) as mark_fd:
        with contextlib.suppress(FileExistsError):
            disk.make_dir(mark_fd, QUARANTINE_DIR, mode=0o700, uid=uid, gid=gid)
        with contextlib.suppress(FileExistsError):
            os.close(disk.create(mark_fd, LOCK_FILE, mode=0o600, uid=uid, gid=gid))


def remove_mark(disk: Disk) -> None:
    """Undo the making of a disk that failed half-way; what others put there, stays."""
    with contextlib.suppress(OSError), _mark(disk) as mark_fd:
        for name in (IDENTITY_FILE + b".tmp", IDENTITY_FILE, LOCK_FILE):
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(mark_fd, name)
        disk.remove_dir(mark_fd, QUARANTINE_DIR)
        disk.remove_dir(disk.root_fd, MARK)


def write_identity(disk: Disk, identity: DiskIdentity) -> None:
    """Replace ``disk.json``, durably. On a disk without any room it is overwritten in place.

    Raises:
        OSError: the disk fails, or is full and has no ``disk.json``; the old one is whole.
    """
    data = msgspec.json.format(msgspec.json.encode(identity)) + b"\n"
    try:
        _replace(disk, IDENTITY_FILE, data)
    except OSError as e:
        if e.errno not in _FULL:
            raise
        _overwrite(disk, IDENTITY_FILE, data, e)


def write_topology(disk: Disk, topology: Topology) -> None:
    """Replace ``topology.json``, durably.

    Raises:
        OSError: the disk fails or is full; the old one is whole.
    """
    data = msgspec.json.format(msgspec.json.encode(topology.to_json())) + b"\n"
    _replace(disk, TOPOLOGY_FILE, data)


def lock(root: Root) -> int:
    """Lock a marked disk for this process and those that inherit the returned descriptor.

    Writes nothing. The lock goes when the last copy of the descriptor is closed.

    Raises:
        BusyError: somebody else holds it.
    """
    with _mark(root) as mark_fd:
        try:
            fd = root.open(mark_fd, LOCK_FILE, os.O_RDONLY)
        except FileNotFoundError:  # the directory does as well, and exists on a read-only disk too
            fd = root.open_dir(MARK, readable=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(fd)
        raise BusyError(
            f"{root.path}: disk in use by another kvfuse: unmount that pool first"
        ) from e
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _mark(root: Root) -> Iterator[int]:
    fd = root.open_dir(MARK)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_file(root: Root, name: bytes) -> bytes | None:
    """Return the content of a file of the mark, None when it is missing."""
    try:
        with _mark(root) as mark_fd:
            root.stat(mark_fd, name)  # missing, or there and then to be a regular file
            return _read(root, mark_fd, name)
    except FileNotFoundError:
        return None
    except NotADirectoryError as e:
        raise DiskRefusedError(
            f"{root.path}/.kvfuse: not a directory of this disk: remove it, or use another disk"
        ) from e


def _decode(content: bytes, where: str) -> object:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as e:
        _damaged(where, f"not JSON: {e}")


def _refuse_newer(data: object, where: str) -> None:
    written = data.get("format") if isinstance(data, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise DiskRefusedError(
            f"{where}: format {written} is newer than {FORMAT}: upgrade kvfuse to use this disk"
        )


def _read(root: Root, mark_fd: int, name: bytes) -> bytes:
    try:
        fd = root.open(mark_fd, name, os.O_RDONLY)
    except FileNotFoundError:
        _damaged(_where(root, name), "not a regular file")
    try:
        data = os.pread(fd, _FILE_BYTES_MAX + 1, 0)
    finally:
        os.close(fd)
    if len(data) > _FILE_BYTES_MAX:
        _damaged(_where(root, name), f"larger than {_FILE_BYTES_MAX} bytes")
    return data


def _replace(disk: Disk, name: bytes, data: bytes) -> None:
    temporary = name + b".tmp"
    mark_fd = disk.open_dir(MARK, readable=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(mark_fd, temporary)
        fd = disk.create(mark_fd, temporary, mode=0o600, uid=os.geteuid(), gid=os.getegid())
        try:
            _write_whole(disk, fd, data)
        except OSError:
            with contextlib.suppress(OSError):
                disk.unlink(mark_fd, temporary)
            raise
        finally:
            os.close(fd)
        disk.rename(mark_fd, temporary, mark_fd, name)
        disk.fsync(mark_fd, data_only=False)
    finally:
        os.close(mark_fd)


def _overwrite(disk: Disk, name: bytes, data: bytes, full: OSError) -> None:
    """Write over the sector the file has: a full disk must still come up, to be cleaned."""
    with _mark(disk) as mark_fd:
        try:
            fd = disk.open(mark_fd, name, os.O_RDWR)
        except FileNotFoundError:
            raise full from None
        try:
            _write_whole(disk, fd, data.ljust(disk.fstat(fd).st_size))
        finally:
            os.close(fd)


def _write_whole(disk: Disk, fd: int, data: bytes) -> None:
    written = disk.write(fd, data, 0)
    if written < len(data):
        written += disk.write(fd, data[written:], written)  # raises what stopped the first
    disk.fsync(fd, data_only=False)


def _where(root: Root, name: bytes) -> str:
    return f"{root.path}/.kvfuse/{name.decode()}"


def _damaged(where: str, what: str) -> NoReturn:
    raise DamagedDiskError(where, what.removeprefix("topology: "))


def _show(value: str) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
