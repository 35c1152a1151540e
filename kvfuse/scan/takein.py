"""What is found on a disk becomes part of the catalog, while the pool serves.

Files nothing is strange about come packed (``sighting.Haul``) and are put into the tables as they
are, a transaction for each haul. Whatever clashes with a record is looked at once more by itself,
under the lock of its name. Live events win: what was made, renamed or removed since the scan began
has a record, or is noted in ``gone``, so a haul that was read before cannot bring it back.

Of two copies of one name the higher generation wins, the other is removed. What has no label is
foreign: reported, never served, never touched.
"""

import contextlib
import itertools
import os
import stat
from dataclasses import dataclass

from kvfuse.catalog.todo import add_todo, is_gone, mark_scanned
from kvfuse.catalog.transaction import Txn, usage_keys
from kvfuse.core import records
from kvfuse.core.eviction import MAIN
from kvfuse.core.records import Label, Node
from kvfuse.disks.sighting import (
    Below,
    Files,
    Haul,
    Sight,
    Terms,
    dir_node,
    file_node,
    is_torn,
    see,
)
from kvfuse.heart import homes, namespace
from kvfuse.heart.carriers import Carriers
from kvfuse.heart.state import PoolState
from kvfuse.scan.hints import Hints

Place = tuple[int, bytes]


@dataclass(slots=True)
class Findings:
    """What a scan found on one disk."""

    files: int = 0
    stale: int = 0
    torn: int = 0
    foreign: int = 0
    unreadable: int = 0

    @property
    def seen(self) -> int:
        """How many files, or what is in their place, were looked at."""
        return self.files + self.stale + self.torn + self.foreign + self.unreadable


class _ClashError(Exception):
    """Records of a haul are there already."""


class TakeIn:
    """Takes in what lies on one disk, as *terms* say."""

    def __init__(self, state: PoolState, terms: Terms, hints: Hints | None = None) -> None:
        self._state = state
        self.terms = terms
        self._hints = hints
        self.findings = Findings()

    def haul(self, haul: Haul) -> None:
        """Take in a haul of the whole disk; this thread holds no locks.

        Raises:
            OSError: the disk failed, or the catalog takes no more.
        """
        files, odd = haul.files, list(haul.odd)
        self._remember_use(files)
        try:
            odd += self._attempt(haul, files, odd)
        except _ClashError:
            with self._state.catalog.read() as txn:
                files, names = self._sort_out(txn, files)
            try:
                odd += names
                odd += self._attempt(haul, files, odd)
            except _ClashError:  # two of them among themselves, or somebody was faster
                odd += [records.split_entry_key(key) for key in files.entries]
                files = Files()
                odd += self._attempt(haul, files, odd)
        self.findings.files += len(files)
        self.findings.foreign += haul.foreign
        self.findings.unreadable += haul.unreadable
        if odd:
            for parent, name in odd:
                with self._state.locks.hold((parent, name), shared=(parent,)):
                    self.look(parent, name, purge=True)
            with self._state.catalog.write() as txn:
                mark_scanned(txn, self.terms.number, haul.done)

    def _attempt(self, haul: Haul, files: Files, odd: list[Place]) -> list[Place]:
        """Take *files* and all else of a haul in; return more names to look at than *odd*.

        Raises:
            _ClashError: nothing of it was.
        """
        with self._state.catalog.write() as txn:
            self._put(txn, files)
            more = self._below(txn, haul)
            if not odd and not more:
                mark_scanned(txn, self.terms.number, haul.done)
        return more

    # -- packed

    def _remember_use(self, files: Files) -> None:
        """Give files the place in the order of last use that an older catalog knew."""
        if self._hints is None or not files.nodes:
            return
        known = self._hints.records(files.nodes)
        for index, key in enumerate(files.nodes):
            old = known.get(key)
            if old is not None:
                value = records.with_last_use(files.node_values[index], old)
                files.node_values[index] = value
                files.recency[index] = records.recency_key(
                    self.terms.number, records.access_of(value), records.unpack_id(key)
                )

    def _put(self, txn: Txn, files: Files) -> None:
        """Put files into the tables, all of them.

        Raises:
            _ClashError: one of them, or its name, has a record or had one, or its directory has
                none. Nothing may be kept of the transaction.
        """
        if not files.nodes:
            return
        parents = {key[:8] for key in files.entries}
        if len(txn.cursor(b"nodes").getmulti(parents)) < len(parents) or self._gone(txn, files):
            raise _ClashError
        for table, items in (
            (b"nodes", zip(files.nodes, files.node_values, strict=True)),
            (b"entries", zip(files.entries, files.entry_values, strict=True)),
            (b"children", zip(files.children, files.child_values, strict=True)),
            (b"recency", zip(files.recency, itertools.repeat(b""))),
        ):
            _, added = txn.cursor(table).putmulti(items, overwrite=False)
            if added != len(files):
                raise _ClashError
        txn.count(self.terms.number, len(files), sum(files.blocks))
        if self._hints is not None:
            self._count_main(txn, files)

    @staticmethod
    def _count_main(txn: Txn, files: Files) -> None:
        """Count those in the second queue of the order once more, as its size."""
        for key, value, blocks in zip(files.nodes, files.node_values, files.blocks, strict=True):
            if records.access_of(value) & MAIN:
                node = records.unpack_node(records.unpack_id(key), value)
                txn.add_usage(usage_keys(node)[-1], 1, blocks)

    @staticmethod
    def _gone(txn: Txn, files: Files) -> set[bytes]:
        """Return which ids and names of these were dropped, or changed, since the scan began."""
        cursor = txn.cursor(b"gone")
        if not cursor.first():
            return set()
        return {key for key, _ in cursor.getmulti(files.nodes + files.entries)}

    def _sort_out(self, txn: Txn, files: Files) -> tuple[Files, list[Place]]:
        """Return the files that are new, and the names to look at."""
        known = {key for key, _ in txn.cursor(b"nodes").getmulti(files.nodes)}
        taken = dict(txn.cursor(b"entries").getmulti(files.entries))
        gone = self._gone(txn, files)
        kept: list[int] = []
        odd: list[Place] = []
        for index, (key, entry_key) in enumerate(zip(files.nodes, files.entries, strict=True)):
            place = records.split_entry_key(entry_key)
            is_fresh = key not in known and entry_key not in taken
            is_fresh = is_fresh and key not in gone and entry_key not in gone
            if is_fresh and txn.has_node(place[0]):
                kept.append(index)
                continue
            there = taken.get(entry_key)
            if there is None or records.unpack_entry(there)[0] != records.unpack_id(key):
                odd.append(place)
        return files.picked(kept), odd

    def _below(self, txn: Txn, haul: Haul) -> list[Place]:
        number = self.terms.number
        bit = records.carrier_bit(number)
        odd: list[Place] = []
        for below in haul.below:
            entry = txn.entry(below.parent, below.name)
            node = txn.node(below.id)
            if node is not None and entry is not None and entry[0] == below.id and node.is_dir:
                self._carrier_again(txn, node, below)
            elif (
                entry is not None
                or node is not None
                or is_gone(txn, below.id, (below.parent, below.name))
                or txn.node(below.parent) is None
            ):
                odd.append((below.parent, below.name))
            elif below.id < self.terms.floor:
                fresh = dir_node(below, bit)
                txn.put_node(fresh, None)
                txn.put_entry(below.parent, below.name, fresh, self._cookie(txn, fresh))
                add_todo(txn, number, below.id)
        return odd

    def _carrier_again(self, txn: Txn, node: Node, below: Below) -> None:
        """A carrier of a directory that is known: of this disk too, perhaps with a newer owner."""
        now = node.replace(ino=node.ino | records.carrier_bit(self.terms.number))
        if below.generation > node.generation and not self.terms.stale:
            mode = stat.S_IFDIR | (below.mode & 0o7777)
            now = now.replace(
                mode=mode, uid=below.uid, gid=below.gid, generation=below.generation
            )  # fmt: skip
        if now != node:
            txn.put_node(now, node)
        if node.id < self.terms.floor:
            add_todo(txn, self.terms.number, node.id)

    # -- singly

    def look(self, parent: int, name: bytes, *, purge: bool = False) -> None:
        """Look at one name on the disk and take in what is there; its lock is held.

        With *purge* directories nobody vouches for are removed, however much is in them.

        Raises:
            OSError: the disk failed.
        """
        state = self._state
        bit = records.carrier_bit(self.terms.number)
        with state.catalog.read() as txn:
            directory = txn.node(parent)
        if directory is None or not (parent == records.ROOT_ID or directory.ino & bit):
            return
        with state.on(self.terms.number) as carriers:
            try:
                dir_fd = carriers.find(parent).fd
                sight = see(carriers.disk, dir_fd, name)
            except FileNotFoundError:
                return
            sight = None if sight is None else self._as_it_counts(sight)
            if sight is None:
                return
            if sight.is_dir:
                is_ours = self._directory(carriers, dir_fd, (parent, name), sight)
                if purge and not is_ours:
                    self._purge(carriers, dir_fd, name)
            else:
                self._file(carriers, dir_fd, (parent, name), sight)

    def _as_it_counts(self, sight: Sight) -> Sight | None:
        """Return what is seen with the label that counts; None when it is in the catalog."""
        label, terms = sight.label, self.terms
        if label is None:
            return sight
        if sight.stat.st_nlink > 1 and not sight.is_dir:
            with self._state.catalog.read() as txn:
                node = txn.node(label.id)
            if node is not None and self._is_same(node, sight):
                return sight  # a further name, perhaps, of a file that just got this label
        if label.id >= terms.floor:
            return None
        return Sight(sight.name, sight.stat, None) if terms.adopting else sight

    def _directory(self, carriers: Carriers, dir_fd: int, place: Place, sight: Sight) -> bool:
        """Take in a carrier; return whether what is in it can be ours."""
        label, terms = sight.label, self.terms
        if sight.stat.st_dev != carriers.disk.fstat(dir_fd).st_dev or (
            label is None and not terms.adopting
        ):
            self.findings.foreign += 1
            return True
        with self._state.catalog.write() as txn:
            if txn.node(place[0]) is None:
                return True
            known = txn.child(*place)
            if known is not None and known.is_dir:
                below = _as_below(place, sight, known.id, terms)
                self._carrier_again(txn, known, below)
            else:
                if terms.stale or (label is not None and is_gone(txn, label.id, place)):
                    self.findings.stale += 1
                    return not terms.stale
                if known is not None and known.id >= terms.floor:
                    self.findings.foreign += 1
                    return True
                if known is not None:  # a file and a directory of one name
                    self._lose(txn, place, known)
                below = _as_below(place, sight, self._free_id(txn, label), terms)
                fresh = dir_node(below, records.carrier_bit(terms.number))
                txn.put_node(fresh, None)
                txn.put_entry(*place, fresh, self._cookie(txn, fresh))
                add_todo(txn, terms.number, fresh.id)
        if label is None or label.id != below.id:
            wanted = records.directory_label(below.id, below.generation)
            self._write_label(carriers, dir_fd, place[1], wanted)
        return True

    def _purge(self, carriers: Carriers, dir_fd: int, name: bytes) -> None:
        """Remove a directory of ours that is nobody's; what is foreign in it stays."""
        disk = carriers.disk
        if not self._writable:
            return
        below = disk.open_subdir(dir_fd, name, readable=True)
        try:
            for item in list(disk.list_fd(below)):
                label = disk.read_label_at(below, item.name) if item.type_bits else None
                if label is None:
                    continue
                if item.type_bits == stat.S_IFDIR:
                    self._purge(carriers, below, item.name)
                else:
                    disk.unlink(below, item.name)
                    self.findings.stale += 1
        finally:
            os.close(below)
        with contextlib.suppress(OSError):  # not empty
            disk.remove_dir(dir_fd, name)

    def _write_label(self, carriers: Carriers, dir_fd: int, name: bytes, label: Label) -> None:
        if self._writable:
            carriers.disk.write_label_at(dir_fd, name, records.pack_label(label))

    def _file(self, carriers: Carriers, dir_fd: int, place: Place, sight: Sight) -> None:
        label = sight.label
        terms = self.terms
        if label is None and not terms.adopting:
            self.findings.foreign += 1
            return
        if label is not None and (terms.stale or is_torn(label, terms)):
            self._remove(carriers, dir_fd, place, sight)
            return
        node = self._take(place, sight)
        if node is None:
            if label is not None:
                self._remove(carriers, dir_fd, place, sight)
            else:
                self.findings.stale += 1
        elif label is None or label.id != node.id:
            wanted = records.label_of(node, place, is_linked=sight.stat.st_nlink > 1)
            self._write_label(carriers, dir_fd, place[1], wanted)

    def _remove(self, carriers: Carriers, dir_fd: int, place: Place, sight: Sight) -> None:
        """Unlink what is nobody's, unless a record says it is somebody's after all."""
        assert sight.label is not None, "only what is labelled is ours to remove"
        with self._state.catalog.read() as txn:
            node = txn.node(sight.label.id)
            entry = txn.entry(*place)
        is_it = node is not None and (node.disk, node.ino) == (
            self.terms.number, sight.stat.st_ino,
        )  # fmt: skip
        if is_it and entry is not None and entry[0] == sight.label.id:
            return
        if sight.label.flags & records.LABEL_PENDING and not self.terms.stale:
            self.findings.torn += 1
        else:
            self.findings.stale += 1
        if self._writable:
            with contextlib.suppress(FileNotFoundError):
                carriers.disk.unlink(dir_fd, place[1])

    def _take(self, place: Place, sight: Sight) -> Node | None:
        """Put a file into the catalog; None when it lost against another copy of its name."""
        state = self._state
        label = _believable(place, sight)
        generation = 0 if label is None else label.generation
        with state.catalog.read() as txn:
            known = txn.child(*place)
        inode = () if known is None else (("inode", known.id),)
        resident = label is not None and bool(label.flags & records.LABEL_RESIDENT)
        is_stale = not resident and homes.is_elsewhere(state, place, self.terms.number)
        with state.locks.hold(*inode), state.catalog.write() as txn:
            known = txn.child(*place)
            if known is not None and self._is_same(known, sight):
                return known
            if txn.node(place[0]) is None or self._is_late(txn, place, sight.label):
                return None
            if known is not None and (known.is_dir or known.generation >= generation):
                return None
            if known is not None:
                self.findings.stale += 1
                self._lose(txn, place, known)
            self.findings.files += 1
            linked = self._add_link(txn, place, sight)
            if linked is not None:
                return linked
            node = file_node(self.terms.number, place, sight.stat, label, self._free_id(txn, label))
            if self._hints is not None:
                value = self._hints.last_use(node.id, records.pack_node(node))
                node = records.unpack_node(node.id, value)
            if is_stale:
                node = node.replace(flags=node.flags | records.STALE)
            txn.put_node(node, None)
            txn.put_entry(*place, node, self._cookie(txn, node))
            return node

    def _is_late(self, txn: Txn, place: Place, label: Label | None) -> bool:
        """Whether a file was removed, or replaced, since the scan began.

        One with several names may have lost only another one: it is here, so it has this one.
        """
        if label is None or txn.node(label.id) is not None:
            return False
        return is_gone(txn, 0 if label.flags & records.LABEL_LINKED else label.id, place)

    def _is_same(self, known: Node, sight: Sight) -> bool:
        return (known.disk, known.ino) == (self.terms.number, sight.stat.st_ino)

    def _add_link(self, txn: Txn, place: Place, sight: Sight) -> Node | None:
        """Take a further name of a file that is known."""
        if sight.label is None or sight.stat.st_nlink < 2:
            return None
        node = txn.node(sight.label.id)
        if node is None or not self._is_same(node, sight):
            return None
        linked = node.replace(nlink=node.nlink + 1)
        txn.put_node(linked, node)
        txn.put_link(node.id, *place)
        txn.put_entry(*place, linked, self._state.next_id())
        return linked

    def _lose(self, txn: Txn, place: Place, known: Node) -> None:
        """Forget the copy another disk has of a name: this one is newer."""
        state = self._state
        slot = state.slots.get(known.disk)
        is_behind = slot is None or slot.disk is None or slot.health.writable
        left, _ = namespace.drop_name(state, txn, *place, known, on_disk=is_behind)
        namespace.keep_open(state, txn, left)
        state.wake([known.disk])

    def _free_id(self, txn: Txn, label: Label | None) -> int:
        """Return the labelled id, or a fresh one when it is taken: a copied file or disk."""
        if label is None or label.id < records.FIRST_ID or txn.node(label.id) is not None:
            return self._state.next_id()
        return label.id

    def _cookie(self, txn: Txn, node: Node) -> int:
        return self._state.next_id() if txn.has_cookie(node.parent, node.id) else node.id

    @property
    def _writable(self) -> bool:
        return self._state.slots[self.terms.number].health.writable


def _believable(place: Place, sight: Sight) -> Label | None:
    """Return the label unless the file was moved here behind our back."""
    label = sight.label
    if label is None or label.flags & records.LABEL_LINKED:
        return label
    return label if label.verify == records.verify_hash(*place) else None


def _as_below(place: Place, sight: Sight, node_id: int, terms: Terms) -> Below:
    found = sight.stat
    generation = 0 if sight.label is None or terms.stale else sight.label.generation
    return Below(
        *place, node_id, generation, found.st_mode, found.st_uid, found.st_gid, found.st_atime_ns,
        found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip
