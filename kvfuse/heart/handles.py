"""Open files: descriptors on the disks by handle number, and what is known of an open inode.

Concurrency: one mutex for the tables; descriptors are closed outside it. A reader that still uses
a handle while another thread releases it is a bug of the driver (the kernel releases last).
"""

import errno
import itertools
import os
import threading
from dataclasses import dataclass, field

from kvfuse.core.records import Node
from kvfuse.heart.handletable import HandleTable, OpenSlot


@dataclass(slots=True)
class OpenFile:
    """One open of one file."""

    fh: int
    id: int
    disk: int
    fd: int
    writable: bool
    reader: bool


@dataclass(slots=True)
class OpenInode:
    """What all opens of one file share.

    *node* is its last record once it has no name any more; until then the catalog has it. *stat*
    is what the disk said after the last change that came through the pool.
    """

    id: int
    disk: int
    files: dict[int, OpenFile] = field(default_factory=dict)
    writers: int = 0
    node: Node | None = None
    stat: os.stat_result | None = None


class Handles:
    """All open files of the pool.

    With a *table* they outlive this process: see :mod:`kvfuse.heart.handletable`.
    """

    def __init__(self, table: HandleTable | None = None) -> None:
        self._mutex = threading.Lock()
        self._files: dict[int, OpenFile] = {}
        self._inodes: dict[int, OpenInode] = {}
        self._numbers = itertools.count(1)
        self._table = table

    def __len__(self) -> int:
        """Return how many files are open."""
        return len(self._files)

    @property
    def outlives(self) -> bool:
        """Whether open files outlive this process."""
        return self._table is not None

    def add(
        self, node_id: int, disk: int, fd: int, *, writable: bool, reader: bool, unique: int = 0
    ) -> OpenFile:
        """Register an open by the request *unique*; takes over *fd*.

        Raises:
            OSError: ENFILE when too many files are open.
        """
        if self._table is None:
            fh = next(self._numbers)
        else:
            fh = self._table.add(node_id, disk, unique, writable=writable, reader=reader)
        with self._mutex:
            return self._insert(OpenFile(fh, node_id, disk, fd, writable, reader))

    def restore(self, slot: OpenSlot, fd: int, node: Node | None) -> None:
        """Take over an open of the server before; *node* is its record if it has no name."""
        file = OpenFile(slot.fh, slot.id, slot.disk, fd, slot.writable, slot.reader)
        with self._mutex:
            self._insert(file)
            self._inodes[slot.id].node = node

    def _insert(self, file: OpenFile) -> OpenFile:
        inode = self._inodes.get(file.id)
        if inode is None:
            inode = self._inodes[file.id] = OpenInode(file.id, file.disk)
        inode.files[file.fh] = file
        inode.writers += file.writable
        self._files[file.fh] = file
        return file

    def file(self, fh: int) -> OpenFile:
        """Return an open file.

        Raises:
            OSError: EBADF when there is no such handle.
        """
        try:
            return self._files[fh]
        except KeyError:
            raise OSError(errno.EBADF, f"no open file {fh}") from None

    def inode(self, node_id: int) -> OpenInode | None:
        """Return what is shared by the opens of a file, None when it is not open."""
        return self._inodes.get(node_id)

    def dup(self, node_id: int) -> int | None:
        """Return an own descriptor of a file that is open, None when it is not.

        One that belongs to a handle may be closed, and its number be another file, at any moment.
        """
        with self._mutex:
            inode = self._inodes.get(node_id)
            for file in () if inode is None else inode.files.values():
                if file.fd >= 0:
                    return os.dup(file.fd)
            return None

    def orphan(self, node: Node) -> bool:
        """Keep *node*, which just lost its last name, while it is open; False when it is not."""
        with self._mutex:
            inode = self._inodes.get(node.id)
            if inode is None:
                return False
            inode.node = node
            return True

    def unorphan(self, node_id: int) -> None:
        """The file has a name after all."""
        with self._mutex:
            inode = self._inodes.get(node_id)
            if inode is not None:
                inode.node = None

    def remove(self, fh: int) -> tuple[OpenFile, OpenInode]:
        """Forget an open; the caller closes its descriptor, and frees its number at last.

        Raises:
            OSError: EBADF when there is no such handle.
        """
        with self._mutex:
            file = self._files.pop(fh, None)
            if file is None:
                raise OSError(errno.EBADF, f"no open file {fh}")
            inode = self._inodes[file.id]
            del inode.files[fh]
            inode.writers -= file.writable
            if not inode.files:
                del self._inodes[file.id]
            if self._table is not None:
                self._table.closing(fh)
            return file, inode

    def free(self, fh: int) -> None:
        """Nothing of a removed open is left anywhere: its number's slot may be used again."""
        if self._table is not None:
            self._table.free(fh)

    def note_backing(self, fh: int, backing_id: int) -> None:
        """Note what the kernel calls the file behind an open."""
        if self._table is not None:
            self._table.note_backing(fh, backing_id)

    def all(self) -> list[OpenFile]:
        """Return every open file."""
        with self._mutex:
            return list(self._files.values())

    def ids(self) -> list[int]:
        """Return the ids of all files that are open."""
        with self._mutex:
            return list(self._inodes)

    def written(self, disk: int) -> list[int]:
        """Return the ids of the files of *disk* that are open for writing."""
        with self._mutex:
            return [i.id for i in self._inodes.values() if i.disk == disk and i.writers]

    def on_disk(self, disk: int) -> int:
        """Return how many files of *disk* are open."""
        with self._mutex:
            return sum(file.disk == disk for file in self._files.values())
