"""The register of steps, and what steps are made of.

A step is a function without arguments. It runs with an empty directory as its working directory
and uses relative names only, so that it does the same on any filesystem. What it returns, and the
tree it leaves behind, is compared between two filesystems. It returns plain data: numbers, texts,
lists. Nothing that may differ between two runs on one filesystem (inode numbers, clock times) may
be in it.
"""

import ctypes
import errno
import hashlib
import os
import pickle
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS: dict[str, Callable[[], object]] = {}

OTHER_UID = 65500
OTHER_GID = 65501
THIRD_UID = 65510
THIRD_GID = 65511

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_SYMLINK_FOLLOW = 0x400
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

# coarser than any clock a filesystem stamps with
TICK_S = 0.012

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


def step(function: Callable[[], object]) -> Callable[[], object]:
    """Register *function* as the step ``<module>.<its name>``."""
    register(f"{function.__module__.rpartition('.')[2]}.{function.__name__}", function)
    return function


def register(step_id: str, function: Callable[[], object]) -> None:
    """Register *function* under *step_id*, which must be new."""
    assert step_id not in STEPS, f"two steps are called {step_id}"
    STEPS[step_id] = function


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what *function* returns (``"ok"`` for None), or the name of the errno it raises."""
    try:
        result = function(*args, **kwargs)
    except OSError as exc:
        return errno.errorcode.get(exc.errno or 0, str(exc.errno))
    return "ok" if result is None else result


def attempt_open(path: str | bytes, flags: int, mode: int = 0o644) -> str:
    """Open *path* and close it again; return ``"opened"`` or the name of the errno."""
    try:
        fd = os.open(path, flags, mode)
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    os.close(fd)
    return "opened"


def check(result: int) -> int:
    """Return *result* of a libc call, or raise its errno."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def renameat2(old: str, new: str, flags: int) -> None:
    """Call renameat2(2) on two paths relative to the working directory."""
    check(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2) itself, without libc's emulation."""
    check(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def utimensat(
    path: str, atime: tuple[int, int], mtime: tuple[int, int], *, follow: bool = True
) -> None:
    """Call utimensat(2) with (seconds, nanoseconds or UTIME_NOW or UTIME_OMIT) pairs."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    flags = 0 if follow else AT_SYMLINK_NOFOLLOW
    check(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, flags))


def link_following(old: str, new: str) -> None:
    """Call linkat(2) with AT_SYMLINK_FOLLOW, which os.link does not pass on."""
    check(_libc.linkat(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), AT_SYMLINK_FOLLOW))


def fchmodat_nofollow(path: str, mode: int) -> None:
    """Call fchmodat(2) on the name *path* itself."""
    check(_libc.fchmodat(AT_FDCWD, os.fsencode(path), mode, AT_SYMLINK_NOFOLLOW))


def write_file(path: str, data: bytes = b"content", mode: int = 0o644) -> None:
    """Make the file *path* holding *data*."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def read_file(path: str) -> bytes:
    """Return the whole content of *path*."""
    return Path(path).read_bytes()


def tick() -> None:
    """Let any filesystem's clock move on."""
    time.sleep(TICK_S)


def changed_times(path: str, function: Callable[[], object], *, follow: bool = True) -> list[str]:
    """Return which of atime, mtime, ctime of *path* calling *function* moved forward."""
    before = os.stat(path, follow_symlinks=follow)
    tick()
    function()
    after = os.stat(path, follow_symlinks=follow)
    names = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
    return [name for name in names if getattr(after, name) > getattr(before, name)]


def same_inode(first: str, second: str) -> bool:
    """Whether two names show one inode."""
    return os.path.samestat(os.lstat(first), os.lstat(second))


def mode_of(path: str) -> str:
    """Return type, mode and owners of *path* as text."""
    status = os.lstat(path)
    return f"{status.st_mode:o} {status.st_uid} {status.st_gid}"


def as_user(
    function: Callable[[], Any],
    *,
    uid: int = OTHER_UID,
    gid: int = OTHER_GID,
    groups: tuple[int, ...] = (),
) -> Any:
    """Return what *function* returns in a child process with these credentials."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.write(writer, pickle.dumps(attempt(function)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return pickle.loads(answer) if answer else "the child died"


# The kinds of things a name can stand for, each with what makes it.
KINDS: dict[str, Callable[[str], None]] = {
    "nothing": lambda name: None,
    "file": lambda name: write_file(name, b"I am " + os.fsencode(name)),
    "directory": lambda name: os.mkdir(name),
    "full_directory": lambda name: (os.mkdir(name), write_file(f"{name}/inside"))[0],
    "link_to_file": lambda name: (write_file(f"{name}.t"), os.symlink(f"{name}.t", name))[1],
    "link_to_directory": lambda name: (os.mkdir(f"{name}.t"), os.symlink(f"{name}.t", name))[1],
    "dangling_link": lambda name: os.symlink(f"{name}.gone", name),
    "looping_link": lambda name: os.symlink(name, name),
}


def snapshot() -> list[list[object]]:
    """Return the tree below the working directory: all that a later reader could see."""
    rows: list[list[object]] = []
    _visit("", rows)
    return rows


def _visit(prefix: str, rows: list[list[object]]) -> None:
    for name in sorted(os.listdir(".")):
        status = os.lstat(name)
        row: list[object] = [prefix + ascii(name), f"{status.st_mode:o}"]
        row += [status.st_uid, status.st_gid]
        if stat.S_ISDIR(status.st_mode):
            rows.append([*row, _xattrs(name)])
            os.chdir(name)
            _visit(f"{prefix}{name!a}/", rows)
            os.chdir("..")
            continue
        row += [status.st_nlink, status.st_size]
        if stat.S_ISLNK(status.st_mode):
            row.append(os.readlink(name))
        elif stat.S_ISREG(status.st_mode):
            row += [_digest(name), _xattrs(name)]
        rows.append(row)


def _digest(name: str) -> str:
    """Hash the data of *name* without reading its holes twice over the limit of memory."""
    digest = hashlib.sha256()
    with open(name, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > 1 << 24:  # a sparse giant: its first and last bytes will do
            digest.update(stream.read(1 << 16))
            stream.seek(size - (1 << 16))
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _xattrs(name: str) -> list[tuple[str, str]]:
    names = sorted(n for n in os.listxattr(name) if n.startswith("user."))
    return [(n, os.getxattr(name, n).hex()) for n in names]
