"""Mends rows of the catalog that contradict each other, where no choice is to be made.

What is derived (orders, lists, sums, the listing) follows the records; a name that leads to nothing
goes; a name that is lost is made again where its record still says it. Each row is judged anew in
the transaction that mends it, under the lock of the name it is about.
"""

from collections.abc import Hashable

from kvfuse.catalog.transaction import Txn, order_key
from kvfuse.core import records
from kvfuse.core.records import Node, State
from kvfuse.heart.state import PoolState
from kvfuse.pool.findings import Count, Row
from kvfuse.pool.tables import is_readable_chore, judge_row, knows

# Rows that say nothing which the records, or nobody, would not say.
_DROPPED = frozenset(
    ("pending", "recency", "xattrs", "orphans", "results", "attempts", "usage", "links")
)
_UNREADABLE_DROPPED = frozenset(("intents", "chores", "parked"))
_OF_SCANS = frozenset(("todo", "scanned", "gone"))
Place = tuple[int, bytes]  # of a name: directory id, name


class Mender:
    """Mends the catalog of one pool, while it serves."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def count(self, mend: Count) -> str:
        """Make a sum right, whatever was added to it since it was found wrong."""
        with self._state.catalog.write() as txn:
            txn.add_usage(mend.key, mend.files, mend.blocks)
        return "counted anew"

    def row(self, row: Row) -> str:
        """Mend a row; return what was done, "" when it is still wrong.

        Raises:
            OSError: the catalog takes no more, or a name stayed locked.
        """
        with self._state.locks.hold(*self._keys(row)), self._state.catalog.write() as txn:
            if not judge_row(txn, row):
                return "mended with another"
            done = self._mended(txn, row)
            return done if done and not judge_row(txn, row) else ""

    def orphan(self, node_id: int) -> str:
        """Forget what is kept of a file without a name that nobody has open."""
        with self._state.catalog.write() as txn:
            txn.drop_orphan(node_id)
        return "forgotten"

    def _keys(self, row: Row) -> tuple[Hashable, ...]:
        """Return what has to be locked while a row is mended."""
        if row.table == "entries":
            return (records.split_entry_key(row.key),)
        with self._state.catalog.read() as txn:
            if row.table == "children":
                value = txn.cursor(b"children").get(row.key)
                if value is not None:
                    name = records.unpack_child(row.key, value).name
                    return ((records.unpack_id(row.key[:8]), name),)
            if row.table == "nodes":
                node = txn.node(records.unpack_id(row.key))
                if node is not None:
                    return ((node.parent, node.name), ("inode", node.id))
        return ()

    def _mended(self, txn: Txn, row: Row) -> str:
        table = row.table
        if table == "entries":
            return self._entry(txn, row.key)
        if table == "children":
            return self._listed(txn, row.key)
        if table == "nodes":
            return self._node(txn, row.key)
        if table in _OF_SCANS:
            txn.empty(table.encode())
            return "emptied"
        is_lost = table in _UNREADABLE_DROPPED and not is_readable_chore(txn, row)
        cursor = txn.cursor(table.encode())
        if (table in _DROPPED or is_lost) and cursor.set_key(row.key):
            cursor.delete(dupdata=table == "links")
            return "forgotten"
        return ""

    def _entry(self, txn: Txn, key: bytes) -> str:
        """Forget a name that leads to nothing; else let it be known, and listed."""
        place = records.split_entry_key(key)
        value = txn.cursor(b"entries").get(key)
        child, cookie, _ = records.unpack_entry(value)
        node, directory = txn.node(child), txn.node(place[0])
        done = ""
        is_known = node is not None and knows(txn, node, place)
        if node is not None and not is_known and not node.is_dir:
            is_known = node.nlink > 1 + len(txn.links(child))
            if is_known:
                txn.put_link(child, *place)
                done = "told to its record, "
        if directory is None or not directory.is_dir or node is None or not is_known:
            txn.cursor(b"entries").pop(key)
            self._unlist(txn, place, cookie)
            return "name forgotten"
        self._list(txn, place, node, cookie)
        return done + "listed anew"

    def _listed(self, txn: Txn, key: bytes) -> str:
        """List a name as its record says; forget a line that is of no name."""
        value = txn.cursor(b"children").get(key)
        parent, row = records.unpack_id(key[:8]), records.unpack_child(key, value)
        place = (parent, row.name)
        entry, node, directory = txn.entry(*place), txn.node(row.id), txn.node(parent)
        is_name = node is not None and knows(txn, node, place)
        is_free = entry is None and directory is not None and directory.is_dir
        if (
            node is not None
            and is_name
            and (is_free or (entry and entry[:2] == (row.id, row.cookie)))
        ):
            txn.put_entry(*place, node, row.cookie)
            return "name made again" if is_free else "listed anew"
        txn.cursor(b"children").pop(key)
        return "no longer listed"

    def _node(self, txn: Txn, key: bytes) -> str:
        """Let what hangs on a record be as it says, and its names be those that lead to it."""
        node = txn.node(records.unpack_id(key))
        assert node is not None, "just judged"
        done = [self._name(txn, node)]
        links = txn.links(node.id)
        for link in links:
            if (txn.entry(*link) or (0,))[0] != node.id:
                txn.drop_link(node.id, *link)
                done.append("a name that leads elsewhere forgotten")
        names = 1 + len(txn.links(node.id))
        if node.nlink != names:
            fresh = node.replace(nlink=names)
            txn.put_node(fresh, node)
            node = fresh
            done.append("names counted anew")
        listed = txn.cursor(b"pending")
        is_pending = node.state == State.PENDING
        if listed.set_key(key) is not is_pending:
            listed.put(key, b"") if is_pending else listed.delete()
            done.append("listed as its state says")
        order = order_key(node)
        if order is not None and not txn.cursor(b"recency").set_key(order):
            txn.cursor(b"recency").put(order, b"")
            done.append("put in its place in the order")
        return ", ".join(filter(None, done))

    def _name(self, txn: Txn, node: Node) -> str:
        """Make the name of a record again, if it is free."""
        directory = txn.node(node.parent)
        if directory is None or not directory.is_dir or txn.entry(node.parent, node.name):
            return ""
        self._list(txn, (node.parent, node.name), node, node.id)
        return "name made again"

    def _list(self, txn: Txn, place: Place, node: Node, cookie: int) -> None:
        """List a name, under its cookie if no other name has that."""
        value = txn.cursor(b"children").get(records.child_key(place[0], cookie))
        if value is not None:
            there = records.unpack_child(records.child_key(place[0], cookie), value)
            if there.name != place[1]:
                cookie = self._state.next_id()
        txn.put_entry(*place, node, cookie)

    def _unlist(self, txn: Txn, place: Place, cookie: int) -> None:
        key = records.child_key(place[0], cookie)
        value = txn.cursor(b"children").get(key)
        if value is not None and records.unpack_child(key, value).name == place[1]:
            txn.cursor(b"children").pop(key)
