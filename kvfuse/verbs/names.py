"""Verbs that make and remove names. See ``pool`` for their contract.

Each change of a disk follows design §3: what is about to be done is in the catalog first (an
intent, or a chore of the disk), and its record is finished in the transaction that drops it.
"""

import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from kvfuse.core import records
from kvfuse.core.health import fault_of
from kvfuse.core.intents import Create, Link
from kvfuse.core.records import NO_DISK, Caller, Node, State, is_reserved
from kvfuse.heart import namespace
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.settle import finish_link, settle_failed
from kvfuse.heart.state import PoolState, check_name
from kvfuse.verbs import placing
from kvfuse.verbs.files import Files

T = TypeVar("T")

DIR_BYTES = 4096  # st_size of a directory
_FILE_BITS = 0o1777  # setuid and setgid mean nothing in a cache, and passthrough would keep them
_RETRIES = 3


class Names:
    """The verbs that make and remove names, but for rename."""

    def __init__(self, state: PoolState, files: Files) -> None:
        self._state = state
        self._files = files

    def lookup(self, parent: int, name: bytes) -> Node | None:
        """Return what a name stands for, None when there is nothing."""
        check_name(name)
        arriving = self._state.arriving
        if arriving is not None:
            arriving.name(parent, name)
        with self._state.catalog.read() as txn:
            node = txn.child(parent, name)
        if node is None or not self._state.visible(node):
            return None
        if node.id in self._state.leases.watched and not self._state.leases.asked(node.id):
            return None
        return self._files.current(node)

    # -- files and symlinks

    def create(
        self, parent: int, name: bytes, flags: int, mode: int, caller: Caller
    ) -> tuple[Node, int]:
        """Create a file, or open the one that is there; return its record and handle."""
        state = self._state
        check_new(parent, name)
        state.arrive((parent, name))
        with state.locks.hold((parent, name), shared=(parent,)):
            with state.catalog.read() as txn:
                directory = state.directory(txn, parent)
                old = namespace.visible_child(state, txn, parent, name)
                is_idle = txn.is_idle
            if old is not None:
                if flags & os.O_EXCL:
                    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
                found = self._open_found(old, flags)  # None: removed behind our back
                if found is not None:
                    return found
            bits = stat.S_IFREG | (mode & ~caller.umask & _FILE_BITS)
            fresh = self._fresh(directory, name, bits, caller)
            node, fd = placing.place(
                state, fresh, lambda node: self._create_reserved(node, is_idle=is_idle)
            )
            return node, self._files.adopt(node, fd, flags)

    def _open_found(self, old: Node, flags: int) -> tuple[Node, int] | None:
        """Open the file whose name is locked; None when it was removed behind our back."""
        try:
            fh = self._files.open(old.id, flags, locked=(old.parent, old.name))
        except OSError as exc:
            if exc.errno == errno.ESTALE:
                return None
            raise
        return self._files.current(old), fh

    def mknod(self, parent: int, name: bytes, mode: int, caller: Caller) -> Node:
        """Create an empty regular file; anything else is EPERM."""
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise OSError(errno.EPERM, "only regular files, directories and symlinks are kept")
        node, fh = self.create(parent, name, os.O_WRONLY | os.O_EXCL, mode, caller)
        self._files.release(fh)
        return node

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Node:
        """Make a symbolic link."""
        state = self._state
        check_new(parent, name)
        state.arrive((parent, name))
        with state.locks.hold((parent, name), shared=(parent,)):
            with state.catalog.read() as txn:
                directory = state.directory(txn, parent)
                if namespace.visible_child(state, txn, parent, name) is not None:
                    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            fresh = self._fresh(directory, name, stat.S_IFLNK | 0o777, caller)
            fresh = fresh.replace(state=State.COMMITTED, size=len(target))
            return self._on_candidates(fresh, lambda node: self._symlink_on(node, target))

    def _fresh(self, directory: Node, name: bytes, mode: int, caller: Caller) -> Node:
        """Return the record of a new node in *directory*, which may hand down its group."""
        state = self._state
        now_ns = state.now_ns()
        inherits = bool(directory.mode & stat.S_ISGID)
        return Node(
            id=state.next_id(), mode=mode, uid=caller.uid,
            gid=directory.gid if inherits else caller.gid, nlink=1, state=State.PENDING,
            flags=0, disk=NO_DISK, ino=0, size=0, blocks=0, atime_ns=now_ns, mtime_ns=now_ns,
            ctime_ns=now_ns, generation=state.generation(), access=0, parent=directory.id,
            name=name,
        )  # fmt: skip

    def _on_candidates(self, fresh: Node, make: Callable[[Node], T]) -> T:
        """Make *fresh* on the best disk that takes it."""
        failure: OSError | None = None
        for number in self._state.candidates(fresh.parent, fresh.name):
            try:
                return make(fresh.replace(disk=number))
            except OSError as exc:
                # The next candidate helps against what the disk says of itself, nothing else.
                if exc.errno is None or fault_of(exc.errno) is None:
                    raise
                failure = exc
        raise failure or OSError(errno.ENOSPC, "no disk takes new files")

    def _create_reserved(self, node: Node, *, is_idle: bool) -> tuple[Node, int]:
        """Make a file for which room is kept, until its last writer has gone."""
        state = self._state
        try:
            return self._create_on(node, is_idle=is_idle)
        except BaseException:
            state.reservations.end(node.id)
            raise

    def _create_on(self, node: Node, *, is_idle: bool) -> tuple[Node, int]:
        state = self._state
        intent = Create(node.disk, node.id, node.parent, node.name, state.request.unique)
        number = state.say(intent, is_idle=is_idle)
        fd = -1
        try:
            with state.on(node.disk) as carriers:
                disk = carriers.disk
                fd = self._in_the_clear(
                    carriers,
                    node,
                    lambda dir_fd: disk.create(
                        dir_fd, node.name, mode=node.mode, uid=node.uid, gid=node.gid
                    ),
                )
                disk.write_label(fd, self._label(node))
                found = disk.fstat(fd)
            made = node.replace(
                ino=found.st_ino, blocks=found.st_blocks, mtime_ns=found.st_mtime_ns,
                ctime_ns=found.st_ctime_ns,
            )  # fmt: skip
            self._record(made, number)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            settle_failed(state, number, intent)
            raise
        return made, fd

    def _symlink_on(self, node: Node, target: bytes) -> Node:
        state = self._state
        intent = Create(node.disk, node.id, node.parent, node.name, state.request.unique)
        number = state.say(intent)
        try:
            with state.on(node.disk) as carriers:
                disk = carriers.disk

                def act(dir_fd: int) -> os.stat_result:
                    disk.symlink(target, dir_fd, node.name, uid=node.uid, gid=node.gid)
                    return disk.stat(dir_fd, node.name)

                found = self._in_the_clear(carriers, node, act)
                label = self._label(node)
                carriers.at(
                    node.parent, lambda dir_fd: disk.write_label_at(dir_fd, node.name, label)
                )
            made = node.replace(ino=found.st_ino, blocks=found.st_blocks)
            self._record(made, number)
        except BaseException:
            settle_failed(state, number, intent)
            raise
        return made

    def _in_the_clear(self, carriers: Carriers, node: Node, action: Callable[[int], T]) -> T:
        """Do *action* in the carrier of *node*; what no record speaks of makes way for it."""
        try:
            return carriers.at(node.parent, action, make=True)
        except FileExistsError:
            carriers.clear_way(node.parent, node.name)
            return carriers.at(node.parent, action, make=True)

    def _record(self, node: Node, intent: int) -> None:
        """Record what was made and drop the intent."""
        with self._state.catalog.write() as txn:
            namespace.put_name(self._state, txn, node, node.id)
            txn.put_node(node, None)
            self._state.touch_dir(txn, node.parent, node.ctime_ns)
            self._state.done(txn, node.id)
            txn.drop_intent(intent)

    @staticmethod
    def _label(node: Node) -> bytes:
        return records.pack_label(records.label_of(node, (node.parent, node.name)))

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name of a file or symlink."""
        state = self._state
        check_name(name)
        state.arrive((parent, name))
        with state.locks.hold((parent, name), shared=(parent,)):
            with state.catalog.read() as txn:
                node = namespace.visible_child(state, txn, parent, name)
            if node is None:
                self._unlink_stale(parent, name)
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if node.is_dir:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            state.check_writable(node.disk)
            with state.locks.hold(("inode", node.id)):
                try:
                    with state.catalog.write() as txn:
                        now = txn.node(node.id) or node
                        left, number = namespace.drop_name(state, txn, parent, name, now)
                        state.touch_dir(txn, parent, left.ctime_ns)
                        namespace.keep_open(state, txn, left)
                        state.done(txn, 0)
                except BaseException:
                    namespace.still_named(state, node.id)
                    raise
            self._finish_unlink(left, parent, name, number)

    def _unlink_stale(self, parent: int, name: bytes) -> None:
        """Remove the stale file at a name that is locked: nobody wants it there any more."""
        state = self._state
        with state.catalog.write() as txn:
            node = txn.child(parent, name)
            if node is None or not node.is_stale:
                return
            namespace.drop_name(state, txn, parent, name, node)
        state.wake([node.disk])

    def _finish_unlink(self, node: Node, parent: int, name: bytes, chore: int) -> None:
        """Do the chore of a removal now; when the disk does not let us, it stays a chore."""
        state = self._state

        def act(dir_fd: int) -> bool:
            if disk.stat(dir_fd, name).st_ino != node.ino:
                return False
            disk.unlink(dir_fd, name)
            return True

        try:
            with state.on(node.disk) as carriers:
                disk = carriers.disk
                is_done = carriers.at(parent, act)
        except FileNotFoundError:
            is_done = True
        except (OSError, KeyError):
            # The name is gone for clients whatever the disk says; its bytes follow later.
            is_done = False
        if is_done:
            with state.catalog.write() as txn:
                txn.drop_chore(node.disk, chore)
        else:  # or it is still on its way to this name, by a chore that comes before
            state.wake([node.disk])

    def link(self, node_id: int, parent: int, name: bytes) -> Node:
        """Give a file one more name, on its own disk."""
        state = self._state
        check_new(parent, name)
        state.arrive((parent, name))
        with state.locks.hold((parent, name), shared=(parent,)):
            for _ in range(_RETRIES):
                with state.catalog.read() as txn:
                    state.directory(txn, parent)
                    node = txn.node(node_id)
                    taken = namespace.visible_child(state, txn, parent, name)
                if node is None or not state.visible(node):
                    raise OSError(errno.ESTALE, "the file is gone")
                if node.is_dir:
                    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
                if taken is not None:
                    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
                state.check_writable(node.disk)
                node = self._files.closes.now(node)
                with state.locks.hold(("inode", node_id)):
                    linked = self._link(node, parent, name)
                if linked is not None:
                    return self._files.current(linked)
        raise OSError(errno.ESTALE, "the file was renamed again and again")

    def _link(self, node: Node, parent: int, name: bytes) -> Node | None:
        """Link *node* as (parent, name); None when it has been renamed since it was read."""
        state = self._state
        with state.catalog.read() as txn:
            node = txn.node(node.id) or node
        intent = Link(node.disk, node.id, node.ino, parent, name, state.request.unique)
        number = state.say(intent)
        try:
            with state.on(node.disk) as carriers:
                disk = carriers.disk
                here = (node.parent, node.name)
                label = records.pack_label(records.label_of(node, here, is_linked=True))
                source = carriers.find(node.parent)
                disk.write_label_at(source.fd, node.name, label)
                place = node.replace(parent=parent, name=name)
                self._in_the_clear(
                    carriers, place, lambda fd: disk.link(source.fd, node.name, fd, name)
                )
            linked = finish_link(state, intent, number)
            if linked is None:
                raise OSError(errno.ESTALE, "the file is gone")  # noqa: TRY301
        except BaseException as exc:
            if settle_failed(state, number, intent) and isinstance(exc, Exception):
                with state.catalog.read() as txn:
                    return txn.node(node.id)
            if isinstance(exc, FileNotFoundError):
                return None
            raise
        return linked

    # -- directories

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Node:
        """Make a directory: a record, and no disk is touched."""
        state = self._state
        check_new(parent, name)
        state.arrive((parent, name))
        with state.locks.hold((parent, name), shared=(parent,)), state.catalog.write() as txn:
            directory = state.directory(txn, parent)
            inherited = directory.mode & stat.S_ISGID
            bits = stat.S_IFDIR | inherited | (mode & ~caller.umask & 0o1777)
            node = self._fresh(directory, name, bits, caller)
            node = node.replace(state=State.COMMITTED, size=DIR_BYTES)
            namespace.put_name(state, txn, node, node.id)
            txn.put_node(node, None)
            state.touch_dir(txn, parent, node.ctime_ns)
            state.done(txn, node.id)
            return node

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory; its carriers go by and by."""
        state = self._state
        check_name(name)
        state.arrive((parent, name))
        with state.catalog.read() as txn:
            seen = txn.entry(parent, name)
        if seen is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        state.arrive_all(seen[0])
        state.relieve()
        with (
            state.locks.hold((parent, name), seen[0], shared=(parent,)),
            state.catalog.write() as txn,
        ):
            node = namespace.visible_child(state, txn, parent, name)
            if node is None or node.id != seen[0]:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if not node.is_dir:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            disks = namespace.drop_dir(state, txn, parent, name, node)
            state.touch_dir(txn, parent, state.now_ns())
            state.done(txn, 0)
        state.forget_dir(node.id)
        state.wake(disks)


def check_new(parent: int, name: bytes) -> None:
    """Refuse a name that must not be made.

    Raises:
        OSError: as :func:`kvfuse.heart.state.check_name`; EPERM for what is the disks' own.
    """
    check_name(name)
    if is_reserved(parent, name):
        raise OSError(errno.EPERM, f"{os.fsdecode(name)} belongs to the disks")
