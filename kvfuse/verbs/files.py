"""Verbs on open files: open, read, write, release and the rest. See ``pool`` for their contract.

A file that is opened for writing is *pending* until its last writer has gone: its label on the disk
and its record say so before the open is answered, and get a new generation at the end (``closes``).
"""

import contextlib
import errno
import os
import time

from kvfuse.core.health import Fault, fault_of
from kvfuse.core.intents import speaks_of
from kvfuse.core.records import HITS_BITS, Node, State
from kvfuse.disks.disk import Disk
from kvfuse.heart import namespace
from kvfuse.heart.handles import OpenFile, OpenInode
from kvfuse.heart.state import PoolState
from kvfuse.verbs.closes import Closes, with_stat, write_label

FALLOC_KEEP_SIZE = 1
WRITE_SHARE = 0.5  # of a request's deadline: for a disk to be cleaned under a write
_RETRIES = 3  # how often a file may be renamed under an open before that is an error


class Files:
    """The verbs on open files."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.closes = Closes(state, lambda node: self._open_node(node, writable=False))

    # -- attributes of what may be open

    def current(self, node: Node) -> Node:
        """Return *node* with what its open handles and recent accesses know better."""
        state = self._state
        inode = state.handles.inode(node.id)
        if inode is not None and inode.writers:
            if state.data_in_kernel:
                self._ask(inode)
            if inode.stat is not None:
                node = with_stat(node, inode.stat)
        elif node.state == State.PENDING:
            # The last writer may have gone since *node* was read: the record now has its size.
            with state.catalog.read() as txn:
                node = txn.node(node.id) or node
            if node.state == State.PENDING and (found := self.closes.found(node.id)):
                node = with_stat(node, found)
        atime_ns = state.accesses.get(node.id)
        return node if atime_ns is None else node.replace(atime_ns=atime_ns)

    def _ask(self, inode: OpenInode) -> None:
        """Let an open file's disk say its size and times."""
        fd = self._state.handles.dup(inode.id)
        if fd is not None:
            try:
                inode.stat = os.fstat(fd)
            finally:
                os.close(fd)

    def orphan(self, node_id: int) -> Node | None:
        """Return the record of a file that is open and has no name any more."""
        inode = self._state.handles.inode(node_id)
        return None if inode is None else inode.node

    # -- open and release

    def open(self, node_id: int, flags: int, locked: tuple[int, bytes] | None = None) -> int:
        """Open a file by id and return its handle number; the caller holds the name *locked*."""
        state = self._state
        writable = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        for _ in range(_RETRIES):
            with state.catalog.read() as txn:
                node = txn.node(node_id)
            if node is None:
                return self._open_orphan(node_id, flags, writable=writable)
            if node.is_dir:
                raise OSError(errno.EISDIR, "is a directory")
            if node.is_symlink:
                raise OSError(errno.ELOOP, "is a symbolic link")
            if not state.visible(node):
                break
            if node_id in state.leases.watched:
                state.leases.accessed(node_id)
            if writable:
                state.check_writable(node.disk)
            fd = self._open_node(node, writable=writable)
            if fd is not None:
                with state.on(node.disk), _closing_on_error(fd):
                    return self._register(node, fd, flags, writable=writable)
            is_locked = locked == (node.parent, node.name)
            if self.forget_lost(node) if is_locked else self._is_lost(node):
                break
        raise OSError(errno.ESTALE, "the file is gone")

    def forget_lost(self, node: Node) -> bool:
        """Forget the file *node* if it was removed or replaced behind our back; True if it was.

        The caller has its first name locked.
        """
        state = self._state
        with state.on(node.disk) as carriers:
            if carriers.drain():
                return False  # it was on its way to its place
        with state.catalog.write() as txn:
            now = txn.node(node.id)
            if now is None or not _is_same(now, node):
                return False
            place = (node.parent, node.name)
            if any(speaks_of(said, node.disk, node.ino, place) for _, said in txn.intents()):
                return False  # a rename of it is not settled: it may be at its other name
            namespace.drop_file(state, txn, now)
            namespace.keep_open(state, txn, now.replace(nlink=0))
        state.wake([node.disk])
        return True

    def adopt(self, node: Node, fd: int, flags: int) -> int:
        """Register the open that created *node*."""
        state = self._state
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        try:
            file = state.handles.add(
                node.id,
                node.disk,
                fd,
                writable=writable,
                reader=_reads(flags),
                unique=state.request.unique,
            )
        except BaseException:
            state.reservations.end(node.id)
            raise
        if not writable:
            state.reservations.end(node.id)
            with state.locks.hold(("inode", node.id)):
                self.closes.settle(node, fd)
        return file.fh

    def _open_node(self, node: Node, *, writable: bool) -> int | None:
        """Return a descriptor of *node*, None when that inode is not at its place on the disk."""
        state = self._state
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            with state.on(node.disk) as carriers:
                disk = carriers.disk
                fd, found = carriers.at(
                    node.parent, lambda dir_fd: disk.open_found(dir_fd, node.name, access)
                )
        except FileNotFoundError:
            return None
        except OSError as exc:
            # Clients take ENOENT for a miss, and EIO for the end of the world.
            if not writable and fault_of(exc.errno or 0) in (Fault.IO, Fault.GONE):
                raise OSError(errno.ENOENT, "the disk of the file failed") from exc
            raise
        if found.st_ino != node.ino or self._is_torn(node, found):
            os.close(fd)
            return None
        return fd

    def _is_torn(self, node: Node, found: os.stat_result) -> bool:
        """Whether a finished file has another length than it had: never serve it."""
        if node.state != State.COMMITTED or found.st_size == node.size:
            return False
        inode = self._state.handles.inode(node.id)
        if inode is not None:
            return False
        with self._state.catalog.read() as txn:
            now = txn.node(node.id)
        return now is not None and _is_same(now, node)  # else a writer came and went meanwhile

    def _is_lost(self, node: Node) -> bool:
        with self._state.locks.hold((node.parent, node.name)):
            return self.forget_lost(node)

    def _open_orphan(self, node_id: int, flags: int, *, writable: bool) -> int:
        """Open once more a file that has no name but is open."""
        inode = self._state.handles.inode(node_id)
        other = self._state.handles.dup(node_id)
        if inode is None or inode.node is None or other is None:
            if other is not None:
                os.close(other)
            raise OSError(errno.ESTALE, "the file is gone")
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = os.open(f"/proc/self/fd/{other}", access | os.O_CLOEXEC)
        finally:
            os.close(other)
        with _closing_on_error(fd):
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
            file = self._state.handles.add(
                node_id,
                inode.disk,
                fd,
                writable=writable,
                reader=_reads(flags),
                unique=self._state.request.unique,
            )
        self._refresh(file)
        return file.fh

    def _register(self, node: Node, fd: int, flags: int, *, writable: bool) -> int:
        state = self._state
        disk = state.disk(node.disk)
        if not writable:
            file = state.handles.add(
                node.id, node.disk, fd, writable=False, reader=True, unique=state.request.unique
            )
            self._catch_unlink(file, node)
            state.accesses.note(node.id, state.now_ns())
            return file.fh
        with state.locks.hold(("inode", node.id)):
            self._take_back(disk, node, fd)
            if flags & os.O_TRUNC:
                disk.truncate(fd, 0)
            file = state.handles.add(
                node.id,
                node.disk,
                fd,
                writable=True,
                reader=_reads(flags),
                unique=state.request.unique,
            )
            self._refresh(file)
        self._catch_unlink(file, node)
        if file.reader:
            state.accesses.note(node.id, state.now_ns())
        return file.fh

    def _take_back(self, disk: Disk, node: Node, fd: int) -> None:
        """Make a finished file pending before its first writer is answered."""
        inode = self._state.handles.inode(node.id)
        if inode is not None and inode.writers:
            return
        generation = self._state.generation(node.generation)
        self.closes.is_settled(node)
        with self._state.catalog.write() as txn:
            before = txn.node(node.id)
            if before is None:
                return
            pending = before.replace(state=State.PENDING, generation=generation)
            txn.put_node(pending, before)
        try:
            write_label(disk, fd, pending)
        except BaseException:
            # It is still whole. While its label cannot say so, its record does not either.
            write_label(disk, fd, before)
            with self._state.catalog.write() as txn:
                txn.put_node(before, txn.node(node.id))
            raise

    def _catch_unlink(self, file: OpenFile, node: Node) -> None:
        """The name may have gone between reading the record and registering the open."""
        with self._state.catalog.read() as txn:
            gone = not txn.has_node(node.id)
        if gone:
            inode = self._state.handles.inode(file.id)
            if inode is not None and inode.node is None:
                orphan = node.replace(nlink=0)
                with self._state.catalog.write() as txn:
                    namespace.keep_open(self._state, txn, orphan)
                self._state.handles.orphan(orphan)

    def release(self, fh: int) -> None:
        """Close a handle; the last writer's close finishes the file.

        The file is finished first and forgotten then: a server that dies between is asked again.
        """
        state = self._state
        file = state.handles.file(fh)
        try:
            if not file.writable:
                _, inode = state.handles.remove(fh)
            else:
                with state.locks.hold(("inode", file.id)):
                    try:
                        self.closes.last(file)
                    finally:
                        _, inode = state.handles.remove(fh)
                        if not inode.writers:
                            state.reservations.end(file.id)
        finally:
            if file.fd >= 0:
                os.close(file.fd)
        if inode.node is not None and not inode.files and state.handles.outlives:
            with state.catalog.write() as txn:
                txn.drop_orphan(file.id)
            if state.keeper is not None:
                state.keeper.drop(namespace.orphan_name(file.id))

    def flush(self, fh: int) -> None:
        """One descriptor of the open was closed: make the record right for a later stat."""
        file = self._state.handles.file(fh)
        if file.writable:
            self._refresh(file)

    # -- bytes

    def fd(self, fh: int) -> int:
        """Return the descriptor of an open file on its disk."""
        return self._state.handles.file(fh).fd

    def read(self, fh: int, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*, fewer only at the end of the file."""
        file = self._state.handles.file(fh)
        with self._state.on(file.disk) as carriers:
            return carriers.disk.read(file.fd, size, offset)

    def write(self, fh: int, offset: int, data: bytes | memoryview) -> int:
        """Write *data* at *offset*; short only where the disk failed part-way."""
        file = self._writer(fh)
        rest = memoryview(data)
        deadline_s = time.monotonic() + WRITE_SHARE * self._state.rules.op_timeout_s
        while True:
            try:
                with self._state.on(file.disk) as carriers:
                    rest = rest[
                        carriers.disk.write(file.fd, rest, offset + len(data) - len(rest)) :
                    ]
            except OSError as exc:
                if not self._makes_room(exc, file.disk, len(rest), deadline_s):
                    if len(rest) == len(data):
                        raise
                    break  # what was written counts
            if not rest:
                break
        self._refresh(file)
        return len(data) - len(rest)

    def _makes_room(self, exc: OSError, number: int, size_bytes: int, deadline_s: float) -> bool:
        """Whether it helps to try again: a disk had no room for *size_bytes*, and has some now."""
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
        return self._state.rooms.make_room(number, size_bytes, deadline_s=deadline_s)

    def fsync(self, fh: int, *, data_only: bool) -> None:
        """Make the bytes of an open file durable."""
        file = self._state.handles.file(fh)
        with self._state.on(file.disk) as carriers:
            carriers.disk.fsync(file.fd, data_only=data_only)

    def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Allocate or punch a range of an open file."""
        file = self._writer(fh)
        if not mode & ~FALLOC_KEEP_SIZE:
            self._check_size(file, offset + length)
        deadline_s = time.monotonic() + WRITE_SHARE * self._state.rules.op_timeout_s
        while True:
            try:
                with self._state.on(file.disk) as carriers:
                    carriers.disk.fallocate(file.fd, mode, offset, length)
                break
            except OSError as exc:
                if not self._makes_room(exc, file.disk, length, deadline_s):
                    raise
        self._refresh(file)

    def lseek(self, fh: int, offset: int, whence: int) -> int:
        """Return where data or a hole begins."""
        file = self._state.handles.file(fh)
        disk = self._state.carriers[file.disk].disk
        return disk.seek(file.fd, offset, whence)  # ENXIO here means the end, not the disk

    def copy_file_range(
        self, fh_in: int, off_in: int, fh_out: int, off_out: int, length: int
    ) -> int:
        """Copy within the pool, in the kernel."""
        source, target = self._state.handles.file(fh_in), self._writer(fh_out)
        with self._state.on(target.disk) as carriers:
            copied = carriers.disk.copy_range(source.fd, off_in, target.fd, off_out, length)
        self._refresh(target)
        return copied

    def truncate(self, node_id: int, size: int, fh: int | None) -> None:
        """Set the size of a file, through an open handle or by itself."""
        own = fh is None or not self._state.handles.file(fh).writable
        handle = self.open(node_id, os.O_WRONLY) if own or fh is None else fh
        try:
            file = self._state.handles.file(handle)
            self._check_size(file, size)
            with self._state.on(file.disk) as carriers:
                carriers.disk.truncate(file.fd, size)
            self._refresh(file)
        finally:
            if own:
                self.release(handle)

    def _check_size(self, file: OpenFile, size_bytes: int) -> None:
        """Refuse a size the disk can never hold: ENOSPC at once, not when it is full."""
        largest_bytes = self._state.rooms.largest_bytes(file.disk)
        if largest_bytes is not None and size_bytes > largest_bytes:
            if size_bytes <= os.fstat(file.fd).st_size:
                return
            raise OSError(errno.ENOSPC, "the disk of the file is smaller than that")

    def _writer(self, fh: int) -> OpenFile:
        file = self._state.handles.file(fh)
        if not file.writable:
            raise OSError(errno.EBADF, "not open for writing")
        return file

    def _refresh(self, file: OpenFile) -> None:
        """Remember size and times after a change, so that a stat need not ask the disk."""
        inode: OpenInode | None = self._state.handles.inode(file.id)
        if inode is not None:
            inode.stat = os.fstat(file.fd)


def _reads(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_WRONLY


def _is_same(now: Node, before: Node) -> bool:
    """Whether two records of a file are of the same bytes at the same place."""
    return _as_stored(now) == _as_stored(before)


def _as_stored(node: Node) -> Node:
    """Return a record without what its uses change."""
    return node.replace(access=0, atime_ns=0, flags=node.flags & ~HITS_BITS)


class _closing_on_error(contextlib.AbstractContextManager[None]):
    """Close a descriptor nobody will get."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __exit__(self, kind: object, exc: object, tb: object) -> None:
        if kind is not None:
            os.close(self._fd)
