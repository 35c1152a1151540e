"""A directory below which nothing is followed: where every path on a disk is opened.

Nothing planted below it (a symlink, ``..``, a FIFO, a device, another mount) leads out of it or
blocks its caller. Methods raise ``OSError`` with the errno of the call.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Self

from kvfuse.system import syscalls

_RESOLVE = (
    syscalls.RESOLVE_BENEATH
    | syscalls.RESOLVE_NO_SYMLINKS
    | syscalls.RESOLVE_NO_XDEV
    | syscalls.RESOLVE_NO_MAGICLINKS
)
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NODE_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a planted FIFO or device must not wait. On regular files it means nothing.
_OPEN_ADDED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OPEN_KEPT = os.O_ACCMODE | os.O_DIRECT | os.O_SYNC | os.O_DSYNC | os.O_NOATIME
# what opening something else than a regular file of this disk may fail with
_FOREIGN = (
    errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EACCES, errno.EBUSY,
)  # fmt: skip
_LEASE_RETRIES = 200  # a lease is held for microseconds: by lease_free, or by whoever we break
_LEASE_RETRY_S = 0.005
_FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x65735546: "fuse",
    0x794C7630: "overlayfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x6969: "nfs",
}


class Root:
    """A directory, opened once. Thread-safe: it holds constants only."""

    def __init__(self, path: str, root_fd: int, *, use_openat2: bool = True) -> None:
        """Take over *root_fd*, a readable descriptor of the directory *path*."""
        magic = syscalls.filesystem_magic(root_fd)
        self._describe(
            path,
            root_fd,
            device=os.fstat(root_fd).st_dev,
            filesystem=_FILESYSTEMS.get(magic, f"{magic:#x}"),
            use_openat2=use_openat2,
        )

    def _describe(
        self, path: str, root_fd: int, *, device: int, filesystem: str, use_openat2: bool
    ) -> None:
        """Set what is constant, asking the disk for nothing."""
        self.path = path
        self.root_fd = root_fd
        self.device = device
        self.filesystem = filesystem
        self.use_openat2 = use_openat2
        # btrfs subvolumes are no mounts, so RESOLVE_NO_XDEV lets them through
        self._check_dir_device = self.filesystem == "btrfs" or not use_openat2
        # files of an overlay may show the device of a layer
        self._check_file_device = self.filesystem != "overlayfs"

    @classmethod
    def open_root(cls, path: str) -> Self:
        """Open the directory at *path*. Symlinks on the way to it are the operator's, and followed.

        Raises:
            OSError: ENOENT, ENOTDIR, EACCES, or what a dead disk answers.
        """
        root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls(path, root_fd, use_openat2=_has_openat2(root_fd))
        except BaseException:
            os.close(root_fd)
            raise

    def close(self) -> None:
        """Give the root descriptor back. Descriptors handed out stay valid."""
        if self.root_fd >= 0:
            os.close(self.root_fd)
            self.root_fd = -1

    def open_dir(self, path: bytes, *, readable: bool = False) -> int:
        """Return a descriptor of the directory *path* (``b""`` = the root); the caller closes it.

        Without *readable* it is O_PATH: good for names below it, not for listing or fsync.

        Raises:
            OSError: ENOENT when a part is missing; ENOTDIR when a part is no directory of this
                disk: a symlink, another mount or subvolume, ``..``, an absolute path.
        """
        flags = _LIST_FLAGS if readable else _PATH_FLAGS
        if path[:1] == b"/" or (b".." in path and b".." in path.split(b"/")):
            raise OSError(errno.ENOTDIR, f"{self.path}: path leaves the disk", os.fsdecode(path))
        if len(path) <= syscalls.PATH_BYTES_MAX:
            return self.open_below(self.root_fd, path or b".", flags)
        fd = -1
        try:
            for piece in _pieces(path):
                above = fd
                fd = self.open_below(self.root_fd if above < 0 else above, piece, _PATH_FLAGS)
                if above >= 0:
                    os.close(above)
            return self.open_below(fd, b".", flags)
        finally:
            if fd >= 0:
                os.close(fd)

    def open_subdir(self, dir_fd: int, name: bytes, *, readable: bool = False) -> int:
        """Return a descriptor of the directory *name* in *dir_fd*; as :meth:`open_dir`."""
        return self.open_below(dir_fd, name, _LIST_FLAGS if readable else _PATH_FLAGS)

    def open_below(self, dir_fd: int, path: bytes, flags: int) -> int:
        """Open a directory (or, O_PATH, anything) below *dir_fd*, staying on this disk."""
        try:
            if self.use_openat2:
                fd = syscalls.openat2(dir_fd, path, flags, _RESOLVE)
            else:
                fd = self._walk(dir_fd, path, flags)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.EXDEV):
                text = f"{self.path}: a symlink or another filesystem is in the way"
                raise OSError(errno.ENOTDIR, text, os.fsdecode(path)) from e
            raise
        if self._check_dir_device and os.fstat(fd).st_dev != self.device:
            os.close(fd)
            text = f"{self.path}: another filesystem or subvolume is in the way"
            raise OSError(errno.ENOTDIR, text, os.fsdecode(path))
        return fd

    def open(self, dir_fd: int, name: bytes, flags: int) -> int:
        """Open an existing regular file; of *flags* only access mode, O_DIRECT and O_(D)SYNC count.

        Raises:
            OSError: ENOENT also when the name is no regular file of this disk.
        """
        return self.open_found(dir_fd, name, flags)[0]

    def open_found(self, dir_fd: int, name: bytes, flags: int) -> tuple[int, os.stat_result]:
        """Open as :meth:`open`; return the attributes of what was opened as well."""
        flags = (flags & OPEN_KEPT) | _OPEN_ADDED
        try:
            fd = self._open_file(dir_fd, name, flags)
        except OSError as e:
            if e.errno in _FOREIGN and self._is_foreign(dir_fd, name):
                raise _foreign(name) from e
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (
                self._check_file_device and found.st_dev != self.device
            ):
                raise _foreign(name)
        except OSError:
            os.close(fd)
            raise
        return fd, found

    def stat(self, dir_fd: int, name: bytes) -> os.stat_result:
        """Return the attributes of *name* itself, symlink or not."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the attributes of an open file."""
        return os.fstat(fd)

    def is_read_only(self) -> bool:
        """Whether the mount or the filesystem refuses writes."""
        return bool(os.fstatvfs(self.root_fd).f_flag & os.ST_RDONLY)

    def _open_file(self, dir_fd: int, name: bytes, flags: int) -> int:
        for _ in range(_LEASE_RETRIES):
            try:
                if self.use_openat2 and (b"/" in name or not self._check_file_device):
                    return syscalls.openat2(dir_fd, name, flags, _RESOLVE)
                # Of one part there is nothing to resolve, and another mount shows its device.
                return os.open(name, flags, dir_fd=dir_fd)
            except BlockingIOError:  # a lease is being broken, and O_NONBLOCK does not wait
                time.sleep(_LEASE_RETRY_S)
        raise OSError(errno.EAGAIN, f"{self.path}: a lease is not given back", os.fsdecode(name))

    def _is_foreign(self, dir_fd: int, name: bytes) -> bool:
        found = self.stat(dir_fd, name)
        return not stat.S_ISREG(found.st_mode) or (
            self._check_file_device and found.st_dev != self.device
        )

    def _walk(self, dir_fd: int, path: bytes, flags: int) -> int:
        """Do what openat2 does, a component at a time, for kernels and sandboxes without it."""
        if b"\0" in path:
            raise OSError(errno.EINVAL, "name holds a NUL byte", os.fsdecode(path))
        parts = path.split(b"/")
        fd = self._step(dir_fd, parts[0], flags if len(parts) == 1 else _PATH_FLAGS)
        for number, part in enumerate(parts[1:], 2):
            try:
                below = self._step(fd, part, flags if number == len(parts) else _PATH_FLAGS)
            finally:
                os.close(fd)
            fd = below
        return fd

    def _step(self, dir_fd: int, name: bytes, flags: int) -> int:
        fd = os.open(name, flags, dir_fd=dir_fd)
        if os.fstat(fd).st_dev == self.device:
            return fd
        os.close(fd)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), os.fsdecode(name))


def _has_openat2(root_fd: int) -> bool:
    try:
        fd = syscalls.openat2(root_fd, b".", _PATH_FLAGS, _RESOLVE)
    except OSError as e:
        if e.errno in (errno.ENOSYS, errno.EPERM):  # older sandboxes answer EPERM
            return False
        raise
    os.close(fd)
    return True


def _foreign(name: bytes) -> OSError:
    return OSError(errno.ENOENT, "not a regular file of this disk", os.fsdecode(name))


def _pieces(path: bytes) -> Iterator[bytes]:
    """Cut a path longer than one call takes into pieces that it takes."""
    piece = b""
    for part in path.split(b"/"):
        if piece and len(piece) + 1 + len(part) > syscalls.PATH_BYTES_MAX:
            yield piece
            piece = part
        else:
            piece = piece + b"/" + part if piece else part
    yield piece
