"""The catalog against itself and against the disks, both ways. Changes nothing.

Whoever calls holds the pool still: nothing may change the catalog or the disks meanwhile.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import Create, Link, Move, Swap
from kvfuse.core.records import NO_DISK, ROOT_ID, Label, Node, State, is_reserved
from kvfuse.disks.disk import DirItem, Disk
from kvfuse.heart import backlog


class Kind(StrEnum):
    """What is wrong, or merely there."""

    CATALOG = "catalog"  # the catalog contradicts itself
    MISSING = "missing"  # a record whose file is not on its disk
    DIFFERENT = "different"  # a file that is not as its record says
    OWNER = "owner"  # owner or mode: clients see the record's
    ORPHAN = "orphan"  # a labelled file or directory no record speaks of
    UNFINISHED = "unfinished"  # said, and not done yet: normal while a disk is away
    UNREADABLE = "unreadable"  # the disk did not answer
    FOREIGN = "foreign"  # not ours, never served: no fault of the pool


class Finding(NamedTuple):
    """One finding. *disk* is a disk's path, "" for the catalog; *path* is below the root."""

    kind: Kind
    disk: str
    path: bytes
    text: str


def check(catalog: Catalog, disks: Mapping[int, Disk]) -> list[Finding]:
    """Compare; *disks* are those that are there, by their number in the catalog."""
    with catalog.read() as txn:
        findings = list(_check_catalog(txn))
        findings += _check_unfinished(txn, {number: disk.path for number, disk in disks.items()})
        for number, disk in sorted(disks.items()):
            findings += _DiskCheck(txn, number, disk).run()
    return findings


# -- the catalog by itself


def _check_catalog(txn: Txn) -> Iterator[Finding]:
    names: Counter[int] = Counter()
    for parent, name, child, cookie, type_bits in txn.entries():
        names[child] += 1
        yield from _check_entry(txn, (parent, name), child, cookie, type_bits)
    yield from _check_listing(txn)
    usage: dict[tuple[int, bool], list[int]] = {}
    pending: set[int] = set()
    for node in txn.nodes():
        yield from _check_node(txn, node, names[node.id])
        if node.state == State.PENDING:
            pending.add(node.id)
        if node.disk != NO_DISK:
            used = usage.setdefault((node.disk, node.is_stale), [0, 0])
            used[0] += 1
            used[1] += node.blocks
    if pending != set(txn.pending()):
        yield _broken(b"", f"files being written: {sorted(pending)}, listed {txn.pending()}")
    for number in txn.disks():
        for is_stale, noted in ((False, txn.usage(number)), (True, txn.stale_usage(number))):
            counted = tuple(usage.get((number, is_stale), (0, 0)))
            if counted != noted:
                what = "has stale" if is_stale else "uses"
                yield _broken(b"", f"disk {number} {what} {counted}, noted {noted}")


def _check_entry(
    txn: Txn, place: tuple[int, bytes], child: int, cookie: int, type_bits: int
) -> Iterator[Finding]:
    parent, name = place
    where = _full(txn, parent, name)
    directory, node = txn.node(parent), txn.node(child)
    if directory is None or not directory.is_dir:
        yield _broken(where, f"lies in {parent}, which is no directory")
    if node is None:
        yield _broken(where, f"stands for {child}, which has no record")
        return
    if stat.S_IFMT(node.mode) != type_bits:
        yield _broken(where, f"is listed as type {type_bits:o}, its record says {node.mode:o}")
    if (node.parent, node.name) != place and (node.is_dir or place not in txn.links(child)):
        yield _broken(where, f"is not a name its record {child} knows")
    if not txn.has_cookie(parent, cookie):
        yield _broken(where, "is not in the listing of its directory")


def _check_listing(txn: Txn) -> Iterator[Finding]:
    for parent, entry in txn.listing():
        where = _full(txn, parent, entry.name)
        found = txn.entry(parent, entry.name)
        if found != (entry.id, entry.cookie, entry.mode):
            what = "its name is not known" if found is None else f"its name stands for {found[0]}"
            yield _broken(where, f"is listed as id {entry.id}, {what}")
        node = txn.node(entry.id)
        if node is not None and node.disk != entry.disk:
            yield _broken(where, f"is listed on disk {entry.disk}, its record says {node.disk}")


def _check_node(txn: Txn, node: Node, names: int) -> Iterator[Finding]:
    where = _full(txn, node.parent, node.name)
    if node.id == ROOT_ID:
        if not node.is_dir:
            yield _broken(b"", "the root is no directory")
        return
    if not _is_reachable(txn, node):
        yield _broken(where, f"{node.id} hangs on no path from the root")
    if names != node.nlink or len(txn.links(node.id)) != node.nlink - 1:
        links = len(txn.links(node.id))
        yield _broken(where, f"has {names} names and {links} links, counts {node.nlink}")
    if node.is_dir is not (node.disk == NO_DISK):
        yield _broken(where, f"has type {node.mode:o} and disk {node.disk}")


def _is_reachable(txn: Txn, node: Node) -> bool:
    seen: set[int] = set()
    while node.id != ROOT_ID:
        entry = txn.entry(node.parent, node.name)
        above = txn.node(node.parent)
        if node.id in seen or entry is None or entry[0] != node.id or above is None:
            return False
        seen.add(node.id)
        node = above
    return True


def _check_unfinished(txn: Txn, paths: Mapping[int, str]) -> Iterator[Finding]:
    for _, intent in txn.intents():
        disk = paths.get(intent.disk, "")
        where = _full(txn, intent.parent, intent.name)
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


def _full(txn: Txn, parent: int, name: bytes) -> bytes:
    """Return a path for people; a broken chain shows as far as it goes."""
    parts, seen = [name], set[int]()
    while parent != ROOT_ID and parent not in seen:
        seen.add(parent)
        node = txn.node(parent)
        if node is None:
            parts.append(b"?")
            break
        parts.append(node.name)
        parent = node.parent
    return b"/".join(reversed(parts))


def _broken(path: bytes, text: str) -> Finding:
    return Finding(Kind.CATALOG, "", path, text)


# -- a disk against the catalog


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


class _DiskCheck:
    """The walk over one disk."""

    def __init__(self, txn: Txn, number: int, disk: Disk) -> None:
        self._txn = txn
        self._number = number
        self._disk = disk
        self._findings: list[Finding] = []
        self._seen: set[tuple[int, bytes]] = set()
        self._doomed = backlog.doomed(txn, number)

    def run(self) -> list[Finding]:
        todo: list[tuple[bytes, Node | None]] = [(b"", self._txn.node(ROOT_ID))]
        while todo:
            path, directory = todo.pop()
            try:
                todo += self._directory(path, directory)
            except OSError as exc:
                self._say(Kind.UNREADABLE, path, exc.strerror or str(exc))
        for parent, entry in self._txn.listing():
            if entry.disk == self._number and (parent, entry.name) not in self._seen:
                self._say(
                    Kind.MISSING,
                    _full(self._txn, parent, entry.name),
                    f"id {entry.id} is not there",
                )
        return self._findings

    def _say(self, kind: Kind, path: bytes, text: str) -> None:
        self._findings.append(Finding(kind, self._disk.path, path, text))

    def _directory(self, path: bytes, directory: Node | None) -> list[tuple[bytes, Node | None]]:
        below: list[tuple[bytes, Node | None]] = []
        dir_fd = self._disk.open_dir(path, readable=True)
        try:
            for item in self._disk.list_fd(dir_fd):
                if not path and is_reserved(ROOT_ID, item.name):
                    continue
                full = path + b"/" + item.name if path else item.name
                try:
                    self._item(dir_fd, full, directory, item, below)
                except OSError as exc:
                    self._say(Kind.UNREADABLE, full, exc.strerror or str(exc))
        finally:
            os.close(dir_fd)
        return below

    def _item(
        self, dir_fd: int, path: bytes, directory: Node | None, item: DirItem,
        below: list[tuple[bytes, Node | None]],
    ) -> None:  # fmt: skip
        if item.type_bits == 0:
            self._say(Kind.FOREIGN, path, "neither file, directory nor symlink")
            return
        node = None if directory is None else self._txn.child(directory.id, item.name)
        try:
            value = self._disk.read_label_at(dir_fd, item.name)
        except NotADirectoryError:
            self._say(Kind.FOREIGN, path, "another file system is mounted there")
            return
        label = None if value is None else records.unpack_label(value)
        found = self._disk.stat(dir_fd, item.name)
        if item.type_bits == stat.S_IFDIR:
            below.append((path, self._carrier(path, node, label, found)))
        else:
            self._file(path, directory, node, label, found)

    def _carrier(
        self, path: bytes, node: Node | None, label: Label | None, found: os.stat_result
    ) -> Node | None:
        if node is None or not node.is_dir:
            if label is None or (label.id, None) not in self._doomed:
                kind = Kind.FOREIGN if label is None else Kind.ORPHAN
                self._say(kind, path, "a directory without a record")
            return None
        if not node.ino & records.carrier_bit(self._number):
            self._say(Kind.DIFFERENT, path, "a carrier its record does not know")
        if label is None or label.id != node.id:
            self._say(Kind.DIFFERENT, path, f"is labelled {_told(label)}, its record is {node.id}")
        self._compare_owner(path, node, found)
        return node

    def _file(
        self, path: bytes, directory: Node | None, node: Node | None, label: Label | None,
        found: os.stat_result,
    ) -> None:  # fmt: skip
        is_ours = node is not None and (node.disk, node.ino) == (self._number, found.st_ino)
        if node is None or directory is None or not is_ours:
            if label is None:
                self._say(Kind.FOREIGN, path, "a file without a record or a label")
            elif (label.id, found.st_ino) not in self._doomed:
                self._say(Kind.ORPHAN, path, f"a file without a record, labelled {_told(label)}")
            return
        name = path.rpartition(b"/")[2]
        self._seen.add((directory.id, name))
        if stat.S_IFMT(found.st_mode) != stat.S_IFMT(node.mode):
            self._say(Kind.DIFFERENT, path, f"has type {found.st_mode:o}, noted {node.mode:o}")
            return
        if found.st_nlink != node.nlink:
            self._say(Kind.DIFFERENT, path, f"has {found.st_nlink} names, noted {node.nlink}")
        if node.state == State.COMMITTED and found.st_size != node.size:
            self._say(Kind.DIFFERENT, path, f"has {found.st_size} bytes, noted {node.size}")
        if node.is_regular:
            self._compare_owner(path, node, found)
        self._compare_label(path, (directory.id, name), node, label)

    def _compare_owner(self, path: bytes, node: Node, found: os.stat_result) -> None:
        there = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
        noted = (stat.S_IMODE(node.mode), node.uid, node.gid)
        if there != noted:
            self._say(Kind.OWNER, path, f"has mode, uid, gid {there}, noted {noted}")

    def _compare_label(
        self, path: bytes, place: tuple[int, bytes], node: Node, label: Label | None
    ) -> None:
        if label is None:
            # Without CAP_SYS_ADMIN a symlink cannot carry one.
            if node.is_regular:
                self._say(Kind.DIFFERENT, path, "has no label")
            return
        if (label.id, label.generation) != (node.id, node.generation):
            self._say(
                Kind.DIFFERENT,
                path,
                f"is labelled {_told(label)}, noted as {node.id} of generation {node.generation}",
            )
        if bool(label.flags & records.LABEL_PENDING) is not (node.state == State.PENDING):
            self._say(
                Kind.DIFFERENT, path, f"is labelled {_told(label)}, noted {State(node.state).name}"
            )
        if bool(label.flags & records.LABEL_RESIDENT) is not bool(node.flags & records.RESIDENT):
            noted = "at home" if node.flags & records.RESIDENT else "not at home"
            self._say(Kind.DIFFERENT, path, f"is labelled {_told(label)}, noted {noted}")
        is_bound = not label.flags & records.LABEL_LINKED
        if node.nlink > 1 and is_bound:
            self._say(Kind.DIFFERENT, path, "has several names, and a label for one")
        if is_bound and label.verify != records.verify_hash(*place):
            self._say(Kind.DIFFERENT, path, "is labelled for another place")
