"""Verbs on attributes and extended attributes. See ``pool`` for their contract."""

import errno
import os
import stat
from dataclasses import dataclass

from kvfuse.core.intents import SetDir
from kvfuse.core.records import ROOT_ID, Node, State
from kvfuse.heart import namespace
from kvfuse.heart.state import PoolState
from kvfuse.verbs.files import Files

_OWN = b"user.kvfuse."
_XATTR_CREATE, _XATTR_REPLACE = 1, 2
_XATTR_BYTES_MAX = 65536
_XATTR_NAME_BYTES_MAX = 255
_FILE_BITS = 0o1777  # as at create: setuid and setgid mean nothing on a regular file


@dataclass(frozen=True, slots=True, kw_only=True)
class AttrChanges:
    """What a SETATTR changes; None keeps."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Attributes:
    """The verbs on attributes."""

    def __init__(self, state: PoolState, files: Files) -> None:
        self._state = state
        self._files = files

    def getattr(self, node_id: int, fh: int | None = None) -> Node:
        """Return the record of an id, named or only open; ESTALE when it is gone."""
        with self._state.catalog.read() as txn:
            node = txn.node(node_id)
        if node is None or not self._state.visible(node):
            node = self._files.orphan(node_id)
            if node is None:
                raise OSError(errno.ESTALE, "the file is gone")
        elif fh is None and node_id in self._state.leases.watched and node.is_evictable:
            self._state.leases.asked(node_id)  # a listing with attributes says that it is there
        return self._files.current(node)

    def setattr(self, node_id: int, changes: AttrChanges, fh: int | None = None) -> Node:
        """Change attributes, on the disk first, and return the record."""
        node = self.getattr(node_id)
        if changes.size is not None:
            if node.is_dir:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._files.truncate(node_id, changes.size, fh)
        if node.nlink == 0:
            return self._set_orphan(node, changes)
        with self._state.locks.hold(("inode", node_id)):
            if node.is_dir:
                return self._set_dir(node_id, changes)
            return self._set_file(node_id, changes)

    def _set_dir(self, node_id: int, changes: AttrChanges) -> Node:
        state = self._state
        disks: list[int] = []
        with state.catalog.write() as txn:
            node = state.directory(txn, node_id)
            changed = _changed(node, changes, state.now_ns(), 0o7777)
            txn.put_node(changed, node)
            owner = (changes.mode, changes.uid, changes.gid)
            if owner != (None, None, None) and node.name:
                path = namespace.full_path(txn, node.parent, node.name)
                disks = namespace.carrier_disks(txn, node)
                chore = SetDir(path, node_id, changed.mode & 0o7777, changed.uid, changed.gid)
                for disk in disks:
                    txn.put_chore(disk, state.next_id(), chore)
        state.wake(disks)
        return changed

    def _set_file(self, node_id: int, changes: AttrChanges) -> Node:
        state = self._state
        with state.catalog.read() as txn:
            node = txn.node(node_id)
        if node is None:
            raise OSError(errno.ESTALE, "the file is gone")
        on_disk = (changes.mode, changes.uid, changes.gid, changes.mtime_ns)
        if on_disk != (None, None, None, None):
            state.check_writable(node.disk)
            self._apply(node, changes)
        with state.catalog.write() as txn:
            now = txn.node(node_id)
            if now is None:
                raise OSError(errno.ESTALE, "the file is gone")
            changed = _changed(now, changes, state.now_ns(), _FILE_BITS)
            txn.put_node(changed, now)
        if changes.atime_ns is not None:
            state.leases.accessed(node_id)
            state.accesses.note(node_id, changes.atime_ns)
        return self._files.current(changed)

    def _set_orphan(self, node: Node, changes: AttrChanges) -> Node:
        """Change a file that has no name, through one of its handles."""
        inode = self._state.handles.inode(node.id)
        if inode is None:
            raise OSError(errno.ESTALE, "the file is gone")
        node = self._files.current(node)
        inode.node = _changed(node, changes, self._state.now_ns(), _FILE_BITS)
        return inode.node

    def _apply(self, node: Node, changes: AttrChanges) -> None:
        """Make the change on the disk; a file that is open is changed through its descriptor."""
        inode = self._state.handles.inode(node.id)
        uid = -1 if changes.uid is None else changes.uid
        gid = -1 if changes.gid is None else changes.gid
        with self._state.on(node.disk) as carriers:
            disk = carriers.disk
            if node.is_symlink:
                carriers.at(node.parent, lambda fd: disk.set_owner_at(fd, node.name, uid, gid))
                carriers.at(
                    node.parent,
                    lambda fd: disk.set_times_at(fd, node.name, None, changes.mtime_ns),
                )
                return
            fd = self._disk_fd(node)
            try:
                if (uid, gid) != (-1, -1):
                    disk.set_owner(fd, uid, gid)
                if changes.mode is not None:
                    disk.set_mode(fd, changes.mode & _FILE_BITS)
                if changes.mtime_ns is not None:
                    disk.set_times(fd, None, changes.mtime_ns)
                if inode is not None:
                    inode.stat = os.fstat(fd)
            finally:
                os.close(fd)

    def _disk_fd(self, node: Node) -> int:
        """Return an own descriptor of a file on its disk."""
        opened = self._state.handles.dup(node.id)
        if opened is not None:
            return opened
        carriers = self._state.carriers[node.disk]
        disk = carriers.disk
        fd = carriers.at(node.parent, lambda fd: disk.open(fd, node.name, os.O_RDONLY))
        if os.fstat(fd).st_ino != node.ino:  # replaced meanwhile: another file
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return fd

    # -- extended attributes

    def getxattr(self, node_id: int, name: bytes) -> bytes:
        """Return an extended attribute; ENODATA when there is none."""
        node = self.getattr(node_id)
        if name.startswith(_OWN):
            return self._own_xattr(node, name)
        if not name.startswith(b"user."):
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        if node.is_dir:
            with self._state.catalog.read() as txn:
                value = txn.xattr(node_id, name)
            if value is None:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            return value
        if node.is_symlink:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        with self._state.on(node.disk) as carriers, _Closing(self._disk_fd(node)) as fd:
            return carriers.disk.get_xattr(fd, name)

    def _own_xattr(self, node: Node, name: bytes) -> bytes:
        """Answer ``user.kvfuse.*``: where a file is and what it is."""
        state = self._state
        if node.id == ROOT_ID and name == _OWN + b"pool":
            return state.pool_id.encode()
        slot = state.slots.get(node.disk)
        if slot is not None:
            path = state.path(node.parent)
            key = path + b"/" + node.name if path else node.name
            match name[len(_OWN) :]:
                case b"disk":
                    return slot.disk_id.encode()
                case b"disk_path":
                    return os.path.join(os.fsencode(slot.path), key)
                case b"owner":
                    owner = state.owner(node.parent, node.name)
                    return (owner or slot.disk_id).encode()
                case b"state":
                    return State(node.state).name.lower().encode()
                case _:
                    pass
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def setxattr(self, node_id: int, name: bytes, value: bytes, flags: int) -> None:
        """Set a ``user.*`` attribute; other namespaces are EOPNOTSUPP, kvfuse's own EPERM."""
        node = self._xattr_target(node_id, name)
        if len(value) > _XATTR_BYTES_MAX:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        if node.is_dir:
            with self._state.catalog.write() as txn:
                self._state.directory(txn, node_id)
                had = txn.xattr(node_id, name) is not None
                if had and flags & _XATTR_CREATE:
                    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
                if not had and flags & _XATTR_REPLACE:
                    raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
                txn.put_xattr(node_id, name, value)
        else:
            self._state.check_writable(node.disk)
            with self._state.on(node.disk) as carriers, _Closing(self._disk_fd(node)) as fd:
                carriers.disk.set_xattr(fd, name, value, flags)
        self._touch(node_id)

    def removexattr(self, node_id: int, name: bytes) -> None:
        """Remove a ``user.*`` attribute; ENODATA when there is none."""
        node = self._xattr_target(node_id, name)
        if node.is_dir:
            with self._state.catalog.write() as txn:
                if txn.xattr(node_id, name) is None:
                    raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
                txn.drop_xattr(node_id, name)
        else:
            self._state.check_writable(node.disk)
            with self._state.on(node.disk) as carriers, _Closing(self._disk_fd(node)) as fd:
                carriers.disk.remove_xattr(fd, name)
        self._touch(node_id)

    def listxattr(self, node_id: int) -> list[bytes]:
        """Return the names of the clients' own attributes."""
        node = self.getattr(node_id)
        if node.is_dir:
            with self._state.catalog.read() as txn:
                return txn.xattr_names(node_id)
        if node.is_symlink:
            return []
        with self._state.on(node.disk) as carriers, _Closing(self._disk_fd(node)) as fd:
            names = carriers.disk.list_xattrs(fd)
        return [n for n in names if n.startswith(b"user.") and not n.startswith(_OWN)]

    def _xattr_target(self, node_id: int, name: bytes) -> Node:
        if name.startswith(_OWN):
            raise OSError(errno.EPERM, "user.kvfuse.* can only be read")
        if not name.startswith(b"user."):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if len(name) > _XATTR_NAME_BYTES_MAX:
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
        node = self.getattr(node_id)
        if node.is_symlink:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return node

    def _touch(self, node_id: int) -> None:
        """Move the change time."""
        with self._state.catalog.write() as txn:
            node = txn.node(node_id)
            if node is not None:
                txn.put_node(node.replace(ctime_ns=self._state.now_ns()), node)


def _changed(node: Node, changes: AttrChanges, now_ns: int, bits: int) -> Node:
    """Return *node* with the changes that are the record's to keep."""
    mode = node.mode
    if changes.mode is not None:
        mode = stat.S_IFMT(node.mode) | (changes.mode & bits)
    return node.replace(
        mode=mode,
        uid=node.uid if changes.uid is None else changes.uid,
        gid=node.gid if changes.gid is None else changes.gid,
        atime_ns=node.atime_ns if changes.atime_ns is None else changes.atime_ns,
        mtime_ns=node.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
        ctime_ns=now_ns,
    )


class _Closing:
    """Close a descriptor at the end of a ``with`` block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_exc: object) -> None:
        os.close(self._fd)
