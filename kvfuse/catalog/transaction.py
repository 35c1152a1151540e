"""One transaction on the catalog: its writes keep the tables consistent.

The tables are described in :mod:`kvfuse.catalog.catalog`.
"""

import errno
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import lmdb

from kvfuse.catalog.intenttable import IntentTable
from kvfuse.catalog.view import (
    CHORE_KEY,
    OF_MAIN,
    OF_STALE,
    RESULT,
    U16,
    USAGE,
    View,
)
from kvfuse.core import records
from kvfuse.core.eviction import MAIN
from kvfuse.core.intents import (
    Chore,
    Intent,
    pack,
)
from kvfuse.core.records import Node, State

_log = logging.getLogger(__name__)

RESULTS_MAX = 1 << 14  # far more than requests can be under way at once


class Txn(View):
    """One transaction: typed reads, and writes when it is a writing one.

    Commits when its ``with`` block ends normally; an exception leaves nothing of it.
    """

    __slots__ = ("_commit", "_deltas", "_floor", "_settled")

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
        super().__init__(db, txn, said)
        self._settled: list[int] = []
        self._floor = floor
        self._commit = commit
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
                key, USAGE.pack(old_files + files, old_blocks + blocks), db=self._db[b"usage"]
            )
        try:
            self._commit(self._txn)
        except lmdb.Error as failure:
            raise no_room(failure) from failure
        for number in self._settled:
            self._said.drop(number)

    def count(self, disk: int, files: int, blocks: int) -> None:
        """Add to the usage of a disk what was put by a cursor."""
        self.add_usage(U16.pack(disk), files, blocks)

    def add_usage(self, key: bytes, files: int, blocks: int) -> None:
        """Add to what is noted under a key that :func:`usage_keys` gives."""
        delta = self._deltas.setdefault(key, [0, 0])
        delta[0] += files
        delta[1] += blocks

    def empty(self, table: bytes) -> None:
        """Drop all that is in a table."""
        self._txn.drop(self._db[table], delete=False)

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
        self._txn.put(CHORE_KEY.pack(disk, number), pack(chore), db=self._db[b"chores"])

    def drop_chore(self, disk: int, number: int) -> None:
        """The chore is done."""
        self._txn.delete(CHORE_KEY.pack(disk, number), db=self._db[b"chores"])

    def put_result(self, number: int, unique: int, node_id: int) -> None:
        """Note, in the transaction that does it, that a request was done."""
        self._txn.put(
            U16.pack(number % RESULTS_MAX),
            RESULT.pack(number, unique, node_id),
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
        self._txn.put(U16.pack(number), disk_id.encode(), db=self._db[b"disks"])


def usage_keys(node: Node) -> list[bytes]:
    """Return the keys of the sums a record is counted in."""
    if node.disk == records.NO_DISK:
        return []
    key = U16.pack(node.disk)
    if node.is_stale:
        return [key + OF_STALE]
    return [key, key + OF_MAIN] if node.access & MAIN and node.is_evictable else [key]


def order_key(node: Node | None) -> bytes | None:
    """Return the key of a record in the order of last use, None when it has no place there."""
    if node is None or not node.is_evictable:
        return None
    return records.recency_key(node.disk, 0 if node.is_stale else node.access, node.id)


def no_room(exc: lmdb.Error) -> OSError:
    """Return what a client is told when the catalog takes no more."""
    _log.error("catalog: %s; nothing can be changed: give its tmpfs more room", exc)
    return OSError(errno.ENOSPC, f"the catalog takes no more: {exc}")
