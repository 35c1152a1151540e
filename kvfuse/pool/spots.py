"""One name of a disk, looked at again while the pool serves, and mended where nobody has to guess.

Under the lock of the name, and that of its file, nothing changes that a client could cause: what
is different then is wrong.
"""

import os
import time

from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import places_of
from kvfuse.core.records import ROOT_ID, Node
from kvfuse.disks.sighting import Terms
from kvfuse.heart import namespace
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.state import PoolState
from kvfuse.pool.check import Where, judge, look_at_name
from kvfuse.pool.findings import Finding, Kind, Spot
from kvfuse.pool.tables import full
from kvfuse.scan.takein import TakeIn

_AGAIN_S = 0.1
Place = tuple[int, bytes]


class Spots:
    """Names on the disks of one pool."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def confirm(self, spot: Spot, *, repair: bool) -> list[Finding]:
        """Return what is wrong at a place; with *repair* it is mended where it can be.

        Raises:
            OSError: the disk failed, or the name stayed locked.
        """
        place = self._place(spot)
        if place is None:
            found = self._nobodys(spot)
            if found:
                time.sleep(_AGAIN_S)
                found = self._nobodys(spot)
            return found
        with self._state.locks.hold(place, shared=(place[0],)):
            found = self._judge(spot.number, place)
            if not repair or not found:
                return found
            # What is missing is forgotten before what lies there is taken in.
            done = {
                found.kind: self._mend(spot.number, place, found)
                for found in sorted(found, key=lambda each: each.kind != Kind.MISSING)
            }
            left = {(each.kind, each.text) for each in self._judge(spot.number, place)}
        return [
            each if (each.kind, each.text) in left or not done[each.kind] else _mended(each, done)
            for each in found
        ]

    def _place(self, spot: Spot) -> Place | None:
        """Return directory and name, None where no directory of the pool is."""
        *above, name = spot.path.split(b"/")
        with self._state.catalog.read() as txn:
            if spot.dir_id and txn.has_node(spot.dir_id):
                return spot.dir_id, name
            parent = ROOT_ID
            for part in above:
                node = txn.child(parent, part)
                if node is None or not node.is_dir:
                    return None
                parent = node.id
        return parent, name

    def _judge(self, number: int, place: Place) -> list[Finding]:
        state = self._state
        if not self._has_followed(number):
            return []
        with state.on(number) as carriers:
            with state.catalog.read() as txn:
                node = txn.child(*place)
                if any(place in places_of(intent) for _, intent in txn.intents()):
                    return []  # a verb failed there; the upkeep settles it, and says so
            inode = () if node is None else (("inode", node.id),)
            with state.locks.hold(*inode):
                disk = carriers.disk
                try:
                    carrier = carriers.find(place[0])
                    seen = look_at_name(disk, carrier.fd, place[1])
                except (FileNotFoundError, NotADirectoryError):
                    seen = None
                with state.catalog.read() as txn:
                    where = Where(place[0], full(txn, *place).rpartition(b"/")[0])
                    return judge(txn, number, disk, where, place[1], seen)

    def _has_followed(self, number: int) -> bool:
        """Let a disk do what it has still to do; return whether its directories are as recorded.

        One that takes no writes may be behind for as long as it does: that is told by itself.
        """
        if self._state.slots[number].health.writable:
            with self._state.on(number) as carriers:
                carriers.drain()
            return True
        with self._state.catalog.read() as txn:
            return txn.is_settled(number)

    def _nobodys(self, spot: Spot) -> list[Finding]:
        """Look at a name in a directory that is of no record."""
        above, _, name = spot.path.rpartition(b"/")
        if not self._has_followed(spot.number):
            return []
        with self._state.on(spot.number) as carriers:
            try:
                dir_fd = carriers.disk.open_dir(above)
            except (FileNotFoundError, NotADirectoryError):
                return []
            try:
                seen = look_at_name(carriers.disk, dir_fd, name)
            finally:
                os.close(dir_fd)
            with self._state.catalog.read() as txn:
                where = Where(0, above)
                return judge(txn, spot.number, carriers.disk, where, name, seen)

    # -- mending; the lock of the name is held

    def _mend(self, number: int, place: Place, found: Finding) -> str:
        """Do what can be done about a finding; return what that was."""
        if not self._state.slots[number].health.writable:
            return ""
        if found.kind == Kind.MISSING:
            return self._forget(number, place)
        if found.kind == Kind.ORPHAN:
            return self._take_in(number, place)
        if found.kind == Kind.DIFFERENT:
            with self._state.on(number) as carriers:
                return self._tell(carriers, place)
        return ""

    def _forget(self, number: int, place: Place) -> str:
        """Forget a name whose file is gone, and its record with the last one."""
        state = self._state
        with state.catalog.read() as txn:
            node = txn.child(*place)
        if node is None or node.disk != number:
            return ""
        with state.locks.hold(("inode", node.id)), state.catalog.write() as txn:
            node = txn.child(*place)
            if node is None or node.disk != number:
                return ""
            left = namespace.forget_name(txn, *place, node, state.now_ns())
            namespace.keep_open(state, txn, left)
            state.touch_dir(txn, place[0], state.now_ns())
        return "forgotten"

    def _take_in(self, number: int, place: Place) -> str:
        """Take in a file or a carrier as a scan does: of two copies the newer stays."""
        state = self._state
        terms = Terms(
            number=number, adopting=False, stale=False, unsure=[], floor=state.next_id(),
            singly=not state.rules.serve_displaced,
        )  # fmt: skip
        with state.catalog.read() as txn:
            directory = txn.node(place[0])
        if directory is None:
            return ""
        self._know_carrier(directory, number)
        taker = TakeIn(state, terms)
        taker.look(*place)
        if taker.findings.torn:
            return "removed: it was never finished"
        return "removed: an older copy" if taker.findings.stale else "taken in"

    def _know_carrier(self, directory: Node, number: int) -> None:
        bit = records.carrier_bit(number)
        if directory.id != ROOT_ID and not directory.ino & bit:
            with self._state.catalog.write() as txn:
                node = txn.node(directory.id)
                if node is not None:
                    txn.put_node(node.replace(ino=node.ino | bit), node)

    def _tell(self, carriers: Carriers, place: Place) -> str:
        """Let a file or carrier say of itself what its record says, if it is that one."""
        disk, number = carriers.disk, carriers.number
        carrier = carriers.find(place[0])
        seen = look_at_name(disk, carrier.fd, place[1])
        with self._state.catalog.read() as txn:
            node = txn.child(*place)
            is_another = _is_anothers(txn, node, None if seen is None else seen.label)
        if node is None or seen is None or seen.stat is None or is_another:
            return ""
        if node.is_dir:
            self._know_carrier(node, number)
            wanted = records.directory_label(node.id, node.generation)
        elif (node.disk, node.ino, node.size) != (number, seen.stat.st_ino, seen.stat.st_size):
            return ""
        else:
            wanted = records.label_of(node, place, is_linked=seen.stat.st_nlink > 1)
        disk.write_label_at(carrier.fd, place[1], records.pack_label(wanted))
        return "labelled anew"


def _is_anothers(txn: Txn, node: Node | None, label: records.Label | None) -> bool:
    """Whether a label is that of another file or directory there is."""
    return node is not None and label is not None and label.id != node.id and txn.has_node(label.id)


def _mended(finding: Finding, done: dict[Kind, str]) -> Finding:
    return Finding(
        finding.kind, finding.disk, finding.path, finding.text, finding.mend, done[finding.kind]
    )
