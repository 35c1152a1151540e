"""What lies in one directory of a disk, read for the catalog: who each name says it is.

Every file says in its label who it is, which generation, and whether it was finished; every carrier
which directory it is. Two read disks: the steward, a process for each disk that scans it whole, and
the server, which looks at what a client asks for before the steward has come there.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence

import msgspec

from kvfuse.core import records
from kvfuse.core.records import NO_DISK, ROOT_ID, Label, Node, State, is_reserved
from kvfuse.disks.disk import Disk

_BLOCKED = (errno.EXDEV, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)
_FILE_BITS = ~0o6000  # a file's mode without setuid and setgid, as the pool makes them


class Terms(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How what lies on a disk is to be understood.

    *number* is the disk's in the catalog. *adopting* makes all on it the pool's: labels mean
    nothing there, for they may be another pool's, and each file gets one of this pool. *stale* says
    that nothing on the disk can be believed, because the pool lived on without it: files, and
    directories that no other disk vouches for, are removed. Generations between the pairs of
    *unsure* may not have reached the disk before the machine went down. What has an id from *floor*
    on was made while this scan ran: the catalog has it. *singly*: the server looks at every file
    itself.
    """

    number: int
    adopting: bool
    stale: bool
    unsure: list[tuple[int, int]]
    floor: int
    singly: bool = False


class Below(msgspec.Struct, frozen=True, array_like=True):
    """A labelled carrier in a directory."""

    parent: int
    name: bytes
    id: int
    generation: int
    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class Files(msgspec.Struct, array_like=True):
    """Files of which nothing has to be asked, as columns: what each table gets for each of them.

    Flat lists of bytes: a list of pairs costs more to make, to send and to read than all the rest.
    *nodes* are the keys of that table, and so on; ``recency`` has no values.
    """

    nodes: list[bytes] = msgspec.field(default_factory=list)
    node_values: list[bytes] = msgspec.field(default_factory=list)
    entries: list[bytes] = msgspec.field(default_factory=list)
    entry_values: list[bytes] = msgspec.field(default_factory=list)
    children: list[bytes] = msgspec.field(default_factory=list)
    child_values: list[bytes] = msgspec.field(default_factory=list)
    recency: list[bytes] = msgspec.field(default_factory=list)
    blocks: list[int] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes)

    def picked(self, indices: Sequence[int]) -> "Files":
        """Return some of them, in this order."""
        columns = msgspec.structs.astuple(self)
        return Files(*([column[index] for index in indices] for column in columns))

    def sorted(self) -> "Files":
        """Return them in the order of their ids: the tables take them in at half the cost."""
        return self.picked(sorted(range(len(self)), key=self.nodes.__getitem__))


class Haul(msgspec.Struct, array_like=True):
    """What was read, packed for the catalog: one transaction takes it in.

    *odd* are names that the server has to look at. *done* are directories read to their end; *lost*
    could not be: (id, errno).
    """

    files: Files = msgspec.field(default_factory=Files)
    below: list[Below] = msgspec.field(default_factory=list)
    odd: list[tuple[int, bytes]] = msgspec.field(default_factory=list)
    done: list[int] = msgspec.field(default_factory=list)
    lost: list[tuple[int, int]] = msgspec.field(default_factory=list)
    foreign: int = 0
    unreadable: int = 0

    @property
    def size(self) -> int:
        """How many records, more or less, this is to take in."""
        return len(self.files) + len(self.below) + len(self.odd) + len(self.done)


class Sight(msgspec.Struct, frozen=True):
    """One name as it lies on a disk, looked at by itself."""

    name: bytes
    stat: os.stat_result
    label: Label | None

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.stat.st_mode)


class Reader:
    """Reads directories of *disk* under *terms*, into hauls of about *full* records for *emit*.

    Files of the pool that nothing is strange about are packed here, so that whoever takes them in
    has next to nothing to compute.
    """

    def __init__(self, disk: Disk, terms: Terms, emit: Callable[[Haul], None], full: int) -> None:
        self.disk = disk
        self.terms = terms
        self.haul = Haul()
        self._emit = emit
        self._full = full

    def directory(self, dir_id: int, dir_fd: int, *, chdir: bool = False) -> None:
        """Read the directory *dir_id*, open at *dir_fd* for reading.

        What cannot be read is in the haul as *lost*. With *chdir* it becomes the working directory
        of this process: names are then found with less work.
        """
        try:
            value = self.disk.read_label(dir_fd)
            label = None if value is None else records.unpack_label(value)
            if label is not None and dir_id not in (label.id, ROOT_ID):
                self.haul.lost.append((dir_id, errno.ESTALE))  # moved since its path was read
                return
            if chdir:
                os.fchdir(dir_fd)
            self._list(dir_id, dir_fd, b"" if chdir else b"/proc/self/fd/%d/" % dir_fd)
            self.haul.done.append(dir_id)
        except OSError as exc:
            self.haul.lost.append((dir_id, exc.errno or errno.EIO))

    def flush(self) -> None:
        """Emit what is left."""
        self._emit(self.taken())

    def taken(self) -> Haul:
        """Return what is left, and begin anew."""
        haul, self.haul = self.haul, Haul()
        haul.files = haul.files.sorted()
        return haul

    def _list(self, dir_id: int, dir_fd: int, here: bytes) -> None:
        device = os.fstat(dir_fd).st_dev
        plain = self._plain(dir_id, here, device)
        room = self._full - self.haul.size
        with os.scandir(here or b".") as items:
            for item in items:
                try:
                    if item.is_file(follow_symlinks=False):
                        name = item.name
                        if not plain(name):
                            self._file(dir_id, name, here, device)
                    else:
                        self._other(dir_id, item, here, device)
                except OSError as exc:
                    if exc.errno not in _BLOCKED:
                        self.haul.unreadable += 1
                room -= 1
                if room <= 0:
                    self.flush()
                    room = self._full

    def _other(self, dir_id: int, item: os.DirEntry[bytes], here: bytes, device: int) -> None:
        if is_reserved(dir_id, item.name):
            return
        if item.is_dir(follow_symlinks=False):
            self._below(dir_id, item.name, here, device)
        elif item.is_symlink():
            self.haul.odd.append((dir_id, item.name))
        else:
            self.haul.foreign += 1

    def _plain(self, dir_id: int, here: bytes, device: int) -> Callable[[bytes], bool]:
        """Return what packs a file that nothing is strange about, and says whether it did."""
        terms, attribute = self.terms, os.fsencode(self.disk.label_name)
        if terms.adopting or terms.stale or terms.singly:
            return lambda _name: False
        pack = records.plain_packer(terms.number, dir_id, device, terms.floor, terms.unsure)
        lstat, getxattr = os.lstat, os.getxattr

        def add(name: bytes) -> bool:
            path = here + name
            found = lstat(path)
            try:
                label = getxattr(path, attribute, follow_symlinks=False)
            except OSError:
                return False
            packed = pack(name, found, label)
            if packed is None:
                return False
            files = self.haul.files
            files.nodes.append(packed[0])
            files.node_values.append(packed[1])
            files.entries.append(packed[2])
            files.entry_values.append(packed[3])
            files.children.append(packed[4])
            files.child_values.append(packed[5])
            files.recency.append(packed[6])
            files.blocks.append(packed[7])
            return True

        return add

    def _below(self, dir_id: int, name: bytes, here: bytes, device: int) -> None:
        found = os.lstat(here + name)
        if found.st_dev != device:  # another file system is mounted there
            self.haul.foreign += 1
            return
        label = self._label(here + name)
        if label is None and not self.terms.adopting:
            self.haul.foreign += 1
            return
        if label is None or self.terms.adopting or self.terms.stale:
            self.haul.odd.append((dir_id, name))
            return
        self.haul.below.append(
            Below(
                dir_id, name, label.id, label.generation, found.st_mode, found.st_uid, found.st_gid,
                found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns,
            )
        )  # fmt: skip

    def _file(self, dir_id: int, name: bytes, here: bytes, device: int) -> None:
        found = os.lstat(here + name)
        if found.st_dev != device:
            self.haul.foreign += 1
            return
        label = self._label(here + name)
        haul, terms = self.haul, self.terms
        if label is None and not terms.adopting:
            haul.foreign += 1
        elif label is None or terms.adopting or label.id < terms.floor or found.st_nlink > 1:
            haul.odd.append((dir_id, name))
        # What is left was made while the scan runs: whoever made it has recorded it.

    def _label(self, path: bytes) -> Label | None:
        try:
            value = os.getxattr(path, self.disk.label_name, follow_symlinks=False)
        except OSError as exc:
            if exc.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return None
            raise
        return records.unpack_label(value)


def see(disk: Disk, dir_fd: int, name: bytes) -> Sight | None:
    """Look at one name of a disk; None when nothing of ours can be there.

    Raises:
        OSError: the disk failed.
    """
    try:
        value = disk.read_label_at(dir_fd, name)
        found = disk.stat(dir_fd, name)
    except OSError as exc:
        if exc.errno in _BLOCKED:
            return None
        raise
    if stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        return None
    return Sight(name, found, None if value is None else records.unpack_label(value))


def is_torn(label: Label, terms: Terms) -> bool:
    """Whether a file was being written when its daemon, or its machine, went down."""
    if label.flags & records.LABEL_PENDING:
        return True
    return records.is_between(label.generation, terms.unsure)


def file_node(
    number: int, place: tuple[int, bytes], found: os.stat_result, label: Label | None, node_id: int
) -> Node:
    """Return the record of a file found at *place* on disk *number*.

    Nobody knows when it was last read: when it was committed comes nearest.
    """
    generation = 0 if label is None else label.generation
    resident = label is not None and label.flags & records.LABEL_RESIDENT
    return Node(
        node_id, found.st_mode & _FILE_BITS, found.st_uid, found.st_gid, 1, State.COMMITTED,
        records.RESIDENT if resident else 0, number, found.st_ino, found.st_size, found.st_blocks,
        found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns, generation, generation, *place,
    )  # fmt: skip


def dir_node(below: Below, bit: int) -> Node:
    """Return the record of a directory that a carrier was found of."""
    return Node(
        id=below.id, mode=stat.S_IFDIR | (below.mode & 0o7777), uid=below.uid, gid=below.gid,
        nlink=1, state=State.COMMITTED, flags=0, disk=NO_DISK, ino=bit, size=4096, blocks=0,
        atime_ns=below.atime_ns, mtime_ns=below.mtime_ns, ctime_ns=below.ctime_ns,
        generation=below.generation, access=0, parent=below.parent, name=below.name,
    )  # fmt: skip
