"""Rename: the commit of every KV file. See ``pool`` for its contract.

A file is renamed on its own disk, whatever lies at the target: bytes never move, EXDEV is never
answered. A directory is renamed in the catalog; its carriers follow as chores.
"""

import contextlib
import errno
import os
import stat
import threading

from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import Move, RenameDir, Swap, SwapPaths
from kvfuse.core.records import Node, State
from kvfuse.heart import namespace, settle
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.state import PoolState, check_name
from kvfuse.verbs.files import Files
from kvfuse.verbs.lingering import Lingering
from kvfuse.verbs.names import check_new

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_RETRIES = 3
_Entry = tuple[int, int, int]  # id, cookie, type bits


class Renames:
    """The verb that renames, in all its cases."""

    def __init__(self, state: PoolState, files: Files, lingering: Lingering) -> None:
        self._state = state
        self._files = files
        self._lingering = lingering
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
        self._state.arrive((parent, name), (new_parent, new_name))
        if self._locked(parent, name, new_parent, new_name, flags, (None, None)):
            return
        for _ in range(_RETRIES):  # a directory is among them
            if self._try(parent, name, new_parent, new_name, flags):
                return
        raise OSError(errno.EIO, "the names were changed again and again")

    def _try(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> bool:
        """Rename; False when a directory came to one of the names before it was locked."""
        state = self._state
        with state.catalog.read() as txn:
            seen = txn.entry(parent, name), txn.entry(new_parent, new_name)
        if seen[1] is not None and stat.S_ISDIR(seen[1][2]):
            state.arrive_all(seen[1][0])
        has_dir = any(entry is not None and stat.S_ISDIR(entry[2]) for entry in seen)
        if has_dir:
            state.relieve()
        if has_dir and not self._tree.acquire(timeout=state.rules.op_timeout_s):
            raise OSError(errno.EIO, "another directory rename does not end")
        try:
            return self._locked(parent, name, new_parent, new_name, flags, seen)
        finally:
            if has_dir:
                self._tree.release()

    def _look(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes
    ) -> tuple[Node | None, Node | None, bool]:
        """Return what is at both names, and whether no disk has anything left to do."""
        with self._state.catalog.read() as txn:
            self._state.directory(txn, parent)
            if new_parent != parent:
                self._state.directory(txn, new_parent)
            return (
                namespace.visible_child(self._state, txn, parent, name),
                namespace.visible_child(self._state, txn, new_parent, new_name),
                txn.is_idle,
            )

    def _locked(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int,
        seen: tuple[_Entry | None, _Entry | None],
    ) -> bool:  # fmt: skip
        state = self._state
        places = {(parent, name), (new_parent, new_name)}
        gone = seen[1][0] if seen[1] is not None and stat.S_ISDIR(seen[1][2]) else None
        exclusive = (*places, gone) if gone is not None and not flags else tuple(places)
        shared = tuple({parent, new_parent} - set(exclusive))
        with state.locks.hold(*exclusive, shared=shared):
            source, target, is_idle = self._look(parent, name, new_parent, new_name)
            if source is None or (flags & RENAME_EXCHANGE and target is None):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if _is_another_dir(source, seen[0]) or _is_another_dir(target, seen[1]):
                return False
            if target is not None and target.id == source.id:
                return True
            if flags & RENAME_EXCHANGE:
                assert target is not None, "checked by the caller"
                self._exchange((parent, name, source), (new_parent, new_name, target))
            else:
                if target is not None:
                    self._check_replaceable(source, target, flags)
                old, new = (parent, name), (new_parent, new_name)
                if source.is_dir:
                    self._move_dir(old, new, source, target)
                else:
                    self._move_file(old, new, source, target, is_idle=is_idle)
            return True

    def _check_replaceable(self, source: Node, target: Node, flags: int) -> None:
        if flags & RENAME_NOREPLACE:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        if source.is_dir and not target.is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if target.is_dir and not source.is_dir:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))

    # -- files

    def _move_file(
        self, old: tuple[int, bytes], new: tuple[int, bytes], source: Node, target: Node | None, *,
        is_idle: bool,
    ) -> None:  # fmt: skip
        state = self._state
        state.check_writable(source.disk)
        if target is None:
            with state.locks.hold(("inode", source.id)):
                self._commit(old, new, source, None, is_idle=is_idle)
            return
        with (
            self._lingering.while_replaced(target),
            state.locks.hold(("inode", source.id), ("inode", target.id)),
        ):
            self._commit(old, new, source, target, is_idle=is_idle)

    def _commit(
        self, old: tuple[int, bytes], new: tuple[int, bytes], source: Node, target: Node | None, *,
        is_idle: bool,
    ) -> None:  # fmt: skip
        """Rename *source* from *old* to *new*: design §3, step by step."""
        state = self._state
        open_inode = state.handles.inode(source.id)
        pending = open_inode is not None and open_inode.writers > 0
        generation = state.generation(target.generation if target is not None else 0)
        intent = Move(
            source.disk, source.id, source.ino, generation, *old, *new, state.request.unique
        )
        with state.on(source.disk) as carriers:
            # Both carriers first: they may need room, and nothing has been said yet.
            carriers.find(old[0])
            carriers.make(new[0])
        number = state.say(intent, is_idle=is_idle)
        replaces = target is not None and target.disk == intent.disk
        try:
            with state.on(source.disk) as carriers:
                found = self._rename_on_disk(
                    carriers, intent, source, pending=pending, replaces=replaces
                )
            settle.finish_move(state, intent, number, found, pending=pending)
            if pending:
                state.reservations.recorded(source.id, found.st_blocks * records.BLOCK_BYTES)
            else:
                self._files.closes.is_settled(source)
                state.learn_size(new, found.st_size)
        except BaseException as exc:
            if target is not None:
                namespace.still_named(state, target.id)
            # Who interrupts has to be heard, in force or not.
            if not settle.settle_failed(state, number, intent) or not isinstance(exc, Exception):
                raise

    def _rename_on_disk(
        self, carriers: Carriers, intent: Move, source: Node, *, pending: bool, replaces: bool
    ) -> os.stat_result:
        disk = carriers.disk
        place = (intent.new_parent, intent.new_name)
        state = State.PENDING if pending else State.COMMITTED
        moved = source.replace(
            generation=intent.generation,
            state=state,
            flags=namespace.moved_flags(self._state, source, intent.name),
        )
        label = records.pack_label(records.label_of(moved, place))

        def mark(dir_fd: int) -> os.stat_result:
            found = disk.stat(dir_fd, intent.name)
            if found.st_ino != intent.ino:
                raise FileNotFoundError(errno.ENOENT, "replaced behind our back")
            disk.write_label_at(dir_fd, intent.name, label)
            return found

        found = carriers.at(intent.parent, mark)
        if replaces:
            old_dir, new_dir = carriers.find(intent.parent), carriers.make(intent.new_parent)
            disk.rename(old_dir.fd, intent.name, new_dir.fd, intent.new_name)
        else:
            settle.rename_clear(carriers, (intent.parent, intent.name), place)
        return found

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
            namespace.carry_to(state, txn, carriers, new[0])
            for disk in carriers:
                txn.put_chore(disk, state.next_id(), RenameDir(path, source.id, new_path))
            txn.drop_entry(*old, entry[1])
            moved = now.replace(parent=new[0], name=new[1], ctime_ns=state.now_ns())
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
            files = [place for place in (a, b) if not place[2].is_dir]
            # To the end of the transaction: the last writer's close writes label and record too.
            with state.locks.hold(*(("inode", node.id) for _, _, node in files)):
                for parent, name, node in files:
                    with state.on(node.disk) as carriers:
                        self._unbind(carriers, (parent, name), node.id, None)
                disks = self._exchange_in_catalog(a, b)
            state.forget_paths()
            state.wake(disks)
            # A file among them is found at once then. A disk that fails has it in its backlog.
            for number in disks:
                with contextlib.suppress(OSError), state.on(number) as carriers:
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
            for directory in (a[0], b[0]):
                namespace.carry_to(state, txn, numbers, directory)
            for number in numbers:
                chore = SwapPaths(path, a[2].id, other, b[2].id)
                txn.put_chore(number, state.next_id(), chore)
            namespace.swap_names(state, txn, a[:2], b[:2])
            state.done(txn, 0)
        return [number for number in numbers if number in state.carriers]

    def _exchange_files(self, a: tuple[int, bytes, Node], b: tuple[int, bytes, Node]) -> None:
        """Swap two files, each on its own disk."""
        state = self._state
        intent = Swap(
            a[2].disk, a[2].ino, *a[:2], b[2].disk, b[2].ino, *b[:2], state.request.unique
        )
        with state.on(a[2].disk) as first, state.on(b[2].disk) as second:
            first.make(a[0]), first.make(b[0]), second.make(a[0]), second.make(b[0])
        newest = max(a[2].generation, b[2].generation)
        generations = {node.id: state.generation(newest) for node in (a[2], b[2])}
        number = state.say(intent)
        try:
            with state.on(a[2].disk) as first, state.on(b[2].disk) as second:
                for carriers, (parent, name, node) in ((first, a), (second, b)):
                    self._unbind(carriers, (parent, name), node.id, generations[node.id])
                if intent.disk == intent.other_disk:
                    settle.exchange_names(first, a[:2], b[:2])
                else:
                    settle.rename_clear(first, a[:2], b[:2])
                    settle.rename_clear(second, b[:2], a[:2])
            with state.catalog.write() as txn:
                namespace.swap_names(state, txn, a[:2], b[:2], generations)
                state.done(txn, 0)
                txn.drop_intent(number)
        except BaseException as exc:
            if not settle.settle_failed(state, number, intent) or not isinstance(exc, Exception):
                raise

    def _unbind(
        self, carriers: Carriers, place: tuple[int, bytes], node_id: int, generation: int | None
    ) -> None:
        """Let the label of a file hold at either of two places; *generation* None keeps it."""
        with self._state.catalog.read() as txn:
            node = txn.node(node_id)
        assert node is not None, "held by its name lock"
        if generation is not None:
            node = node.replace(generation=generation)
        value = records.pack_label(records.label_of(node, place, is_linked=True))
        carriers.at(place[0], lambda fd: carriers.disk.write_label_at(fd, place[1], value))


def _is_another_dir(node: Node | None, seen: _Entry | None) -> bool:
    """Whether what is locked is a directory that was not seen, and so needs locks not taken.

    Files need none: many that replace one name all the time would never find what they saw.
    """
    return node is not None and node.is_dir and (seen is None or node.id != seen[0])
