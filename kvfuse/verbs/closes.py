"""The last close of a file that was written: label and record say that it is whole.

A new file with a temp name is about to be renamed, and the rename writes both anyway. Its close
leaves that to the rename; if none comes for a moment, to the upkeep. Until then it is pending for a
daemon that finds it after a crash, as it was while it was written: a temp nobody will rename.

Concurrency: any thread; a file is settled under the lock of its inode.
"""

import os
import time
from collections.abc import Callable

from kvfuse.core import records
from kvfuse.core.records import BLOCK_BYTES, Node, State
from kvfuse.core.routing import is_temp
from kvfuse.disks.disk import Disk
from kvfuse.heart.handles import OpenFile
from kvfuse.heart.state import PoolState

PUT_OFF_S = 1.0  # a rename comes within microseconds of the close, or not at all
PUT_OFF_MAX = 4096


class Closes:
    """The last closes of files of one pool; *open_node* opens one to read, None if it is lost."""

    def __init__(self, state: PoolState, open_node: Callable[[Node], int | None]) -> None:
        self._state = state
        self._open_node = open_node
        # What the disk said of files whose last close is not recorded.
        self._unsettled: dict[int, os.stat_result] = {}
        # By disk: ids, the oldest first, and when they were closed (monotonic).
        self._put_off: dict[int, dict[int, float]] = {number: {} for number in state.carriers}

    def found(self, node_id: int) -> os.stat_result | None:
        """Return what the disk said of a file at its last close, where the record does not yet."""
        return self._unsettled.get(node_id)

    def last(self, file: OpenFile) -> None:
        """The last writer of a file is about to go; the caller holds its inode's lock."""
        state = self._state
        inode = state.handles.inode(file.id)
        if inode is None or inode.writers != 1 or inode.node is not None or file.fd < 0:
            return
        with state.on(file.disk):
            with state.catalog.read() as txn:
                node = txn.node(file.id)
            if node is None:
                return
            is_new_temp = not node.access and is_temp(node.name, patterns=state.rules.temp_patterns)
            if is_new_temp and len(self._put_off[node.disk]) < PUT_OFF_MAX:
                found = os.fstat(file.fd)
                self._unsettled[node.id] = found
                self.put_off(node)
                state.reservations.finished(node.id, found.st_blocks * BLOCK_BYTES)
            else:
                self.settle(node, file.fd)

    def settle(self, node: Node, fd: int) -> None:
        """Take a pending file without writers as complete; the caller holds its inode's lock."""
        state = self._state
        node_id = node.id
        found = os.fstat(fd)
        generation = state.generation(node.generation)
        done = with_stat(node, found).replace(state=State.COMMITTED, generation=generation)
        # Until it is recorded it is served as it is; the next mount asks its label.
        self._unsettled[node_id] = found
        write_label(state.disk(node.disk), fd, done)
        with state.catalog.write() as txn:
            now = txn.node(node_id)
            if now is not None:
                place = state.place(now, generation)
                # From *now*: an exchange may have given it another name meanwhile.
                done = with_stat(now, found).replace(state=State.COMMITTED, generation=generation)
                txn.put_node(done.replace(access=place), now)
        self._unsettled.pop(node_id, None)
        state.reservations.finished(node_id, found.st_blocks * BLOCK_BYTES)
        if not node.access:
            state.leases.committed(node_id)
        state.learn_size((node.parent, node.name), found.st_size)

    # -- what was left to the rename

    def put_off(self, node: Node) -> None:
        """A file is pending and has no writer: settle it soon. One on a disk that is away waits."""
        if node.disk in self._put_off:
            self._put_off[node.disk][node.id] = time.monotonic()

    def is_settled(self, node: Node) -> None:
        """The file has been settled by a rename, or is written again."""
        self._put_off[node.disk].pop(node.id, None)
        self._unsettled.pop(node.id, None)

    def now(self, node: Node) -> Node:
        """Return the record of a file; settled now, if that was put off."""
        waiting = self._put_off.get(node.disk)
        if waiting is None or waiting.pop(node.id, None) is None:
            return node
        self._settle_unopened(node.id)
        with self._state.catalog.read() as txn:
            return txn.node(node.id) or node

    def tidy(self, number: int, now_s: float) -> None:
        """Settle what was closed on a disk a moment before *now_s*, and not renamed since.

        Waits for that disk: for a thread of its own. A disk that takes no changes is left alone.
        """
        waiting = self._put_off[number]
        for node_id, closed_s in list(waiting.items()):
            if closed_s > now_s - PUT_OFF_S or not self._state.slots[number].health.writable:
                return
            waiting.pop(node_id, None)
            try:
                self._settle_unopened(node_id)
            except OSError:  # its disk has noted it; tried again
                waiting[node_id] = time.monotonic()

    def _settle_unopened(self, node_id: int) -> None:
        """Settle a file that is pending and has no writer."""
        state = self._state
        with state.locks.hold(("inode", node_id)):
            inode = state.handles.inode(node_id)
            with state.catalog.read() as txn:
                node = txn.node(node_id)
            if node is None or node.state != State.PENDING:
                self._unsettled.pop(node_id, None)
                return
            if inode is not None and inode.writers:
                return
            fd = self._open_node(node)
            if fd is not None:
                try:
                    with state.on(node.disk):
                        self.settle(node, fd)
                finally:
                    os.close(fd)


def write_label(disk: Disk, fd: int, node: Node) -> None:
    """Let the label of an open file say what its record says."""
    disk.write_label(fd, records.pack_label(records.label_of(node, (node.parent, node.name))))


def with_stat(node: Node, found: os.stat_result) -> Node:
    """Return a record with size and times as the disk said."""
    return node.replace(
        size=found.st_size,
        blocks=found.st_blocks,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=max(node.ctime_ns, found.st_ctime_ns),
    )
