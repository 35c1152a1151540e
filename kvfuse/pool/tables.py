"""The tables of the catalog against each other: every row of every one.

A row is judged together with those it speaks of, in one view of the catalog; so a pool may go on
changing while its rows are read in many short transactions. Only the sums of usage need one long
one.
"""

import stat
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol, TypeVar

import msgspec

from kvfuse.catalog.todo import is_reading
from kvfuse.catalog.transaction import RESULTS_MAX, Txn, order_key, usage_keys
from kvfuse.core import records
from kvfuse.core.intents import Unlink, disks_of, unpack_chore, unpack_intent
from kvfuse.core.records import NO_DISK, ROOT_ID, Node, State
from kvfuse.pool.findings import Count, Finding, Kind, Row

BATCH = 256  # rows of one view
_SUMMED = 4096  # records between two looks at how much an old view costs
_GROWTH_BYTES_MAX = 256 << 20  # of the catalog, while its records are summed
_CHORE_KEY = struct.Struct(">HQ")
_U16 = struct.Struct(">H")
_U64 = struct.Struct("<Q")
_SCAN_TABLES = ("todo", "scanned", "gone")

T = TypeVar("T")
Place = tuple[int, bytes]  # of a name: directory id, name
Fault = tuple[Place | bytes, str]  # place, or path, and what is wrong there
Judge = Callable[[Txn, bytes, bytes], Iterator[Fault]]


class Views(Protocol):
    """Where views of a catalog come from."""

    def read(self) -> Txn:
        """Begin a reading transaction."""
        ...

    def bytes_used(self) -> int:
        """Return the size of the catalog."""
        ...


def check_tables(
    views: Views, tick: Callable[[int], None] = lambda _rows: None
) -> Iterator[Finding]:
    """Yield what is wrong with the catalog by itself; *tick* is told how many rows were judged."""
    for table, judge in JUDGES.items():
        for txn, rows in batches(views, table.encode()):
            for key, value in rows:
                for place, text in judge(txn, key, value):
                    path = place if isinstance(place, bytes) else full(txn, *place)
                    yield Finding(Kind.CATALOG, "", path, text, Row(table, key))
            tick(len(rows))
    with views.read() as txn:
        yield from _left_over(txn)
    yield from _check_usage(views, tick)


def batches(
    views: Views, table: bytes, start: bytes = b"", size: int = BATCH
) -> Iterator[tuple[Txn, list[tuple[bytes, bytes]]]]:
    """Yield (view, rows) until the table was read; of several values of a key the first."""
    after = start
    while True:
        with views.read() as txn:
            cursor = txn.cursor(table)
            if not cursor.set_range(after):
                return
            rows = list(islice(cursor.iternext_nodup(values=True), size))
            if not rows:
                return
            yield txn, rows
        after = rows[-1][0] + b"\0"


def judge_row(txn: Txn, row: Row) -> bool:
    """Whether a row is still wrong."""
    if not row.key:
        return any(found.mend == row for found in _left_over(txn))
    value = txn.cursor(row.table.encode()).get(row.key)
    return value is not None and any(JUDGES[row.table](txn, row.key, value))


# -- names


def _entry(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    where = place = records.split_entry_key(key)
    child, cookie, type_bits = records.unpack_entry(value)
    directory, node = txn.node(place[0]), txn.node(child)
    if directory is None or not directory.is_dir:
        yield where, f"lies in {place[0]}, which is no directory"
    if node is None:
        yield where, f"stands for {child}, which has no record"
        return
    if stat.S_IFMT(node.mode) != type_bits:
        yield where, f"is listed as type {type_bits:o}, its record says {node.mode:o}"
    if not knows(txn, node, place):
        yield where, f"is not a name its record {child} knows"
    if not txn.has_cookie(place[0], cookie):
        yield where, "is not in the listing of its directory"


def knows(txn: Txn, node: Node, place: tuple[int, bytes]) -> bool:
    """Whether a record says that it has this name."""
    return (node.parent, node.name) == place or (not node.is_dir and place in txn.links(node.id))


def _listed(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    parent, entry = records.unpack_id(key[:8]), records.unpack_child(key, value)
    where = (parent, entry.name)
    found = txn.entry(parent, entry.name)
    if found != (entry.id, entry.cookie, entry.mode):
        what = "its name is not known" if found is None else f"its name stands for {found[0]}"
        yield where, f"is listed as id {entry.id}, {what}"
    node = txn.node(entry.id)
    if node is not None and node.disk != entry.disk:
        yield where, f"is listed on disk {entry.disk}, its record says {node.disk}"


def _link(txn: Txn, key: bytes, _value: bytes) -> Iterator[Fault]:
    node = txn.node(records.unpack_id(key))
    if node is None or node.is_dir:
        what = "no record" if node is None else "a directory's record"
        yield b"", f"{records.unpack_id(key)} has further names, and {what}"


# -- records


def _node(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    node = records.unpack_node(records.unpack_id(key), value)
    if node.id == ROOT_ID:
        if not node.is_dir:
            yield b"", "the root is no directory"
        return
    where = (node.parent, node.name)
    if not _is_reachable(txn, node):
        yield where, f"{node.id} hangs on no path from the root"
    links = txn.links(node.id)
    names = 1 + sum((txn.entry(*link) or (0,))[0] == node.id for link in links)
    if names != node.nlink or len(links) != node.nlink - 1:
        yield where, f"has {names} names and {len(links)} links, counts {node.nlink}"
    if node.is_dir is not (node.disk == NO_DISK):
        yield where, f"has type {node.mode:o} and disk {node.disk}"
    elif not node.is_dir and not txn.cursor(b"disks").set_key(_U16.pack(node.disk)):
        yield where, f"lies on disk {node.disk}, which is not known"
    is_listed = txn.cursor(b"pending").set_key(key)
    if is_listed is not (node.state == State.PENDING):
        told = "is listed" if is_listed else "is not listed"
        yield where, f"is {State(node.state).name.lower()}, and {told} as being written"
    order = order_key(node)
    if order is not None and not txn.cursor(b"recency").set_key(order):
        yield where, "is not in its place in the order of last use"


def _is_reachable(txn: Txn, node: Node) -> bool:
    """Whether a file's name leads to it, and that of every directory above a directory."""
    seen: set[int] = set()
    while node.id != ROOT_ID:
        entry = txn.entry(node.parent, node.name)
        above = txn.node(node.parent)
        if node.id in seen or entry is None or entry[0] != node.id or above is None:
            return False
        if not node.is_dir:
            return above.is_dir
        seen.add(node.id)
        node = above
    return True


def _pending(txn: Txn, key: bytes, _value: bytes) -> Iterator[Fault]:
    node = txn.node(records.unpack_id(key))
    if node is None:  # one that is finished is told with its record
        yield b"", f"{records.unpack_id(key)} is listed as being written, and has no record"


def _recent(txn: Txn, key: bytes, _value: bytes) -> Iterator[Fault]:
    number, place, node_id = records.unpack_recency(key)
    node = txn.node(node_id)
    if order_key(node) != key:
        what = "has no record" if node is None else "has another place, or none"
        where = b"" if node is None else (node.parent, node.name)
        yield where, f"{node_id} is at {place} in the order of disk {number}, and {what}"


def _attribute(txn: Txn, key: bytes, _value: bytes) -> Iterator[Fault]:
    node = txn.node(records.unpack_id(key[:8]))
    if node is None or not node.is_dir:
        yield b"", f"{records.unpack_id(key[:8])} has an attribute, and is no directory"


def _orphan(txn: Txn, key: bytes, _value: bytes) -> Iterator[Fault]:
    node_id = records.unpack_id(key)
    node = txn.node(node_id)
    try:
        found = txn.orphan(node_id)
    except (ValueError, IndexError):
        yield b"", f"what is kept of {node_id}, a file without a name, cannot be read"
        return
    if node is not None:
        yield (node.parent, node.name), "is kept as a file without a name, and has one"
    elif found is not None and found[0].disk not in txn.disks():
        yield b"", f"{node_id}, a file without a name, lies on a disk that is not known"


# -- what is to be done, and was done


def _intent(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    intent = _readable(unpack_intent, value)
    if intent is None:
        yield b"", f"what was begun as {records.unpack_id(key)} cannot be read"
    elif not disks_of(intent) <= set(txn.disks()):
        yield (intent.parent, intent.name), "was begun on a disk that is not known"


def _chore(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    disk, number = _CHORE_KEY.unpack(key)
    chore = _readable(unpack_chore, value)
    if chore is None:
        yield b"", f"change {number} of disk {disk} cannot be read"
    elif disk not in txn.disks():
        yield chore.path, "is to be changed on a disk that is not known"


def _parked(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    yield from _chore(txn, key, value)
    chore = _readable(unpack_chore, value)
    if chore is not None and not isinstance(chore, Unlink):
        yield chore.path, "is to be tried again, and is no removal of a file"


def _readable(unpack: Callable[[bytes], T], value: bytes) -> T | None:
    try:
        return unpack(value)
    except (msgspec.DecodeError, ValueError):
        return None


def is_readable_chore(txn: Txn, row: Row) -> bool:
    """Whether what is to be done can be read, and a disk is there to do it on."""
    value = txn.cursor(row.table.encode()).get(row.key)
    if value is None or row.table == "intents":
        return value is not None and _readable(unpack_intent, value) is not None
    chore, disk = _readable(unpack_chore, value), _CHORE_KEY.unpack(row.key)[0]
    is_kind = row.table == "chores" or isinstance(chore, Unlink)
    return chore is not None and is_kind and disk in txn.disks()


def _result(_txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    slot = int(_U16.unpack(key)[0]) if len(key) == _U16.size else -1
    if len(value) != 3 * _U64.size or _U64.unpack_from(value)[0] % RESULTS_MAX != slot:
        yield b"", f"what was noted of a request in slot {slot} is not of that slot"


def _attempt(_txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    if (len(key), len(value)) != (8, 8) or not records.unpack_id(value):
        yield b"", "how often a request was sent again cannot be read"


# -- the rest


def _disk(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    if list(txn.disks().values()).count(value.decode()) > 1:
        yield b"", f"disk {value.decode()} has number {_U16.unpack(key)[0]}, and another one"


def _usage(txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    number = _U16.unpack(key[:2])[0] if len(key) >= _U16.size else NO_DISK
    if number not in txn.disks() or key[2:] not in (b"", b"s", b"m") or len(value) != 16:
        yield b"", f"a sum is noted that is of no disk: {key.hex()}"


def _meta(_txn: Txn, key: bytes, value: bytes) -> Iterator[Fault]:
    if key in (b"session", b"floor", b"format") and not value.isdigit():
        yield b"", f"{key.decode()} is noted as {value.decode(errors='backslashreplace')}"


JUDGES: dict[str, Judge] = {
    "disks": _disk,
    "meta": _meta,
    "entries": _entry,  # before records: a name that its record lost is told to it again
    "nodes": _node,
    "children": _listed,
    "links": _link,
    "pending": _pending,
    "recency": _recent,
    "xattrs": _attribute,
    "orphans": _orphan,
    "intents": _intent,
    "chores": _chore,
    "parked": _parked,
    "results": _result,
    "attempts": _attempt,
    "usage": _usage,
}


def _left_over(txn: Txn) -> Iterator[Finding]:
    """Tell what is left of reading disks, when none has to be read any more."""
    if is_reading(txn):
        return
    for table in _SCAN_TABLES:
        if txn.cursor(table.encode()).first():
            text = f"no disk is to be read, and {table} still has what is to be known for that"
            yield Finding(Kind.CATALOG, "", b"", text, Row(table, b""))


def _check_usage(views: Views, tick: Callable[[int], None]) -> Iterator[Finding]:
    """Sum up all records in one view, and compare with what is noted in it."""
    counted: dict[bytes, list[int]] = {}
    most_bytes = views.bytes_used() + _GROWTH_BYTES_MAX
    with views.read() as txn:
        for count, node in enumerate(txn.nodes(), 1):
            for key in usage_keys(node):
                files_blocks = counted.setdefault(key, [0, 0])
                files_blocks[0] += 1
                files_blocks[1] += node.blocks
            if count % _SUMMED == 0:
                tick(0)
                if views.bytes_used() > most_bytes:
                    text = "the sums were not compared: the pool changes too fast for one view"
                    yield Finding(Kind.UNFINISHED, "", b"", text)
                    return
        noted = txn.usages()
    words = {b"": "uses", b"s": "has stale", b"m": "has in its second queue"}
    for key in sorted({*counted, *noted}):
        found, told = tuple(counted.get(key, (0, 0))), noted.get(key, (0, 0))
        if found != told and key[2:] in words:
            what = (
                f"disk {_U16.unpack(key[:2])[0]} {words[key[2:]]} {_sum(found)}, noted {_sum(told)}"
            )
            mend = Count(key, found[0] - told[0], found[1] - told[1])
            yield Finding(Kind.CATALOG, "", b"", what, mend)


def _sum(found: tuple[int, ...]) -> str:
    return f"{found[0]} files of {found[1]} blocks"


def full(txn: Txn, parent: int, name: bytes) -> bytes:
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
