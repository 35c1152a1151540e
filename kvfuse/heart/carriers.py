"""Carriers: the directories on one disk that hold its files, and the work still to do there.

A directory of the pool is a record; on a disk it exists only as a carrier, made when a file needs
it. What happens to directories (rename, removal, new owner) and to files nobody sees any more is
decided in the catalog and written down there as a *chore* of the disk; chores are done in order,
by whoever next needs a path on that disk, or by the pool's upkeep.

Concurrency: one mutex for each disk, held during its I/O, so that a hung disk delays only itself.
A path is resolved in a catalog view in which the backlog has nothing on directories: they are then
on the disk as that view says. Descriptors are cached by directory id and stay right when a carrier
is renamed.
"""

import contextlib
import errno
import logging
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvfuse.catalog.catalog import Catalog
from kvfuse.core import health, records
from kvfuse.core.intents import Chore, RemoveDir, Unlink
from kvfuse.core.records import Node
from kvfuse.disks.carrier import Carrier, Ground, Wanted
from kvfuse.disks.disk import Disk
from kvfuse.heart import backlog
from kvfuse.heart.chores import do_chore

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BATCH = 64  # chores read in one transaction


class _MovedError(Exception):
    """A directory was renamed since its path was read."""


class Carriers:
    """The carriers of the disk with *number* in *catalog*."""

    def __init__(
        self, number: int, disk: Disk, catalog: Catalog, *, cached_max: int, timeout_s: float
    ) -> None:
        self.number = number
        self.disk = disk
        self._catalog = catalog
        self._ground = Ground(disk)
        self._cached_max = cached_max
        self._timeout_s = timeout_s
        self._cache: dict[int, Carrier] = {}
        self._mutex = threading.Lock()

    def find(self, dir_id: int) -> Carrier:
        """Return the carrier of a directory.

        Raises:
            FileNotFoundError: the disk has none, or the directory is gone.
        """
        carrier = self._cache.get(dir_id)
        return carrier if carrier is not None else self._resolve(dir_id, make=False)

    def make(self, dir_id: int) -> Carrier:
        """Return the carrier of a directory, made with its parents where they are missing.

        Raises:
            FileNotFoundError: the directory is gone.
        """
        carrier = self._cache.get(dir_id)
        return carrier if carrier is not None else self._resolve(dir_id, make=True)

    def at(self, dir_id: int, action: Callable[[int], T], *, make: bool = False) -> T:
        """Return ``action(descriptor of the carrier)``.

        When that does not find what it needs, the backlog is done and it is tried once more: the
        carrier may have been removed behind our back, or the file be on its way.

        Raises:
            FileNotFoundError: the disk has no such carrier, or the action still found nothing.
        """
        cached = dir_id in self._cache
        try:
            carrier = self.make(dir_id) if make else self.find(dir_id)
            return action(carrier.fd)
        except FileNotFoundError:
            if not cached:
                raise
        self.forget(dir_id)
        carrier = self.make(dir_id) if make else self.find(dir_id)
        return action(carrier.fd)

    def forget(self, dir_id: int) -> None:
        """Drop a cached descriptor."""
        self._cache.pop(dir_id, None)

    def drain(self) -> bool:
        """Do the backlog, oldest first; return whether there was any.

        Raises:
            OSError: the disk failed; the rest waits.
        """
        with self._locked():
            return self._drain()

    def retry(self) -> None:
        """Try once more to unlink the files that would not go.

        Raises:
            OSError: the disk failed; the rest waits.
        """
        with self._locked():
            self._drain()
            with self._catalog.read() as txn:
                if not any(number == self.number for number, _ in backlog.parked(txn)):
                    return
            with self._catalog.write() as txn:
                backlog.unpark(txn, self.number)
            self._drain()

    def close(self) -> None:
        """Drop all descriptors."""
        self._cache.clear()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._mutex.acquire(timeout=self._timeout_s):
            raise OSError(errno.EIO, f"disk {self.disk.path}: busy beyond the deadline")
        try:
            yield
        finally:
            self._mutex.release()

    def clear_way(self, dir_id: int, name: bytes) -> None:
        """Make room at a name that no record speaks of.

        What is ours goes: its record has gone, or is of somewhere else. What is not is set aside.
        """
        self.drain()
        with contextlib.suppress(FileNotFoundError):
            carrier = self.find(dir_id)
            with self._locked():
                if self._is_garbage(carrier, name):
                    self.disk.unlink(carrier.fd, name)
                else:
                    self._ground.set_aside(carrier.fd, name)

    def _is_garbage(self, carrier: Carrier, name: bytes) -> bool:
        """Whether a name holds a file that was ours, and is nobody's now."""
        found = self.disk.stat(carrier.fd, name)
        label_id = self._ground.label_id(carrier.fd, name)
        if label_id is None or stat.S_ISDIR(found.st_mode):
            return False
        with self._catalog.read() as txn:
            node = txn.node(label_id)
        return node is None or (node.disk, node.ino) != (self.number, found.st_ino)

    # -- resolving

    def _resolve(self, dir_id: int, *, make: bool) -> Carrier:
        with self._locked():
            while True:
                chain = self._chain(dir_id)
                try:
                    carrier = self._open_chain(chain, make=make)
                except _MovedError:
                    continue
                self._remember(dir_id, carrier)
                return carrier

    def _open_chain(self, chain: list[Node], *, make: bool) -> Carrier:
        path = b"/".join(node.name for node in chain)
        try:
            carrier = Carrier(self.disk.open_dir(path))
        except (FileNotFoundError, NotADirectoryError):
            if not make:
                raise FileNotFoundError(errno.ENOENT, "no carrier") from None
            return self._build(chain)
        # What lies there may be foreign, and a disk that no record knows of gets no chores.
        if make and chain and not self._is_known(carrier, chain[-1]):
            return self._build(chain)
        return carrier

    def _is_known(self, carrier: Carrier, node: Node) -> bool:
        return bool(node.ino & records.carrier_bit(self.number)) and (
            self._ground.label_id(carrier.fd, b".") == node.id
        )

    def _chain(self, dir_id: int) -> list[Node]:
        """Return the records from below the root down to *dir_id*, with nothing left to do."""
        while True:
            with self._catalog.read() as txn:
                if txn.is_settled(self.number):
                    chain: list[Node] = []
                    while dir_id != records.ROOT_ID:
                        node = txn.node(dir_id)
                        if node is None:
                            raise FileNotFoundError(errno.ENOENT, "the directory is gone")
                        chain.append(node)
                        dir_id = node.parent
                    chain.reverse()
                    return chain
            self._drain()

    def _remember(self, dir_id: int, carrier: Carrier) -> None:
        if len(self._cache) >= self._cached_max:
            with contextlib.suppress(StopIteration, KeyError):
                self._cache.pop(next(iter(self._cache)))
        self._cache[dir_id] = carrier

    def _build(self, chain: list[Node]) -> Carrier:
        """Make what is missing of *chain*, parents first."""
        carrier = self._ground.root()
        path = b""
        for node in chain:
            path = path + b"/" + node.name if path else node.name
            fresh = self._note_carrier(node.id, path)
            wanted = Wanted(
                fresh.id, fresh.generation, fresh.mode & 0o7777, fresh.uid, fresh.gid
            )  # fmt: skip
            carrier = self._ground.ensure(carrier, node.name, wanted)
        return carrier

    def _note_carrier(self, dir_id: int, path: bytes) -> Node:
        """Record that the disk may have a carrier, before it has: chores go only to such disks.

        Raises:
            _MovedError: the directory is not at *path* any more; a later rename leaves a chore.
        """
        bit = records.carrier_bit(self.number)
        with self._catalog.read() as txn:
            node = txn.node(dir_id)
            is_noted = node is not None and node.ino & bit and txn.path(dir_id) == path
        if is_noted and node is not None:
            return node
        with self._catalog.write() as txn:
            node = txn.node(dir_id)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "the directory is gone")
            if txn.path(dir_id) != path:
                raise _MovedError
            noted = node.replace(ino=node.ino | bit)
            txn.put_node(noted, node)
            return noted

    # -- the backlog

    def _drain(self) -> bool:
        """Do all chores there are now, in order; called with the mutex held.

        Those that come meanwhile are left to others: who drains must come to an end.
        """
        did_any = False
        with self._catalog.read() as txn:
            last = txn.last_chore(self.number)
        while True:
            with self._catalog.read() as txn:
                chores = [item for item in txn.chores(self.number, _BATCH) if item[0] <= last]
            if not chores:
                return did_any
            did_any = True
            unlinked: list[int] = []
            try:
                for number, chore in chores:
                    if not self._do_or_park(number, chore):
                        continue
                    unlinked.append(number)
                    if isinstance(chore, RemoveDir):
                        self.forget(chore.id)
                    if not isinstance(chore, Unlink):
                        # Done again after a later one, it would undo that.
                        self._drop(unlinked, chore)
            finally:
                self._drop(unlinked)

    def _do_or_park(self, number: int, chore: Chore) -> bool:
        """Do a chore; return False when its file would not go, and was parked.

        Raises:
            OSError: the disk failed, or a directory could not be changed.
        """
        try:
            do_chore(self._ground, chore)
        except OSError as exc:
            if not isinstance(chore, Unlink) or health.fault_of(exc.errno or errno.EIO):
                raise
            with self._catalog.write() as txn:
                backlog.park(txn, self.number, number, chore)
            path = chore.path.decode(errors="backslashreplace")
            _log.warning(
                "disk %s: %s cannot be removed: %s; it is tried again now and then",
                self.disk.path, path, exc.strerror,
            )  # fmt: skip
            return False
        return True

    def _drop(self, numbers: list[int], last: Chore | None = None) -> None:
        """Drop chores that were done, of which *last* may have moved paths; empty the list."""
        if numbers:
            with self._catalog.write() as txn:
                for number in numbers:
                    txn.drop_chore(self.number, number)
                if last is not None:
                    backlog.follow(txn, self.number, last)
            numbers.clear()
