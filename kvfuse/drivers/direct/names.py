"""Requests about names, attributes and directories, answered by the pool.

Concurrency: any thread; nothing is kept here.
"""

import errno
import os
import time
from collections.abc import Callable

from kvfuse.core.records import NAME_BYTES_MAX, NO_DISK, Caller, DirEntry, Node, State
from kvfuse.core.routing import is_temp
from kvfuse.drivers.direct import abi, replies
from kvfuse.drivers.direct.abi import Opcode
from kvfuse.drivers.direct.protocol import (
    GetAttr,
    GetXattr,
    Link,
    MkDir,
    MkNod,
    Read,
    Rename,
    Request,
    SetAttr,
    SetXattr,
    Symlink,
)
from kvfuse.drivers.direct.replies import Timeouts
from kvfuse.pool.pool import AttrChanges, Pool

_BLOCK_BYTES = 4096  # unit of statfs

# "." and ".." stand before every cookie of the pool
_COOKIE_DOT = 1
_COOKIE_DOT_DOT = 2
_LISTED_MAX = 256  # names asked from the pool at once
_DIRENT_BYTES_MIN = 32
_DIRENT_PLUS_BYTES_MIN = 160

_USER = b"user."
_NOT_KEPT = (b"security.", b"trusted.", b"system.")
_ATTRIBUTE_BITS = 0o7777


def check_name(name: bytes) -> None:
    """Check the length of *name*.

    Raises:
        OSError: ENAMETOOLONG.
    """
    if len(name) > NAME_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, f"a name of {len(name)} bytes")


def caller_of(request: Request, umask: int) -> Caller:
    """Return who asks."""
    return Caller(request.uid, request.gid, umask, request.pid)


class Names:
    """Handlers of everything but open files."""

    def __init__(self, pool: Pool, *, timeouts: Timeouts, negative: Timeouts) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._created = timeouts._replace(entry_s=0, entry_ns=0)
        self._negative = negative
        self._keeps_negative = negative.entry_s > 0 or negative.entry_ns > 0

    def handlers(self) -> dict[Opcode, Callable[[Request], bytes]]:
        """Return the handler of each opcode answered here."""
        return {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.STATX: self._statx,
            Opcode.SETATTR: self._setattr,
            Opcode.READLINK: self._readlink,
            Opcode.SYMLINK: self._symlink,
            Opcode.MKNOD: self._mknod,
            Opcode.MKDIR: self._mkdir,
            Opcode.UNLINK: self._unlink,
            Opcode.RMDIR: self._rmdir,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename,
            Opcode.LINK: self._link,
            Opcode.STATFS: self._statfs,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdir_plus,
            Opcode.RELEASEDIR: self._nothing,
            Opcode.FSYNCDIR: self._fsyncdir,
            Opcode.GETXATTR: self._getxattr,
            Opcode.SETXATTR: self._setxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.REMOVEXATTR: self._removexattr,
            Opcode.SYNCFS: self._syncfs,
            Opcode.DESTROY: self._nothing,
        }

    def _lookup(self, request: Request) -> bytes:
        name: bytes = request.args
        if len(name) > NAME_BYTES_MAX:
            check_name(name)
        if name in {b".", b".."}:  # asked by who serves the mount over NFS
            return self._lookup_dots(request)
        node = self._pool.lookup(request.node, name)
        if node is not None:
            if self._pool.answers_quietly and (node.state == State.PENDING or is_temp(name)):
                return replies.entry(request.unique, node, self._created)
            return replies.entry(request.unique, node, self._timeouts)
        if self._keeps_negative and self._pool.is_complete:
            return replies.no_entry(request.unique, self._negative)
        return replies.error(request.unique, errno.ENOENT)

    def _lookup_dots(self, request: Request) -> bytes:
        pool = self._pool
        node_id = request.node if request.args == b"." else pool.parent_of(request.node)
        return replies.entry(request.unique, pool.getattr(node_id), self._timeouts)

    def _node_of(self, request: Request) -> Node:
        args: GetAttr = request.args
        return self._pool.getattr(request.node, args.fh if args.flags & abi.GETATTR_FH else None)

    def _getattr(self, request: Request) -> bytes:
        return replies.attributes(request.unique, self._node_of(request), self._timeouts)

    def _statx(self, request: Request) -> bytes:
        return replies.statx(request.unique, self._node_of(request), self._timeouts)

    def _setattr(self, request: Request) -> bytes:
        args: SetAttr = request.args
        valid = args.valid
        now_ns = time.time_ns() if valid & (abi.ATTR_ATIME_NOW | abi.ATTR_MTIME_NOW) else 0
        atime_ns = now_ns if valid & abi.ATTR_ATIME_NOW else args.atime_ns
        mtime_ns = now_ns if valid & abi.ATTR_MTIME_NOW else args.mtime_ns
        changes = AttrChanges(
            mode=args.mode & _ATTRIBUTE_BITS if valid & abi.ATTR_MODE else None,
            uid=args.uid if valid & abi.ATTR_UID else None,
            gid=args.gid if valid & abi.ATTR_GID else None,
            size=args.size if valid & abi.ATTR_SIZE else None,
            atime_ns=atime_ns if valid & abi.ATTR_ATIME else None,
            mtime_ns=mtime_ns if valid & abi.ATTR_MTIME else None,
        )
        fh = args.fh if valid & abi.ATTR_FH else None
        node = self._pool.setattr(request.node, changes, fh)
        return replies.attributes(request.unique, node, self._timeouts)

    def _readlink(self, request: Request) -> bytes:
        return replies.data(request.unique, self._pool.readlink(request.node))

    def _symlink(self, request: Request) -> bytes:
        args: Symlink = request.args
        check_name(args.name)
        node = self._pool.symlink(request.node, args.name, args.target, caller_of(request, 0))
        return replies.entry(request.unique, node, self._timeouts)

    def _mknod(self, request: Request) -> bytes:
        args: MkNod = request.args
        check_name(args.name)
        caller = caller_of(request, args.umask)
        node = self._pool.mknod(request.node, args.name, args.mode, caller)
        return replies.entry(request.unique, node, self._created)

    def _mkdir(self, request: Request) -> bytes:
        args: MkDir = request.args
        check_name(args.name)
        caller = caller_of(request, args.umask)
        node = self._pool.mkdir(request.node, args.name, args.mode, caller)
        return replies.entry(request.unique, node, self._timeouts)

    def _unlink(self, request: Request) -> bytes:
        check_name(request.args)
        self._pool.unlink(request.node, request.args)
        return replies.done(request.unique)

    def _rmdir(self, request: Request) -> bytes:
        check_name(request.args)
        self._pool.rmdir(request.node, request.args)
        return replies.done(request.unique)

    def _rename(self, request: Request) -> bytes:
        args: Rename = request.args
        check_name(args.name)
        check_name(args.new_name)
        self._pool.rename(request.node, args.name, args.new_parent, args.new_name, args.flags)
        return replies.done(request.unique)

    def _link(self, request: Request) -> bytes:
        args: Link = request.args
        check_name(args.name)
        node = self._pool.link(args.node, request.node, args.name)
        return replies.entry(request.unique, node, self._timeouts)

    def _statfs(self, request: Request) -> bytes:
        space = self._pool.statfs()
        return replies.statfs(
            request.unique,
            replies.StatFs(
                blocks=space.f_blocks,
                bfree=space.f_bfree,
                bavail=space.f_bavail,
                files=space.f_files,
                ffree=space.f_ffree,
                bsize=_BLOCK_BYTES,
                namemax=NAME_BYTES_MAX,
                frsize=_BLOCK_BYTES,
            ),
        )

    def _opendir(self, request: Request) -> bytes:
        self._pool.getattr(request.node)
        return replies.opened(request.unique, 0, 0, 0)

    def _readdir(self, request: Request) -> bytes:
        return replies.data(request.unique, self._listing(request, plus=False))

    def _readdir_plus(self, request: Request) -> bytes:
        return replies.data(request.unique, self._listing(request, plus=True))

    def _listing(self, request: Request, *, plus: bool) -> bytes:
        """Return as many entries after the asked offset as fit into the asked size."""
        args: Read = request.args
        parts: list[bytes] = []
        room = args.size
        offset = args.offset
        limit = room // (_DIRENT_PLUS_BYTES_MIN if plus else _DIRENT_BYTES_MIN) + 1
        while entries := self._listed(request.node, offset, min(limit, _LISTED_MAX)):
            for entry in entries:
                part = replies.dirent(entry.cookie, entry.id, entry.mode, entry.name)
                if plus:
                    part = self._dirent_plus(entry, part)
                room -= len(part)
                if room < 0:
                    return b"".join(parts)
                parts.append(part)
            offset = entries[-1].cookie
        return b"".join(parts)

    def _listed(self, node_id: int, offset: int, limit: int) -> list[DirEntry]:
        pool = self._pool
        if offset >= _COOKIE_DOT_DOT:
            return pool.readdir(node_id, offset, limit)
        dots = []
        if offset < _COOKIE_DOT:
            dots.append(DirEntry(_COOKIE_DOT, node_id, 0o040000, NO_DISK, b"."))
        dots.append(DirEntry(_COOKIE_DOT_DOT, pool.parent_of(node_id), 0o040000, NO_DISK, b".."))
        return dots

    def _dirent_plus(self, entry: DirEntry, plain: bytes) -> bytes:
        if entry.cookie <= _COOKIE_DOT_DOT:
            return replies.dirent_plus(plain, None, self._timeouts)
        try:
            node = self._pool.getattr(entry.id)
        except OSError:  # removed since it was listed
            return b""
        return replies.dirent_plus(plain, node, self._timeouts)

    def _fsyncdir(self, request: Request) -> bytes:
        self._pool.fsyncdir(request.node)
        return replies.done(request.unique)

    def _getxattr(self, request: Request) -> bytes:
        args: GetXattr = request.args
        if args.name.startswith(_USER):
            return _sized(request, self._pool.getxattr(request.node, args.name))
        # The kernel asks for security.capability before writes, so it is denied from memory; never
        # by ENOSYS, which would end user attributes for good.
        known = args.name.startswith(_NOT_KEPT)
        return replies.error(request.unique, errno.ENODATA if known else errno.EOPNOTSUPP)

    def _setxattr(self, request: Request) -> bytes:
        args: SetXattr = request.args
        _check_user(args.name)
        self._pool.setxattr(request.node, args.name, bytes(args.value), args.flags)
        return replies.done(request.unique)

    def _listxattr(self, request: Request) -> bytes:
        return _sized(request, replies.xattr_list(self._pool.listxattr(request.node)))

    def _removexattr(self, request: Request) -> bytes:
        _check_user(request.args)
        self._pool.removexattr(request.node, request.args)
        return replies.done(request.unique)

    def _syncfs(self, request: Request) -> bytes:
        self._pool.sync()
        return replies.done(request.unique)

    def _nothing(self, request: Request) -> bytes:
        return replies.done(request.unique)


def _check_user(name: bytes) -> None:
    if not name.startswith(_USER):
        raise OSError(errno.EOPNOTSUPP, f"{os.fsdecode(name)}: only user. attributes are kept")


def _sized(request: Request, value: bytes) -> bytes:
    """Return the reply that carries *value*, or its size when only that was asked."""
    args: GetXattr = request.args
    if args.size == 0:
        return replies.size(request.unique, len(value))
    if len(value) > args.size:
        return replies.error(request.unique, errno.ERANGE)
    return replies.data(request.unique, value)
