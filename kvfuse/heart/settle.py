"""What became of a change that was said and not finished: decided by inode identity, then settled.

Used by the verb itself when a step fails, by the upkeep when a disk can be asked again, and by the
next daemon. Whoever calls keeps others away from the names of the intent.

A creation is always taken back. A rename that happened on the disk is in force; one that did not
never was. An exchange is taken back: it needs a step on each of two disks. A link that is there is
in force. Where the record of a file has gone meanwhile (its disk was away), the file goes.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import Create, Intent, Link, Move, Swap, Unlink, disks_of
from kvfuse.core.records import Label, Node, State
from kvfuse.core.routing import is_temp
from kvfuse.heart import namespace
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.state import PoolState

_log = logging.getLogger(__name__)


def settle(state: PoolState, number: int) -> bool:
    """Settle the intent *number*; return whether its change is in force.

    Raises:
        OSError: a disk cannot say; the intent stays.
    """
    with state.catalog.read() as txn:
        intent = txn.intent(number)
    match intent:
        case None:
            return True
        case Create():
            _take_back_create(state, intent, number)
            return False
        case Move():
            return _settle_move(state, intent, number)
        case Swap():
            _take_back_swap(state, intent, number)
            return False
        case Link():
            return _settle_link(state, intent, number)


def settle_failed(state: PoolState, number: int, intent: Intent) -> bool:
    """Settle the intent of a verb that failed; return whether its change is in force all the same.

    What cannot be settled now is left to the upkeep.
    """
    with contextlib.ExitStack() as disks:
        try:
            for disk in disks_of(intent):
                disks.enter_context(state.on(disk))
            return settle(state, number)
        except OSError as exc:
            _log.warning("%s waits: %s", intent, exc.strerror)
            state.leave(number, intent)
            return False


# -- creations


def _take_back_create(state: PoolState, intent: Create, number: int) -> None:
    """Remove what a creation left: never recorded, so nobody saw it."""
    carriers = state.carriers[intent.disk]
    disk = carriers.disk
    found = found_at(carriers, intent.parent, intent.name)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        with state.catalog.read() as txn:
            node = txn.child(intent.parent, intent.name)
        is_recorded = node is not None and (node.disk, node.ino) == (intent.disk, found.st_ino)
        label = label_at(carriers, intent.parent, intent.name)
        # Between its creation and its label it is empty, or a symlink.
        is_ours = found.st_size == 0 or stat.S_ISLNK(found.st_mode)
        if not is_recorded and (is_ours if label is None else label.id == intent.id):
            carriers.at(intent.parent, lambda fd: disk.unlink(fd, intent.name))
    drop(state, number)


# -- renames


def _settle_move(state: PoolState, intent: Move, number: int) -> bool:
    with state.catalog.read() as txn:
        node = txn.child(intent.new_parent, intent.new_name)
    if node is not None and (node.id, node.generation) == (intent.id, intent.generation):
        drop(state, number)  # all that was missing
        return True
    carriers = state.carriers[intent.disk]
    found = found_at(carriers, intent.new_parent, intent.new_name)
    if found is None or found.st_ino != intent.ino:
        rebind(state, intent.id, (intent.parent, intent.name))
        drop(state, number)
        return False
    label = label_at(carriers, intent.new_parent, intent.new_name)
    pending = label is not None and bool(label.flags & records.LABEL_PENDING)
    return finish_move(state, intent, number, found, pending=pending)


def finish_move(
    state: PoolState, intent: Move, number: int, found: os.stat_result, *, pending: bool
) -> bool:
    """Record a rename that happened on the disk; False when it came too late to count."""
    old, new = (intent.parent, intent.name), (intent.new_parent, intent.new_name)
    woken: list[int] = []
    with state.catalog.write() as txn:
        txn.drop_intent(number)
        source, entry = txn.node(intent.id), txn.entry(*old)
        target = txn.child(*new)
        is_there = source is not None and entry is not None and entry[0] == intent.id
        if not is_there or (target is not None and target.generation > intent.generation):
            # While the disk was away the source was removed, or the target made anew.
            _discard_moved(state, txn, intent, is_there=is_there)
            state.wake([intent.disk])
            return False
        assert source is not None, "just seen"
        if target is not None:
            elsewhere = target.disk != intent.disk
            loser, chore = namespace.drop_name(state, txn, *new, target, on_disk=elsewhere)
            namespace.keep_open(state, txn, loser)
            woken = [target.disk] if chore else []
        moved = namespace.move_name(txn, source, old, new).replace(
            size=found.st_size, blocks=found.st_blocks, mtime_ns=found.st_mtime_ns,
            ctime_ns=state.now_ns(), generation=intent.generation,
            state=State.PENDING if pending else State.COMMITTED,
            flags=namespace.moved_flags(state, source, intent.name),
        )  # fmt: skip
        moved = moved.replace(access=state.place(moved, intent.generation))
        txn.put_node(moved, source)
        for directory in {intent.parent, intent.new_parent}:
            state.touch_dir(txn, directory, moved.ctime_ns)
        _done(state, txn, 0, intent)
    # Whoever asked for its temp name did not ask for it; who asked for the target did.
    was_temp = not source.access or is_temp(intent.name, patterns=state.rules.temp_patterns)
    if was_temp and not pending and target is None:
        state.leases.committed(source.id)
    else:
        state.leases.accessed(source.id)
    state.wake(woken)
    return True


def _discard_moved(state: PoolState, txn: Txn, intent: Move, *, is_there: bool) -> None:
    """Forget a renamed file that lost its name, or its place, before the rename was recorded."""
    path = txn.path(intent.new_parent)
    if path is not None:
        full = path + b"/" + intent.new_name if path else intent.new_name
        chore = Unlink(full, intent.id, intent.ino, 0)
        txn.put_chore(intent.disk, state.next_id(), chore)
    if is_there:
        source = txn.node(intent.id)
        assert source is not None, "just seen"
        namespace.drop_name(state, txn, intent.parent, intent.name, source, on_disk=False)


# -- exchanges


class _Side(NamedTuple):
    """One of two files that were to exchange their names: *here* before, *there* after."""

    disk: int
    ino: int
    here: tuple[int, bytes]
    there: tuple[int, bytes]


def _sides(intent: Swap) -> tuple[_Side, _Side]:
    one = (intent.parent, intent.name)
    other = (intent.other_parent, intent.other_name)
    return (
        _Side(intent.disk, intent.ino, one, other),
        _Side(intent.other_disk, intent.other_ino, other, one),
    )


def _take_back_swap(state: PoolState, intent: Swap, number: int) -> None:
    """Put each file back where its record says it is; one without a record goes."""
    moved = [side for side in _sides(intent) if _is_at(state, side, side.there)]
    kept: list[tuple[_Side, Node]] = []
    for side in moved:
        node = _record_of(state, side)
        if node is None:
            carriers = state.carriers[side.disk]
            carriers.at(side.there[0], _unlinking(carriers, side.there[1]))
        else:
            kept.append((side, node))
    if len(kept) == 2 and kept[0][0].disk == kept[1][0].disk:
        exchange_names(state.carriers[intent.disk], *(side.there for side, _ in kept))
    else:
        for side, _ in kept:
            rename_clear(state.carriers[side.disk], side.there, side.here)
    for side in _sides(intent):
        if (node := _record_of(state, side)) is not None:
            rebind(state, node.id, side.here)
    drop(state, number)


def _unlinking(carriers: Carriers, name: bytes) -> Callable[[int], None]:
    return lambda fd: carriers.disk.unlink(fd, name)


def _is_at(state: PoolState, side: _Side, place: tuple[int, bytes]) -> bool:
    found = found_at(state.carriers[side.disk], *place)
    return found is not None and found.st_ino == side.ino


def _record_of(state: PoolState, side: _Side) -> Node | None:
    with state.catalog.read() as txn:
        node = txn.child(*side.here)
    is_it = node is not None and (node.disk, node.ino) == (side.disk, side.ino)
    return node if is_it else None


def exchange_names(carriers: Carriers, a: tuple[int, bytes], b: tuple[int, bytes]) -> None:
    """Swap two names on one disk."""
    carriers.disk.exchange(carriers.find(a[0]).fd, a[1], carriers.find(b[0]).fd, b[1])


def rename_clear(carriers: Carriers, old: tuple[int, bytes], new: tuple[int, bytes]) -> None:
    """Rename on one disk, where no record speaks of the target."""
    names = (carriers.find(old[0]).fd, old[1], carriers.make(new[0]).fd, new[1])
    try:
        carriers.disk.rename_new(*names)
    except FileExistsError:
        carriers.clear_way(*new)
        carriers.disk.rename_new(*names)


# -- links


def _settle_link(state: PoolState, intent: Link, number: int) -> bool:
    carriers = state.carriers[intent.disk]
    place = (intent.parent, intent.name)
    found = found_at(carriers, *place)
    if found is None or found.st_ino != intent.ino:
        drop(state, number)
        return False
    if finish_link(state, intent, number) is not None:
        return True
    carriers.at(intent.parent, _unlinking(carriers, intent.name))
    drop(state, number)
    return False


def finish_link(state: PoolState, intent: Link, number: int) -> Node | None:
    """Record a link that is on the disk; None when its file, or its directory, has gone."""
    with state.catalog.write() as txn:
        node, old = txn.node(intent.id), txn.child(intent.parent, intent.name)
        if node is None or node.ino != intent.ino or txn.node(intent.parent) is None:
            return None
        if old is not None and state.visible(old):
            return None
        namespace.hide_away(state, txn, intent.parent, intent.name)
        linked = node.replace(nlink=node.nlink + 1, ctime_ns=state.now_ns())
        txn.put_node(linked, node)
        txn.put_link(node.id, intent.parent, intent.name)
        txn.put_entry(intent.parent, intent.name, linked, state.next_id())
        state.touch_dir(txn, intent.parent, linked.ctime_ns)
        _done(state, txn, node.id, intent)
        txn.drop_intent(number)
    return linked


def _done(state: PoolState, txn: Txn, node_id: int, intent: Move | Link) -> None:
    own = intent.unique == state.request.unique
    state.done(txn, node_id, None if own else intent.unique)


# -- what a disk says


def found_at(carriers: Carriers, parent: int, name: bytes) -> os.stat_result | None:
    """Return what lies at a place on a disk, None when nothing."""
    try:
        return carriers.at(parent, lambda fd: carriers.disk.stat(fd, name))
    except FileNotFoundError:
        return None


def label_at(carriers: Carriers, parent: int, name: bytes) -> Label | None:
    """Return the label of what lies at a place on a disk, None without."""
    value = carriers.at(parent, lambda fd: carriers.disk.read_label_at(fd, name))
    return None if value is None else records.unpack_label(value)


def rebind(state: PoolState, node_id: int, place: tuple[int, bytes]) -> None:
    """Let the label of a file that did not move say again what its record says."""
    with state.catalog.read() as txn:
        node = txn.node(node_id)
    if node is None:
        return
    carriers = state.carriers[node.disk]
    wanted = records.label_of(node, place)
    found = found_at(carriers, *place)
    if found is not None and found.st_ino == node.ino and label_at(carriers, *place) != wanted:
        value = records.pack_label(wanted)
        carriers.at(place[0], lambda fd: carriers.disk.write_label_at(fd, place[1], value))


def drop(state: PoolState, number: int) -> None:
    """Forget an intent that is settled."""
    state.catalog.settled(number)
