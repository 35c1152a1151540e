"""One transaction on the catalog: typed reads of its tables, and writes that keep them consistent.

The tables are described in :mod:`kvfuse.catalog.catalog`.
"""

import errno
import itertools
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, cast

import lmdb

from kvfuse.catalog.intenttable import IntentTable
from kvfuse.core import records
from kvfuse.core.eviction import MAIN
from kvfuse.core.intents import (
    Chore,
    Intent,
    Unlink,
    moves_paths,
    pack,
    unpack_chore,
    unpack_intent,
)
from kvfuse.core.records import DirEntry, Node, State

_log = logging.getLogger(__name__)

_USAGE = struct.Struct("<qq")
_OF_STALE = b"s"  # appended to the key of a disk's usage
_OF_MAIN = b"m"
_CHORE_KEY = struct.Struct(">HQ")
_U16 = struct.Struct(">H")
_RESULT = struct.Struct("<QQQ")  # number, unique of a request, id of what it made
RESULTS_MAX = 1 << 14  # far more than requests can be under way at once


class Txn:
    """One transaction: typed reads, and writes when it is a writing one.

    Commits when its ``with`` block ends normally; an exception leaves nothing of it.
    """

    __slots__ = ("_commit", "_db", "_deltas", "_floor", "_said", "_settled", "_txn")

    def __init__(
        self,
        db: Mapping[bytes, Any],
        txn: lmdb.Transaction,
        said: IntentTable,
        commit: Callable[[lmdb.Transaction], None] | None,
        floor: int = 0,
    ) -> None:
        """Begin over the tables *db* and the intents *said*; one that writes ends with *commit*.

        Records below *floor* that are dropped are noted in ``gone``.
        """
        self._db = db
        self._said = said
        self._settled: list[int] = []
        self._floor = floor
        self._commit = commit
        # Any: py-lmdb's types allow for buffers=True, which is not used here
        self._txn: Any = txn
        self._deltas: dict[bytes, list[int]] = {}

    def __enter__(self) -> "Txn":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is not None or self._commit is None:
            self._txn.abort()
            if isinstance(exc, lmdb.MapFullError):
                raise no_room(exc) from exc
            return
        for key, (files, blocks) in self._deltas.items():
            old_files, old_blocks = self._usage(key)
            self._txn.put(
                key, _USAGE.pack(old_files + files, old_blocks + blocks), db=self._db[b"usage"]
            )
        try:
            self._commit(self._txn)
        except lmdb.Error as failure:
            raise no_room(failure) from failure
        for number in self._settled:
            self._said.drop(number)

    def cursor(self, table: bytes) -> Any:  # noqa: ANN401 - py-lmdb's
        """Return a cursor on a table, for those who take in many records at once."""
        return self._txn.cursor(db=self._db[table])

    def count(self, disk: int, files: int, blocks: int) -> None:
        """Add to the usage of a disk what was put by a cursor."""
        self.add_usage(_U16.pack(disk), files, blocks)

    def usages(self) -> dict[bytes, tuple[int, int]]:
        """Return (files, blocks) noted under each key that :func:`usage_keys` gives."""
        keys = list(self._txn.cursor(db=self._db[b"usage"]).iternext(values=False))
        return {key: self._usage(key) for key in keys}

    def add_usage(self, key: bytes, files: int, blocks: int) -> None:
        """Add to what is noted under a key that :func:`usage_keys` gives."""
        delta = self._deltas.setdefault(key, [0, 0])
        delta[0] += files
        delta[1] += blocks

    def empty(self, table: bytes) -> None:
        """Drop all that is in a table."""
        self._txn.drop(self._db[table], delete=False)

    # -- reads

    @property
    def number(self) -> int:
        """Which state of the catalog this sees: equal numbers, equal contents."""
        return cast(int, self._txn.id())

    def entry(self, parent: int, name: bytes) -> tuple[int, int, int] | None:
        """Return (child id, cookie, type bits) of a name, or None."""
        value = self._txn.get(records.entry_key(parent, name), db=self._db[b"entries"])
        return None if value is None else records.unpack_entry(value)

    def node(self, node_id: int) -> Node | None:
        """Return the record of *node_id*, or None."""
        value = self._txn.get(records.pack_id(node_id), db=self._db[b"nodes"])
        return None if value is None else records.unpack_node(node_id, value)

    def has_node(self, node_id: int) -> bool:
        """Whether there is a record of *node_id*."""
        return self._txn.get(records.pack_id(node_id), db=self._db[b"nodes"]) is not None

    def child(self, parent: int, name: bytes) -> Node | None:
        """Return the record a name stands for, or None."""
        entry = self.entry(parent, name)
        return None if entry is None else self.node(entry[0])

    def children(self, parent: int, after: int) -> Iterator[DirEntry]:
        """Yield the entries of a directory with a cookie greater than *after*, in order."""
        prefix = records.pack_id(parent)
        cursor = self._txn.cursor(db=self._db[b"children"])
        if not cursor.set_range(records.child_key(parent, after + 1)):
            return
        unpack = records.unpack_child
        for key, value in cursor.iternext():
            if key[:8] != prefix:
                return
            yield unpack(key, value)

    def entries(self) -> Iterator[tuple[int, bytes, int, int, int]]:
        """Yield (directory id, name, child id, cookie, type bits) of every name of the pool."""
        for key, value in self._txn.cursor(db=self._db[b"entries"]):
            yield (*records.split_entry_key(key), *records.unpack_entry(value))

    def listing(self) -> Iterator[tuple[int, DirEntry]]:
        """Yield (directory id, entry) of the listings of all directories."""
        for key, value in self._txn.cursor(db=self._db[b"children"]):
            yield records.unpack_id(key[:8]), records.unpack_child(key, value)

    def has_cookie(self, parent: int, cookie: int) -> bool:
        """Whether an entry of the directory has this cookie."""
        key = records.child_key(parent, cookie)
        return self._txn.get(key, db=self._db[b"children"]) is not None

    def path(self, node_id: int) -> bytes | None:
        """Return the path of a directory below the root (b"" for the root), None when gone."""
        parts: list[bytes] = []
        while node_id != records.ROOT_ID:
            value = self._txn.get(records.pack_id(node_id), db=self._db[b"nodes"])
            if value is None:
                return None
            node_id, name = records.place_of(value)
            parts.append(name)
        return b"/".join(reversed(parts))

    def links(self, node_id: int) -> list[tuple[int, bytes]]:
        """Return the further names (parent, name) of a file with several."""
        cursor = self._txn.cursor(db=self._db[b"links"])
        if not cursor.set_key(records.pack_id(node_id)):
            return []
        return [records.split_entry_key(value) for value in cursor.iternext_dup()]

    def usage(self, disk: int) -> tuple[int, int]:
        """Return (files, 512-byte blocks) that the records put on *disk*, but for stale ones."""
        return self._usage(_U16.pack(disk))

    def stale_usage(self, disk: int) -> tuple[int, int]:
        """Return (files, 512-byte blocks) that stale records put on *disk*."""
        return self._usage(_U16.pack(disk) + _OF_STALE)

    def main_usage(self, disk: int) -> tuple[int, int]:
        """Return (files, 512-byte blocks) of *disk* that are in the second queue of its order."""
        return self._usage(_U16.pack(disk) + _OF_MAIN)

    def _usage(self, key: bytes) -> tuple[int, int]:
        value = self._txn.get(key, db=self._db[b"usage"])
        return (0, 0) if value is None else cast(tuple[int, int], _USAGE.unpack(value))

    def meta(self, key: bytes) -> bytes | None:
        """Return a value of the catalog itself."""
        return cast(bytes | None, self._txn.get(key, db=self._db[b"meta"]))

    def disks(self) -> dict[int, str]:
        """Return the disk id of every number ever given."""
        cursor = self._txn.cursor(db=self._db[b"disks"])
        return {_U16.unpack(key)[0]: value.decode() for key, value in cursor}

    def nodes(self, after: int = 0) -> Iterator[Node]:
        """Yield every record with an id above *after*, by id."""
        cursor = self._txn.cursor(db=self._db[b"nodes"])
        if not cursor.set_range(records.pack_id(after + 1)):
            return
        for key, value in cursor:
            node_id = records.unpack_id(key)
            yield records.unpack_node(node_id, value)

    def pending(self) -> list[int]:
        """Return the ids of all files that are being written."""
        cursor = self._txn.cursor(db=self._db[b"pending"])
        return [records.unpack_id(key) for key in cursor.iternext(values=False)]

    def recent(self, disk: int, after: tuple[int, int] = (0, 0)) -> Iterator[tuple[int, int]]:
        """Yield (place, id) of the committed files of *disk* behind *after*; stale ones have 0."""
        cursor = self._txn.cursor(db=self._db[b"recency"])
        if not cursor.set_range(records.recency_key(disk, after[0], after[1] + 1)):
            return
        for key in cursor.iternext(values=False):
            number, place, node_id = records.unpack_recency(key)
            if number != disk:
                return
            yield place, node_id

    def intents(self) -> list[tuple[int, Intent]]:
        """Return (number, intent) of all that were said and not finished, oldest first."""
        cursor = self._txn.cursor(db=self._db[b"intents"])
        found = [(records.unpack_id(key), value) for key, value in cursor]
        return [
            (number, unpack_intent(value)) for number, value in sorted(found + self._said.all())
        ]

    def intent(self, number: int) -> Intent | None:
        """Return what was said under *number*, None when it is settled."""
        value = self._said.get(number)
        if value is None:
            value = self._txn.get(records.pack_id(number), db=self._db[b"intents"])
        return None if value is None else unpack_intent(value)

    def is_behind(self, disk: int) -> bool:
        """Whether a chore of *disk* has still to put something at a path."""
        return any(moves_paths(chore) for _, chore in self._backlog(disk))

    def chores(self, disk: int, limit: int) -> list[tuple[int, Chore]]:
        """Return the oldest *limit* (number, chore) of the backlog of *disk*."""
        return list(itertools.islice(self._backlog(disk), limit))

    def last_chore(self, disk: int) -> int:
        """Return the number of the newest chore of *disk*, 0 without any."""
        cursor = self._txn.cursor(db=self._db[b"chores"])
        found = cursor.set_range(_CHORE_KEY.pack(disk + 1, 0))
        if not (cursor.prev() if found else cursor.last()):
            return 0
        number_disk, number = _CHORE_KEY.unpack(cursor.key())
        return number if number_disk == disk else 0

    def is_settled(self, disk: int) -> bool:
        """Whether all directories are on *disk* as the records say; files may still have to go."""
        return all(isinstance(chore, Unlink) for _, chore in self._backlog(disk))

    def _backlog(self, disk: int) -> Iterator[tuple[int, Chore]]:
        cursor = self._txn.cursor(db=self._db[b"chores"])
        if not cursor.set_range(_CHORE_KEY.pack(disk, 0)):
            return
        for key, value in cursor.iternext():
            number_disk, number = _CHORE_KEY.unpack(key)
            if number_disk != disk:
                return
            yield number, unpack_chore(value)

    def highest_number(self) -> int:
        """Return the highest id, intent or chore number in use."""
        highest = 0
        for table in (b"nodes", b"intents"):
            cursor = self._txn.cursor(db=self._db[table])
            if cursor.last():
                highest = max(highest, records.unpack_id(cursor.key()))
        for table in (b"chores", b"parked"):
            cursor = self._txn.cursor(db=self._db[table])
            for disk in self.disks():
                found = cursor.set_range(_CHORE_KEY.pack(disk + 1, 0)) and cursor.prev()
                if (found or cursor.last()) and _CHORE_KEY.unpack(cursor.key())[0] == disk:
                    highest = max(highest, _CHORE_KEY.unpack(cursor.key())[1])
        return highest

    def xattr(self, node_id: int, name: bytes) -> bytes | None:
        """Return an extended attribute of a directory."""
        key = records.entry_key(node_id, name)
        return cast(bytes | None, self._txn.get(key, db=self._db[b"xattrs"]))

    def xattr_names(self, node_id: int) -> list[bytes]:
        """Return the names of the extended attributes of a directory."""
        prefix = records.pack_id(node_id)
        cursor = self._txn.cursor(db=self._db[b"xattrs"])
        names: list[bytes] = []
        if cursor.set_range(prefix):
            for key in cursor.iternext(values=False):
                if key[:8] != prefix:
                    break
                names.append(bytes(key[8:]))
        return names

    def results(self) -> list[tuple[int, int, int]]:
        """Return (number, unique, id made or 0) of the last requests that were done."""
        cursor = self._txn.cursor(db=self._db[b"results"])
        return [_RESULT.unpack(value) for value in cursor.iternext(keys=False)]

    def orphan(self, node_id: int) -> tuple[Node, bytes] | None:
        """Return (record, file handle) of a file that lost its last name while it was open."""
        value = self._txn.get(records.pack_id(node_id), db=self._db[b"orphans"])
        if value is None:
            return None
        end = 1 + value[0]
        return records.unpack_node(node_id, value[end:]), bytes(value[1:end])

    def orphans(self) -> list[int]:
        """Return the ids of all files without a name that were open."""
        cursor = self._txn.cursor(db=self._db[b"orphans"])
        return [records.unpack_id(key) for key in cursor.iternext(values=False)]

    # -- writes

    def put_entry(self, parent: int, name: bytes, node: Node, cookie: int) -> None:
        """Let *name* in *parent* stand for *node*."""
        db = self._db
        self._txn.put(
            records.entry_key(parent, name),
            records.pack_entry(node.id, cookie, node.mode),
            db=db[b"entries"],
        )
        self._txn.put(
            records.child_key(parent, cookie),
            records.pack_child(node.id, node.mode, node.disk, name),
            db=db[b"children"],
        )

    def drop_entry(self, parent: int, name: bytes, cookie: int) -> None:
        """Forget a name."""
        db = self._db
        self._txn.delete(records.entry_key(parent, name), db=db[b"entries"])
        self._txn.delete(records.child_key(parent, cookie), db=db[b"children"])

    def put_node(self, node: Node, old: Node | None) -> None:
        """Write a record; *old* is what it replaces, so that usage stays right."""
        self._txn.put(records.pack_id(node.id), records.pack_node(node), db=self._db[b"nodes"])
        if old is not None:
            self._count(old, -1)
        self._count(node, 1)
        was = old is not None and old.state == State.PENDING
        if (node.state == State.PENDING) is not was:
            self._mark_pending(node.id, pending=not was)
        self._order(node, old)

    def set_times(self, node_id: int, now_ns: int) -> None:
        """Set the times of a directory whose names changed; nothing where it is gone."""
        key, db = records.pack_id(node_id), self._db[b"nodes"]
        value = self._txn.get(key, db=db)
        if value is not None:
            self._txn.put(key, records.with_times(value, mtime_ns=now_ns, ctime_ns=now_ns), db=db)

    def drop_node(self, node: Node) -> None:
        """Forget a record and what hangs on it."""
        key = records.pack_id(node.id)
        self._txn.delete(key, db=self._db[b"nodes"])
        self._txn.delete(key, db=self._db[b"links"])
        self._count(node, -1)
        self._order(None, node)
        if node.id < self._floor:
            self._txn.put(key, b"", db=self._db[b"gone"])
        if node.state == State.PENDING:
            self._mark_pending(node.id, pending=False)
        if node.is_dir:
            for name in self.xattr_names(node.id):
                self.drop_xattr(node.id, name)

    def _mark_pending(self, node_id: int, *, pending: bool) -> None:
        key, db = records.pack_id(node_id), self._db[b"pending"]
        if pending:
            self._txn.put(key, b"", db=db)
        else:
            self._txn.delete(key, db=db)

    def _order(self, node: Node | None, old: Node | None) -> None:
        """Keep the order of last use."""
        key = order_key(node)
        old_key = order_key(old)
        if key != old_key:
            db = self._db[b"recency"]
            if old_key is not None:
                self._txn.delete(old_key, db=db)
            if key is not None:
                self._txn.put(key, b"", db=db)

    def _count(self, node: Node, sign: int) -> None:
        for key in usage_keys(node):
            self.add_usage(key, sign, sign * node.blocks)

    def put_link(self, node_id: int, parent: int, name: bytes) -> None:
        """Add a further name of a file."""
        self._txn.put(
            records.pack_id(node_id),
            records.entry_key(parent, name),
            db=self._db[b"links"],
            dupdata=True,
        )

    def drop_link(self, node_id: int, parent: int, name: bytes) -> None:
        """Forget a further name of a file."""
        self._txn.delete(
            records.pack_id(node_id),
            records.entry_key(parent, name),
            db=self._db[b"links"],
        )

    def keep_said(self) -> None:
        """Take what is said beside the catalog into it: only then a copy of it has it, too."""
        for number, value in self._said.all():
            self._txn.put(records.pack_id(number), value, db=self._db[b"intents"])
            self._settled.append(number)

    def put_intent(self, number: int, intent: Intent) -> None:
        """Say what is about to be done."""
        self._txn.put(records.pack_id(number), pack(intent), db=self._db[b"intents"])

    def drop_intent(self, number: int) -> None:
        """It happened, or it did not: either way it is settled."""
        if number in self._said:
            self._settled.append(number)  # once this is committed
        else:
            self._txn.delete(records.pack_id(number), db=self._db[b"intents"])

    def put_chore(self, disk: int, number: int, chore: Chore) -> None:
        """Append to the backlog of *disk*."""
        self._txn.put(_CHORE_KEY.pack(disk, number), pack(chore), db=self._db[b"chores"])

    def drop_chore(self, disk: int, number: int) -> None:
        """The chore is done."""
        self._txn.delete(_CHORE_KEY.pack(disk, number), db=self._db[b"chores"])

    def put_result(self, number: int, unique: int, node_id: int) -> None:
        """Note, in the transaction that does it, that a request was done."""
        self._txn.put(
            _U16.pack(number % RESULTS_MAX),
            _RESULT.pack(number, unique, node_id),
            db=self._db[b"results"],
        )

    def put_orphan(self, node: Node, handle: bytes) -> None:
        """Keep the record of a file that lost its last name while it is open."""
        value = bytes((len(handle),)) + handle + records.pack_node(node)
        self._txn.put(records.pack_id(node.id), value, db=self._db[b"orphans"])

    def count_attempt(self, unique: int) -> int:
        """Count that a request was sent again; return how often it was."""
        key, db = records.pack_id(unique), self._db[b"attempts"]
        value = self._txn.get(key, db=db)
        count = 1 if value is None else records.unpack_id(value) + 1
        self._txn.put(key, records.pack_id(count), db=db)
        return count

    def drop_orphan(self, node_id: int) -> None:
        """Nobody has it open any more."""
        self._txn.delete(records.pack_id(node_id), db=self._db[b"orphans"])

    def forget_connection(self) -> None:
        """Forget what belongs to the requests and handles of a mount that is gone."""
        for table in (b"results", b"orphans", b"attempts"):
            self._txn.drop(self._db[table], delete=False)

    def put_xattr(self, node_id: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute of a directory."""
        self._txn.put(records.entry_key(node_id, name), value, db=self._db[b"xattrs"])

    def drop_xattr(self, node_id: int, name: bytes) -> None:
        """Remove an extended attribute of a directory."""
        self._txn.delete(records.entry_key(node_id, name), db=self._db[b"xattrs"])

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Set a value of the catalog itself."""
        self._txn.put(key, value, db=self._db[b"meta"])

    def put_disk(self, number: int, disk_id: str) -> None:
        """Give a disk its number; numbers are never reused."""
        self._txn.put(_U16.pack(number), disk_id.encode(), db=self._db[b"disks"])


def usage_keys(node: Node) -> list[bytes]:
    """Return the keys of the sums a record is counted in."""
    if node.disk == records.NO_DISK:
        return []
    key = _U16.pack(node.disk)
    if node.is_stale:
        return [key + _OF_STALE]
    return [key, key + _OF_MAIN] if node.access & MAIN and node.is_evictable else [key]


def order_key(node: Node | None) -> bytes | None:
    """Return the key of a record in the order of last use, None when it has no place there."""
    if node is None or not node.is_evictable:
        return None
    return records.recency_key(node.disk, 0 if node.is_stale else node.access, node.id)


def no_room(exc: lmdb.Error) -> OSError:
    """Return what a client is told when the catalog takes no more."""
    _log.error("catalog: %s; nothing can be changed: give its tmpfs more room", exc)
    return OSError(errno.ENOSPC, f"the catalog takes no more: {exc}")
