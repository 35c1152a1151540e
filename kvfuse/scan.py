"""Rebuild the catalog from what lies on the disks.

Every file says in its label who it is, which generation, and whether it was finished; every carrier
which directory it is. Of two copies of one name the higher generation wins, the other is removed.
What has no label is foreign: reported, never served, never touched. On a disk that is adopted with
its files labels mean nothing, for they may be another pool's: each file gets one of this pool. On a
disk that the pool lived on without, nothing is believed: files and directories that no other disk
vouches for are removed.

A scan that was cut short is begun again: what it knows already is passed over.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfuse import durability, records
from kvfuse.catalog import Catalog
from kvfuse.disk import DirItem, Disk
from kvfuse.diskset import Slot
from kvfuse.intents import RemoveDir, Unlink
from kvfuse.namespace import forget_name
from kvfuse.numbers import Numbers
from kvfuse.records import NO_DISK, ROOT_ID, Label, Node, State, is_reserved
from kvfuse.transaction import Txn

_log = logging.getLogger(__name__)
_BATCH = 256  # files a transaction
_GHOST = 0  # stands for a directory that is going to be removed
_BLOCKED = (errno.EXDEV, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)


@dataclass(slots=True)
class Findings:
    """What a scan found on one disk."""

    files: int = 0
    stale: int = 0
    torn: int = 0
    foreign: int = 0
    unreadable: int = 0


@dataclass(slots=True)
class _Found:
    """One file or symlink as it lies on the disk."""

    name: bytes
    stat: os.stat_result
    label: Label | None


@dataclass(slots=True)
class DiskScan:
    """The scan of one disk into a catalog.

    *adopting* takes what has no label as a file of the pool; *stale* says that nothing on the disk
    can be believed, because the pool lived on without it. *progress* is told the files so far.
    """

    catalog: Catalog
    numbers: Numbers
    slot: Slot
    adopting: bool
    stale: bool
    progress: Callable[[int], None]
    findings: Findings = field(default_factory=Findings)
    _believed: int | None = None
    _links: dict[int, int] = field(default_factory=dict)
    _ghosts: list[RemoveDir] = field(default_factory=list)

    def run(self) -> Findings:
        """Walk the disk.

        Raises:
            OSError: its root cannot be read.
        """
        disk = self._disk
        self._believed = durability.believed(disk)
        todo: list[tuple[bytes, int]] = [(b"", ROOT_ID)]
        while todo:
            path, dir_id = todo.pop()
            todo += self._directory(path, dir_id)
        with self.catalog.write() as txn:
            for ghost in reversed(self._ghosts):  # what is below a directory goes before it
                txn.put_chore(self.slot.number, self.numbers.next_id(), ghost)
        return self.findings

    @property
    def _disk(self) -> Disk:
        assert self.slot.disk is not None, "only disks that are there are scanned"
        return self.slot.disk

    def _directory(self, path: bytes, dir_id: int) -> list[tuple[bytes, int]]:
        """Take in one directory; return those below it."""
        below: list[tuple[bytes, int]] = []
        try:
            dir_fd = self._disk.open_dir(path, readable=True)
        except OSError as exc:
            if not path:
                raise
            self._unreadable(path, exc)
            return below
        try:
            for batch in _batches(self._disk.list_fd(dir_fd)):
                with self.catalog.write() as txn:
                    for item in batch:
                        if dir_id == ROOT_ID and is_reserved(dir_id, item.name):
                            continue
                        full = path + b"/" + item.name if path else item.name
                        self._item(txn, dir_fd, full, dir_id, item, below)
                self.progress(self.findings.files)
        finally:
            os.close(dir_fd)
        return below

    def _item(
        self, txn: Txn, dir_fd: int, path: bytes, dir_id: int, item: DirItem,
        below: list[tuple[bytes, int]],
    ) -> None:  # fmt: skip
        try:
            if item.type_bits == stat.S_IFDIR:
                child = self._carrier(txn, dir_fd, path, dir_id, item.name)
                if child is not None:
                    below.append((path, child))
            elif item.type_bits in (stat.S_IFREG, stat.S_IFLNK):
                value = self._disk.read_label_at(dir_fd, item.name)
                label = None if value is None else records.unpack_label(value)
                found = _Found(item.name, self._disk.stat(dir_fd, item.name), label)
                self._file(txn, dir_fd, path, dir_id, found)
            else:
                self.findings.foreign += 1
        except OSError as exc:
            if exc.errno in _BLOCKED:  # another filesystem is mounted there, or it just went
                self.findings.foreign += 1
            else:
                self._unreadable(path, exc)

    def _unreadable(self, path: bytes, exc: OSError) -> None:
        self.findings.unreadable += 1
        _log.warning("disk %s: %r cannot be read: %s", self.slot.path, path, exc.strerror)

    # -- directories

    def _carrier(self, txn: Txn, dir_fd: int, path: bytes, parent: int, name: bytes) -> int | None:
        """Take in a carrier; return the id of its directory, None when it is not ours."""
        fd = self._disk.open_subdir(dir_fd, name)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        value = self._disk.read_label_at(dir_fd, name)
        label = None if value is None or self.adopting else records.unpack_label(value)
        known = None if parent == _GHOST else txn.child(parent, name)
        if known is not None and known.is_dir:
            node = self._known_carrier(txn, known, label, found)
        elif label is None and not self.adopting:
            self.findings.foreign += 1
            return None
        elif label is not None and self.stale:
            self.findings.stale += 1
            self._ghosts.append(RemoveDir(path, label.id))
            return _GHOST
        else:
            if known is not None:  # a file and a directory of one name: the directory holds more
                self._lose(txn, known, parent, name)
            node = self._new_directory(txn, parent, name, label, found)
        if label is None or label.id != node.id:
            self._label_carrier(dir_fd, name, node)
        return node.id

    def _known_carrier(
        self, txn: Txn, known: Node, label: Label | None, found: os.stat_result
    ) -> Node:
        node = known._replace(ino=known.ino | records.carrier_bit(self.slot.number))
        if label is not None and label.generation > known.generation and not self.stale:
            node = _owned(node, found)._replace(generation=label.generation)
        txn.put_node(node, known)
        return node

    def _new_directory(
        self, txn: Txn, parent: int, name: bytes, label: Label | None, found: os.stat_result
    ) -> Node:
        node_id = self._free_id(txn, label)
        node = Node(
            id=node_id, mode=stat.S_IFDIR | (found.st_mode & 0o7777), uid=found.st_uid,
            gid=found.st_gid, nlink=1, state=State.COMMITTED, flags=0,
            disk=NO_DISK, ino=records.carrier_bit(self.slot.number), size=4096, blocks=0,
            atime_ns=found.st_atime_ns, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns,
            generation=0 if label is None else label.generation, access=0, parent=parent, name=name,
        )  # fmt: skip
        txn.put_node(node, None)
        txn.put_entry(parent, name, node, self._free_cookie(txn, parent, node_id))
        return node

    def _label_carrier(self, dir_fd: int, name: bytes, node: Node) -> None:
        """Let a carrier say which directory it is: chores find it by that."""
        label = records.directory_label(node.id, node.generation)
        try:
            self._disk.write_label_at(dir_fd, name, records.pack_label(label))
        except OSError as exc:
            if exc.errno != errno.EROFS:
                raise

    # -- files

    def _file(self, txn: Txn, dir_fd: int, path: bytes, parent: int, found: _Found) -> None:
        if self.adopting:
            found.label = None
        elif not self._is_live(txn, path, parent, found):
            return
        label = self._believable(parent, found)
        generation = 0 if label is None else label.generation
        known = txn.child(parent, found.name)
        if known is not None:
            if (known.disk, known.ino) == (self.slot.number, found.stat.st_ino):
                return  # by a scan that was cut short
            self.findings.stale += 1
            if known.is_dir or known.generation >= generation:
                self._remove(txn, path, found)
                return
            self._lose(txn, known, parent, found.name)
        if self._add_link(txn, parent, found):
            return
        node = self._node(txn, parent, found, label)
        if label is None or label.id != node.id:
            self._write_label(dir_fd, node, is_linked=found.stat.st_nlink > 1)
        txn.put_node(node, None)
        txn.put_entry(parent, found.name, node, self._free_cookie(txn, parent, node.id))
        if found.stat.st_nlink > 1 and stat.S_ISREG(found.stat.st_mode):
            self._links[found.stat.st_ino] = node.id
        self.findings.files += 1

    def _is_live(self, txn: Txn, path: bytes, parent: int, found: _Found) -> bool:
        """Whether a file is ours, and whole, and not removed; one that was ours is removed."""
        if found.label is None:
            self.findings.foreign += 1
            return False
        if self._is_torn(found.label):
            self.findings.torn += 1
        elif self.stale or parent == _GHOST:
            self.findings.stale += 1
        else:
            return True
        self._remove(txn, path, found)
        return False

    def _believable(self, parent: int, found: _Found) -> Label | None:
        """Return the label unless the file was moved here behind our back."""
        label = found.label
        if label is None or label.flags & records.LABEL_LINKED:
            return label
        return label if label.verify == records.verify_hash(parent, found.name) else None

    def _is_torn(self, label: Label) -> bool:
        if label.flags & records.LABEL_PENDING:
            return True
        return self._believed is not None and label.generation > self._believed

    def _node(self, txn: Txn, parent: int, found: _Found, label: Label | None) -> Node:
        status = found.stat
        generation = 0 if label is None else label.generation
        resident = label is not None and label.flags & records.LABEL_RESIDENT
        return Node(
            id=self._free_id(txn, label), mode=status.st_mode & ~0o6000, uid=status.st_uid,
            gid=status.st_gid, nlink=1, state=State.COMMITTED,
            flags=records.RESIDENT if resident else 0, disk=self.slot.number, ino=status.st_ino,
            size=status.st_size, blocks=status.st_blocks,
            atime_ns=status.st_atime_ns, mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns, generation=generation, access=0, parent=parent,
            name=found.name,
        )  # fmt: skip

    def _add_link(self, txn: Txn, parent: int, found: _Found) -> bool:
        """Take a further name of a file that is already known."""
        if found.stat.st_nlink < 2:
            return False
        label_id = 0 if found.label is None else found.label.id
        node = txn.node(self._links.get(found.stat.st_ino, label_id))
        if node is None or (node.disk, node.ino) != (self.slot.number, found.stat.st_ino):
            return False
        linked = node._replace(nlink=node.nlink + 1)
        txn.put_node(linked, node)
        txn.put_link(node.id, parent, found.name)
        txn.put_entry(parent, found.name, linked, self.numbers.next_id())
        return True

    def _write_label(self, dir_fd: int, node: Node, *, is_linked: bool) -> None:
        label = records.label_of(node, (node.parent, node.name), is_linked=is_linked)
        self._disk.write_label_at(dir_fd, node.name, records.pack_label(label))

    def _remove(self, txn: Txn, path: bytes, found: _Found) -> None:
        """Let the disk remove a file, if it is ours."""
        if found.label is not None:
            chore = Unlink(path, found.label.id, found.stat.st_ino, found.stat.st_blocks)
            txn.put_chore(self.slot.number, self.numbers.next_id(), chore)

    def _lose(self, txn: Txn, node: Node, parent: int, name: bytes) -> None:
        """Forget the copy another disk has of a name: this one is newer."""
        path = txn.path(parent)
        full = path + b"/" + name if path else name
        chore = Unlink(full, node.id, node.ino, node.blocks)
        txn.put_chore(node.disk, self.numbers.next_id(), chore)
        forget_name(txn, parent, name, node, node.ctime_ns)

    def _free_id(self, txn: Txn, label: Label | None) -> int:
        """Return the labelled id, or a fresh one when it is taken: a copied file or disk."""
        if label is None or label.id < records.FIRST_ID or txn.node(label.id) is not None:
            return self.numbers.next_id()
        return label.id

    def _free_cookie(self, txn: Txn, parent: int, node_id: int) -> int:
        return self.numbers.next_id() if txn.has_cookie(parent, node_id) else node_id


def _owned(node: Node, found: os.stat_result) -> Node:
    return node._replace(
        mode=stat.S_IFDIR | (found.st_mode & 0o7777), uid=found.st_uid, gid=found.st_gid
    )


def _batches(items: Iterator[DirItem]) -> Iterator[list[DirItem]]:
    batch: list[DirItem] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
