"""One consistent state of the catalog: typed reads of its tables.

The tables are described in :mod:`kvfuse.catalog.catalog`.
"""

import itertools
import struct
from collections.abc import Iterator, Mapping
from typing import Any, cast

import lmdb

from kvfuse.catalog.intenttable import IntentTable
from kvfuse.core import records
from kvfuse.core.intents import (
    Chore,
    Intent,
    Unlink,
    moves_paths,
    unpack_chore,
    unpack_intent,
)
from kvfuse.core.records import DirEntry, Node

USAGE = struct.Struct("<qq")
OF_STALE = b"s"  # appended to the key of a disk's usage
OF_MAIN = b"m"
CHORE_KEY = struct.Struct(">HQ")
U16 = struct.Struct(">H")
RESULT = struct.Struct("<QQQ")  # number, unique of a request, id of what it made


class View:
    """What a transaction sees."""

    __slots__ = ("_db", "_said", "_txn")

    def __init__(self, db: Mapping[bytes, Any], txn: lmdb.Transaction, said: IntentTable) -> None:
        """Read the tables *db* as *txn* sees them, and what is *said* beside them."""
        self._db = db
        self._said = said
        # Any: py-lmdb's types allow for buffers=True, which is not used here
        self._txn: Any = txn

    def cursor(self, table: bytes) -> Any:  # noqa: ANN401 - py-lmdb's
        """Return a cursor on a table, for those who take in many records at once."""
        return self._txn.cursor(db=self._db[table])

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
        return self._usage(U16.pack(disk))

    def stale_usage(self, disk: int) -> tuple[int, int]:
        """Return (files, 512-byte blocks) that stale records put on *disk*."""
        return self._usage(U16.pack(disk) + OF_STALE)

    def main_usage(self, disk: int) -> tuple[int, int]:
        """Return (files, 512-byte blocks) of *disk* that are in the second queue of its order."""
        return self._usage(U16.pack(disk) + OF_MAIN)

    def _usage(self, key: bytes) -> tuple[int, int]:
        value = self._txn.get(key, db=self._db[b"usage"])
        return (0, 0) if value is None else cast(tuple[int, int], USAGE.unpack(value))

    def meta(self, key: bytes) -> bytes | None:
        """Return a value of the catalog itself."""
        return cast(bytes | None, self._txn.get(key, db=self._db[b"meta"]))

    def disks(self) -> dict[int, str]:
        """Return the disk id of every number ever given."""
        cursor = self._txn.cursor(db=self._db[b"disks"])
        return {U16.unpack(key)[0]: value.decode() for key, value in cursor}

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

    @property
    def is_idle(self) -> bool:
        """Whether there is no chore of any disk."""
        return bool(self._txn.stat(self._db[b"chores"])["entries"] == 0)

    def chores(self, disk: int, limit: int) -> list[tuple[int, Chore]]:
        """Return the oldest *limit* (number, chore) of the backlog of *disk*."""
        return list(itertools.islice(self._backlog(disk), limit))

    def last_chore(self, disk: int) -> int:
        """Return the number of the newest chore of *disk*, 0 without any."""
        cursor = self._txn.cursor(db=self._db[b"chores"])
        found = cursor.set_range(CHORE_KEY.pack(disk + 1, 0))
        if not (cursor.prev() if found else cursor.last()):
            return 0
        number_disk, number = CHORE_KEY.unpack(cursor.key())
        return number if number_disk == disk else 0

    def is_settled(self, disk: int) -> bool:
        """Whether all directories are on *disk* as the records say; files may still have to go."""
        return all(isinstance(chore, Unlink) for _, chore in self._backlog(disk))

    def _backlog(self, disk: int) -> Iterator[tuple[int, Chore]]:
        cursor = self._txn.cursor(db=self._db[b"chores"])
        if not cursor.set_range(CHORE_KEY.pack(disk, 0)):
            return
        for key, value in cursor.iternext():
            number_disk, number = CHORE_KEY.unpack(key)
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
                found = cursor.set_range(CHORE_KEY.pack(disk + 1, 0)) and cursor.prev()
                if (found or cursor.last()) and CHORE_KEY.unpack(cursor.key())[0] == disk:
                    highest = max(highest, CHORE_KEY.unpack(cursor.key())[1])
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
        return [RESULT.unpack(value) for value in cursor.iternext(keys=False)]

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

    def usages(self) -> dict[bytes, tuple[int, int]]:
        """Return (files, blocks) noted under each key that :func:`usage_keys` gives."""
        keys = list(self._txn.cursor(db=self._db[b"usage"]).iternext(values=False))
        return {key: self._usage(key) for key in keys}
