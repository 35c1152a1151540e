"""The pool: every verb of the file system on ids and names. Knows no FUSE.

Verbs raise ``OSError`` with the errno the client gets. An id is a directory's or file's for ever:
one that is gone is ESTALE, a name that is gone ENOENT. Sizes are bytes, times nanoseconds.

Concurrency: all verbs may be called from any thread. Those for which ``disk_of…`` names a disk may
block on it; the others touch memory only.
Durability: a file is visible at create, and survives a restart of the daemon once it is renamed or
its last writer has closed it. Survival of a power cut is for ``fsync`` and the upkeep.
"""

import contextlib
import errno
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvfuse.catalog import soundness
from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.transaction import Txn
from kvfuse.cleaning.cleanups import Cleanups
from kvfuse.core.config import Config
from kvfuse.core.eviction import Pins, Watermarks
from kvfuse.core.records import NO_DISK, DirEntry
from kvfuse.core.settings import RecoverySettings
from kvfuse.disks.diskset import DiskSet
from kvfuse.heart.handletable import HandleTable, OpenSlot
from kvfuse.heart.homes import judge_homes
from kvfuse.heart.rules import Rules
from kvfuse.heart.state import Keeper, Outliving, PoolState
from kvfuse.pool.audit import Audits
from kvfuse.pool.reconciling import Reconciling
from kvfuse.pool.recovery import recover
from kvfuse.pool.report import Report, StatFs
from kvfuse.pool.resume import restore_handles, write_facts
from kvfuse.pool.snapshots import Snapshots
from kvfuse.pool.upkeep import Upkeep
from kvfuse.scan.arrivals import Arrivals
from kvfuse.scan.bringup import bring_up
from kvfuse.scan.scanner import Scanner
from kvfuse.verbs.attributes import AttrChanges, Attributes
from kvfuse.verbs.files import Files
from kvfuse.verbs.lingering import Lingering
from kvfuse.verbs.names import Names
from kvfuse.verbs.renames import RENAME_EXCHANGE, RENAME_NOREPLACE, Renames

__all__ = [
    "RENAME_EXCHANGE", "RENAME_NOREPLACE", "AttrChanges", "Pool", "StatFs", "open_pool",
]  # fmt: skip

_log = logging.getLogger(__name__)
_CARRIERS_SHARE = 4  # of the descriptors this process may have, one in four for carriers
_STOP_TIMEOUT_S = 10.0
_COPY_TIMEOUT_S = 60.0  # of the catalog
READ_FOR_S = 0.1


class Pool:
    """A mounted pool. Most verbs are those of the parts it is made of."""

    def __init__(  # noqa: PLR0915 - a line for each verb
        self,
        state: PoolState,
        disks: DiskSet,
        arrivals: Arrivals,
        snapshot: Path,
        opens: dict[int, list[OpenSlot]],
        recovery: RecoverySettings,
    ) -> None:
        self.opens = opens  # taken over from the server before, by id
        self._state = state
        self._disks = disks
        self._snapshots = Snapshots(state, snapshot)
        self._files = files = Files(state)
        names = Names(state, files)
        attributes = Attributes(state, files)
        self._arrivals = arrivals
        self._scanner = Scanner(state, arrivals, recovery.scan_files_per_s)
        self._audits = Audits(state)
        self._reconciling = Reconciling(self._audits, 0 if arrivals.found else recovery.check_after)
        report = Report(state, disks, self.recovery)
        renames = Renames(state, files, lingering := Lingering(state, files))
        self._upkeep = Upkeep(state, [lingering.tidy, files.closes.tidy])
        cleanups = Cleanups(state, self._upkeep.evictors, self._upkeep.tasks)

        self.lookup = names.lookup
        self.create = names.create
        self.mknod = names.mknod
        self.symlink = names.symlink
        self.link = names.link
        self.unlink = names.unlink
        self.mkdir = names.mkdir
        self.rmdir = names.rmdir
        self.rename = renames.rename
        self.getattr = attributes.getattr
        self.setattr = attributes.setattr
        self.getxattr = attributes.getxattr
        self.setxattr = attributes.setxattr
        self.listxattr = attributes.listxattr
        self.removexattr = attributes.removexattr
        self.open = files.open
        self.release = files.release
        self.flush = files.flush
        self.read = files.read
        self.write = files.write
        self.fallocate = files.fallocate
        self.lseek = files.lseek
        self.copy_file_range = files.copy_file_range
        self.fd = files.fd
        self.statfs = report.statfs
        self.status = report.status
        self.locate = report.locate
        self.clean = cleanups.clean
        self.tasks = cleanups.tasks
        self.fsck = self._audits.fsck
        self.findings = self._audits.findings
        self.note_timeout = state.note_timeout
        self.request = state.request
        self.handles = state.handles
        self._begin()

    def _begin(self) -> None:
        """See to what the server before had still to settle, and let all threads work."""
        with self._state.catalog.read() as txn:
            nodes = [node for node in map(txn.node, txn.pending()) if node is not None]
        for node in nodes:
            inode = self.handles.inode(node.id)
            if inode is None or not inode.writers:
                self._files.closes.put_off(node)
        self._upkeep.start()
        self._scanner.start()
        self._reconciling.start()
        self._snapshots.start()

    def recovery(self) -> dict[str, Any]:
        """Return JSON-ready how far the disks were read, and compared with the catalog."""
        return {**self._scanner.summary(), "check": self._reconciling.summary()}

    # -- reading

    def readdir(self, node_id: int, cookie: int, limit: int) -> list[DirEntry]:
        """Return up to *limit* entries with a cookie above *cookie*, in order of cookies."""
        state = self._state
        state.arrive_all(node_id)
        found: list[DirEntry] = []
        readable = {NO_DISK, *filter(self._disk_is_read, state.slots)}
        hides_stale = not state.rules.serve_displaced
        with state.catalog.read() as txn:
            state.directory(txn, node_id)
            for entry in txn.children(node_id, cookie):
                if entry.disk not in readable:
                    continue
                if hides_stale and self._is_stale(txn, entry.id):
                    continue
                found.append(entry)
                if len(found) == limit:
                    break
        return found

    @staticmethod
    def _is_stale(txn: Txn, node_id: int) -> bool:
        node = txn.node(node_id)
        return node is not None and node.is_stale

    def _disk_is_read(self, number: int) -> bool:
        slot = self._state.slots.get(number)
        return slot is not None and slot.disk is not None and slot.health.readable

    def readlink(self, node_id: int) -> bytes:
        """Return the target of a symbolic link."""
        node = self.getattr(node_id)
        if not node.is_symlink:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        with self._state.on(node.disk) as carriers:
            disk = carriers.disk
            return carriers.at(node.parent, lambda fd: disk.readlink(fd, node.name))

    def parent_of(self, node_id: int) -> int:
        """Return the id of the directory a directory is in; the root is in itself."""
        return self.getattr(node_id).parent

    def key(self, node_id: int) -> bytes:
        """Return the path of a node below the mountpoint."""
        node = self.getattr(node_id)
        path = self._state.path(node.parent)
        return path + b"/" + node.name if path else node.name

    # -- durability

    def fsync(self, fh: int, datasync: bool) -> None:
        """Make the bytes of an open file durable."""
        self._files.fsync(fh, data_only=datasync)

    def fsyncdir(self, node_id: int) -> None:
        """Make the names in a directory durable on every disk that carries it."""
        self.getattr(node_id)
        for number, carriers in self._state.carriers.items():
            if not self._disk_is_read(number):
                continue
            with contextlib.suppress(FileNotFoundError), self._state.on(number):
                carrier = carriers.find(node_id)
                fd = os.open(f"/proc/self/fd/{carrier.fd}", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def sync(self) -> None:
        """Make everything durable that was finished before."""
        generation = self._state.numbers.last_generation()
        for number in self._state.carriers:
            if self._state.slots[number].health.writable:
                with self._state.on(number):
                    self._state.sync(number, generation)

    # -- what a verb will block on

    def disk_of(self, node_id: int) -> int | None:
        """Return the number of the disk a verb on this id blocks on, None for memory only."""
        with self._state.catalog.read() as txn:
            node = txn.node(node_id)
        if node is None:
            inode = self._state.handles.inode(node_id)
            return None if inode is None else inode.disk
        return None if node.disk == NO_DISK else node.disk

    def disk_of_name(self, parent: int, name: bytes) -> int | None:
        """Return the number of the disk a verb on this name blocks on, None for memory only."""
        with self._state.catalog.read() as txn:
            node = txn.child(parent, name)
        return None if node is None or node.disk == NO_DISK else node.disk

    def disk_of_create(self, parent: int, name: bytes) -> int | None:
        """Return the number of the disk a file made at this name goes to."""
        found = self.disk_of_name(parent, name)
        if found is not None:
            return found
        candidates = self._state.candidates(parent, name, promise=True)
        return candidates[0] if candidates else None

    def disk_of_handle(self, fh: int) -> int:
        """Return the number of the disk of an open file."""
        return self._state.handles.file(fh).disk

    @property
    def is_complete(self) -> bool:
        """Whether all disks were read: until then no miss may be remembered by anybody."""
        return self._state.arriving is None

    def wait_complete(self, timeout_s: float) -> bool:
        """Wait until all disks were read, as far as they let us; return whether they were."""
        return self._scanner.wait(timeout_s)

    def result(self, unique: int) -> int | None:
        """Return the id a request of the server before made (0: none), None if it was not done."""
        return self._state.results.get(unique)

    def count_attempt(self, unique: int) -> int:
        """Return how often a request was sent again, this time included; survives the server."""
        with self._state.catalog.write() as txn:
            return txn.count_attempt(unique)

    def data_in_kernel(self, *, on: bool, passthrough: bool = False) -> None:
        """Tell the pool that writes pass it by: sizes are then asked of the disk.

        With *passthrough* the kernel itself holds what it has open.
        """
        self._state.data_in_kernel = on
        self._state.passthrough = passthrough

    # -- leases

    def kernel_answers(
        self,
        entry_timeout_s: float,
        expire: Callable[[int, int, bytes, Callable[[], None]], None] | None = None,
        *,
        can_be_quiet: bool = False,
    ) -> None:
        """Tell the pool how long the kernel answers lookups by itself after an answer.

        ``expire(disk, parent, name, done)`` makes it ask again sooner, and calls *done* when that
        has happened, from any thread; None where nobody can. *can_be_quiet*: the driver heeds
        :attr:`answers_quietly`.
        """
        self._state.leases.answers_kept(entry_timeout_s, can_be_quiet=can_be_quiet)
        self._state.expire = expire

    @property
    def answers_quietly(self) -> bool:
        """Whether lookups of what is being written shall not be kept by the kernel: room is short.

        Then a file that nobody asks for can go at once when it must.
        """
        return self._state.leases.is_quiet

    def is_tight(self, fh: int) -> bool:
        """Whether writes through an open file should pass the pool: its disk is nearly full."""
        return self._state.rooms.is_tight(self._state.handles.file(fh).disk)

    def on_visibility(self, call: Callable[[], object]) -> None:
        """Have *call* made when files come or go without a verb: a disk failed, or is back.

        It is made by any thread, with locks held: it must not wait.
        """
        self._state.visibility_changed = call

    # -- the end

    def close(self, clean: bool = True) -> None:
        """Take the pool down; *clean* leaves a catalog that is believed after a boot."""
        state = self._state
        self._reconciling.stop(timeout_s=_STOP_TIMEOUT_S)
        self._audits.stop(timeout_s=_STOP_TIMEOUT_S)
        self._scanner.stop(timeout_s=_STOP_TIMEOUT_S)
        self._arrivals.save()
        self._upkeep.stop(timeout_s=_STOP_TIMEOUT_S)
        for file in state.handles.all():
            with contextlib.suppress(OSError):
                self.release(file.fh)
        for number in state.carriers:
            self._files.closes.tidy(number, math.inf)
        state.accesses.flush()
        is_free = self._snapshots.stop(timeout_s=_COPY_TIMEOUT_S)
        if not is_free:
            _log.error("catalog: a copy of it does not end; it is left as after a death")
        if clean and is_free:
            self._settle_disks()
            with state.catalog.write() as txn:
                txn.put_meta(b"floor", b"%d" % state.numbers.floor())
                txn.put_meta(b"clean", b"1")
                txn.keep_said()
            self._snapshots.copy_at_end()
        for carriers in state.carriers.values():
            carriers.close()
        if not is_free:
            return
        state.catalog.close()
        if clean:
            try:
                soundness.seal(state.catalog.path)
            except OSError as exc:
                _log.warning("catalog: not sealed: %s", exc)

    def _settle_disks(self) -> None:
        """Finish backlogs and make the disks durable, as far as they let us."""
        generation = self._state.numbers.last_generation()
        for number, carriers in self._state.carriers.items():
            if not self._state.slots[number].health.writable:
                continue
            try:
                carriers.drain()
                self._state.sync(number, generation)
            except OSError as exc:
                _log.warning("disk %s: %s", carriers.disk.path, exc.strerror)


def open_pool(  # noqa: PLR0913 - what a successor needs besides
    config: Config,
    disks: DiskSet,
    *,
    progress: Callable[[str], None] = lambda _text: None,
    outlives: bool = False,
    resume: bool = False,
    stuck_pids: Sequence[int] = (),
    keeper: Keeper | None = None,
    read_for_s: float = READ_FOR_S,
) -> Pool:
    """Return the pool of *disks*: its catalog found or rebuilt, what was begun before finished.

    *progress* is told, about twice a second, how far a scan is. With *outlives* open files are kept
    where the next server finds them; with *resume* this is the next server, and threads of
    *stuck_pids* still hang inside system calls of the one before. *keeper* keeps descriptors of
    files that nothing else would hold. Disks that have to be read are, for *read_for_s*; after that
    they are read while the pool serves.

    Raises:
        CatalogDamagedError: with *resume*, the catalog of the mount cannot be read.
    """
    run_dir = Path(config.pool.run_dir) / disks.pool_id
    snapshot = Path(config.pool.state_dir) / disks.pool_id / "catalog"
    snapshot.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if resume:
        catalog = Catalog(run_dir / "catalog")
    else:
        catalog = bring_up(disks, run_dir / "catalog", snapshot)
        with catalog.write() as txn:
            txn.forget_connection()
    table = HandleTable(run_dir / "handles", resume=resume) if outlives or resume else None
    state = PoolState(
        catalog,
        disks.slots,
        disks.topology,
        _rules(config),
        carriers_max=_carriers_max(len(disks.slots)),
        outliving=None if table is None else Outliving(table, run_dir / "inflight"),
    )
    state.stuck_pids = list(stuck_pids)
    state.keeper = keeper
    arrivals = Arrivals(state)
    opens: dict[int, list[OpenSlot]] = {}
    if resume:
        assert table is not None, "made above"
        opens = restore_handles(state, table)
        recover(state, resume=True)
    else:
        recover(state)
        judge_homes(state, disks.topology.id, progress)
        if not config.recovery.scan_files_per_s:
            _read_small(arrivals, read_for_s)
        _vouch(state)
        write_facts(disks, run_dir)
    return Pool(state, disks, arrivals, snapshot, opens, config.recovery)


def _read_small(arrivals: Arrivals, budget_s: float) -> None:
    """Read disks with few files before anybody asks: what is left is read while the pool serves."""
    until_s = time.monotonic() + budget_s
    for number, taker in sorted(arrivals.takers.items(), key=lambda item: item[1].terms.stale):
        try:
            if not arrivals.read_for(number, until_s - time.monotonic()) and not taker.terms.stale:
                return
        except OSError as exc:
            _log.warning("disk %d: cannot be read: %s", number, exc.strerror)


def _rules(config: Config) -> Rules:
    return Rules(
        policy=config.pool.placement,
        serve_displaced=config.pool.serve_displaced,
        temp_dirs=config.pool.routing_dirs(),
        temp_patterns=config.pool.routing_patterns(),
        reserve_bytes=config.space.reserve.of,
        op_timeout_s=config.health.op_timeout,
        watermarks=Watermarks(config.space.high_watermark, config.space.low_watermark),
        lease_ttl_s=config.space.lease_ttl,
        temp_max_age_s=config.space.temp_max_age,
        pins=Pins(config.space.pin),
        eviction=config.space.eviction,
        stale_first=config.space.stale_first,
        counts_evictable=config.space.statfs == "evictable",
    )


def _carriers_max(disks: int) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(4096, descriptors // _CARRIERS_SHARE // max(1, disks)))


def _vouch(state: PoolState) -> None:
    """Note on each disk that from now on this boot's page cache has what was written.

    And ask it for its room: the first placement must not guess.
    """
    for number, carriers in state.carriers.items():
        if state.slots[number].health.writable:
            try:
                state.measure_room(number)
                state.sync(number, state.numbers.last_generation())
            except OSError as exc:
                _log.warning("disk %s: %s", carriers.disk.path, exc.strerror)
                state.note_error(number, exc.errno or errno.EIO)
