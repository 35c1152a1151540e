"""Which files are where their names belong: judged when the disks have changed, if it matters.

Only where displaced files are not served. Whether one is stale is in its record, so that a lookup
need not ask for the owner; a file is not moved, nor removed, and is served again when the disks are
as they were.
"""

from collections.abc import Callable

from blake3 import blake3

from kvfuse.core import records
from kvfuse.core.records import NO_DISK, Node
from kvfuse.heart.state import PoolState

_BATCH = 2048  # records a transaction
_META = b"homes"  # what all records were judged by


def judge_homes(
    state: PoolState, topology_id: str, progress: Callable[[str], None] = lambda _text: None
) -> None:
    """Mark every file that the configured placement puts on another disk, and unmark the others.

    Returns at once when nothing has changed since the last time. *progress* is told how far it is.
    No request may be under way.
    """
    judged_by = _rules_mark(state, topology_id)
    with state.catalog.read() as txn:
        if (txn.meta(_META) or b"") == judged_by:
            return
    last, count = 0, 0
    while True:
        with state.catalog.read() as txn:
            nodes = [node for node, _ in zip(txn.nodes(after=last), range(_BATCH), strict=False)]
        if not nodes:
            break
        last, count = nodes[-1].id, count + len(nodes)
        marked = [_judged(state, node) for node in nodes]
        with state.catalog.write() as txn:
            for node, now in zip(nodes, marked, strict=True):
                if now is not node:
                    txn.put_node(now, node)
        progress(f"comparing files with their owners: {count} records")
    with state.catalog.write() as txn:
        txn.put_meta(_META, judged_by)


def _rules_mark(state: PoolState, topology_id: str) -> bytes:
    """Return what tells one way to judge from another; empty where all files are served."""
    rules = state.rules
    if rules.serve_displaced:
        return b""
    patterns = [pattern.regex.pattern for pattern in rules.temp_patterns]
    parts = [topology_id.encode(), rules.policy.encode(), *sorted(rules.temp_dirs), *patterns]
    return blake3(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def is_elsewhere(state: PoolState, place: tuple[int, bytes], number: int) -> bool:
    """Whether displaced files are not served, and the owner of *place* is not disk *number*."""
    if state.rules.serve_displaced:
        return False
    slot = state.slots.get(number)
    return slot is None or state.owner(*place) != slot.disk_id


def _judged(state: PoolState, node: Node) -> Node:
    if node.disk == NO_DISK:
        return node
    flags = node.flags & ~records.STALE
    if not flags & records.RESIDENT and is_elsewhere(state, (node.parent, node.name), node.disk):
        flags |= records.STALE
    return node if flags == node.flags else node.replace(flags=flags)
