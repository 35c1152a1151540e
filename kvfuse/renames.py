"""Rename: the commit of every KV file. See ``pool`` for its contract.

A file is renamed on its own disk, whatever lies at the target: bytes never move, EXDEV is never
answered. A directory is renamed in the catalog; its carriers follow as chores.
"""

import errno
import os
import threading

from kvfuse import namespace, records
from kvfuse.carriers import Carriers
from kvfuse.catalog import Txn
from kvfuse.files import Files
from kvfuse.intents import Move, RenameDir, Swap, SwapPaths
from kvfuse.names import Names, check_new
from kvfuse.records import Label, Node, State
from kvfuse.state import PoolState, check_name

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


class Renames:
    """The verb that renames, in all its cases."""

    def __init__(self, state: PoolState, files: Files, names: Names) -> None:
        self._state = state
        self._files = files
        self._names = names
        # Two directory renames at once could each move one below the other.
        self._tree = threading.Lock()

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename, replace or exchange; *flags* as renameat2(2)."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == 3:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        check_name(name)
        check_new(new_parent, new_name)
        state = self._state
        source, target = self._look(parent, name, new_parent, new_name)
        if source is None or (flags & RENAME_EXCHANGE and target is None):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        has_dir = source.is_dir or (target is not None and target.is_dir)
        if has_dir and not self._tree.acquire(timeout=state.rules.op_timeout_s):
            raise OSError(errno.EIO, "another directory rename does not end")
        try:
            self._locked(parent, name, new_parent, new_name, flags, (source, target))
        finally:
            if has_dir:
                self._tree.release()

    def _look(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes
    ) -> tuple[Node | None, Node | None]:
        with self._state.catalog.read() as txn:
            self._state.directory(txn, parent)
            self._state.directory(txn, new_parent)
            return (
                namespace.visible_child(self._state, txn, parent, name),
                namespace.visible_child(self._state, txn, new_parent, new_name),
            )

    def _locked(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int,
        seen: tuple[Node | None, Node | None],
    ) -> None:  # fmt: skip
        state = self._state
        places = {(parent, name), (new_parent, new_name)}
        gone = seen[1].id if seen[1] is not None and seen[1].is_dir else None
        exclusive = (*places, gone) if gone is not None and not flags else tuple(places)
        shared = tuple({parent, new_parent} - set(exclusive))
        with state.locks.hold(*exclusive, shared=shared):
            source, target = self._look(parent, name, new_parent, new_name)
            if source is None or [n and n.id for n in (source, target)] != [
                n and n.id for n in seen
            ]:
                # Somebody changed a name before it was locked; the kernel would not let them.
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if target is not None and target.id == source.id:
                return
            if flags & RENAME_EXCHANGE:
                assert target is not None, "checked by the caller"
                self._exchange((parent, name, source), (new_parent, new_name, target))
            else:
                if target is not None:
                    self._check_replaceable(source, target, flags)
                move = self._move_dir if source.is_dir else self._move_file
                move((parent, name), (new_parent, new_name), source, target)

    def _check_replaceable(self, source: Node, target: Node, flags: int) -> None:
        if flags & RENAME_NOREPLACE:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        if source.is_dir and not target.is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if target.is_dir and not source.is_dir:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))

    # -- files

    def _move_file(
        self, old: tuple[int, bytes], new: tuple[int, bytes], source: Node, target: Node | None
    ) -> None:
        state = self._state
        state.check_writable(source.disk)
        inodes = [("inode", node.id) for node in (source, target) if node is not None]
        with state.locks.hold(*inodes):
            self._commit(old, new, source, target)

    def _commit(
        self, old: tuple[int, bytes], new: tuple[int, bytes], source: Node, target: Node | None
    ) -> None:
        """Rename *source* from *old* to *new*: design §3, step by step."""
        state = self._state
        open_inode = state.handles.inode(source.id)
        pending = open_inode is not None and open_inode.writers > 0
        generation = state.generation(target.generation if target is not None else 0)
        intent = Move(
            source.disk, source.id, source.ino, generation, *old, *new, state.request.unique
        )
        number = state.next_id()
        with state.on(source.disk) as carriers:
            # Both carriers first: they may need room, and nothing has been said yet.
            carriers.find(old[0])
            carriers.make(new[0])
            with state.catalog.write() as txn:
                txn.put_intent(number, intent)
            try:
                found = self._rename_on_disk(carriers, intent, source, target, pending=pending)
            except BaseException:
                self._settle_failure(carriers, intent, number)
                raise
        losers = self._finish(intent, number, found, pending=pending)
        for loser, chore in losers:
            if loser.nlink == 0:
                state.handles.orphan(loser)
            if chore:
                state.wake([loser.disk])

    def _rename_on_disk(
        self, carriers: Carriers, intent: Move, source: Node, target: Node | None, *, pending: bool
    ) -> os.stat_result:
        disk = carriers.disk
        place = (intent.new_parent, intent.new_name)
        label = _label(source, place, intent.generation, pending=pending)

        def mark(dir_fd: int) -> os.stat_result:
            found = disk.stat(dir_fd, intent.name)
            if found.st_ino != intent.ino:
                raise FileNotFoundError(errno.ENOENT, "replaced behind our back")
            disk.write_label_at(dir_fd, intent.name, label)
            return found

        found = carriers.at(intent.parent, mark)
        old_dir = carriers.find(intent.parent)
        new_dir = carriers.make(intent.new_parent)
        replaces = target is not None and target.disk == intent.disk
        names = (old_dir.fd, intent.name, new_dir.fd, intent.new_name)
        if replaces:
            disk.rename(*names)
        else:
            try:
                disk.rename_new(*names)
            except FileExistsError:
                carriers.clear_way(*place)
                disk.rename_new(*names)
        return found

    def _settle_failure(self, carriers: Carriers, intent: Move, number: int) -> None:
        """Drop an intent whose rename failed; keep it when the disk cannot say what happened."""
        disk = carriers.disk
        try:
            found = carriers.at(intent.parent, lambda fd: disk.stat(fd, intent.name))
        except OSError:
            return
        if found.st_ino == intent.ino:
            with self._state.catalog.write() as txn:
                txn.drop_intent(number)

    def _finish(
        self, intent: Move, number: int, found: os.stat_result, *, pending: bool
    ) -> list[tuple[Node, int]]:
        """Record what the disk did; return the replaced file and its chore, if there is one."""
        state = self._state
        with state.catalog.write() as txn:
            source = txn.node(intent.id)
            entry = txn.entry(intent.parent, intent.name)
            assert source is not None, "held by its name and inode locks"
            assert entry is not None, "held by its name and inode locks"
            losers = replace_target(state, txn, intent)
            moved = move_name(txn, source, entry[1], intent)
            moved = moved._replace(
                size=found.st_size, blocks=found.st_blocks, mtime_ns=found.st_mtime_ns,
                ctime_ns=state.now_ns(), generation=intent.generation,
                state=State.PENDING if pending else State.COMMITTED,
            )  # fmt: skip
            txn.put_node(moved, source)
            for directory in {intent.parent, intent.new_parent}:
                state.touch_dir(txn, directory, moved.ctime_ns)
            for loser, _ in losers:
                namespace.keep_open(state, txn, loser)
            state.done(txn, 0)
            txn.drop_intent(number)
        return losers

    # -- directories

    def _move_dir(
        self, old: tuple[int, bytes], new: tuple[int, bytes], source: Node, target: Node | None
    ) -> None:
        state = self._state
        with state.catalog.write() as txn:
            self._check_no_loop(txn, source.id, new[0])
            disks: list[int] = []
            if target is not None:
                disks += namespace.drop_dir(state, txn, *new, target)
            else:
                namespace.hide_away(state, txn, *new)
            entry = txn.entry(*old)
            now = txn.node(source.id)
            assert entry is not None, "held by its name lock"
            assert now is not None, "held by its name lock"
            path, new_path = namespace.full_path(txn, *old), namespace.full_path(txn, *new)
            carriers = namespace.carrier_disks(txn, now)
            for disk in carriers:
                txn.put_chore(disk, state.next_id(), RenameDir(path, source.id, new_path))
            txn.drop_entry(*old, entry[1])
            moved = now._replace(parent=new[0], name=new[1], ctime_ns=state.now_ns())
            txn.put_node(moved, now)
            txn.put_entry(*new, moved, entry[1])
            for directory in {old[0], new[0]}:
                state.touch_dir(txn, directory, moved.ctime_ns)
            state.done(txn, 0)
        state.forget_paths()
        if target is not None:
            state.forget_dir(target.id)
        state.wake(disks + carriers)

    def _check_no_loop(self, txn: Txn, moved: int, into: int) -> None:
        """Refuse to move a directory below itself."""
        while into != records.ROOT_ID:
            if into == moved:
                raise OSError(errno.EINVAL, "a directory cannot be moved below itself")
            node = txn.node(into)
            if node is None:
                raise OSError(errno.ESTALE, "the directory is gone")
            into = node.parent

    # -- exchange

    def _exchange(self, a: tuple[int, bytes, Node], b: tuple[int, bytes, Node]) -> None:
        state = self._state
        for _, _, node in (a, b):
            if not node.is_dir:
                state.check_writable(node.disk)
        if a[2].is_dir or b[2].is_dir:
            disks = self._exchange_in_catalog(a, b)
            state.forget_paths()
            # A file among them must be found at once under its new name.
            for number in disks:
                with state.on(number) as carriers:
                    carriers.drain()
            return
        with state.locks.hold(("inode", a[2].id), ("inode", b[2].id)):
            self._exchange_files(a, b)

    def _exchange_in_catalog(
        self, a: tuple[int, bytes, Node], b: tuple[int, bytes, Node]
    ) -> list[int]:
        state = self._state
        with state.catalog.write() as txn:
            if a[2].is_dir:
                self._check_no_loop(txn, a[2].id, b[0])
            if b[2].is_dir:
                self._check_no_loop(txn, b[2].id, a[0])
            path, other = namespace.full_path(txn, *a[:2]), namespace.full_path(txn, *b[:2])
            numbers: set[int] = set()
            for _, _, node in (a, b):
                now = txn.node(node.id) or node
                numbers |= set(namespace.carrier_disks(txn, now)) if node.is_dir else {node.disk}
            for number in numbers:
                chore = SwapPaths(path, a[2].id, other, b[2].id)
                txn.put_chore(number, state.next_id(), chore)
            swap_names(state, txn, a[:2], b[:2])
            state.done(txn, 0)
        return [number for number in numbers if number in state.carriers]

    def _exchange_files(self, a: tuple[int, bytes, Node], b: tuple[int, bytes, Node]) -> None:
        """Swap two files, each on its own disk."""
        state = self._state
        number = state.next_id()
        intent = Swap(
            a[2].disk, a[2].ino, *a[:2], b[2].disk, b[2].ino, *b[:2], state.request.unique
        )
        with state.on(a[2].disk) as first, state.on(b[2].disk) as second:
            first.make(a[0]), first.make(b[0]), second.make(a[0]), second.make(b[0])
            with state.catalog.write() as txn:
                txn.put_intent(number, intent)
            exchange_on_disks(first, second, intent)
        with state.catalog.write() as txn:
            swap_names(state, txn, a[:2], b[:2])
            state.done(txn, 0)
            txn.drop_intent(number)
        for place, node in ((b[:2], a[2]), (a[:2], b[2])):
            self._relabel(node, place)

    def _relabel(self, node: Node, place: tuple[int, bytes]) -> None:
        """Bind the label of a file to its new place; without it a scan takes it as moved."""
        state = self._state
        inode = state.handles.inode(node.id)
        pending = inode is not None and inode.writers > 0
        label = _label(node, place, node.generation, pending=pending)
        with state.on(node.disk) as carriers:
            disk = carriers.disk
            carriers.at(place[0], lambda fd: disk.write_label_at(fd, place[1], label))


def exchange_on_disks(first: Carriers, second: Carriers, intent: Swap) -> None:
    """Swap two files on the disks as far as that has not happened yet."""
    if intent.disk == intent.other_disk:
        if _ino(first, intent.parent, intent.name) == intent.ino:
            first.disk.exchange(
                first.find(intent.parent).fd, intent.name,
                first.find(intent.other_parent).fd, intent.other_name,
            )  # fmt: skip
        return
    if _ino(first, intent.parent, intent.name) == intent.ino:
        _rename_clear(first, (intent.parent, intent.name), (intent.other_parent, intent.other_name))
    if _ino(second, intent.other_parent, intent.other_name) == intent.other_ino:
        _rename_clear(
            second, (intent.other_parent, intent.other_name), (intent.parent, intent.name)
        )


def _rename_clear(carriers: Carriers, old: tuple[int, bytes], new: tuple[int, bytes]) -> None:
    names = (carriers.find(old[0]).fd, old[1], carriers.make(new[0]).fd, new[1])
    try:
        carriers.disk.rename_new(*names)
    except FileExistsError:
        carriers.clear_way(*new)
        carriers.disk.rename_new(*names)


def _ino(carriers: Carriers, parent: int, name: bytes) -> int | None:
    try:
        return carriers.at(parent, lambda fd: carriers.disk.stat(fd, name)).st_ino
    except FileNotFoundError:
        return None


def swap_names(state: PoolState, txn: Txn, a: tuple[int, bytes], b: tuple[int, bytes]) -> None:
    """Exchange two names in the catalog."""
    entry_a, entry_b = txn.entry(*a), txn.entry(*b)
    assert entry_a is not None, "held by their name locks"
    assert entry_b is not None, "held by their name locks"
    now_ns = state.now_ns()
    for place, other in ((a, entry_a), (b, entry_b)):
        txn.drop_entry(*place, other[1])
    for (old, new), entry in (((a, b), entry_a), ((b, a), entry_b)):
        node = txn.node(entry[0])
        assert node is not None, "a name stands for a record"
        moved = _renamed(txn, node, old, new)._replace(ctime_ns=now_ns)
        txn.put_node(moved, node)
        txn.put_entry(*new, moved, entry[1])
    for directory in {a[0], b[0]}:
        state.touch_dir(txn, directory, now_ns)


def replace_target(state: PoolState, txn: Txn, intent: Move) -> list[tuple[Node, int]]:
    """Forget what *intent* replaces; return it with the chore that unlinks it elsewhere (or 0)."""
    target = txn.child(intent.new_parent, intent.new_name)
    if target is None:
        return []
    elsewhere = target.disk != intent.disk
    return [
        namespace.drop_name(
            state, txn, intent.new_parent, intent.new_name, target, on_disk=elsewhere
        )
    ]


def move_name(txn: Txn, source: Node, cookie: int, intent: Move) -> Node:
    """Move the name of *source* as *intent* says; the caller writes the record returned."""
    old, new = (intent.parent, intent.name), (intent.new_parent, intent.new_name)
    moved = _renamed(txn, source, old, new)
    txn.drop_entry(*old, cookie)
    txn.put_entry(*new, moved, cookie)
    return moved


def _renamed(txn: Txn, node: Node, old: tuple[int, bytes], new: tuple[int, bytes]) -> Node:
    if (node.parent, node.name) == old:
        return node._replace(parent=new[0], name=new[1])
    txn.drop_link(node.id, *old)
    txn.put_link(node.id, *new)
    return node


def _label(node: Node, place: tuple[int, bytes], generation: int, *, pending: bool) -> bytes:
    flags = records.LABEL_PENDING if pending else 0
    if node.nlink > 1:
        flags |= records.LABEL_LINKED
    verify = records.verify_hash(*place)
    return records.pack_label(Label(node.id, generation, verify, flags))
