"""How far the disks have been read, in the catalog itself: it survives whoever reads and serves.

``todo`` has the directories that were found on a disk and not read there, ``scanned`` for each
directory the disks on which it was, ``gone`` what must not come back: ids of records dropped while
disks are read, and names changed while one of the disks could not be asked.
"""

import struct
from collections.abc import Iterable
from typing import Protocol

from kvfuse.catalog.transaction import Txn
from kvfuse.core import records

_TODO = struct.Struct(">HQ")
_MASK = struct.Struct("<Q")
_NONE = b"{}"  # JSON, of the disks that have to be read


class Arriving(Protocol):
    """Disks are still being read: what a verb relies on has to be asked for first."""

    def name(self, parent: int, name: bytes, *, changes: bool = False) -> None:
        """Make the catalog right about one name; with *changes* the caller will change it."""
        ...

    def directory(self, dir_id: int) -> None:
        """Make the catalog right about all names in a directory."""
        ...


def is_reading(txn: Txn) -> bool:
    """Whether any disk is to be read; else nothing is noted here any more."""
    return (txn.meta(b"scans") or _NONE) != _NONE


def add_todo(txn: Txn, number: int, dir_id: int) -> None:
    """A directory was found on a disk."""
    if is_reading(txn) and not scanned(txn, dir_id) & records.carrier_bit(number):
        txn.cursor(b"todo").put(_TODO.pack(number, dir_id), b"")


def todo(txn: Txn, number: int, after: int, limit: int) -> list[int]:
    """Return up to *limit* ids above *after* of directories still to be read on a disk."""
    cursor = txn.cursor(b"todo")
    found: list[int] = []
    if cursor.set_range(_TODO.pack(number, after + 1)):
        for key in cursor.iternext(values=False):
            disk, dir_id = _TODO.unpack(key)
            if disk != number or len(found) == limit:
                break
            found.append(dir_id)
    return found


def is_todo(txn: Txn, number: int, dir_id: int) -> bool:
    """Whether a directory was found on a disk, and not read there."""
    return bool(txn.cursor(b"todo").set_key(_TODO.pack(number, dir_id)))


def scanned(txn: Txn, dir_id: int) -> int:
    """Return the bits of the disks on which a directory was read."""
    value = txn.cursor(b"scanned").get(records.pack_id(dir_id))
    return 0 if value is None else int(_MASK.unpack(value)[0])


def mark_scanned(txn: Txn, number: int, dir_ids: Iterable[int]) -> None:
    """Directories were read on a disk, and all in them was taken in."""
    if not is_reading(txn):  # the last disk was done meanwhile
        return
    for dir_id in dir_ids:
        bit = records.carrier_bit(number)
        if not records.is_shared_bit(bit):
            mask = _MASK.pack(scanned(txn, dir_id) | bit)
            txn.cursor(b"scanned").put(records.pack_id(dir_id), mask)
        cursor = txn.cursor(b"todo")
        if cursor.set_key(_TODO.pack(number, dir_id)):
            cursor.delete()


def note_gone(txn: Txn, place: tuple[int, bytes]) -> None:
    """A name is changed while a disk that may have it cannot be asked."""
    if is_reading(txn):
        txn.cursor(b"gone").put(records.entry_key(*place), b"")


def is_gone(txn: Txn, node_id: int, place: tuple[int, bytes]) -> bool:
    """Whether an id, or what lies at a name, must not come back."""
    cursor = txn.cursor(b"gone")
    if cursor.get(records.pack_id(node_id)) is not None:
        return True
    return cursor.get(records.entry_key(*place)) is not None


def forget(txn: Txn) -> None:
    """All disks were read."""
    for table in (b"todo", b"scanned", b"gone"):
        txn.empty(table)
