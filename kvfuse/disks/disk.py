"""One disk of the pool: every system call on it, by descriptors, never through a symlink.

All methods raise ``OSError`` with the errno of the call; sizes and offsets are bytes, times
nanoseconds since the epoch, names and paths bytes below the root.
"""

import contextlib
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvfuse.disks.root import NODE_FLAGS, OPEN_KEPT, Root
from kvfuse.system import syscalls

LABEL_TRUSTED = "trusted.kvfuse"
LABEL_USER = "user.kvfuse.."  # without CAP_SYS_ADMIN; no client can set this name on the mount

_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a disk. What the filesystem reserves for root is never room, used or free."""

    capacity_bytes: int
    used_bytes: int
    available_bytes: int
    inodes_total: int  # 0 where the filesystem has no limit
    inodes_free: int

    @property
    def fill(self) -> float:
        """Used share of the capacity, 0.0 to 1.0; the fuller of bytes and inodes."""
        by_bytes = self.used_bytes / self.capacity_bytes if self.capacity_bytes else 1.0
        by_inodes = 1 - self.inodes_free / self.inodes_total if self.inodes_total else 0.0
        return max(by_bytes, by_inodes)


@dataclass(frozen=True, slots=True)
class DirItem:
    """One name in a directory of a disk, as a scan meets it."""

    name: bytes
    type_bits: int  # S_IFREG, S_IFDIR or S_IFLNK; 0 for anything else, which is foreign
    ino: int


def _proc_path(fd: int) -> str:
    # the way to name what an O_PATH descriptor holds: a magic link, resolved in the kernel
    return f"/proc/self/fd/{fd}"


def _probe_label(root_fd: int, name: str) -> bool | None:
    """Return whether this process can set a label called *name*, None on a read-only disk."""
    try:
        # REPLACE of a name that cannot exist: ENODATA says "you might", and nothing is written
        os.setxattr(root_fd, f"{name}.probe", b"", os.XATTR_REPLACE)
    except OSError as e:
        if e.errno in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if e.errno == errno.EROFS:
            return None
        if e.errno != errno.ENODATA:
            raise
    return True


def _has_sys_admin() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


@dataclass(frozen=True, slots=True)
class DiskTraits:
    """What was found out about a disk when it was opened."""

    device: int
    filesystem: str
    use_openat2: bool
    label_name: str


class Disk(Root):
    """A directory that is one disk of a pool.

    Thread-safe: it holds constants only. Each mutating method is one step of a protocol, so that
    tests can make any of them fail.
    """

    def __init__(self, path: str, root_fd: int, *, use_openat2: bool = True) -> None:
        """Take over *root_fd*, a readable descriptor of the directory *path*."""
        super().__init__(path, root_fd, use_openat2=use_openat2)
        can = _probe_label(root_fd, LABEL_TRUSTED)
        is_trusted = _has_sys_admin() if can is None else can
        self.label_name = LABEL_TRUSTED if is_trusted else LABEL_USER

    @classmethod
    def known(cls, path: str, root_fd: int, traits: DiskTraits) -> Self:
        """Take over the root of a disk whose *traits* are known; it may hang, and is not asked."""
        disk = cls.__new__(cls)
        disk._describe(
            path, root_fd, device=traits.device, filesystem=traits.filesystem,
            use_openat2=traits.use_openat2,
        )  # fmt: skip
        disk.label_name = traits.label_name
        return disk

    @property
    def traits(self) -> DiskTraits:
        """What :meth:`known` needs."""
        return DiskTraits(self.device, self.filesystem, self.use_openat2, self.label_name)

    @property
    def counts_late(self) -> bool:
        """Whether its file system counts what was written at its next commit only."""
        return self.filesystem == "btrfs"

    @property
    def frees_late(self) -> bool:
        """Whether its file system gives back what was removed some time later."""
        return self.filesystem in ("btrfs", "xfs")

    # -- directories ------------------------------------------------------------------------------

    def make_dir(self, dir_fd: int, name: bytes, *, mode: int, uid: int, gid: int) -> None:
        """Make a directory, closed to others until it has its owner and *mode* (07777 bits).

        Raises:
            OSError: EEXIST when the name is taken, by whatever; on any later failure the new
                directory is removed again.
        """
        os.mkdir(name, 0o700, dir_fd=dir_fd)
        try:
            self.set_dir(dir_fd, name, mode=mode, uid=uid, gid=gid)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=dir_fd)
            raise

    def set_dir(self, dir_fd: int, name: bytes, *, mode: int, uid: int, gid: int) -> None:
        """Give the directory *name* its owner and *mode*."""
        fd = self.open_subdir(dir_fd, name)
        try:
            os.chown(_proc_path(fd), uid, gid)
            os.chmod(_proc_path(fd), mode & 0o7777)
        finally:
            os.close(fd)

    def remove_dir(self, dir_fd: int, name: bytes) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=dir_fd)

    def list_dir(self, path: bytes) -> Iterator[DirItem]:
        """Yield what the directory *path* holds, in the order of the disk, without . and .. ."""
        fd = self.open_dir(path, readable=True)
        try:
            yield from self.list_fd(fd)
        finally:
            os.close(fd)

    def list_fd(self, dir_fd: int) -> Iterator[DirItem]:
        """Yield what the readable directory *dir_fd* holds; as :meth:`list_dir`."""
        with os.scandir(dir_fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    type_bits = stat.S_IFREG
                elif entry.is_dir(follow_symlinks=False):
                    type_bits = stat.S_IFDIR
                else:
                    type_bits = stat.S_IFLNK if entry.is_symlink() else 0
                yield DirItem(os.fsencode(entry.name), type_bits, entry.inode())

    # -- names ------------------------------------------------------------------------------------

    def create(self, dir_fd: int, name: bytes, *, mode: int, uid: int, gid: int) -> int:
        """Create a file and return a read-write descriptor; private until it has owner and *mode*.

        Raises:
            OSError: EEXIST when the name is taken; on a later failure the file is removed again.
        """
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=dir_fd)
        try:
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode & 0o7777)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
            raise
        return fd

    def rename(self, src_fd: int, src: bytes, dst_fd: int, dst: bytes) -> None:
        """Rename, replacing *dst*."""
        os.rename(src, dst, src_dir_fd=src_fd, dst_dir_fd=dst_fd)

    def rename_new(self, src_fd: int, src: bytes, dst_fd: int, dst: bytes) -> None:
        """Rename; EEXIST when *dst* is there."""
        syscalls.renameat2(src_fd, src, dst_fd, dst, syscalls.RENAME_NOREPLACE)

    def exchange(self, a_fd: int, a: bytes, b_fd: int, b: bytes) -> None:
        """Swap two names."""
        syscalls.renameat2(a_fd, a, b_fd, b, syscalls.RENAME_EXCHANGE)

    def link(self, src_fd: int, src: bytes, dst_fd: int, dst: bytes) -> None:
        """Give *src* a further name; a symlink is linked itself. EEXIST when *dst* is there."""
        os.link(src, dst, src_dir_fd=src_fd, dst_dir_fd=dst_fd, follow_symlinks=False)

    def unlink(self, dir_fd: int, name: bytes) -> None:
        """Remove a name that is no directory."""
        os.unlink(name, dir_fd=dir_fd)

    def symlink(self, target: bytes, dir_fd: int, name: bytes, *, uid: int, gid: int) -> None:
        """Make a symlink owned by *uid* and *gid*; removed again when that fails."""
        os.symlink(target, name, dir_fd=dir_fd)
        try:
            os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
            raise

    def readlink(self, dir_fd: int, name: bytes) -> bytes:
        """Return the target of a symlink; EINVAL when *name* is none."""
        return os.readlink(name, dir_fd=dir_fd)

    # -- bytes ------------------------------------------------------------------------------------

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Return *size* bytes, fewer only at the end of the file."""
        data = os.pread(fd, size, offset)
        if len(data) in (size, 0):
            return data
        pieces, have = [data], len(data)
        while have < size and (data := os.pread(fd, size - have, offset + have)):
            pieces.append(data)
            have += len(data)
        return b"".join(pieces)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write *data* and return its length, or less when the disk fails part-way.

        Raises:
            OSError: nothing was written.
        """
        written, total = os.pwrite(fd, data, offset), len(data)
        while written < total:
            try:
                more = os.pwrite(fd, memoryview(data)[written:], offset + written)
            except OSError:
                break
            if more == 0:
                break
            written += more
        return written

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of an open file."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int, *, data_only: bool) -> None:
        """Make an open file or directory durable."""
        if data_only:
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        """Allocate or punch a range; *mode* is FALLOC_FL_*, never emulated."""
        syscalls.fallocate(fd, mode, offset, length)

    def seek(self, fd: int, offset: int, whence: int) -> int:
        """Return where data or a hole begins (SEEK_DATA, SEEK_HOLE; ENXIO at the end).

        Moves the offset of *fd*, which nothing here uses: reads and writes name theirs.
        """
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, f"whence {whence} is not SEEK_DATA or SEEK_HOLE")
        return os.lseek(fd, offset, whence)

    def copy_range(self, fd_in: int, off_in: int, fd_out: int, off_out: int, length: int) -> int:
        """Copy in the kernel, by reflink where it can; return how much, 0 at the end.

        Raises:
            OSError: EXDEV or EOPNOTSUPP between filesystems of two kinds: the caller copies.
        """
        return os.copy_file_range(fd_in, fd_out, length, off_in, off_out)

    # -- attributes -------------------------------------------------------------------------------

    def set_mode(self, fd: int, mode: int) -> None:
        """Set the mode bits (07777) of an open file."""
        os.fchmod(fd, mode & 0o7777)

    def set_owner(self, fd: int, uid: int, gid: int) -> None:
        """Set the owner of an open file; -1 keeps one."""
        os.fchown(fd, uid, gid)

    def set_owner_at(self, dir_fd: int, name: bytes, uid: int, gid: int) -> None:
        """Set the owner of *name* itself, symlink or not; -1 keeps one."""
        os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)

    def set_times(self, fd: int, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of an open file; None keeps one."""
        syscalls.futimens(fd, atime_ns, mtime_ns)

    def set_times_at(
        self, dir_fd: int, name: bytes, atime_ns: int | None, mtime_ns: int | None
    ) -> None:
        """Set the times of *name* itself, symlink or not; None keeps one."""
        syscalls.utimensat(dir_fd, name, atime_ns, mtime_ns)

    def get_xattr(self, fd: int, name: bytes) -> bytes:
        """Return an extended attribute; ENODATA when it is not there."""
        return os.getxattr(fd, name)

    def set_xattr(self, fd: int, name: bytes, value: bytes, flags: int) -> None:
        """Set an extended attribute; *flags* 0, XATTR_CREATE or XATTR_REPLACE."""
        os.setxattr(fd, name, value, flags)

    def list_xattrs(self, fd: int) -> list[bytes]:
        """Return the names of all extended attributes, kvfuse's own among them."""
        return [os.fsencode(name) for name in os.listxattr(fd)]

    def remove_xattr(self, fd: int, name: bytes) -> None:
        """Remove an extended attribute; ENODATA when it is not there."""
        os.removexattr(fd, name)

    # -- labels -----------------------------------------------------------------------------------

    def keeps_labels(self) -> bool:
        """Whether the file system takes labels; writes nothing. False on a read-only one."""
        return bool(_probe_label(self.root_fd, self.label_name))

    def read_label(self, fd: int) -> bytes | None:
        """Return what kvfuse noted on an open file or readable directory, None when nothing."""
        return self._read_label(fd)

    def write_label(self, fd: int, value: bytes) -> None:
        """Note *value* on an open file or readable directory."""
        os.setxattr(fd, self.label_name, value)

    def read_label_at(self, dir_fd: int, name: bytes) -> bytes | None:
        """Return what kvfuse noted on *name* itself: a directory, a symlink, a file."""
        fd = self.open_below(dir_fd, name, NODE_FLAGS)
        try:
            return self._read_label(_proc_path(fd))
        finally:
            os.close(fd)

    def write_label_at(self, dir_fd: int, name: bytes, value: bytes) -> None:
        """Note *value* on *name* itself. Skipped for a symlink where only user.* can be set."""
        if self.label_name == LABEL_TRUSTED:
            # One call instead of three; the last part of a path is not followed.
            place = b"/proc/self/fd/%d/%s" % (dir_fd, name)
            os.setxattr(place, self.label_name, value, follow_symlinks=False)
            return
        fd = self.open_below(dir_fd, name, NODE_FLAGS)
        try:
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                os.setxattr(_proc_path(fd), self.label_name, value)
        finally:
            os.close(fd)

    # -- the disk as a whole ----------------------------------------------------------------------

    def space(self) -> Space:
        """Return the room on the disk now."""
        found = os.fstatvfs(self.root_fd)
        capacity_blocks = max(0, found.f_blocks - (found.f_bfree - found.f_bavail))
        available_blocks = min(found.f_bavail, capacity_blocks)
        return Space(
            capacity_bytes=capacity_blocks * found.f_frsize,
            used_bytes=(capacity_blocks - available_blocks) * found.f_frsize,
            available_bytes=available_blocks * found.f_frsize,
            inodes_total=found.f_files,
            inodes_free=found.f_favail,
        )

    def sync(self) -> None:
        """Make all of the disk durable (syncfs); raises a writeback error that happened since."""
        syscalls.syncfs(self.root_fd)

    def settle_removals(self) -> None:
        """Have a file system that frees late free now what was removed, as far as it can."""
        if self.filesystem == "xfs":
            syscalls.xfs_free_removed(self.root_fd)
        else:
            self.sync()

    def handle(self, fd: int) -> bytes | None:
        """Return a handle that outlives the process and the name, None where unsupported."""
        try:
            return syscalls.name_to_handle(fd)
        except OSError as e:
            if e.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise

    def open_handle(self, handle: bytes, flags: int) -> int:
        """Open the file of a :meth:`handle`, unlinked or not.

        Raises:
            OSError: ESTALE when the file is gone.
        """
        return syscalls.open_by_handle(self.root_fd, handle, flags & OPEN_KEPT)

    def lease_free(self, fd: int, *, for_write: bool) -> bool:
        """Whether the kernel grants a lease on *fd*, which is given back at once.

        Without *for_write* (F_RDLCK; *fd* must be O_RDONLY): nobody has the file open for
        writing. With it (F_WRLCK): nobody but *fd* has it open or mapped at all.

        Raises:
            OSError: EINVAL where the filesystem has no leases; EACCES without CAP_LEASE.
        """
        # whoever opens the file meanwhile signals the holder; SIGIO would end this process
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK if for_write else fcntl.F_RDLCK)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EBUSY):
                return False
            raise
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def _read_label(self, where: int | str) -> bytes | None:
        try:
            return os.getxattr(where, self.label_name)
        except OSError as e:
            if e.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return None
            raise
