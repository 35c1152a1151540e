"""What all verbs of the pool share: catalog, disks, locks, open files, clocks and numbers.

Concurrency: everything here may be used by any thread. Lock order: names, then inode, then the
catalog's writer; a disk's carrier mutex is taken with names or inode held, never the reverse.
"""

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.numbers import Numbers
from kvfuse.catalog.todo import Arriving
from kvfuse.catalog.transaction import Txn
from kvfuse.core import eviction, placement, records
from kvfuse.core.admission import Kind, kind_of
from kvfuse.core.health import Health, fault_of
from kvfuse.core.intents import Intent, disks_of
from kvfuse.core.records import Node
from kvfuse.core.routing import routing_name
from kvfuse.core.topology import Topology
from kvfuse.disks import durability
from kvfuse.disks.disk import Disk
from kvfuse.disks.diskset import Slot
from kvfuse.heart.accesses import Accesses
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.handles import Handles
from kvfuse.heart.handletable import HandleTable
from kvfuse.heart.inflight import Inflight
from kvfuse.heart.locks import KeyedLocks
from kvfuse.heart.rules import Rules
from kvfuse.space.ghosts import Ghosts
from kvfuse.space.leases import Leases
from kvfuse.space.reservations import Reservations
from kvfuse.space.room import Rooms

_log = logging.getLogger(__name__)

_PATHS_MAX = 65536
_CHORES_FEW = 16  # a backlog that nobody who changes directories has to help with
_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the time module does not name it


class Keeper(Protocol):
    """Whoever keeps descriptors for the next server, and has those of the one before in *fds*."""

    fds: Mapping[str, int]

    def keep(self, name: str, fd: int) -> None:
        """Keep a duplicate of *fd*; best effort."""
        ...

    def drop(self, name: str) -> None:
        """Close what is kept under *name*, if anything is."""
        ...


@dataclass(frozen=True, slots=True)
class Outliving:
    """What of this process the next server finds: its open files, and where its threads are."""

    table: HandleTable
    inflight: Path


class PoolState:
    """The shared state of one mounted pool."""

    def __init__(
        self,
        catalog: Catalog,
        slots: Sequence[Slot],
        topology: Topology,
        rules: Rules,
        *,
        carriers_max: int = 2048,
        outliving: Outliving | None = None,
    ) -> None:
        self.catalog = catalog
        self.slots = {slot.number: slot for slot in slots}
        self._by_id = {slot.disk_id: slot for slot in slots}
        self.pool_id = topology.pool_id
        self.members = topology.members
        self.rules = rules
        self.locks = KeyedLocks(timeout_s=rules.op_timeout_s)
        self.handles = Handles(None if outliving is None else outliving.table)
        self.carriers = {
            slot.number: Carriers(
                slot.number, slot.disk, catalog, cached_max=carriers_max,
                timeout_s=rules.op_timeout_s,
            )
            for slot in slots
            if slot.disk is not None
        }  # fmt: skip
        self.arriving: Arriving | None = None  # while disks are being read
        self.unsure: dict[int, list[tuple[int, int]]] = {}  # see durability.sync
        self.keeper: Keeper | None = None
        self.passthrough = False  # the kernel holds the files it has open on the disks itself
        self.visibility_changed: Callable[[], object] = lambda: None  # all files of a disk at once
        self.data_in_kernel = False  # passthrough: writes are seen only by asking the disk
        self.work = {number: threading.Event() for number in self.carriers}  # backlog to look at
        self.inflight = Inflight(None if outliving is None else outliving.inflight)
        self.stuck_pids: list[int] = []  # servers of before that have not died yet
        self.request = Request()
        with catalog.read() as txn:
            done = txn.results()
        self.results = {unique: node_id for _, unique, node_id in done}
        self._result_numbers = itertools.count(max((r[0] for r in done), default=-1) + 1)
        self.left: dict[int, Intent] = {}  # intents of verbs that failed, not settled yet
        self._paths: dict[int, bytes] = {}
        self._health_mutex = threading.Lock()
        self._room: dict[int, int] = {}  # bytes for new files by disk, as last measured
        self._capacities: dict[int, int] = {}  # these, and what the pool had there then
        self.reservations = Reservations()
        self.numbers = Numbers(catalog)
        self.order = eviction.POLICIES[rules.eviction]
        self.ghosts = Ghosts()
        self.accesses = Accesses(catalog, self.numbers, self.order)
        self.leases = Leases(rules.lease_ttl_s)
        self.rooms = Rooms(self.reservations, rules.reserve_bytes, rules.watermarks)
        # Have the kernel forget (disk, parent, name); then call back. None: nobody can.
        self.expire: Callable[[int, int, bytes, Callable[[], None]], None] | None = None
        self.next_id = self.numbers.next_id
        self.generation = self.numbers.generation

    @staticmethod
    def now_ns() -> int:
        """Return the time for file times: the clock the kernel's filesystems use."""
        return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)

    # -- disks

    def visible(self, node: Node) -> bool:
        """Whether clients see *node*: what is stale, or lies on an unusable disk, is a miss."""
        if node.disk == records.NO_DISK:
            return True
        if node.is_stale:
            return False
        slot = self.slots.get(node.disk)
        return slot is not None and slot.disk is not None and slot.health.readable

    def on(self, number: int) -> "Touch":
        """Return a context manager for work on a disk, which learns from its errors."""
        return Touch(self, number)

    def disk(self, number: int) -> Disk:
        """Return the disk; ESTALE when it is not there."""
        slot = self.slots.get(number)
        if slot is None or slot.disk is None or not slot.health.readable:
            raise OSError(errno.ESTALE, "the disk of the file is not usable")
        return slot.disk

    def check_writable(self, number: int) -> None:
        """Raise EROFS, or EIO, when a change on the disk would be refused."""
        slot = self.slots.get(number)
        if slot is None or slot.disk is None or not slot.health.readable:
            raise OSError(errno.EIO, "the disk of the file is not usable")
        if not slot.health.writable:
            raise OSError(errno.EROFS, f"disk {slot.path}: read-only")

    def note_error(self, number: int, code: int) -> None:
        """Let the health of a disk learn from an errno."""
        if self.slots[number].health.is_stuck:
            return  # what a call brings back late is not believed; a scan decides
        self.change_health(number, lambda health, now_s: health.on_error(code, now_s=now_s))

    def note_timeout(self, number: int, thread: int | None = None) -> None:
        """A request on the disk outlived its deadline: it is fenced until no call hangs on it.

        *thread*, by its native id, is who works on the request: it may be at another disk by now,
        or wait for a lock, which is no disk's fault.
        """
        if thread is not None:
            asked = self.inflight.disk_of(thread)
            if asked is None:
                return
            number = asked
        self.change_health(number, lambda health, now_s: health.on_timeout(now_s=now_s))
        self.wake([number])

    def change_health(self, number: int, change: Callable[[Health, float], Health]) -> None:
        """Set the health of a disk to ``change(health, now)``, and log a new state once."""
        slot = self.slots[number]
        with self._health_mutex:
            before = slot.health
            slot.health = change(before, time.monotonic())
        if slot.health.readable is not before.readable:
            self.visibility_changed()
        if slot.health.state is not before.state:
            _log.warning(
                "disk %s: %s -> %s (%s)",
                slot.path, before.state, slot.health.state, slot.health.reason,
            )  # fmt: skip

    def arrive(self, *places: tuple[int, bytes]) -> None:
        """Make the catalog right about names that the caller is going to change."""
        if self.arriving is not None:
            for place in places:
                arriving = self.arriving
                if arriving is not None:
                    arriving.name(*place, changes=True)

    def arrive_all(self, dir_id: int) -> None:
        """Make the catalog right about all names in a directory."""
        arriving = self.arriving
        if arriving is not None:
            arriving.directory(dir_id)

    def sync(self, number: int, generation: int) -> None:
        """Make a disk durable up to *generation*, and note on it that it is.

        But for files that were there before, while they have not been looked at.
        """
        unsure = self.unsure.get(number, ())
        durability.sync(self.carriers[number].disk, generation, unsure)

    # -- placement

    def candidates(
        self, parent: int, name: bytes, *, promise: bool = False, even_full: bool = False
    ) -> list[int]:
        """Return the numbers of the disks a new file may go to, best first.

        With *promise* the first one will be first as well when the file is made; with *even_full*
        those are among them where room has to be made first.
        """
        if self.rules.policy.has_owners:
            ranked = placement.candidates(
                self._routing_name(parent, name), self.members, self.rules.policy
            )
        else:
            ranked = self._least_used((parent, name))
        slots = (self._by_id.get(disk_id) for disk_id in ranked)
        able = [slot for slot in slots if slot is not None and slot.disk and slot.health.writable]
        # As last measured by the upkeep: a placement must not wait for a disk.
        found = [
            s.number
            for s in able
            if (self._room.get(s.number, 1) > 0 and s.health.schedulable)
            or (even_full and s.health.takes_files)
        ]
        if promise and found and not self.rules.policy.has_owners:
            self.reservations.promise((parent, name), found[0])
        return found

    def owner(self, parent: int, name: bytes) -> str | None:
        """Return the id of the disk that owns a name, usable or not; None where names have none."""
        if not self.rules.policy.has_owners:
            return None
        routing = self._routing_name(parent, name)
        ranked = placement.candidates(routing, self.members, self.rules.policy)
        return ranked[0] if ranked else None

    def learn_size(self, place: tuple[int, bytes], size_bytes: int) -> None:
        """Remember for estimates how large the finished file at *place* is."""
        with contextlib.suppress(OSError):  # its directory has gone meanwhile
            self.reservations.learn(self.kind(*place), size_bytes)

    def kind(self, parent: int, name: bytes) -> Kind:
        """Return which files the one at a name will be as large as."""
        return kind_of(self.path(parent), name, patterns=self.rules.temp_patterns)

    def _routing_name(self, parent: int, name: bytes) -> bytes:
        path = self.path(parent)
        return routing_name(
            path + b"/" + name if path else name,
            temp_dirs=self.rules.temp_dirs,
            patterns=self.rules.temp_patterns,
        )

    def _least_used(self, place: tuple[int, bytes]) -> tuple[str, ...]:
        """Return the disks there are, least used first, a promised one before all."""
        reservations = self.reservations
        promised = reservations.promised(place)
        loads = []
        with self.catalog.read() as txn:
            for slot in self.slots.values():
                number = slot.number
                load = placement.Load(
                    slot.disk_id,
                    _counted_bytes(txn, number),
                    self._capacities.get(number, 0),
                    reservations.on_disk(number),
                )
                loads.append(load)
        turn = reservations.take_turn() if promised is None else 0
        ranked = placement.least_used(loads, turn)
        if promised is not None:
            first = self.slots[promised].disk_id
            ranked = (first, *(disk_id for disk_id in ranked if disk_id != first))
        return ranked

    def place(self, node: Node, number: int) -> int:
        """Return the place of a file that is committed now in the order of its disk.

        *number* is higher than all before. Its name is the new one.
        """
        if node.access:
            return self.order.accessed(node.access, records.hits_of(node.flags), number)[0]
        was_ghost = self.order.uses_ghosts and self.ghosts.take(node.parent, node.name)
        return self.order.committed(number, was_ghost=was_ghost)

    def measure_room(self, number: int, *, is_settled: bool | None = None) -> None:
        """Ask a disk whether it has room for new files; may block on it.

        *is_settled*: the disk counts what was written before; None: if its file system does.
        """
        slot = self.slots[number]
        if slot.disk is None:
            return
        ended_bytes = self.reservations.ended(number)
        began_s = time.monotonic()
        with self.on(number):
            space = slot.disk.space()
        if not slot.disk.counts_late if is_settled is None else is_settled:
            self.reservations.measured(number, ended_bytes)
        self.rooms.measured(number, space, slot.disk.filesystem, began_s)
        reserve_bytes = self.rules.reserve_bytes(space.capacity_bytes)
        room = space.available_bytes > reserve_bytes and (
            space.inodes_total == 0 or space.inodes_free > 0
        )
        self._room[number] = max(0, space.available_bytes - reserve_bytes) if room else 0
        # Not the capacity of the file system: what others keep there is no room of ours.
        with self.catalog.read() as txn:
            self._capacities[number] = _counted_bytes(txn, number) + self._room[number]
        if room and slot.health.is_full:
            self.change_health(number, lambda health, at_s: health.on_room(now_s=at_s))
        elif not room and not slot.health.is_full:
            self.change_health(
                number,
                lambda health, at_s: health.on_full(now_s=at_s, reason="down to the reserve"),
            )

    # -- paths

    def path(self, dir_id: int) -> bytes:
        """Return the path of a directory; ESTALE when it is gone."""
        path = self._paths.get(dir_id)
        if path is None:
            with self.catalog.read() as txn:
                path = txn.path(dir_id)
            if path is None:
                raise OSError(errno.ESTALE, "the directory is gone")
            if len(self._paths) >= _PATHS_MAX:
                self._paths.clear()
            self._paths[dir_id] = path
        return path

    def key(self, node: Node) -> bytes:
        """Return the key of a file by its first name; ESTALE when its directory is gone."""
        path = self.path(node.parent)
        return path + b"/" + node.name if path else node.name

    def forget_paths(self) -> None:
        """A directory was renamed or removed."""
        self._paths.clear()

    def forget_dir(self, dir_id: int) -> None:
        """A directory was removed: drop its descriptors everywhere."""
        self._paths.pop(dir_id, None)
        for carriers in self.carriers.values():
            carriers.forget(dir_id)

    # -- records

    def directory(self, txn: Txn, dir_id: int) -> Node:
        """Return the record of a directory a verb works in."""
        node = txn.node(dir_id)
        if node is None:
            raise OSError(errno.ESTALE, "the directory is gone")
        if not stat.S_ISDIR(node.mode):
            raise OSError(errno.ENOTDIR, "not a directory")
        return node

    def touch_dir(self, txn: Txn, dir_id: int, now_ns: int) -> None:
        """Move the times of a directory whose names changed."""
        txn.set_times(dir_id, now_ns)

    def done(self, txn: Txn, node_id: int, unique: int | None = None) -> None:
        """Note in *txn* that the request under way is done by it: it is not done again.

        *node_id* is what it made, 0 for nothing.
        """
        if unique is None:
            unique = self.request.unique
        else:  # from recovery: the request itself may be about to be sent again
            self.results[unique] = node_id
        if unique:
            txn.put_result(next(self._result_numbers), unique, node_id)

    # -- intents

    def say(self, intent: Intent, *, is_idle: bool = False) -> int:
        """Say what is about to be done, and return the number it has until it is settled.

        The names in it are locked by the caller. What the disks still have to put at a path is
        done first: it would find the new file in its way. *is_idle*: the caller has seen, under
        these locks, that there is no such thing.

        Raises:
            OSError: a disk failed; nothing is said.
        """
        number = self.next_id()
        try:
            self.catalog.say(number, intent)
            if not is_idle:
                self._catch_up(disks_of(intent))
        except BaseException:
            self.catalog.settled(number)
            raise
        return number

    def _catch_up(self, numbers: set[int]) -> None:
        with self.catalog.read() as txn:
            behind = [disk for disk in numbers if txn.is_behind(disk)]
        for disk in behind:
            with self.on(disk) as carriers:
                carriers.drain()

    def relieve(self) -> None:
        """Help disks that have much to do with directories, before more is added.

        Who adds faster than a disk can follow would keep everybody waiting who needs a path there.
        """
        for number, slot in self.slots.items():
            if number not in self.carriers or not slot.health.writable:
                continue
            with self.catalog.read() as txn:
                is_behind = len(txn.chores(number, _CHORES_FEW + 1)) > _CHORES_FEW
            if is_behind:
                with contextlib.suppress(OSError), self.on(number) as carriers:
                    carriers.drain()

    def leave(self, number: int, intent: Intent) -> None:
        """Leave an intent to the upkeep: a disk could not say what became of it."""
        self.left[number] = intent
        self.wake(list(disks_of(intent)))

    def wake(self, numbers: Sequence[int]) -> None:
        """Tell the upkeep of these disks that there are chores."""
        for number in numbers:
            event = self.work.get(number)
            if event is not None:
                event.set()


def _counted_bytes(txn: Txn, number: int) -> int:
    """Return how many bytes of a disk the catalog counts, seen by clients or not."""
    return records.BLOCK_BYTES * (txn.usage(number)[1] + txn.stale_usage(number)[1])


class Request(threading.local):
    """The request of a client that this thread works on, where the driver names it."""

    unique = 0


class Touch:
    """Work on one disk: an OSError that passes is noted in the disk's health."""

    __slots__ = ("_before", "_number", "_state")

    def __init__(self, state: PoolState, number: int) -> None:
        self._state = state
        self._number = number
        self._before = 0

    def __enter__(self) -> Carriers:
        carriers = self._state.carriers[self._number]
        self._before = self._state.inflight.enter(self._number)
        return carriers

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._state.inflight.leave(self._before)
        if isinstance(exc, OSError) and exc.errno and fault_of(exc.errno) is not None:
            self._state.note_error(self._number, exc.errno)


def check_name(name: bytes) -> None:
    """Refuse a name before anything is looked up.

    Raises:
        OSError: ENAMETOOLONG, EINVAL, or EPERM for a name kvfuse keeps for itself.
    """
    if len(name) > records.NAME_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise OSError(errno.EINVAL, "not a name")
