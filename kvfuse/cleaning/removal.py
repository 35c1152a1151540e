"""Removing files that nobody holds: the last step of an eviction, for several files at once.

The caller has condemned them, and silence has passed. Each is looked at again: it is removed only
if its record is still the same, no handle and no mapping has it, and its lease can be claimed. The
records go in one transaction, which leaves chores; the files are unlinked at once, and what the
disk does not let us do stays a chore.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvfuse.core.eviction import Protection
from kvfuse.core.records import BLOCK_BYTES, Node, State
from kvfuse.heart import namespace
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.state import PoolState

audit = logging.getLogger("kvfuse.audit")


class Unit(NamedTuple):
    """Files that go together or not at all, as they were when they were condemned."""

    nodes: tuple[Node, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the files."""
        return tuple(node.id for node in self.nodes)

    @property
    def size_bytes(self) -> int:
        """What they take on their disks."""
        return sum(node.blocks for node in self.nodes) * BLOCK_BYTES


class Removed(NamedTuple):
    """What became of some units: those that went, and why others stayed."""

    gone: list[Unit]
    kept: list[tuple[Unit, Protection]]


class _Unlink(NamedTuple):
    disk: int
    chore: int
    parent: int
    name: bytes
    ino: int


def remove(state: PoolState, units: Sequence[Unit], why: str) -> Removed:
    """Remove those of *units* that may go; *why* is for the audit log.

    Raises:
        OSError: a name stayed locked beyond the deadline, or the catalog takes no more.
    """
    kept: list[tuple[Unit, Protection]] = []
    claimed: list[Unit] = []
    with state.catalog.read() as txn:
        same = {unit.ids: all(is_same(txn.node(n.id), n) for n in unit.nodes) for unit in units}
    for unit in units:
        protection = _protection(state, unit) if same[unit.ids] else Protection.ABSENT
        if protection is None and not state.leases.claim(unit.ids):
            protection = Protection.LEASED
        if protection is None:
            claimed.append(unit)
        else:
            kept.append((unit, protection))
    gone: list[Unit] = []
    try:
        if claimed:
            gone = _forget(state, claimed, why)
    finally:
        for unit in claimed:
            if unit not in gone:
                for node_id in unit.ids:
                    state.leases.unclaim(node_id)
                kept.append((unit, Protection.ABSENT))
    return Removed(gone, kept)


def is_same(now: Node | None, before: Node) -> bool:
    """Whether a record still speaks of the committed file it did, at the same place."""
    return (
        now is not None
        and now.state == State.COMMITTED
        and (now.generation, now.disk, now.ino, now.nlink, now.parent, now.name)
        == (before.generation, before.disk, before.ino, before.nlink, before.parent, before.name)
    )


def _protection(state: PoolState, unit: Unit) -> Protection | None:
    for node in unit.nodes:
        if not state.slots[node.disk].health.writable:
            return Protection.ABSENT
        if is_in_use(state, node):
            return Protection.IN_USE
    return None


def is_in_use(state: PoolState, node: Node) -> bool:
    """Whether a client has the file open or mapped; the kernel of the disk is asked, too."""
    if state.handles.inode(node.id) is not None:
        return True
    if not state.passthrough:
        return False  # then what is mapped is open here
    try:
        with state.on(node.disk) as carriers:
            disk = carriers.disk
            fd, found = carriers.at(
                node.parent, lambda at: disk.open_found(at, node.name, os.O_RDONLY)
            )
            try:
                return found.st_ino == node.ino and not disk.lease_free(fd, for_write=True)
            finally:
                os.close(fd)
    except FileNotFoundError:
        return False  # removed behind our back: so may its record be
    except OSError as exc:
        # Where there are no leases the handles are all that is known.
        return exc.errno not in (errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP)


def _forget(state: PoolState, units: Sequence[Unit], why: str) -> list[Unit]:
    """Drop the records of *units* whose names still hold them, unlink the files."""
    nodes = [node for unit in units for node in unit.nodes]
    with state.catalog.read() as txn:
        links = {node.id: txn.links(node.id) for node in nodes if node.nlink > 1}
    places = {node.id: [(node.parent, node.name), *links.get(node.id, ())] for node in nodes}
    names = [place for found in places.values() for place in found]
    parents = tuple({parent for parent, _ in names})
    gone: list[Unit] = []
    todo: list[_Unlink] = []
    with state.locks.hold(*names, *(("inode", node.id) for node in nodes), shared=parents):
        with state.catalog.write() as txn:
            for unit in units:
                if not all(is_same(txn.node(node.id), node) for node in unit.nodes):
                    continue
                for node in unit.nodes:
                    for parent, name in places[node.id]:
                        now = txn.node(node.id)
                        if now is None or txn.entry(parent, name) is None:
                            continue
                        left, chore = namespace.drop_name(state, txn, parent, name, now)
                        namespace.keep_open(state, txn, left)
                        todo.append(_Unlink(node.disk, chore, parent, name, node.ino))
                gone.append(unit)
            now_ns = state.now_ns()
            for parent in {step.parent for step in todo}:
                state.touch_dir(txn, parent, now_ns)
        for unit in gone:
            for node in unit.nodes:
                audit.info("%s: removed %s, %d bytes", why, _key(state, node), node.size)
        _unlink(state, todo)
    return gone


def _key(state: PoolState, node: Node) -> str:
    try:
        key = state.key(node)
    except OSError:
        key = b"?/" + node.name
    return key.decode(errors="backslashreplace")


def _unlink(state: PoolState, todo: Sequence[_Unlink]) -> None:
    """Do the chores of a removal; the first failure leaves the rest of its disk to the upkeep."""
    done: list[_Unlink] = []
    failed: set[int] = set()
    for step in todo:
        if step.disk in failed:
            continue
        try:
            with state.on(step.disk) as carriers:
                is_done = _unlink_one(carriers, step)
        except (OSError, KeyError):
            failed.add(step.disk)
            continue
        if is_done:
            done.append(step)
        else:
            failed.add(step.disk)
    if done:
        with state.catalog.write() as txn:
            for step in done:
                txn.drop_chore(step.disk, step.chore)
    state.wake(list(failed))


def _unlink_one(carriers: Carriers, step: _Unlink) -> bool:
    disk = carriers.disk

    def act(dir_fd: int) -> bool:
        if disk.stat(dir_fd, step.name).st_ino != step.ino:
            return False
        disk.unlink(dir_fd, step.name)
        return True

    with contextlib.suppress(FileNotFoundError):
        return carriers.at(step.parent, act)
    return True
