"""A disk that fails on command: a FUSE file system over a real directory.

As a program: ``python tests/faultdisk.py BACKING MOUNTPOINT --control SOCKET``. Each line sent to
the socket is a command, each answer one line of JSON:

* ``fail OP ERRNO [COUNT]``: OP answers ERRNO, COUNT times or until ``release``
* ``hang OP``: OP is not answered until ``release``; who asked sleeps in D, as on a dead cable
* ``release``: nothing fails or hangs any more
* ``status``: requests by operation, how many hang now, how many failed

OP is the name of a handler below, ``*`` for all of them, or ``changes`` for those that write.
In tests: ``with FaultDisk(backing, mountpoint) as disk: disk.fail("write", "EIO")``.
"""

import argparse
import contextlib
import ctypes
import errno
import functools
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyfuse3
import trio

# fmt: off
CHANGES = frozenset({
    "open_write", "create", "write", "setattr", "mknod", "mkdir", "unlink", "rmdir", "symlink",
    "rename", "link", "setxattr", "removexattr", "fsync", "fsyncdir",
})
READS = frozenset({
    "lookup", "getattr", "readlink", "open", "read", "flush", "release", "opendir", "readdir",
    "releasedir", "statfs", "getxattr", "listxattr",
})
# fmt: on
_KEPT_BACK = os.O_APPEND | os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_THREADS = 64


class Faults:
    """What fails and what hangs at the moment."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.failed = 0
        self.hanging = 0
        self._failing: dict[str, list] = {}  # op -> [errno, times left or None]
        self._hung: set[str] = set()
        self._released = trio.Event()

    async def gate(self, op: str) -> None:
        """Let a request of *op* pass, fail or hang."""
        self.requests[op] += 1
        names = (op, "changes", "*") if op in CHANGES else (op, "*")
        if self._hung.intersection(names):
            self.hanging += 1
            try:
                await self._released.wait()
            finally:
                self.hanging -= 1
        for name in names:
            rule = self._failing.get(name)
            if rule is None:
                continue
            if rule[1] is not None:
                rule[1] -= 1
                if not rule[1]:
                    del self._failing[name]
            self.failed += 1
            raise pyfuse3.FUSEError(rule[0])

    def command(self, line: str) -> dict:
        """Obey one command; return the answer."""
        match line.split():
            case ["fail", op, name, *count]:
                self._known(op)
                self._failing[op] = [getattr(errno, name), int(count[0]) if count else None]
            case ["hang", op]:
                self._known(op)
                self._hung.add(op)
            case ["release"]:
                self._failing.clear()
                self._hung.clear()
                self._released.set()
                self._released = trio.Event()
            case ["status"]:
                return {
                    "requests": dict(self.requests),
                    "hanging": self.hanging,
                    "failed": self.failed,
                }
            case _:
                raise ValueError(f"no such command: {line!r}")
        return {}

    def _known(self, op: str) -> None:
        if op not in CHANGES | READS | {"*", "changes"}:
            raise ValueError(f"no such operation: {op!r}")


def handler(method):
    """Pass the gate of the operation, then turn what the backing disk says into an errno."""

    @functools.wraps(method)
    async def guarded(self, *args):
        await self.faults.gate(method.__name__)
        try:
            return await method(self, *args)
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from None

    return guarded


def _proc(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


@dataclass
class Inode:
    """An object the kernel knows, pinned by a descriptor."""

    fd: int
    lookups: int = 0


class FaultOperations(pyfuse3.Operations):
    """Passes every request to the backing directory, if the faults let it."""

    def __init__(self, backing: str, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self._limiter = trio.CapacityLimiter(_THREADS)
        root = os.open(backing, os.O_PATH | os.O_DIRECTORY)
        self._root_ino = os.fstat(root).st_ino
        self._inodes = {pyfuse3.ROOT_INODE: Inode(root)}
        self._listings: dict[int, tuple[int, list[bytes]]] = {}

    async def _do(self, fn, *args, **kwargs):
        return await trio.to_thread.run_sync(
            functools.partial(fn, *args, **kwargs), limiter=self._limiter
        )

    def _fd(self, inode: int) -> int:
        try:
            return self._inodes[inode].fd
        except KeyError:
            raise OSError(errno.ESTALE, "not known") from None

    def _entry(self, st: os.stat_result) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.ROOT_INODE if st.st_ino == self._root_ino else st.st_ino
        entry.entry_timeout = entry.attr_timeout = 0
        # fmt: off
        for name in (
            "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blksize",
            "st_blocks", "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
        ):
            setattr(entry, name, getattr(st, name))
        # fmt: on
        return entry

    async def _look(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        """Return the attributes of *name* and count that the kernel knows it."""
        flags = os.O_PATH | os.O_NOFOLLOW
        fd = await self._do(os.open, name, flags, dir_fd=self._fd(parent))
        entry = self._entry(os.fstat(fd))
        inode = self._inodes.setdefault(entry.st_ino, Inode(fd))
        if inode.fd != fd:
            os.close(fd)
        inode.lookups += 1
        return entry

    async def _give(self, parent: int, name: bytes, ctx) -> None:
        """Make the caller the owner of what was just made."""
        fd = self._fd(parent)
        gid = -1 if os.fstat(fd).st_mode & stat.S_ISGID else ctx.gid
        await self._do(os.chown, name, ctx.uid, gid, dir_fd=fd, follow_symlinks=False)

    @handler
    async def lookup(self, parent, name, ctx):
        return await self._look(parent, name)

    async def forget(self, inode_list):
        for number, count in inode_list:
            inode = self._inodes.get(number)
            if inode is not None and number != pyfuse3.ROOT_INODE:
                inode.lookups -= count
                if inode.lookups <= 0:
                    os.close(self._inodes.pop(number).fd)

    @handler
    async def getattr(self, inode, ctx):
        return self._entry(await self._do(os.fstat, self._fd(inode)))

    @handler
    async def setattr(self, inode, attr, fields, fh, ctx):
        fd = self._fd(inode)
        path = _proc(fd)
        if fields.update_size:
            await self._do(os.truncate, path if fh is None else fh, attr.st_size)
        if fields.update_uid or fields.update_gid:
            uid = attr.st_uid if fields.update_uid else -1
            gid = attr.st_gid if fields.update_gid else -1
            await self._do(os.chown, path, uid, gid)
        if fields.update_mode:  # after chown, which takes setuid and setgid away
            await self._do(os.chmod, path, stat.S_IMODE(attr.st_mode))
        if fields.update_atime or fields.update_mtime:
            st = os.fstat(fd)
            atime_ns = attr.st_atime_ns if fields.update_atime else st.st_atime_ns
            mtime_ns = attr.st_mtime_ns if fields.update_mtime else st.st_mtime_ns
            await self._do(os.utime, path, ns=(atime_ns, mtime_ns))
        return self._entry(os.fstat(fd))

    @handler
    async def readlink(self, inode, ctx):
        return await self._do(os.readlink, b"", dir_fd=self._fd(inode))

    @handler
    async def mknod(self, parent, name, mode, rdev, ctx):
        await self._do(os.mknod, name, mode, rdev, dir_fd=self._fd(parent))
        await self._give(parent, name, ctx)
        return await self._look(parent, name)

    @handler
    async def mkdir(self, parent, name, mode, ctx):
        await self._do(os.mkdir, name, stat.S_IMODE(mode), dir_fd=self._fd(parent))
        await self._give(parent, name, ctx)
        return await self._look(parent, name)

    @handler
    async def unlink(self, parent, name, ctx):
        await self._do(os.unlink, name, dir_fd=self._fd(parent))

    @handler
    async def rmdir(self, parent, name, ctx):
        await self._do(os.rmdir, name, dir_fd=self._fd(parent))

    @handler
    async def symlink(self, parent, name, target, ctx):
        await self._do(os.symlink, target, name, dir_fd=self._fd(parent))
        await self._give(parent, name, ctx)
        return await self._look(parent, name)

    @handler
    async def rename(self, old, old_name, new, new_name, flags, ctx):
        await self._do(_renameat2, self._fd(old), old_name, self._fd(new), new_name, flags)

    @handler
    async def link(self, inode, parent, name, ctx):
        await self._do(os.link, _proc(self._fd(inode)), name, dst_dir_fd=self._fd(parent))
        return await self._look(parent, name)

    @handler
    async def open(self, inode, flags, ctx):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            await self.faults.gate("open_write")
        fh = await self._do(os.open, _proc(self._fd(inode)), flags & ~_KEPT_BACK)
        return pyfuse3.FileInfo(fh=fh, keep_cache=False)

    @handler
    async def create(self, parent, name, mode, flags, ctx):
        wanted = flags & ~_KEPT_BACK | os.O_CREAT | os.O_EXCL
        dir_fd = self._fd(parent)
        try:
            fh = await self._do(os.open, name, wanted, stat.S_IMODE(mode), dir_fd=dir_fd)
            await self._give(parent, name, ctx)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            fh = await self._do(os.open, name, flags & ~_KEPT_BACK | os.O_NOFOLLOW, dir_fd=dir_fd)
        return pyfuse3.FileInfo(fh=fh, keep_cache=False), await self._look(parent, name)

    @handler
    async def read(self, fh, off, size):
        return await self._do(os.pread, fh, size, off)

    @handler
    async def write(self, fh, off, buf):
        return await self._do(os.pwrite, fh, buf, off)

    @handler
    async def flush(self, fh):
        await self._do(lambda: os.close(os.dup(fh)))

    @handler
    async def release(self, fh):
        os.close(fh)

    @handler
    async def fsync(self, fh, datasync):
        await self._do(os.fdatasync if datasync else os.fsync, fh)

    @handler
    async def opendir(self, inode, ctx):
        fh = await self._do(os.open, _proc(self._fd(inode)), os.O_RDONLY | os.O_DIRECTORY)
        self._listings[fh] = (inode, [])
        return fh

    @handler
    async def readdir(self, fh, start_id, token):
        inode, names = self._listings[fh]
        if start_id == 0:
            names = [os.fsencode(name) for name in await self._do(os.listdir, fh)]
            self._listings[fh] = (inode, names)
        for cookie, name in enumerate(names[start_id:], start_id + 1):
            try:
                entry = await self._look(inode, name)
            except FileNotFoundError:  # removed since
                continue
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                await self.forget([(entry.st_ino, 1)])
                return

    @handler
    async def releasedir(self, fh):
        del self._listings[fh]
        os.close(fh)

    @handler
    async def fsyncdir(self, fh, datasync):
        await self._do(os.fsync, fh)

    @handler
    async def statfs(self, ctx):
        st = await self._do(os.statvfs, _proc(self._fd(pyfuse3.ROOT_INODE)))
        reply = pyfuse3.StatvfsData()
        reply.__setstate__({name: getattr(st, name) for name in reply.__getstate__()})
        return reply

    @handler
    async def setxattr(self, inode, name, value, ctx):
        await self._do(os.setxattr, _proc(self._fd(inode)), name, value)

    @handler
    async def getxattr(self, inode, name, ctx):
        return await self._do(os.getxattr, _proc(self._fd(inode)), name)

    @handler
    async def listxattr(self, inode, ctx):
        names = await self._do(os.listxattr, _proc(self._fd(inode)))
        return [os.fsencode(name) for name in names]

    @handler
    async def removexattr(self, inode, name, ctx):
        await self._do(os.removexattr, _proc(self._fd(inode)), name)


_libc = ctypes.CDLL(None, use_errno=True)


def _renameat2(old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
    if _libc.renameat2(old_fd, old, new_fd, new, ctypes.c_uint(flags)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


async def _obey(faults: Faults, stream: trio.SocketStream) -> None:
    async with stream:
        pending = b""
        async for chunk in stream:
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                try:
                    answer = faults.command(line.decode())
                except (ValueError, AttributeError) as exc:
                    answer = {"error": str(exc)}
                await stream.send_all(json.dumps(answer).encode() + b"\n")


async def _serve(backing: str, mountpoint: str, control: str) -> None:
    faults = Faults()
    operations = FaultOperations(backing, faults)
    options = {"fsname=faultdisk", "subtype=faultdisk", "default_permissions", "allow_other"}
    pyfuse3.init(operations, mountpoint, options)
    try:
        listener = trio.socket.socket(socket.AF_UNIX)
        await listener.bind(control)
        listener.listen()
        async with trio.open_nursery() as nursery:
            obey = functools.partial(_obey, faults)
            nursery.start_soon(trio.serve_listeners, obey, [trio.SocketListener(listener)])
            await pyfuse3.main(max_tasks=2000)
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.close(unmount=True)


def main() -> None:
    """Serve until unmounted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backing")
    parser.add_argument("mountpoint")
    parser.add_argument("--control", required=True)
    args = parser.parse_args()
    logging.basicConfig()
    os.umask(0)
    trio.run(_serve, args.backing, args.mountpoint, args.control)


class FaultDisk:
    """A :mod:`faultdisk` program for the length of a ``with`` block, and what to tell it.

    Whatever hangs in the end is released, the mount is gone and the process with it.
    """

    START_TIMEOUT_S = 30.0
    END_TIMEOUT_S = 10.0

    def __init__(self, backing: Path, mountpoint: Path) -> None:
        self.backing = backing
        self.mountpoint = mountpoint
        self._process: subprocess.Popen | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="faultdisk")
        self._socket = os.path.join(self._directory.name, "s")  # its path must be short

    def __enter__(self) -> "FaultDisk":
        args = [sys.executable, __file__, self.backing, self.mountpoint, "--control", self._socket]
        self._process = subprocess.Popen(args)
        deadline_s = time.monotonic() + self.START_TIMEOUT_S
        while True:
            try:
                self.status()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    self.__exit__()
                    raise RuntimeError(f"{self.mountpoint}: no fault disk came up") from None
                time.sleep(0.02)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.release()
        subprocess.run(["umount", "-l", self.mountpoint], capture_output=True, check=False)
        self._end(self.END_TIMEOUT_S)
        self._directory.cleanup()

    def _end(self, patience_s: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            # Someone still holds a file there. With the process goes the descriptor of its
            # connection, so that the kernel answers whoever still waits.
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def fail(self, op: str, error: str, count: int | None = None) -> None:
        """Let *op* answer *error* (a name like "EIO"), *count* times or until released."""
        self._tell(f"fail {op} {error}" + ("" if count is None else f" {count}"))

    def hang(self, op: str) -> None:
        """Let *op* not answer until released."""
        self._tell(f"hang {op}")

    def release(self) -> None:
        """Let everything work again, and answer what hangs."""
        self._tell("release")

    def status(self) -> dict:
        """Return requests by operation, how many hang now, and how many failed."""
        return self._tell("status")

    def kill(self) -> None:
        """Let the disk die: every request, waiting or to come, fails with ENOTCONN."""
        self._end(0)

    def wait_hanging(self, count: int = 1) -> None:
        """Return when at least *count* requests hang."""
        deadline_s = time.monotonic() + self.START_TIMEOUT_S
        while self.status()["hanging"] < count:
            assert time.monotonic() < deadline_s, f"{self.mountpoint}: nothing hangs"
            time.sleep(0.01)

    def _tell(self, line: str) -> dict:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(self.END_TIMEOUT_S)
            stream.connect(self._socket)
            stream.sendall(line.encode() + b"\n")
            answer = json.loads(stream.makefile("rb").readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


if __name__ == "__main__":
    main()
