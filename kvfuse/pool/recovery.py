"""What a daemon finishes that the one before it began.

No request is under way when this runs. Each intent is decided by inode identity: the
step on the disk happened, or it did not (``settle``). What was being written is torn, and goes. An
intent of a disk that is away waits for it.
"""

import contextlib
import logging

from kvfuse.core import records
from kvfuse.core.intents import Intent, disks_of, places_of
from kvfuse.core.records import Node, State
from kvfuse.disks import durability
from kvfuse.heart import namespace
from kvfuse.heart.settle import found_at, label_at, settle
from kvfuse.heart.state import PoolState
from kvfuse.pool.resume import reopen_lost

_log = logging.getLogger(__name__)


def recover(state: PoolState, *, resume: bool = False) -> None:
    """Finish intents, drop torn files, do the backlogs; a disk that fails is noted and left.

    With *resume* the mount goes on: clients still have files open, and what they write is not torn.
    """
    finish_intents(state)
    if not resume:
        _drop_unsure(state)
        _decide_pending(state)
    for number, carriers in state.carriers.items():
        if state.slots[number].health.writable:
            with contextlib.suppress(OSError), state.on(number):
                carriers.retry()


def finish_intents(state: PoolState, only_disk: int | None = None) -> None:
    """Decide every intent whose disks can be asked, or those of one disk.

    No request may be under way on the disks in question.
    """
    with state.catalog.read() as txn:
        intents = txn.intents()
    for number, intent in intents:
        if only_disk is None or only_disk in disks_of(intent):
            _finish(state, number, intent)


def settle_left(state: PoolState, number: int) -> None:
    """Settle what verbs that failed on a disk have left, while others go on."""
    for said, intent in list(state.left.items()):
        if number in disks_of(intent):
            places = set(places_of(intent))
            with contextlib.suppress(OSError):
                parents = tuple({parent for parent, _ in places})
                with state.locks.hold(*places, shared=parents):
                    _finish(state, said, intent)


def readmit(state: PoolState, number: int) -> None:
    """Take a fenced disk back when no call hangs on it any more.

    Raises:
        OSError: it failed again.
    """
    finish_intents(state, only_disk=number)
    state.carriers[number].retry()
    for file in state.handles.all():
        if file.disk == number and file.fd < 0:
            reopen_lost(state, file)
    state.change_health(number, lambda health, now_s: health.on_unstuck(now_s=now_s))
    state.change_health(number, lambda health, now_s: health.registered(now_s=now_s))


def _finish(state: PoolState, number: int, intent: Intent) -> None:
    if not all(_may_ask(state, disk) for disk in disks_of(intent)):
        return
    try:
        with state.on(intent.disk):
            settle(state, number)
    except OSError as exc:
        _log.warning("disk %s: %s waits: %s", state.slots[intent.disk].path, intent, exc.strerror)
    else:
        state.left.pop(number, None)


def _may_ask(state: PoolState, disk: int) -> bool:
    """Whether a disk is there and takes changes, or is about to be taken back."""
    slot = state.slots.get(disk)
    if slot is None or slot.disk is None:
        return False
    return slot.health.writable or (slot.health.is_stuck and disk not in state.inflight.busy())


def _drop_unsure(state: PoolState) -> None:
    """Forget what may not have reached its disk before the machine went down.

    A disk says itself how far it was synced, and in which boot: one that was away is asked when it
    is back.
    """
    believed = {}
    for number, carriers in state.carriers.items():
        noted = durability.read_synced(carriers.disk)
        if noted is not None and noted.boot_id != durability.boot_id():
            believed[number] = noted.generation
    if not believed:
        return
    with state.catalog.read() as txn:
        unsure = [n for n in txn.nodes() if n.generation > believed.get(n.disk, n.generation)]
    for node in unsure:
        with state.catalog.write() as txn:
            namespace.drop_file(state, txn, node)
    if unsure:
        _log.warning("%d files were not synced when the machine went down: misses", len(unsure))


def _decide_pending(state: PoolState) -> None:
    """Decide about every file that was being written: nobody writes it any more.

    Its label says whether its last writer had closed it, or its first had not begun.
    """
    with state.catalog.read() as txn:
        torn = txn.pending()
    for node_id in torn:
        with state.catalog.read() as txn:
            node = txn.node(node_id)
        if node is None or node.disk not in state.carriers:
            continue  # a disk that is away is asked when it is back
        finished = _as_finished(state, node)
        with state.catalog.write() as txn:
            if finished is None:
                namespace.drop_file(state, txn, node)
            else:
                txn.put_node(finished, node)


def _as_finished(state: PoolState, node: Node) -> Node | None:
    """Return the record of a file that is whole, None when it is torn, or nobody can say."""
    place = (node.parent, node.name)
    try:
        with state.on(node.disk) as carriers:
            found = found_at(carriers, *place)
            if found is None or found.st_ino != node.ino:
                return None
            label = label_at(carriers, *place)
    except OSError:
        return None
    if label is None or label.id != node.id or label.flags & records.LABEL_PENDING:
        return None
    return node.replace(
        state=State.COMMITTED, generation=label.generation,
        access=max(node.access, label.generation), size=found.st_size,
        blocks=found.st_blocks, mtime_ns=found.st_mtime_ns,
    )  # fmt: skip
