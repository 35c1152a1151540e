"""Changes of names inside one transaction: what hangs together when a name comes or goes."""

import errno
import os
from collections.abc import Iterable

from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.intents import MakeDir, RemoveDir, Unlink
from kvfuse.core.records import NO_DISK, Node
from kvfuse.core.routing import says_nothing
from kvfuse.heart.state import PoolState

ORPHAN_FD = "orphan-"  # names of kept descriptors


def full_path(txn: Txn, parent: int, name: bytes) -> bytes:
    """Return the path of a name below the root; ESTALE when its directory is gone."""
    path = txn.path(parent)
    if path is None:
        raise OSError(errno.ESTALE, "the directory is gone")
    return path + b"/" + name if path else name


def visible_child(state: PoolState, txn: Txn, parent: int, name: bytes) -> Node | None:
    """Return what clients see at a name, None when nothing."""
    node = txn.child(parent, name)
    return node if node is not None and state.visible(node) else None


def is_empty(state: PoolState, txn: Txn, dir_id: int) -> bool:
    """Whether clients see nothing in a directory."""
    for entry in txn.children(dir_id, 0):
        if entry.disk == NO_DISK:
            return False
        node = txn.node(entry.id)
        if node is not None and state.visible(node):
            return False
    return True


def put_name(state: PoolState, txn: Txn, node: Node, cookie: int) -> None:
    """Let the primary name of *node* stand for it; what was hidden there goes.

    Raises:
        OSError: ESTALE when the directory is gone.
    """
    if not txn.has_node(node.parent):
        raise OSError(errno.ESTALE, "the directory is gone")
    hide_away(state, txn, node.parent, node.name)
    txn.put_entry(node.parent, node.name, node, cookie)


def hide_away(state: PoolState, txn: Txn, parent: int, name: bytes) -> None:
    """Forget what lies at a name on a disk that is away; the disk removes it when it is back."""
    old = txn.child(parent, name)
    if old is None:
        return
    if state.visible(old):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    drop_name(state, txn, parent, name, old)


def drop_name(
    state: PoolState, txn: Txn, parent: int, name: bytes, node: Node, *, on_disk: bool = True
) -> tuple[Node, int]:
    """Forget one name of a file or symlink, and the record with the last one.

    Returns the record as it is afterwards (``nlink`` 0: dropped) and the number of the chore that
    unlinks it on its disk; *on_disk* False when a rename there does that already (number 0).
    """
    number = 0
    if on_disk:
        number = state.next_id()
        path = full_path(txn, parent, name)
        txn.put_chore(node.disk, number, Unlink(path, node.id, node.ino, node.blocks))
    return forget_name(txn, parent, name, node, state.now_ns()), number


def forget_name(txn: Txn, parent: int, name: bytes, node: Node, now_ns: int) -> Node:
    """Forget one name of a file, and with the last the record, which is returned as it is then."""
    entry = txn.entry(parent, name)
    assert entry is not None, "the caller read this name under its lock"
    txn.drop_entry(parent, name, entry[1])
    if node.nlink <= 1:
        txn.drop_node(node)
        return node.replace(nlink=0, ctime_ns=now_ns)
    left = node.replace(nlink=node.nlink - 1, ctime_ns=now_ns)
    if (node.parent, node.name) == (parent, name):
        left = left.replace(parent=(link := txn.links(node.id)[0])[0], name=link[1])
        txn.drop_link(node.id, *link)
    else:
        txn.drop_link(node.id, parent, name)
    txn.put_node(left, node)
    return left


def drop_file(state: PoolState, txn: Txn, node: Node) -> None:
    """Forget a file or symlink with all its names; its disk unlinks them."""
    for parent, name in [(node.parent, node.name), *txn.links(node.id)]:
        left = txn.node(node.id)
        assert left is not None, "the record goes with the last name"
        drop_name(state, txn, parent, name, left)


def keep_open(state: PoolState, txn: Txn, node: Node) -> None:
    """Keep the record of a file that is losing its last name while it is open.

    With its file handle: the next server could not find it otherwise. From here on requests by id
    find it among the open files, before the record goes; ``still_named`` if it does not go.
    """
    if node.nlink or not state.handles.orphan(node) or not state.handles.outlives:
        return
    fd = state.handles.dup(node.id)
    if fd is None:  # closed meanwhile
        return
    try:
        handle = state.carriers[node.disk].disk.handle(fd)
        if state.keeper is not None and (handle is None or not state.passthrough):
            # Then nothing but a descriptor holds the file when this server dies.
            state.keeper.keep(orphan_name(node.id), fd)
    finally:
        os.close(fd)
    txn.put_orphan(node, handle or b"")


def still_named(state: PoolState, node_id: int) -> None:
    """The transaction failed that took the last name of a file: it still has it."""
    with state.catalog.read() as txn:
        if txn.node(node_id) is not None:
            state.handles.unorphan(node_id)


def moved_flags(state: PoolState, node: Node, old_name: bytes) -> int:
    """Return the flags of a file that loses *old_name* for another.

    A temp name that did not tell the final one did not lead it to its owner either.
    """
    is_led = not says_nothing(old_name, patterns=state.rules.temp_patterns)
    return node.flags if is_led else node.flags | records.RESIDENT


def move_name(txn: Txn, node: Node, old: tuple[int, bytes], new: tuple[int, bytes]) -> Node:
    """Move one name of a file; the caller writes the record returned."""
    entry = txn.entry(*old)
    assert entry is not None, "the caller read this name under its lock"
    moved = _renamed(txn, node, old, new)
    txn.drop_entry(*old, entry[1])
    txn.put_entry(*new, moved, entry[1])
    return moved


def swap_names(
    state: PoolState,
    txn: Txn,
    a: tuple[int, bytes],
    b: tuple[int, bytes],
    generations: dict[int, int] | None = None,
) -> None:
    """Exchange two names; *generations* has new ones by id, for those on whose disks it is seen."""
    entry_a, entry_b = txn.entry(*a), txn.entry(*b)
    assert entry_a is not None, "held by their name locks"
    assert entry_b is not None, "held by their name locks"
    now_ns = state.now_ns()
    for place, other in ((a, entry_a), (b, entry_b)):
        txn.drop_entry(*place, other[1])
    for (old, new), entry in (((a, b), entry_a), ((b, a), entry_b)):
        node = txn.node(entry[0])
        assert node is not None, "a name stands for a record"
        moved = _renamed(txn, node, old, new).replace(
            ctime_ns=now_ns, generation=(generations or {}).get(node.id, node.generation)
        )
        txn.put_node(moved, node)
        txn.put_entry(*new, moved, entry[1])
    for directory in {a[0], b[0]}:
        state.touch_dir(txn, directory, now_ns)


def _renamed(txn: Txn, node: Node, old: tuple[int, bytes], new: tuple[int, bytes]) -> Node:
    if (node.parent, node.name) == old:
        return node.replace(parent=new[0], name=new[1])
    txn.drop_link(node.id, *old)
    txn.put_link(node.id, *new)
    return node


def orphan_name(node_id: int) -> str:
    """Return the name under which a descriptor of a file without a name is kept."""
    return f"{ORPHAN_FD}{node_id}"


def drop_dir(state: PoolState, txn: Txn, parent: int, name: bytes, node: Node) -> list[int]:
    """Forget an empty directory and return the disks that get a chore for it.

    Raises:
        OSError: ENOTEMPTY when clients see anything in it.
    """
    if not is_empty(state, txn, node.id):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    for entry in list(txn.children(node.id, 0)):
        hidden = txn.node(entry.id)
        if hidden is not None:
            drop_name(state, txn, node.id, entry.name, hidden)
    path = full_path(txn, parent, name)
    disks = carrier_disks(txn, node)
    for disk in disks:
        txn.put_chore(disk, state.next_id(), RemoveDir(path, node.id))
    entry_now = txn.entry(parent, name)
    assert entry_now is not None, "the caller read this name under its lock"
    txn.drop_entry(parent, name, entry_now[1])
    txn.drop_node(node)
    return disks


def carrier_disks(txn: Txn, node: Node) -> list[int]:
    """Return the numbers of the disks that may have a carrier of a directory, present or not."""
    return [number for number in txn.disks() if node.ino & records.carrier_bit(number)]


def carry_to(state: PoolState, txn: Txn, disks: Iterable[int], dir_id: int) -> None:
    """Let *disks* have carriers of a directory and those above: a chore moves something there."""
    chain: list[Node] = []
    while dir_id != records.ROOT_ID:
        node = txn.node(dir_id)
        if node is None:
            raise OSError(errno.ESTALE, "the directory is gone")
        chain.append(node)
        dir_id = node.parent
    for node in reversed(chain):
        bits = node.ino
        path = full_path(txn, node.parent, node.name)
        mode = node.mode & 0o7777
        for disk in disks:
            bit = records.carrier_bit(disk)
            if not node.ino & bit or records.is_shared_bit(bit):
                chore = MakeDir(path, node.id, node.generation, mode, node.uid, node.gid)
                txn.put_chore(disk, state.next_id(), chore)
                bits |= bit
        if bits != node.ino:
            txn.put_node(node.replace(ino=bits), node)
