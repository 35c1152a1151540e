"""Serving while disks are still being read: what a verb asks for is taken in first.

Until all disks were read the catalog does not know every name. So before a verb believes that
nothing is at a name, every usable disk on which the directory was not read yet is asked for that
name; before it believes a listing, the directory is read on all of them. After that the catalog is
right about this name, or this directory: every later change goes through it.

Concurrency: any thread may ask; verbs do so before they take their locks.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import asdict
from typing import Any

import msgspec

from kvfuse.catalog.todo import add_todo, forget, is_todo, mark_scanned, note_gone, scanned, todo
from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.records import ROOT_ID, Node
from kvfuse.disks import durability
from kvfuse.disks.disk import Disk
from kvfuse.disks.sighting import Haul, Reader, Terms
from kvfuse.heart.state import PoolState
from kvfuse.scan.bringup import How, put_scans, scans
from kvfuse.scan.hints import open_hints
from kvfuse.scan.takein import Findings, TakeIn

_log = logging.getLogger(__name__)
_ASKED_LATELY_S = 0.05
_URGENT_MAX = 1024  # directories to be read first, of each disk
_ASKED_MAX = 8192  # names remembered as asked for
_HAUL = 128  # records a transaction: well below a millisecond
_SMALL_BYTES = 64 << 10  # of a directory, as stat tells: some thousand names at most
_META = b"scan:%d"
_RETRIES = 5  # of a directory that moves whenever it is about to be read


class _Scan(msgspec.Struct, array_like=True):
    """The scan of a disk as the catalog remembers it; *seconds* when it was done, else 0."""

    terms: Terms
    findings: dict[str, int] = {}
    seconds: float = 0.0


class Arrivals:
    """The disks of a pool that are being read, and what was found on them."""

    def __init__(self, state: PoolState) -> None:
        """Begin, or go on, to read the disks that the catalog says have to be read.

        Publishes itself in *state* until all are done.
        """
        self._state = state
        self._mutex = threading.Lock()
        self._asked: dict[tuple[int, bytes], None] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self.takers: dict[int, TakeIn] = {}  # of disks still to be read
        self.found: dict[int, Findings] = {}
        self._asked_s = 0.0
        self._urgent: dict[int, dict[int, None]] = {}
        self.began_s = time.monotonic()
        self.seconds = 0.0
        self._expected: dict[int, int] = {}
        with state.catalog.write() as txn:
            wanted = scans(txn)
            hints = open_hints(state.catalog.path) if wanted else None
            for number, slot in state.slots.items():
                scan = _noted(txn, number)
                how = wanted.get(slot.disk_id)
                if how is not None and slot.disk is not None:
                    if scan is None or scan.seconds:
                        scan = _Scan(self._terms(slot.disk, number, how))
                        self._note(txn, number, scan)
                        add_todo(txn, number, ROOT_ID)
                    self.takers[number] = taker = TakeIn(state, scan.terms, hints)
                    self.found[number] = taker.findings = Findings(**scan.findings)
                    self._expected[number] = _inodes_used(slot.disk)
        if self.takers:
            state.catalog.floor = max(taker.terms.floor for taker in self.takers.values())
            state.unsure = {n: t.terms.unsure for n, t in self.takers.items()}
            state.arriving = self

    def _terms(self, disk: Disk, number: int, how: How) -> Terms:
        floor = self._state.next_id()
        return Terms(
            number=number,
            adopting=how is How.ADOPT,
            stale=how is How.STALE,
            unsure=durability.unsure(disk, floor),
            floor=floor,
            singly=not self._state.rules.serve_displaced,
        )

    def _note(self, txn: Txn, number: int, scan: _Scan) -> None:
        txn.put_meta(_META % number, msgspec.msgpack.encode(scan))

    @property
    def is_complete(self) -> bool:
        """Whether every disk that can be read was."""
        return not self.takers

    def summary(self) -> dict[str, Any]:
        """Return the JSON-ready progress."""
        seconds = self.seconds if self.is_complete else time.monotonic() - self.began_s
        disks = {}
        for number, findings in self.found.items():
            state = "scanning" if number in self.takers else "complete"
            disks[self._state.slots[number].disk_id] = {"state": state, **asdict(findings)}
        return {
            "state": "complete" if self.is_complete else "scanning",
            "files": sum(findings.files for findings in self.found.values()),
            "share": None if (share := self._share()) is None else round(share, 4),
            "seconds": round(seconds, 3),
            "disks": disks,
        }

    def _share(self) -> float | None:
        """Return about how much of all was read, 0 to 1; None where the disks do not count files.

        A disk has as many inodes in use as there are files, directories and what is not the pool's.
        """
        if self.is_complete:
            return 1.0
        if not all(self._expected.values()):
            return None
        shares = [
            min(0.99, findings.seen / self._expected[number]) if number in self.takers else 1.0
            for number, findings in self.found.items()
        ]
        weights = [self._expected[number] for number in self.found]
        done = sum(share * weight for share, weight in zip(shares, weights, strict=True))
        return done / sum(weights)

    def save(self) -> None:
        """Note what was found so far: the next daemon goes on counting."""
        with self._state.catalog.write() as txn:
            for number, taker in self.takers.items():
                self._note(txn, number, _Scan(taker.terms, asdict(taker.findings)))

    # -- what verbs ask for

    def name(self, parent: int, name: bytes, *, changes: bool = False) -> None:
        """Make the catalog right about one name; with *changes* the caller will change it."""
        place = (parent, name)
        if place in self._asked and not changes:
            return
        self._asked_s = time.monotonic()
        numbers, directory = self._unread(parent)
        if numbers and directory is not None and place not in self._asked:
            if parent != ROOT_ID:
                self.name(directory.parent, directory.name)
            self._ask(place, numbers)
        if changes and any(not self._can_ask(number) for number in tuple(self.takers)):
            with self._state.catalog.write() as txn:
                note_gone(txn, place)

    def directory(self, dir_id: int) -> None:
        """Make the catalog right about all names in a directory."""
        self._asked_s = time.monotonic()
        numbers, directory = self._unread(dir_id)
        if numbers and directory is not None and dir_id != ROOT_ID:
            self.name(directory.parent, directory.name)
        for number in sorted(numbers, key=self._is_doubtful):
            with contextlib.suppress(OSError):  # noted in the disk's health
                self.read(number, dir_id)

    def is_asked(self) -> bool:
        """Whether verbs have lately had to ask: then reading must leave them the machine."""
        return time.monotonic() - self._asked_s < _ASKED_LATELY_S

    def _unread(self, dir_id: int) -> tuple[list[int], Node | None]:
        """Return the usable disks a directory was not read on, and its record."""
        with self._state.catalog.read() as txn:
            node = txn.node(dir_id)
            mask = scanned(txn, dir_id)
        if node is None:
            return [], None
        numbers = [
            number
            for number, taker in tuple(self.takers.items())
            # What is in a directory made since the scan began was made since, too.
            if dir_id < taker.terms.floor
            and self._can_ask(number)
            and not mask & records.carrier_bit(number)
        ]
        return numbers, node

    def _can_ask(self, number: int) -> bool:
        slot = self._state.slots[number]
        return slot.disk is not None and slot.health.readable

    def _is_doubtful(self, number: int) -> bool:
        """Sorts disks: what the others say of a directory holds for one that is not believed."""
        taker = self.takers.get(number)
        return taker is not None and taker.terms.stale

    def _ask(self, place: tuple[int, bytes], numbers: list[int]) -> None:
        with self._state.catalog.read() as txn:
            directory = txn.node(place[0])
        if directory is None:
            return
        try:
            # A disk has nothing there, or all changes of it since have gone through the catalog.
            there = [number for number in numbers if self._has(number, directory, place[1])]
            if there:
                with self._state.locks.hold(place, shared=(place[0],)):
                    for number in sorted(there, key=self._is_doubtful):
                        taker = self.takers.get(number)
                        if taker is not None:  # else read to its end meanwhile
                            taker.look(*place)
        except OSError:
            return  # noted in the disk's health; asked again as long as it is read
        with self._mutex:
            if len(self._asked) >= _ASKED_MAX:
                self._asked.clear()
            self._asked[place] = None
            for number in numbers:
                urgent = self._urgent.setdefault(number, {})
                if len(urgent) < _URGENT_MAX:
                    urgent[place[0]] = None

    def _has(self, number: int, directory: Node, name: bytes) -> bool:
        """Whether a disk has anything at a name."""
        if directory.id != ROOT_ID and not directory.ino & records.carrier_bit(number):
            return False
        with self._state.on(number) as carriers:
            try:
                carriers.disk.stat(carriers.find(directory.id).fd, name)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    # -- reading

    def read(self, number: int, dir_id: int) -> None:
        """Read one directory on a disk, here and now.

        Raises:
            OSError: the disk failed.
        """
        taker = self.takers.get(number)
        if taker is None:
            return
        with self._state.catalog.read() as txn:
            node = txn.node(dir_id)
        bit = records.carrier_bit(number)
        if node is None or not (dir_id == ROOT_ID or node.ino & bit):
            with self._state.catalog.write() as txn:
                mark_scanned(txn, number, [dir_id])
            return
        try:
            with self._state.on(number) as carriers:
                carrier = carriers.find(dir_id)
                fd = os.open(f"/proc/self/fd/{carrier.fd}", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    reader = Reader(carriers.disk, taker.terms, taker.haul, _HAUL)
                    reader.directory(dir_id, fd)
                    lost, reader.haul.lost = reader.haul.lost, []
                    reader.flush()
                finally:
                    os.close(fd)
        except FileNotFoundError:
            lost = [(dir_id, errno.ENOENT)]
        self._give_up(taker, lost)

    def take(self, number: int, haul: Haul) -> None:
        """Take in what a steward read.

        Raises:
            OSError: the disk failed, or the catalog takes no more.
        """
        taker = self.takers.get(number)
        if taker is not None:
            taker.haul(haul)
            self._give_up(taker, haul.lost, retries=_RETRIES)

    def _give_up(self, taker: TakeIn, lost: list[tuple[int, int]], *, retries: int = 0) -> None:
        """Directories could not be read: one that moved is tried again, then done with."""
        number = taker.terms.number
        for dir_id, code in lost:
            tries = self._lost.get((number, dir_id), 0) + 1
            self._lost[number, dir_id] = tries
            if code in (errno.ENOENT, errno.ESTALE) and tries <= retries:
                continue
            if code not in (errno.ENOENT, errno.ESTALE):
                taker.findings.unreadable += 1
                with self._state.catalog.read() as txn:
                    path = txn.path(dir_id)
                _log.warning(
                    "disk %s: %r cannot be read: %s",
                    self._state.slots[number].path, path, os.strerror(code),
                )  # fmt: skip
            with self._state.catalog.write() as txn:
                mark_scanned(txn, number, [dir_id])

    def urgent(self, number: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (id, path) of directories on a disk that verbs had to ask for, once each."""
        with self._mutex:
            asked = self._urgent.get(number, {})
            dir_ids = [asked_id for asked_id, _ in zip(list(asked), range(limit), strict=False)]
            for dir_id in dir_ids:
                del asked[dir_id]
        found: list[tuple[int, bytes]] = []
        with self._state.catalog.read() as txn:
            for dir_id in dir_ids:
                path = txn.path(dir_id)
                if path is not None and is_todo(txn, number, dir_id):
                    found.append((dir_id, path))
        return found

    def work(self, number: int, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (id, path) of directories still to be read on a disk, with ids above *after*."""
        while True:
            with self._state.catalog.read() as txn:
                paths = {dir_id: txn.path(dir_id) for dir_id in todo(txn, number, after, limit)}
            found = [(dir_id, path) for dir_id, path in paths.items() if path is not None]
            if len(found) < len(paths):  # removed since it was found
                with self._state.catalog.write() as txn:
                    mark_scanned(txn, number, [i for i, path in paths.items() if path is None])
            if found or not paths:
                return found

    def read_for(self, number: int, budget_s: float) -> bool:
        """Read a disk in this thread for about *budget_s*; return whether it is done.

        Raises:
            OSError: the disk failed.
        """
        until_s = time.monotonic() + budget_s
        while time.monotonic() < until_s:
            found = self.work(number, 0, 1)
            if not found:
                self.finish(number)
                return True
            if not self._is_small(number, found[0][0]):
                break
            self.read(number, found[0][0])
        return False

    def _is_small(self, number: int, dir_id: int) -> bool:
        with self._state.on(number) as carriers, contextlib.suppress(FileNotFoundError):
            return carriers.disk.fstat(carriers.find(dir_id).fd).st_size <= _SMALL_BYTES
        return True

    def finish(self, number: int) -> None:
        """A disk was read to its end."""
        with self._mutex:
            taker = self.takers.get(number)
            if taker is None:
                return
            seconds = time.monotonic() - self.began_s
            is_last = len(self.takers) == 1
            slot = self._state.slots[number]
            with self._state.catalog.write() as txn:
                self._note(txn, number, _Scan(taker.terms, asdict(taker.findings), seconds))
                wanted = scans(txn)
                wanted.pop(slot.disk_id, None)
                put_scans(txn, wanted)
                if is_last:
                    forget(txn)
                    # Here: the next writer would note once more what it drops.
                    self._state.catalog.floor = 0
            if slot.disk is not None:
                with contextlib.suppress(OSError):  # it is gone through once more then
                    durability.trust(slot.disk)
            del self.takers[number]
            self._state.unsure.pop(number, None)
            _log.info("disk %s: read in %.1f s: %s", slot.path, seconds, taker.findings)
            if is_last:
                self.seconds = seconds
                self._state.arriving = None


def _inodes_used(disk: Disk) -> int:
    """Return how many inodes of a disk are in use, 0 where nobody can tell."""
    try:
        space = disk.space()
    except OSError:
        return 0
    return max(0, space.inodes_total - space.inodes_free)


def _noted(txn: Txn, number: int) -> _Scan | None:
    value = txn.meta(_META % number)
    return None if value is None else msgspec.msgpack.decode(value, type=_Scan)
