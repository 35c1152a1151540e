"""System calls that Python does not offer, through ctypes.

Each raises ``OSError`` with the errno of the call, retries EINTR, and releases the GIL meanwhile.
Names are bytes without NUL. Only ``disk`` and the drivers call these.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from functools import lru_cache

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MNT_FORCE = 0x1
MNT_DETACH = 0x2

UTIME_OMIT = (1 << 30) - 2
PATH_BYTES_MAX = 4095  # longest path one call takes, without its NUL

_SYS_OPENAT2 = 437  # the same number on every architecture
_AT_EMPTY_PATH = 0x1000
_AT_SYMLINK_NOFOLLOW = 0x100
_HANDLE_BYTES_MAX = 128
_HANDLE_HEAD = struct.Struct("=Ii")  # handle_bytes, handle_type
_STATFS_BYTES = 256  # struct statfs is 120 on 64-bit; only its first word is read
_NS_PER_S = 1_000_000_000
# linux/xfs_fs.h, xfs_fs_eofblocks: version, flags, uid, gid, project, pad; least size; pad
_XFS_EOFBLOCKS = struct.Struct("=IIIIIIQ96x")
_XFS_IOC_FREE_EOFBLOCKS = 2 << 30 | _XFS_EOFBLOCKS.size << 16 | ord("X") << 8 | 58
_XFS_EOF_SYNC_MINSIZE = 1 << 0 | 1 << 4


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


_Times = _Timespec * 2
_OPEN_HOW_BYTES = ctypes.sizeof(_OpenHow)
_libc = ctypes.CDLL(None, use_errno=True)


def _declare(name: str, *argtypes: type) -> Callable[..., int]:
    """Return libc's *name*, as an object of its own, so that its types are not shared."""
    function = _libc[name]
    function.argtypes = argtypes
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    return function


_int, _long, _text, _ptr = ctypes.c_int, ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p
_uint, _ulong, _off, _size = ctypes.c_uint, ctypes.c_ulong, ctypes.c_int64, ctypes.c_size_t

_openat2 = _declare("syscall", _long, _int, _text, _ptr, _size)
_renameat2 = _declare("renameat2", _int, _text, _int, _text, _uint)
_syncfs = _declare("syncfs", _int)
_fallocate = _declare("fallocate64", _int, _int, _off, _off)
_utimensat = _declare("utimensat", _int, _text, _ptr, _int)
_futimens = _declare("futimens", _int, _ptr)
_fstatfs = _declare("fstatfs", _int, _ptr)
_name_to_handle_at = _declare("name_to_handle_at", _int, _text, _ptr, _ptr, _int)
_open_by_handle_at = _declare("open_by_handle_at", _int, _ptr, _int)
_mount = _declare("mount", _text, _text, _text, _ulong, _text)
_umount2 = _declare("umount2", _text, _int)


def _error(name: bytes | None = None) -> OSError:
    number = ctypes.get_errno()
    text = os.strerror(number)
    return OSError(number, text) if name is None else OSError(number, text, os.fsdecode(name))


def _checked(function: Callable[..., int], *args: object, name: bytes | None = None) -> int:
    """Call *function* until a signal does not interrupt it; raise what it failed with."""
    while True:
        result = function(*args)
        if result >= 0:
            return result
        if ctypes.get_errno() != errno.EINTR:
            raise _error(name)


def _no_nul(*names: bytes) -> None:
    for name in names:
        if b"\0" in name:  # C would see a shorter, other name
            raise OSError(errno.EINVAL, "name holds a NUL byte", os.fsdecode(name))


@lru_cache(maxsize=64)
def _open_how(flags: int, mode: int, resolve: int) -> object:
    # kept per set of flags: building the struct each time doubles the cost of the call
    return ctypes.pointer(_OpenHow(flags, mode, resolve))


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int, mode: int = 0) -> int:
    """Open *path* below *dir_fd* under the RESOLVE_* rules; return a descriptor.

    Raises:
        OSError: ENOSYS where the kernel or a sandbox has no openat2; ELOOP for a symlink refused,
            EXDEV for a way out of *dir_fd* or into another mount.
    """
    _no_nul(path)
    how = _open_how(flags | os.O_CLOEXEC, mode, resolve)
    return _checked(_openat2, _SYS_OPENAT2, dir_fd, path, how, _OPEN_HOW_BYTES, name=path)


def renameat2(src_fd: int, src: bytes, dst_fd: int, dst: bytes, flags: int) -> None:
    """Rename with RENAME_NOREPLACE or RENAME_EXCHANGE."""
    _no_nul(src, dst)
    _checked(_renameat2, src_fd, src, dst_fd, dst, flags, name=src)


def syncfs(fd: int) -> None:
    """Write everything the filesystem of *fd* holds back; raises the first writeback error."""
    _checked(_syncfs, fd)


def xfs_free_removed(fd: int) -> None:
    """Have XFS give back now the room of files that were removed; *fd* is any file of it.

    The call is for preallocations, of files of a size none has here; it waits for removals first.
    """
    wanted = _XFS_EOFBLOCKS.pack(1, _XFS_EOF_SYNC_MINSIZE, 0, 0, 0, 0, 1 << 62)
    fcntl.ioctl(fd, _XFS_IOC_FREE_EOFBLOCKS, wanted)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Allocate, punch, zero or collapse a range, with the kernel's FALLOC_FL_* *mode*.

    Never emulated: EOPNOTSUPP says that the filesystem cannot.
    """
    _checked(_fallocate, fd, mode, offset, length)


def _timespec(time_ns: int | None) -> _Timespec:
    return _Timespec(0, UTIME_OMIT) if time_ns is None else _Timespec(*divmod(time_ns, _NS_PER_S))


def _times(atime_ns: int | None, mtime_ns: int | None) -> ctypes.Array[_Timespec]:
    return _Times(_timespec(atime_ns), _timespec(mtime_ns))


def futimens(fd: int, atime_ns: int | None, mtime_ns: int | None) -> None:
    """Set the times of an open file, in ns since the epoch; None keeps one."""
    _checked(_futimens, fd, ctypes.byref(_times(atime_ns, mtime_ns)))


def utimensat(dir_fd: int, name: bytes, atime_ns: int | None, mtime_ns: int | None) -> None:
    """Set the times of *name*, in ns since the epoch, not following a symlink; None keeps one."""
    _no_nul(name)
    times = ctypes.byref(_times(atime_ns, mtime_ns))
    _checked(_utimensat, dir_fd, name, times, _AT_SYMLINK_NOFOLLOW, name=name)


def filesystem_magic(fd: int) -> int:
    """Return ``f_type`` of the filesystem of *fd*, as in ``linux/magic.h``."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    _checked(_fstatfs, fd, buffer)
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def name_to_handle(fd: int) -> bytes:
    """Return a handle that opens the inode of *fd* again, also in another process.

    Raises:
        OSError: EOPNOTSUPP where the filesystem has no handles.
    """
    buffer = ctypes.create_string_buffer(_HANDLE_HEAD.size + _HANDLE_BYTES_MAX)
    _HANDLE_HEAD.pack_into(buffer, 0, _HANDLE_BYTES_MAX, 0)
    mount_id = ctypes.byref(ctypes.c_int())
    _checked(_name_to_handle_at, fd, b"", buffer, mount_id, _AT_EMPTY_PATH)
    length, _ = _HANDLE_HEAD.unpack_from(buffer)
    return buffer.raw[: _HANDLE_HEAD.size + length]


def open_by_handle(mount_fd: int, handle: bytes, flags: int) -> int:
    """Open what :func:`name_to_handle` named; *mount_fd* is any readable descriptor of its mount.

    Raises:
        OSError: ESTALE when the inode is gone; EPERM without CAP_DAC_READ_SEARCH; EINVAL for
            bytes that are no handle.
    """
    if len(handle) < _HANDLE_HEAD.size:
        raise OSError(errno.EINVAL, f"file handle of {len(handle)} bytes")
    length, _ = _HANDLE_HEAD.unpack_from(handle)
    if length != len(handle) - _HANDLE_HEAD.size:
        raise OSError(errno.EINVAL, f"file handle of {len(handle)} bytes says {length}")
    buffer = ctypes.create_string_buffer(handle, len(handle))
    return _checked(_open_by_handle_at, mount_fd, buffer, flags | os.O_CLOEXEC)


def mount(source: str, target: str, filesystem: str, flags: int, options: str = "") -> None:
    """Mount *source* on *target*; *flags* are MS_*, *options* what the filesystem parses."""
    args = (os.fsencode(source), os.fsencode(target), filesystem.encode())
    _no_nul(*args, options.encode())
    _checked(_mount, *args, flags, options.encode(), name=args[1])


def umount(target: str, flags: int = 0) -> None:
    """Unmount *target*; *flags* are MNT_*."""
    path = os.fsencode(target)
    _no_nul(path)
    _checked(_umount2, path, flags, name=path)
