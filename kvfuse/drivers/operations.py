"""The verbs of the pool as pyfuse3 handlers.

Concurrency: handlers run in the trio loop. What is answered from memory is answered there; what
may wait, for a disk or for a lock, goes to the threads of that disk, and nobody waits longer than
the deadline.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import pyfuse3
import trio

from kvfuse.core.records import NAME_BYTES_MAX, Caller, Node, State
from kvfuse.drivers.counters import RequestCounters
from kvfuse.drivers.guard import handler
from kvfuse.drivers.threads import EVERY, MEMORY, DiskThreads
from kvfuse.pool.pool import AttrChanges, Pool

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

BLOCK_BYTES = 4096  # preferred size of an access, unit of statfs
SYNC_TIMEOUT_FACTOR = 6  # fsync waits for all that was written before: slow is not sick

# "." and ".." stand before every cookie of the pool
_COOKIE_DOT = 1
_COOKIE_DOT_DOT = 2
_READDIR_FIRST = 32  # a page of the kernel takes about 25 names
_READDIR_MAX = 256

# Offsets come from the kernel: O_APPEND would make the disk ignore them. Buffers here are not
# aligned: O_DIRECT stays between the client and the kernel.
_FLAGS_KEPT_BACK = os.O_APPEND | os.O_DIRECT

_TIME_NS_MAX = (1 << 63) - 1

_USER = b"user."
_ANSWERED = b"user.kvfuse."
_NOT_KEPT = (b"security.", b"trusted.", b"system.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the kernel may believe an answer, and how long a client waits for one, in s."""

    entry_s: float
    negative_s: float
    op_s: float


def _check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, f"a name of {len(name)} bytes")


def _in_range(time_ns: int) -> int:
    """Return the nearest time that 64 bits hold (years 1677 to 2262)."""
    return max(-_TIME_NS_MAX - 1, min(time_ns, _TIME_NS_MAX))


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.umask, ctx.pid)


class PoolOperations(pyfuse3.Operations):
    """FUSE handlers over *pool*.

    ``access`` and ``poll`` stay unimplemented: the kernel checks permissions itself
    (``default_permissions``), and after one ENOSYS it asks no more.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, pool: Pool, *, timeouts: Timeouts, counters: RequestCounters) -> None:
        super().__init__()
        self._pool = pool
        self._timeouts = timeouts
        self.threads = DiskThreads(pool.note_timeout, op_timeout_s=timeouts.op_s)
        self.counters = counters
        self._readers: set[int] = set()  # handles that cannot write
        self.answering = trio.Event()  # set once the kernel has asked for the first time

    def init(self) -> None:
        """Note that the kernel has begun to ask."""
        self.answering.set()

    # ------------------------------------------------------------------ replies

    def _attributes(self, node: Node, entry_s: float | None = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = node.id
        entry.generation = 0  # ids are never used again
        entry.entry_timeout = self._timeouts.entry_s if entry_s is None else entry_s
        entry.attr_timeout = self._timeouts.entry_s
        entry.st_mode = node.mode
        entry.st_nlink = node.nlink
        entry.st_uid = node.uid
        entry.st_gid = node.gid
        entry.st_size = node.size
        entry.st_blksize = BLOCK_BYTES
        entry.st_blocks = node.blocks
        entry.st_atime_ns = node.atime_ns
        entry.st_mtime_ns = node.mtime_ns
        entry.st_ctime_ns = node.ctime_ns
        return entry

    def _negative(self) -> pyfuse3.EntryAttributes:
        if not self._timeouts.negative_s or not self._pool.is_complete:
            raise OSError(errno.ENOENT, "no such name")
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = 0  # the kernel remembers this answer; ENOENT it would not
        entry.entry_timeout = self._timeouts.negative_s
        return entry

    async def _ask(self, inode: int, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run a verb that only reads what *inode* is.

        Past the deadline it is ESTALE: the kernel looks the name up again, and what lies on a disk
        that hangs is then a name that is not there, which for a client is a miss and no error.
        """
        disk = self._pool.disk_of(inode)
        return await self.threads.run(disk, fn, *args, late_errno=errno.ESTALE)

    async def _change(self, disk: int | None, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run a verb that may wait for a lock even if it asks no disk."""
        return await self.threads.run(MEMORY if disk is None else disk, fn, *args)

    # ------------------------------------------------------------------ names

    @handler
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Answer from memory; "." and ".." are asked by who serves the mount over NFS."""
        _check_name(name)
        pool = self._pool
        if name == b".":
            return self._attributes(pool.getattr(parent_inode))
        if name == b"..":
            return self._attributes(pool.getattr(pool.parent_of(parent_inode)))
        node = pool.lookup(parent_inode, name)
        return self._negative() if node is None else self._attributes(node)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Do nothing: nothing is kept for what the kernel knows. Must not raise."""

    @handler
    async def mknod(
        self,
        parent_inode: int,
        name: bytes,
        mode: int,
        rdev: int,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Make a regular file; the pool refuses anything else."""
        _check_name(name)
        pool = self._pool
        disk = pool.disk_of_create(parent_inode, name)
        node = await self._change(disk, pool.mknod, parent_inode, name, mode, _caller(ctx))
        return self._attributes(node)

    @handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a directory, which touches no disk."""
        _check_name(name)
        node = await self._change(None, self._pool.mkdir, parent_inode, name, mode, _caller(ctx))
        return self._attributes(node)

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        _check_name(name)
        disk = self._pool.disk_of_name(parent_inode, name)
        await self._change(disk, self._pool.rmdir, parent_inode, name)

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a name."""
        _check_name(name)
        disk = self._pool.disk_of_name(parent_inode, name)
        await self._change(disk, self._pool.unlink, parent_inode, name)

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a symbolic link."""
        _check_name(name)
        pool = self._pool
        disk = pool.disk_of_create(parent_inode, name)
        node = await self._change(disk, pool.symlink, parent_inode, name, target, _caller(ctx))
        return self._attributes(node)

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """Return the target of a symbolic link."""
        return await self._ask(inode, self._pool.readlink, inode)

    @handler
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """Rename on the disk where the file lies."""
        _check_name(name_old)
        _check_name(name_new)
        pool = self._pool
        disk = pool.disk_of_name(parent_inode_old, name_old)
        if disk is None:
            disk = pool.disk_of_name(parent_inode_new, name_new)
        await self._change(
            disk, pool.rename, parent_inode_old, name_old, parent_inode_new, name_new, flags
        )

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Give a file another name."""
        _check_name(new_name)
        disk = self._pool.disk_of(inode)
        node = await self._change(disk, self._pool.link, inode, new_parent_inode, new_name)
        return self._attributes(node)

    # ------------------------------------------------------------------ attributes

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Answer from memory."""
        return self._attributes(self._pool.getattr(inode))

    @handler
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Change what *fields* names. "Now" was resolved to a time before it came here."""
        changes = AttrChanges(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=_in_range(attr.st_atime_ns) if fields.update_atime else None,
            mtime_ns=_in_range(attr.st_mtime_ns) if fields.update_mtime else None,
        )
        pool = self._pool
        disk = pool.disk_of(inode) if fh is None else pool.disk_of_handle(fh)
        node = await self._change(disk, pool.setattr, inode, changes, fh)
        return self._attributes(node)

    @handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Return the space of the pool, in blocks of 4096 bytes."""
        space = await self.threads.run(EVERY, self._pool.statfs)
        reply = pyfuse3.StatvfsData()
        reply.f_bsize = reply.f_frsize = BLOCK_BYTES
        reply.f_blocks = space.f_blocks
        reply.f_bfree = space.f_bfree
        reply.f_bavail = space.f_bavail
        reply.f_files = space.f_files
        reply.f_ffree = space.f_ffree
        reply.f_favail = space.f_favail
        reply.f_namemax = NAME_BYTES_MAX
        return reply

    # ------------------------------------------------------------------ files

    @handler
    async def create(
        self,
        parent_inode: int,
        name: bytes,
        mode: int,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Make and open a file.

        The entry is given no time to live: the first question about the name reaches the pool,
        which thereby knows what somebody has asked for.
        """
        _check_name(name)
        pool = self._pool
        disk = pool.disk_of_create(parent_inode, name)
        node, fh = await self.threads.run(
            MEMORY if disk is None else disk,
            pool.create,
            parent_inode,
            name,
            flags & ~_FLAGS_KEPT_BACK,
            mode,
            _caller(ctx),
            on_late=lambda made: self._take_back(parent_inode, name, *made),
        )
        return pyfuse3.FileInfo(fh=fh, keep_cache=False), self._attributes(node, entry_s=0)

    def _take_back(self, parent: int, name: bytes, node: Node, fh: int) -> None:
        """Undo a create whose client was told that it failed; an empty file must not remain."""
        self._pool.release(fh)
        if node.state == State.PENDING and not node.size:
            now = self._pool.lookup(parent, name)
            if now is not None and now.id == node.id and not now.size:
                self._pool.unlink(parent, name)

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Open a file; cached pages stay good when nobody writes it."""
        pool = self._pool
        fh = await self.threads.run(
            pool.disk_of(inode),
            pool.open,
            inode,
            flags & ~_FLAGS_KEPT_BACK,
            on_late=pool.release,
            late_errno=errno.ESTALE,
        )
        keep = False
        if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
            self._readers.add(fh)
            keep = self._is_committed(inode)
        return pyfuse3.FileInfo(fh=fh, direct_io=False, keep_cache=keep)

    def _is_committed(self, inode: int) -> bool:
        try:
            return self._pool.getattr(inode).state == State.COMMITTED
        except OSError:  # removed between open and here: the handle still reads
            return False

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Return *size* bytes, fewer only at the end of the file."""
        pool = self._pool
        return await self.threads.run(pool.disk_of_handle(fh), pool.read, fh, off, size)

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write all of *buf*."""
        pool = self._pool
        return await self.threads.run(pool.disk_of_handle(fh), pool.write, fh, off, buf)

    @handler
    async def flush(self, fh: int) -> None:
        """One descriptor of the handle was closed; only a writer's close has something to tell."""
        if fh in self._readers:
            return
        pool = self._pool
        await self.threads.run(pool.disk_of_handle(fh), pool.flush, fh)

    @handler
    async def release(self, fh: int) -> None:
        """Give the handle back: always answered well, and done even if the disk hangs now."""
        pool = self._pool
        self._readers.discard(fh)
        await self.threads.run_surely(pool.disk_of_handle(fh), pool.release, fh)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Bring the file to its disk."""
        pool = self._pool
        await self.threads.run(
            pool.disk_of_handle(fh),
            pool.fsync,
            fh,
            datasync,
            timeout_s=self._timeouts.op_s * SYNC_TIMEOUT_FACTOR,
        )

    # ------------------------------------------------------------------ directories

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """Return the id itself: a listing keeps no state but its cookie."""
        self._pool.getattr(inode)
        return inode

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List names whose cookie is greater than *start_id* until the kernel's buffer is full."""
        pool = self._pool
        if start_id < _COOKIE_DOT:
            dot = self._attributes(pool.getattr(fh))
            pyfuse3.readdir_reply(token, b".", dot, _COOKIE_DOT)
        if start_id < _COOKIE_DOT_DOT:
            up = self._attributes(pool.getattr(pool.parent_of(fh)))
            pyfuse3.readdir_reply(token, b"..", up, _COOKIE_DOT_DOT)
        cookie = 0 if start_id <= _COOKIE_DOT_DOT else start_id
        limit = _READDIR_FIRST
        while entries := pool.readdir(fh, cookie, limit):
            for entry in entries:
                try:
                    node = pool.getattr(entry.id)
                except OSError:  # removed since it was listed
                    continue
                attributes = self._attributes(node)
                if not pyfuse3.readdir_reply(token, entry.name, attributes, entry.cookie):
                    return
            cookie = entries[-1].cookie
            limit = min(2 * limit, _READDIR_MAX)

    @handler
    async def releasedir(self, fh: int) -> None:
        """Nothing is kept for an open directory."""

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Bring the names of a directory to their disks."""
        await self.threads.run(
            EVERY, self._pool.fsyncdir, fh, timeout_s=self._timeouts.op_s * SYNC_TIMEOUT_FACTOR
        )

    # ------------------------------------------------------------------ extended attributes

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Return a ``user.`` attribute; of others there is none, which is said from memory."""
        pool = self._pool
        if name.startswith(_ANSWERED):
            return pool.getxattr(inode, name)
        if name.startswith(_USER):
            return await self._ask(inode, pool.getxattr, inode, name)
        # The kernel asks for security.capability at every write.
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR if name.startswith(_NOT_KEPT) else errno.EOPNOTSUPP)

    @handler
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """Set a ``user.`` attribute. XATTR_CREATE and XATTR_REPLACE were checked before."""
        if not name.startswith(_USER):
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        pool = self._pool
        await self._change(pool.disk_of(inode), pool.setxattr, inode, name, value, 0)

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        """Return the names of the ``user.`` attributes."""
        return await self._ask(inode, self._pool.listxattr, inode)

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a ``user.`` attribute."""
        if not name.startswith(_USER):
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        pool = self._pool
        await self._change(pool.disk_of(inode), pool.removexattr, inode, name)
