"""What a daemon finishes that the one before it began.

No request is under way when this runs. Each intent is decided by inode identity: the
step on the disk happened, or it did not. What was being written is torn, and goes. An intent of a
disk that is away waits for it.
"""

import contextlib
import logging
import os
import stat

from kvfuse import namespace, records
from kvfuse.carriers import Carriers
from kvfuse.intents import Create, Intent, Link, Move, Swap
from kvfuse.records import State
from kvfuse.renames import exchange_on_disks, move_name, replace_target, swap_names
from kvfuse.resume import reopen_lost
from kvfuse.state import PoolState

_log = logging.getLogger(__name__)


def recover(state: PoolState, *, resume: bool = False) -> None:
    """Finish intents, drop torn files, do the backlogs; a disk that fails is noted and left.

    With *resume* the mount goes on: clients still have files open, and what they write is not torn.
    """
    finish_intents(state)
    if not resume:
        _drop_torn(state)
    for number, carriers in state.carriers.items():
        if state.slots[number].health.writable:
            with contextlib.suppress(OSError), state.on(number):
                carriers.drain()


def finish_intents(state: PoolState, only_disk: int | None = None) -> None:
    """Decide every intent whose disks can be asked, or those of one disk.

    No request may be under way on the disks in question.
    """
    with state.catalog.read() as txn:
        intents = txn.intents()
    for number, intent in intents:
        if only_disk is None or only_disk in _disks_of(intent):
            _finish(state, number, intent)


def readmit(state: PoolState, number: int) -> None:
    """Take a fenced disk back when no call hangs on it any more.

    Raises:
        OSError: it failed again.
    """
    finish_intents(state, only_disk=number)
    state.carriers[number].drain()
    for file in state.handles.all():
        if file.disk == number and file.fd < 0:
            reopen_lost(state, file)
    state.change_health(number, lambda health, now_s: health.on_unstuck(now_s=now_s))
    state.change_health(number, lambda health, now_s: health.registered(now_s=now_s))


def _disks_of(intent: Intent) -> set[int]:
    return {intent.disk, intent.other_disk} if isinstance(intent, Swap) else {intent.disk}


def _finish(state: PoolState, number: int, intent: Intent) -> None:
    if not all(_may_ask(state, disk) for disk in _disks_of(intent)):
        return
    carriers = state.carriers[intent.disk]
    try:
        with state.on(intent.disk):
            match intent:
                case Create():
                    _finish_create(carriers, intent)
                case Move():
                    _finish_move(state, carriers, intent, number)
                case Swap():
                    _finish_swap(state, carriers, intent, number)
                case Link():
                    _finish_link(state, carriers, intent, number)
    except OSError as exc:
        _log.warning("disk %s: %s waits: %s", state.slots[intent.disk].path, intent, exc.strerror)
        return
    with state.catalog.write() as txn:
        txn.drop_intent(number)


def _may_ask(state: PoolState, disk: int) -> bool:
    """Whether a disk is there and takes changes, or is about to be taken back."""
    slot = state.slots.get(disk)
    if slot is None or slot.disk is None:
        return False
    return slot.health.writable or (slot.health.is_stuck and disk not in state.inflight.busy())


def _found(carriers: Carriers, parent: int, name: bytes) -> os.stat_result | None:
    try:
        return carriers.at(parent, lambda fd: carriers.disk.stat(fd, name))
    except FileNotFoundError:
        return None


def _finish_create(carriers: Carriers, intent: Create) -> None:
    """Remove what a creation left: never recorded, so nobody saw it."""
    disk = carriers.disk
    found = _found(carriers, intent.parent, intent.name)
    if found is None:
        return
    value = carriers.at(intent.parent, lambda fd: disk.read_label_at(fd, intent.name))
    label = None if value is None else records.unpack_label(value)
    # Between its creation and its label it is empty, or a symlink.
    ours = label.id == intent.id if label is not None else (
        found.st_size == 0 or stat.S_ISLNK(found.st_mode)
    )  # fmt: skip
    if ours and not stat.S_ISDIR(found.st_mode):
        carriers.at(intent.parent, lambda fd: disk.unlink(fd, intent.name))


def _finish_move(state: PoolState, carriers: Carriers, intent: Move, number: int) -> None:
    found = _found(carriers, intent.new_parent, intent.new_name)
    if found is None or found.st_ino != intent.ino:
        return
    value = carriers.at(
        intent.new_parent, lambda fd: carriers.disk.read_label_at(fd, intent.new_name)
    )
    label = None if value is None else records.unpack_label(value)
    pending = label is not None and bool(label.flags & records.LABEL_PENDING)
    with state.catalog.write() as txn:
        source = txn.node(intent.id)
        entry = txn.entry(intent.parent, intent.name)
        if source is None or entry is None:
            return
        losers = replace_target(state, txn, intent)
        for loser, _ in losers:
            namespace.keep_open(state, txn, loser)
            if loser.nlink == 0:
                state.handles.orphan(loser)
        moved = move_name(txn, source, entry[1], intent)
        moved = moved._replace(
            size=found.st_size, blocks=found.st_blocks, mtime_ns=found.st_mtime_ns,
            generation=intent.generation, state=State.PENDING if pending else State.COMMITTED,
        )  # fmt: skip
        txn.put_node(moved, source)
        state.done(txn, 0, intent.unique)
        txn.drop_intent(number)


def _finish_swap(state: PoolState, carriers: Carriers, intent: Swap, number: int) -> None:
    other = state.carriers[intent.other_disk]
    there = _found(carriers, intent.other_parent, intent.other_name)
    here = _found(other, intent.parent, intent.name)
    began = (there is not None and there.st_ino == intent.ino) or (
        here is not None and here.st_ino == intent.other_ino
    )
    if not began:
        return
    exchange_on_disks(carriers, other, intent)
    with state.catalog.write() as txn:
        swap_names(
            state, txn, (intent.parent, intent.name), (intent.other_parent, intent.other_name)
        )
        state.done(txn, 0, intent.unique)
        txn.drop_intent(number)


def _finish_link(state: PoolState, carriers: Carriers, intent: Link, number: int) -> None:
    found = _found(carriers, intent.parent, intent.name)
    if found is None or found.st_ino != intent.ino:
        return
    with state.catalog.write() as txn:
        node = txn.node(intent.id)
        if node is None or txn.entry(intent.parent, intent.name) is not None:
            return
        linked = node._replace(nlink=node.nlink + 1)
        txn.put_node(linked, node)
        txn.put_link(node.id, intent.parent, intent.name)
        txn.put_entry(intent.parent, intent.name, linked, state.next_id())
        state.done(txn, node.id, intent.unique)
        txn.drop_intent(number)


def _drop_torn(state: PoolState) -> None:
    """Forget every file that was being written: its writer is gone."""
    with state.catalog.read() as txn:
        torn = txn.pending()
    for node_id in torn:
        with state.catalog.write() as txn:
            node = txn.node(node_id)
            if node is not None:
                namespace.drop_file(state, txn, node)
