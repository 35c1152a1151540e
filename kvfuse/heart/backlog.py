"""The work left on each disk, as the catalog notes it: chores, and files that would not go.

A chore that fails for a reason of its own (an immutable file, a busy one) says nothing of its disk.
It must not hold up those behind it: it is *parked* in a table of its own, under its number, and
comes back to the end of the backlog now and then.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvfuse.catalog.transaction import Txn
from kvfuse.core.intents import Chore, RemoveDir, RenameDir, SwapPaths, Unlink, pack, unpack_chore

_CHORE_KEY = struct.Struct(">HQ")  # disk, number


class Backlog(NamedTuple):
    """What is left to do on a disk: the *files* among the *chores* are to be unlinked.

    The *parked* ones are among them all.
    """

    chores: int
    files: int
    blocks: int
    parked: int = 0


def backlogs(txn: Txn) -> dict[int, Backlog]:
    """Return what is left to do on every disk with a backlog."""
    counts: dict[int, Backlog] = {}
    for disk, chore, is_parked in _all(txn):
        chores, files, blocks, parked = counts.get(disk, Backlog(0, 0, 0))
        is_file = isinstance(chore, Unlink)
        freed = chore.blocks if isinstance(chore, Unlink) else 0
        counts[disk] = Backlog(chores + 1, files + is_file, blocks + freed, parked + is_parked)
    return counts


def condemned(txn: Txn) -> dict[bytes, set[int]]:
    """Return the numbers of the disks that have still to unlink a copy, by its path there."""
    found: dict[bytes, set[int]] = {}
    for disk, chore, _ in _all(txn):
        if isinstance(chore, Unlink):
            found.setdefault(chore.path, set()).add(disk)
    return found


def doomed(txn: Txn, disk: int) -> set[tuple[int, int | None]]:
    """Return (id, inode number) of what *disk* has still to remove; a directory's is None."""
    return {
        (chore.id, chore.ino if isinstance(chore, Unlink) else None)
        for number, chore, _ in _all(txn)
        if number == disk and isinstance(chore, Unlink | RemoveDir)
    }


def parked(txn: Txn) -> list[tuple[int, Unlink]]:
    """Return (disk, chore) of the files that would not go."""
    return [(disk, chore) for disk, _, chore in _parked(txn)]


def park(txn: Txn, disk: int, number: int, chore: Unlink) -> None:
    """Put a chore aside, so that those behind it are done."""
    txn.drop_chore(disk, number)
    txn.cursor(b"parked").put(_CHORE_KEY.pack(disk, number), pack(chore))


def unpark(txn: Txn, disk: int) -> bool:
    """Put the parked chores of *disk* back, where it has no other; return whether it had any.

    They name paths as they are on the disk now, not as they were before a chore that waits.
    """
    if txn.chores(disk, 1):
        return False
    waiting = [item for item in _parked(txn) if item[0] == disk]
    for _, number, chore in waiting:
        txn.put_chore(disk, number, chore)  # numbers only grow: those to come are behind it
        _drop(txn, disk, number)
    return bool(waiting)


def follow(txn: Txn, disk: int, moved: Chore) -> None:
    """Keep the paths of parked chores right when *moved* was done."""
    if not isinstance(moved, RenameDir | SwapPaths):
        return
    for number_disk, number, chore in _parked(txn):
        path = _moved(chore.path, moved) if number_disk == disk else chore.path
        if path != chore.path:
            value = pack(msgspec.structs.replace(chore, path=path))
            txn.cursor(b"parked").put(_CHORE_KEY.pack(disk, number), value)


def _moved(path: bytes, chore: RenameDir | SwapPaths) -> bytes:
    if path.startswith(chore.path + b"/"):
        return chore.new_path + path[len(chore.path) :]
    if isinstance(chore, SwapPaths) and path.startswith(chore.new_path + b"/"):
        return chore.path + path[len(chore.new_path) :]
    return path


def _drop(txn: Txn, disk: int, number: int) -> None:
    cursor = txn.cursor(b"parked")
    if cursor.set_key(_CHORE_KEY.pack(disk, number)):
        cursor.delete()


def _parked(txn: Txn) -> list[tuple[int, int, Unlink]]:
    found = []
    for key, value in txn.cursor(b"parked"):
        disk, number = _CHORE_KEY.unpack(key)
        chore = unpack_chore(value)
        if isinstance(chore, Unlink):
            found.append((disk, number, chore))
    return found


def _all(txn: Txn) -> Iterator[tuple[int, Chore, bool]]:
    """Yield (disk, chore, whether it is parked) of all."""
    for table, is_parked in ((b"chores", False), (b"parked", True)):
        for key, value in txn.cursor(table):
            yield _CHORE_KEY.unpack(key)[0], unpack_chore(value), is_parked
