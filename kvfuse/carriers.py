"""Carriers: the directories on one disk that hold its files, and the work still to do there.

A directory of the pool is a record; on a disk it exists only as a carrier, made when a file needs
it. What happens to directories (rename, removal, new owner) and to files nobody sees any more is
decided in the catalog and written down there as a *chore* of the disk; chores are done in order,
by whoever next needs a path on that disk, or by the pool's upkeep.

Concurrency: one mutex for each disk, held during its I/O, so that a hung disk delays only itself.
A path is resolved in the same catalog view in which the backlog was empty: the disk then looks as
that view says. Descriptors are cached by directory id and stay right when a carrier is renamed.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvfuse import records
from kvfuse.catalog import Catalog
from kvfuse.disk import Disk
from kvfuse.intents import Chore, RemoveDir, RenameDir, SetDir, SwapPaths, Unlink
from kvfuse.records import Label, Node

T = TypeVar("T")

_BATCH = 64  # chores dropped in one transaction
_ASIDE = b".kvfuse/aside"  # what stood in the way and is not ours to delete


class Carrier:
    """An open directory on a disk; its descriptor is closed with the last reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Carriers:
    """The carriers of the disk with *number* in *catalog*."""

    def __init__(
        self, number: int, disk: Disk, catalog: Catalog, *, cached_max: int, timeout_s: float
    ) -> None:
        self.number = number
        self.disk = disk
        self._catalog = catalog
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

    def drain(self) -> None:
        """Do the backlog, oldest first.

        Raises:
            OSError: the disk failed; the rest waits.
        """
        with self._locked():
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

        What chores still have to remove goes; what is not known to be ours is set aside.
        """
        self.drain()
        with contextlib.suppress(FileNotFoundError):
            carrier = self.find(dir_id)
            with self._locked():
                self._set_aside(carrier.fd, name)

    # -- resolving

    def _resolve(self, dir_id: int, *, make: bool) -> Carrier:
        with self._locked():
            chain = self._chain(dir_id)
            path = b"/".join(node.name for node in chain)
            known = not chain or chain[-1].ino & records.carrier_bit(self.number)
            try:
                # What a chore made on its way is not known yet: it still lacks owner and label.
                if make and not known:
                    raise FileNotFoundError  # noqa: TRY301
                carrier = Carrier(self.disk.open_dir(path))
            except (FileNotFoundError, NotADirectoryError):
                if not make:
                    raise FileNotFoundError(errno.ENOENT, "no carrier") from None
                carrier = self._build(chain)
            self._remember(dir_id, carrier)
            return carrier

    def _chain(self, dir_id: int) -> list[Node]:
        """Return the records from below the root down to *dir_id*, with nothing left to do."""
        while True:
            with self._catalog.read() as txn:
                if not txn.chores(self.number, 1):
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
        """Make what is missing of *chain*, parents first, each closed until it is owned."""
        carrier = Carrier(self.disk.open_dir(b""))
        for node in chain:
            carrier = self._build_one(carrier, node)
        return carrier

    def _build_one(self, parent: Carrier, node: Node) -> Carrier:
        try:
            found = Carrier(self.disk.open_subdir(parent.fd, node.name))
        except FileNotFoundError:
            pass
        except (NotADirectoryError, OSError) as exc:
            if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._set_aside(parent.fd, node.name)
        else:
            if self._label_id(parent.fd, node.name) == node.id:
                return found
            return self._own(parent, node)
        self._note_carrier(node.id)
        self.disk.make_dir(
            parent.fd, node.name, mode=node.mode & 0o7777, uid=node.uid, gid=node.gid
        )
        self._write_label(parent.fd, node)
        return Carrier(self.disk.open_subdir(parent.fd, node.name))

    def _own(self, parent: Carrier, node: Node) -> Carrier:
        """Take over a directory that was made, but not labelled, when a daemon died."""
        self._note_carrier(node.id)
        self.disk.set_dir(parent.fd, node.name, mode=node.mode & 0o7777, uid=node.uid, gid=node.gid)
        self._write_label(parent.fd, node)
        return Carrier(self.disk.open_subdir(parent.fd, node.name))

    def _write_label(self, parent_fd: int, node: Node) -> None:
        verify = records.verify_hash(node.parent, node.name)
        label = Label(node.id, node.generation, verify, records.LABEL_LINKED)
        self.disk.write_label_at(parent_fd, node.name, records.pack_label(label))

    def _note_carrier(self, dir_id: int) -> None:
        """Record that the disk may have a carrier, before it has: chores go only to such disks."""
        with self._catalog.write() as txn:
            node = txn.node(dir_id)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "the directory is gone")
            bit = records.carrier_bit(self.number)
            if not node.ino & bit:
                txn.put_node(node._replace(ino=node.ino | bit), node)

    def _label_id(self, dir_fd: int, name: bytes) -> int | None:
        """Return the id a name on the disk is labelled with; None without label or name."""
        try:
            value = self.disk.read_label_at(dir_fd, name)
        except FileNotFoundError:
            return None
        label = None if value is None else records.unpack_label(value)
        return None if label is None else label.id

    def _set_aside(self, dir_fd: int, name: bytes) -> None:
        """Move what stands in the way, and is not known to be ours, out of the tree."""
        kvfuse_fd = self.disk.open_dir(b".kvfuse")
        try:
            with contextlib.suppress(FileExistsError):
                self.disk.make_dir(kvfuse_fd, b"aside", mode=0o700, uid=0, gid=0)
        finally:
            os.close(kvfuse_fd)
        aside = Carrier(self.disk.open_dir(_ASIDE))
        found = self.disk.stat(dir_fd, name)
        self.disk.rename(dir_fd, name, aside.fd, b"%d-%s" % (found.st_ino, name[:200]))

    # -- the backlog

    def _drain(self) -> None:
        """Do all chores in order; called with the mutex held."""
        while True:
            with self._catalog.read() as txn:
                chores = txn.chores(self.number, _BATCH)
            if not chores:
                return
            done: list[int] = []
            try:
                for number, chore in chores:
                    self._do(chore)
                    done.append(number)
            finally:
                if done:
                    with self._catalog.write() as txn:
                        for number in done:
                            txn.drop_chore(self.number, number)

    def _do(self, chore: Chore) -> None:
        """Do one chore; doing it again is harmless, for a crash may come before it is dropped."""
        with contextlib.suppress(FileNotFoundError):
            match chore:
                case Unlink():
                    self._unlink(chore)
                case RemoveDir():
                    self._remove_dir(chore)
                case RenameDir():
                    self._rename_dir(chore)
                case SwapPaths():
                    self._swap_paths(chore)
                case SetDir():
                    parent, name = self._parent(chore.path)
                    if self._label_id(parent.fd, name) == chore.id:
                        self.disk.set_dir(
                            parent.fd, name, mode=chore.mode, uid=chore.uid, gid=chore.gid
                        )

    def _parent(self, path: bytes) -> tuple[Carrier, bytes]:
        directory, _, name = path.rpartition(b"/")
        return Carrier(self.disk.open_dir(directory)), name

    def _unlink(self, chore: Unlink) -> None:
        parent, name = self._parent(chore.path)
        if self.disk.stat(parent.fd, name).st_ino != chore.ino:
            return
        # The inode number alone may have been reused while the disk was away.
        if self._label_id(parent.fd, name) in (None, chore.id):
            self.disk.unlink(parent.fd, name)

    def _remove_dir(self, chore: RemoveDir) -> None:
        self.forget(chore.id)
        parent, name = self._parent(chore.path)
        if self._label_id(parent.fd, name) not in (None, chore.id):
            return
        try:
            self.disk.remove_dir(parent.fd, name)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if exc.errno == errno.ENOTDIR:
                    return
                raise
            self._set_aside(parent.fd, name)

    def _rename_dir(self, chore: RenameDir) -> None:
        parent, name = self._parent(chore.path)
        if self._label_id(parent.fd, name) not in (None, chore.id):
            return
        if not stat.S_ISDIR(self.disk.stat(parent.fd, name).st_mode):
            return
        self._move(parent, name, chore.new_path)

    def _move(self, parent: Carrier, name: bytes, new_path: bytes) -> None:
        new_parent, new_name = self._made_parent(new_path)
        try:
            self.disk.rename_new(parent.fd, name, new_parent.fd, new_name)
        except FileExistsError:
            self._set_aside(new_parent.fd, new_name)
            self.disk.rename_new(parent.fd, name, new_parent.fd, new_name)

    def _swap_paths(self, chore: SwapPaths) -> None:
        ids = (self._id_at(chore.path), self._id_at(chore.new_path))
        if ids[0] == chore.other_id or ids[1] == chore.id:
            return  # done before a crash
        if ids == (chore.id, chore.other_id):
            parent, name = self._parent(chore.path)
            new_parent, new_name = self._parent(chore.new_path)
            self.disk.exchange(parent.fd, name, new_parent.fd, new_name)
        elif ids[0] == chore.id:
            self._move(*self._parent(chore.path), chore.new_path)
        elif ids[1] == chore.other_id:
            self._move(*self._parent(chore.new_path), chore.path)

    def _id_at(self, path: bytes) -> int | None:
        try:
            parent, name = self._parent(path)
        except FileNotFoundError:
            return None
        return self._label_id(parent.fd, name)

    def _made_parent(self, path: bytes) -> tuple[Carrier, bytes]:
        """Return the directory of *path*, made closed and unlabelled where it is missing.

        The next file that needs such a carrier gives it owner and label (``_own``).
        """
        directory, _, name = path.rpartition(b"/")
        carrier = Carrier(self.disk.open_dir(b""))
        for part in directory.split(b"/") if directory else ():
            with contextlib.suppress(FileExistsError):
                self.disk.make_dir(carrier.fd, part, mode=0o700, uid=0, gid=0)
            carrier = Carrier(self.disk.open_subdir(carrier.fd, part))
        return carrier, name
