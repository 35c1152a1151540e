"""The catalog against itself and against the disks, both ways. Changes nothing.

:func:`check` is for a pool that is held still. While one changes, :class:`DiskCheck` gives
suspects, for disk and catalog are read at two moments; whoever runs it looks again.

What is kept meanwhile is a batch of names for each level of directories, and eight bytes for each
directory of the disk.
"""

import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import Create, Intent, Link, Move, Swap, places_of
from kvfuse.core.records import ROOT_ID, DirEntry, Label, Node, State, is_reserved
from kvfuse.disks.aside import aside
from kvfuse.disks.disk import DirItem, Disk
from kvfuse.heart import backlog
from kvfuse.pool.findings import Finding, Kind, Spot
from kvfuse.pool.tables import Views, check_tables, full

__all__ = ["DiskCheck", "Finding", "Kind", "check", "judge", "look_at_name"]

_ITEMS = 64  # of a directory, between two views of the catalog
_DEPTH_MAX = 400  # directories below each other; each costs two descriptors

Emit = Callable[[Finding], None]


def check(
    catalog: Catalog, disks: Mapping[int, Disk], tick: Callable[[int], None] = lambda _done: None
) -> list[Finding]:
    """Compare; *disks* are those that are there, by their number in the catalog.

    Whoever calls holds the pool still. *tick* is told how many rows and names were compared.
    """
    findings = list(check_tables(catalog, tick))
    with catalog.read() as txn:
        intents = [intent for _, intent in txn.intents()]
        paths = {number: disk.path for number, disk in disks.items()}
        findings += unfinished(txn, paths, intents)
        begun = {place for intent in intents for place in places_of(intent)}
        explained = {full(txn, *place) for place in begun}
    for number, disk in sorted(disks.items()):
        found: list[Finding] = []
        DiskCheck(catalog, number, disk, found.append, tick).run()
        findings += [each for each in found if each.path not in explained]
    return findings


def unfinished(txn: Txn, paths: Mapping[int, str], intents: Sequence[Intent]) -> Iterator[Finding]:
    """Tell what was said and is not done; *paths* are those of the disks that are there."""
    for intent in intents:
        disk = paths.get(intent.disk, "")
        where = full(txn, intent.parent, intent.name)
        yield Finding(Kind.UNFINISHED, disk, where, _STEPS[type(intent)])
    for number, waiting in backlog.backlogs(txn).items():
        left = waiting.chores - waiting.parked
        if left:
            text = f"{left} changes are still to be made on the disk"
            yield Finding(Kind.UNFINISHED, paths.get(number, f"disk {number}"), b"", text)
    for number, chore in backlog.parked(txn):
        text = "removed by its clients, and the disk would not let it go; tried again at each mount"
        yield Finding(Kind.UNFINISHED, paths.get(number, f"disk {number}"), chore.path, text)


_STEPS = {
    Create: "was about to be made",
    Move: "was about to be renamed",
    Swap: "was about to exchange its name with another",
    Link: "was about to get a further name",
}


def set_aside(disk: Disk) -> Iterator[Finding]:
    """Tell what stood in the way on a disk and was moved out of it."""
    try:
        kept = aside(disk)
    except OSError as exc:
        yield Finding(Kind.UNREADABLE, disk.path, b".kvfuse/aside", exc.strerror or str(exc))
        return
    if kept.files:
        most = "" if kept.is_all else "at least "
        text = f"{most}{kept.files} files, {kept.bytes} bytes, stood in the way and are kept here"
        yield Finding(Kind.ASIDE, disk.path, b".kvfuse/aside", text)


# -- a name of a disk against the catalog


class Seen(NamedTuple):
    """What lies at a name; *is_mount*: another file system does."""

    name: bytes
    type_bits: int  # S_IFREG, S_IFDIR, S_IFLNK; 0 for anything else
    label: Label | None = None
    stat: os.stat_result | None = None
    is_mount: bool = False


class Where(NamedTuple):
    """A directory on a disk: its id, 0 where it is of no record, and its path there."""

    dir_id: int
    path: bytes

    def below(self, name: bytes) -> bytes:
        """Return the path of a name in it."""
        return self.path + b"/" + name if self.path else name


def see(disk: Disk, dir_fd: int, item: DirItem) -> Seen | None:
    """Look at what a listing had; None when it has gone.

    Raises:
        OSError: the disk failed.
    """
    if item.type_bits == 0:
        return Seen(item.name, 0)
    try:
        value = disk.read_label_at(dir_fd, item.name)
        found = disk.stat(dir_fd, item.name)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return Seen(item.name, item.type_bits, is_mount=True)
    label = None if value is None else records.unpack_label(value)
    return Seen(item.name, stat.S_IFMT(found.st_mode), label, found)


def look_at_name(disk: Disk, dir_fd: int, name: bytes) -> Seen | None:
    """Look at one name by itself; as :func:`see`."""
    try:
        mode = disk.stat(dir_fd, name).st_mode
    except FileNotFoundError:
        return None
    known = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    type_bits = stat.S_IFMT(mode) if stat.S_IFMT(mode) in known else 0
    return see(disk, dir_fd, DirItem(name, type_bits, 0))


def judge(
    txn: Txn, number: int, disk: Disk, where: Where, name: bytes, seen: Seen | None
) -> list[Finding]:
    """Return what is wrong with a name of disk *number*, where *seen* lies; None: nothing."""
    return _Judge(txn, number, disk, where).name(name, seen)


class _Judge:
    """Compares what lies in one directory of a disk with one view of the catalog."""

    def __init__(self, txn: Txn, number: int, disk: Disk, where: Where) -> None:
        self.txn = txn
        self.number = number
        self._disk = disk
        self._where = where
        self.is_settled = txn.is_settled(number)
        self._doomed: set[tuple[int, int | None]] | None = None
        self._findings: list[Finding] = []
        self.matched = 0  # names at which the catalog has a file of this disk, and something lies

    def name(self, name: bytes, seen: Seen | None) -> list[Finding]:
        """Return what is wrong with a name."""
        self._findings = []
        path = self._where.below(name)
        node = self.txn.child(self._where.dir_id, name) if self._where.dir_id else None
        is_here = node is not None and node.disk == self.number
        self.matched += is_here and seen is not None
        if seen is None:
            if node is not None and is_here:
                self._say(Kind.MISSING, path, f"id {node.id} is not there")
        elif seen.type_bits == 0 or seen.is_mount:
            what = "another file system is mounted there" if seen.is_mount else (
                "neither file, directory nor symlink"
            )  # fmt: skip
            self._say(Kind.FOREIGN, path, what)
            if node is not None and is_here:
                self._say(Kind.MISSING, path, f"id {node.id} is not there")
        elif seen.type_bits == stat.S_IFDIR:
            self._carrier(path, node, seen)
        else:
            self._file(path, node, seen)
        return self._findings

    def directory_of(self, name: bytes, seen: Seen) -> int:
        """Return the id of the directory whose carrier this is, 0 when it is of no record."""
        node = self.txn.child(self._where.dir_id, name) if self._where.dir_id else None
        node = self._by_label(node, seen.label)
        return node.id if node is not None and node.is_dir else 0

    def _by_label(self, node: Node | None, label: Label | None) -> Node | None:
        """Return the record of a carrier: while directories are to be moved, that of its label."""
        if self.is_settled or label is None:
            return node
        return self.txn.node(label.id) or node

    def _is_doomed(self, label: Label, ino: int | None) -> bool:
        if self._doomed is None:
            self._doomed = backlog.doomed(self.txn, self.number)
        return (label.id, ino) in self._doomed

    def _say(self, kind: Kind, path: bytes, text: str) -> None:
        spot = Spot(self.number, self._where.dir_id, path)
        self._findings.append(Finding(kind, self._disk.path, path, text, spot))

    def _carrier(self, path: bytes, node: Node | None, seen: Seen) -> None:
        label = seen.label
        if node is not None and node.disk == self.number:
            self._say(Kind.MISSING, path, f"id {node.id} is not there, a directory is")
        node = self._by_label(node, label)
        if node is None or not node.is_dir:
            if label is None or not self._is_doomed(label, None):
                kind = Kind.FOREIGN if label is None else Kind.ORPHAN
                self._say(kind, path, "a directory without a record")
            return
        if not node.ino & records.carrier_bit(self.number):
            self._say(Kind.DIFFERENT, path, "a carrier its record does not know")
        if label is None or label.id != node.id:
            self._say(Kind.DIFFERENT, path, f"is labelled {_told(label)}, its record is {node.id}")
        if self.is_settled:
            self._compare_owner(path, node, seen.stat)

    def _file(self, path: bytes, node: Node | None, seen: Seen) -> None:
        found, label = seen.stat, seen.label
        assert found is not None, "looked at"
        if node is None or (node.disk, node.ino) != (self.number, found.st_ino):
            if label is None:
                self._say(Kind.FOREIGN, path, "a file without a record or a label")
            elif not self._is_doomed(label, found.st_ino):
                self._say(Kind.ORPHAN, path, f"a file without a record, labelled {_told(label)}")
            if node is not None and node.disk == self.number:
                self._say(Kind.MISSING, path, f"id {node.id} is not there, another file is")
            return
        if seen.type_bits != stat.S_IFMT(node.mode):
            self._say(Kind.DIFFERENT, path, f"has type {found.st_mode:o}, noted {node.mode:o}")
            return
        if found.st_nlink != node.nlink:
            self._say(Kind.DIFFERENT, path, f"has {found.st_nlink} names, noted {node.nlink}")
        if node.state == State.COMMITTED and found.st_size != node.size:
            self._say(Kind.DIFFERENT, path, f"has {found.st_size} bytes, noted {node.size}")
        if node.is_regular:
            self._compare_owner(path, node, found)
        place = (self._where.dir_id, path.rpartition(b"/")[2])
        for text in _label_faults(place, node, label):
            self._say(Kind.DIFFERENT, path, text)

    def _compare_owner(self, path: bytes, node: Node, found: os.stat_result | None) -> None:
        assert found is not None, "looked at"
        there = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
        noted = (stat.S_IMODE(node.mode), node.uid, node.gid)
        if there != noted:
            self._say(Kind.OWNER, path, f"has mode, uid, gid {there}, noted {noted}")


def _label_faults(place: tuple[int, bytes], node: Node, label: Label | None) -> Iterator[str]:
    if label is None:
        # Without CAP_SYS_ADMIN a symlink cannot carry one.
        if node.is_regular:
            yield "has no label"
        return
    if (label.id, label.generation) != (node.id, node.generation):
        yield f"is labelled {_told(label)}, noted as {node.id} of generation {node.generation}"
    if bool(label.flags & records.LABEL_PENDING) is not (node.state == State.PENDING):
        yield f"is labelled {_told(label)}, noted {State(node.state).name}"
    if bool(label.flags & records.LABEL_RESIDENT) is not bool(node.flags & records.RESIDENT):
        noted = "at home" if node.flags & records.RESIDENT else "not at home"
        yield f"is labelled {_told(label)}, noted {noted}"
    is_bound = not label.flags & records.LABEL_LINKED
    if node.nlink > 1 and is_bound:
        yield "has several names, and a label for one"
    if is_bound and label.verify != records.verify_hash(*place):
        yield "is labelled for another place"


def _told(label: Label | None) -> str:
    """Return a label for people."""
    if label is None:
        return "as nothing"
    words = [f"as {label.id} of generation {label.generation}"]
    words += [
        word
        for flag, word in (
            (records.LABEL_PENDING, "being written"),
            (records.LABEL_LINKED, "with several names"),
            (records.LABEL_RESIDENT, "at home"),
        )
        if label.flags & flag
    ]
    return ", ".join(words)


# -- a disk


@dataclass(slots=True)
class _Level:
    """A directory that is being gone through; *fd* is closed with it."""

    where: Where
    fd: int
    items: Iterator[DirItem]
    below: list[Where] = field(default_factory=list)
    matched: int = 0


class DiskCheck:
    """Goes over one disk, and over what the catalog says is there."""

    def __init__(
        self, views: Views, number: int, disk: Disk, emit: Emit, tick: Callable[[int], None]
    ) -> None:
        self._views = views
        self._number = number
        self._disk = disk
        self._emit = emit
        self._tick = tick
        self._visited = array("Q")
        self._levels: list[_Level] = []

    def run(self) -> None:
        """Compare; what is found goes to *emit*."""
        try:
            self._enter(Where(ROOT_ID, b""))
            while self._levels:
                level = self._levels[-1]
                if level.below:
                    self._enter(level.below.pop())
                elif not self._some(level):
                    self._leave(level)
        finally:
            for level in self._levels:
                os.close(level.fd)
        self._visited = array("Q", sorted(self._visited))
        self._elsewhere()

    def _enter(self, where: Where) -> None:
        if len(self._levels) == _DEPTH_MAX:
            self._unreadable(where.path, f"lies in {_DEPTH_MAX} directories: too deep to look at")
            return
        try:
            if self._levels:
                above, name = self._levels[-1], where.path.rpartition(b"/")[2]
                fd = self._disk.open_subdir(above.fd, name, readable=True)
            else:
                fd = self._disk.open_dir(b"", readable=True)
        except FileNotFoundError:
            return
        except OSError as exc:
            self._unreadable(where.path, exc.strerror or str(exc))
            return
        if where.dir_id:
            self._visited.append(where.dir_id)
        self._levels.append(_Level(where, fd, self._disk.list_fd(fd)))

    def _some(self, level: _Level) -> bool:
        """Compare some names of a directory; return whether there were any."""
        where = level.where
        try:
            items = list(islice(level.items, _ITEMS))
        except OSError as exc:
            self._unreadable(where.path, exc.strerror or str(exc))
            return False
        there = [see for item in items if (see := self._see(level, item)) is not None]
        with self._views.read() as txn:
            judged = _Judge(txn, self._number, self._disk, where)
            for seen in there:
                for found in judged.name(seen.name, seen):
                    self._emit(found)
                if seen.type_bits == stat.S_IFDIR and not seen.is_mount:
                    dir_id = judged.directory_of(seen.name, seen)
                    level.below.append(Where(dir_id, where.below(seen.name)))
            level.matched += judged.matched
        self._tick(len(items))
        return bool(items)

    def _see(self, level: _Level, item: DirItem) -> Seen | None:
        if not level.where.path and is_reserved(ROOT_ID, item.name):
            return None
        try:
            return see(self._disk, level.fd, item)
        except OSError as exc:
            self._unreadable(level.where.below(item.name), exc.strerror or str(exc))
            level.matched += 1  # it is there
            return None

    def _leave(self, level: _Level) -> None:
        """All names of a directory were compared: look for those that were not there."""
        self._levels.pop()
        try:
            where = level.where
            if where.dir_id:
                wanted = sum(1 for _ in self._entries(where.dir_id))
                if wanted != level.matched:
                    self._missing(level)
        finally:
            os.close(level.fd)

    def _missing(self, level: _Level) -> None:
        for entry in self._entries(level.where.dir_id):
            try:
                self._disk.stat(level.fd, entry.name)
            except FileNotFoundError:
                self._gone(level.where, entry)
            except OSError as exc:
                self._unreadable(level.where.below(entry.name), exc.strerror or str(exc))

    def _entries(self, dir_id: int) -> Iterator[DirEntry]:
        """Yield what the catalog has of a directory on this disk, some in each view."""
        after = 0
        while True:
            with self._views.read() as txn:
                some = list(islice(txn.children(dir_id, after), _ITEMS * 4))
            if not some:
                return
            self._tick(0)
            yield from (entry for entry in some if entry.disk == self._number)
            after = some[-1].cookie

    def _elsewhere(self) -> None:
        """Go through the directories of the catalog that the disk does not have."""
        after = b""
        while True:
            with self._views.read() as txn:
                cursor = txn.cursor(b"children")
                if not cursor.set_range(after):
                    return
                dir_id = records.unpack_id(cursor.key()[:8])
            after = records.pack_id(dir_id + 1)
            self._tick(0)
            at = bisect_left(self._visited, dir_id)
            if at < len(self._visited) and self._visited[at] == dir_id:
                continue
            for entry in self._entries(dir_id):
                with self._views.read() as txn:
                    path = full(txn, dir_id, b"")[:-1]
                self._gone(Where(dir_id, path), entry)

    def _gone(self, where: Where, entry: DirEntry) -> None:
        path = where.below(entry.name)
        spot = Spot(self._number, where.dir_id, path)
        text = f"id {entry.id} is not there"
        self._emit(Finding(Kind.MISSING, self._disk.path, path, text, spot))

    def _unreadable(self, path: bytes, text: str) -> None:
        self._emit(Finding(Kind.UNREADABLE, self._disk.path, path, text))
