"""What operators are told: the pool's part of ``status``, and ``locate``."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfuse.catalog.transaction import Txn
from kvfuse.cleaning.line import is_pinned
from kvfuse.core import records
from kvfuse.core.records import BLOCK_BYTES, RESIDENT, ROOT_ID, Node, State
from kvfuse.disks.aside import Aside, aside
from kvfuse.disks.disk import Space
from kvfuse.disks.diskset import DiskSet, Slot
from kvfuse.heart.backlog import Backlog, backlogs, condemned
from kvfuse.heart.state import PoolState

STATFS_BLOCK_BYTES = 4096
_ASIDE_S = 60.0  # what stood in the way is counted once in that time


class StatFs(NamedTuple):
    """What statvfs(2) answers for the mount; blocks of 4096 bytes."""

    f_bsize: int
    f_frsize: int
    f_blocks: int
    f_bfree: int
    f_bavail: int
    f_files: int
    f_ffree: int
    f_favail: int
    f_namemax: int


class Report:
    """Facts about a mounted pool."""

    def __init__(
        self, state: PoolState, disks: DiskSet, recovery: Callable[[], dict[str, Any]]
    ) -> None:
        self._state = state
        self._disks = disks
        self._recovery = recovery
        self._disk_ids: dict[int, str] = {}
        self._asides: dict[int, tuple[float, Aside | None]] = {}  # monotonic end of validity
        self._backlog_seen: tuple[int, dict[bytes, set[int]]] = (-1, {})

    def statfs(self) -> StatFs:
        """Return the room of the pool: used is what its files take, free what the disks give."""
        free_bytes = inodes_free = 0
        for slot in self._state.slots.values():
            space = self._space(slot)
            if space is not None:
                reserve_bytes = self._state.rules.reserve_bytes(space.capacity_bytes)
                free_bytes += max(0, space.available_bytes - reserve_bytes)
                inodes_free += space.inodes_free
        files, blocks = self._usage()
        evictable_bytes = self._evictable_bytes() if self._state.rules.counts_evictable else 0
        free = free_bytes // STATFS_BLOCK_BYTES
        return StatFs(
            f_bsize=STATFS_BLOCK_BYTES, f_frsize=STATFS_BLOCK_BYTES,
            f_blocks=blocks * BLOCK_BYTES // STATFS_BLOCK_BYTES + free, f_bfree=free,
            f_bavail=free + evictable_bytes // STATFS_BLOCK_BYTES,
            f_files=files + inodes_free, f_ffree=inodes_free,
            f_favail=inodes_free, f_namemax=records.NAME_BYTES_MAX,
        )  # fmt: skip

    def _usage(self) -> tuple[int, int]:
        """Return (files, 512-byte blocks) clients see."""
        with self._state.catalog.read() as txn:
            usages = [
                txn.usage(slot.number)
                for slot in self._state.slots.values()
                if slot.disk is not None and slot.health.readable
            ]
        return sum(files for files, _ in usages), sum(blocks for _, blocks in usages)

    def _evictable_bytes(self) -> int:
        """Return what would make room if it were needed: what is committed and not open now.

        What is pinned does not count, as of when the files of its disk were last looked through.
        """
        total_bytes = 0
        with self._state.catalog.read() as txn:
            for slot in self._state.slots.values():
                if slot.disk is not None and slot.health.writable:
                    blocks = txn.usage(slot.number)[1] + txn.stale_usage(slot.number)[1]
                    total_bytes += blocks * BLOCK_BYTES
                    total_bytes -= self._state.rooms.pinned_bytes.get(slot.number, 0)
            for node_id in self._state.handles.ids():
                node = txn.node(node_id)
                if node is not None and not is_pinned(self._state, node):
                    total_bytes -= node.blocks * BLOCK_BYTES
        return max(0, total_bytes)

    def _space(self, slot: Slot) -> Space | None:
        if slot.disk is None or not slot.health.readable:
            return None
        try:
            return slot.disk.space()
        except OSError as exc:
            self._state.note_error(slot.number, exc.errno or errno.EIO)
            return None

    def status(self) -> dict[str, Any]:
        """Return the JSON-ready status of the pool and its disks."""
        with self._state.catalog.read() as txn:
            waiting = backlogs(txn)
            usages = {
                number: (txn.usage(number), txn.stale_usage(number)) for number in self._state.slots
            }
        rows = [
            self._disk_row(slot, *usages[slot.number], waiting.get(slot.number, Backlog(0, 0, 0)))
            for slot in self._state.slots.values()
        ]
        seen = [row for row in rows if row["capacity_bytes"] is not None]
        return {
            "pool": {
                "id": self._disks.pool_id,
                "epoch": self._disks.topology.epoch,
                "session": self._disks.session,
                "placement": self._state.rules.policy.value,
                "serve_displaced": self._state.rules.serve_displaced,
            },
            "recovery": self._recovery(),
            "space": {
                "capacity_bytes": sum(row["capacity_bytes"] for row in seen),
                "used_bytes": sum(row["used_bytes"] for row in seen),
                "available_bytes": sum(row["free_bytes"] for row in seen),
                "evictable_bytes": self._evictable_bytes(),
                "high_watermark": self._state.rules.watermarks.high,
                "low_watermark": self._state.rules.watermarks.low,
                "rejected": self._state.rooms.rejected,
            },
            "catalog": {"bytes": self._state.catalog.bytes_used()},
            "open_files": len(self._state.handles),
            "disks": rows,
        }

    def _disk_row(
        self, slot: Slot, usage: tuple[int, int], stale: tuple[int, int], backlog: Backlog
    ) -> dict[str, Any]:
        space = self._space(slot)
        free_bytes = None
        if space is not None:
            reserve_bytes = self._state.rules.reserve_bytes(space.capacity_bytes)
            free_bytes = max(0, space.available_bytes - reserve_bytes)
        kept = None if space is None else self._kept_aside(slot)
        # The clock of the health machine is monotonic; people want the time of day.
        since_s = time.time() - (time.monotonic() - slot.health.since_s)
        return {
            "id": slot.disk_id,
            "path": slot.path,
            "state": slot.health.state.value,
            "runtime_state": slot.health.runtime.value,
            "reason": slot.health.reason,
            "since": round(since_s, 3),
            "weight": slot.weight,
            "capacity_bytes": None if space is None else space.capacity_bytes,
            "used_bytes": usage[1] * BLOCK_BYTES,
            "free_bytes": free_bytes,
            "files": usage[0],
            "stale_files": stale[0] + backlog.files,
            "stale_bytes": (stale[1] + backlog.blocks) * BLOCK_BYTES,
            "aside_files": None if kept is None else kept.files,
            "aside_bytes": None if kept is None else kept.bytes,
            "reserved_bytes": self._state.reservations.on_disk(slot.number),
            "inodes_free": None if space is None else space.inodes_free,
            "errors": slot.health.errors,
            "open_files": self._state.handles.on_disk(slot.number),
            "filesystem": None if slot.disk is None else slot.disk.filesystem,
        }

    def _kept_aside(self, slot: Slot) -> Aside | None:
        """Return what stood in the way on a disk, as it was within the last minute."""
        now_s = time.monotonic()
        until_s, kept = self._asides.get(slot.number, (0.0, None))
        if now_s >= until_s and slot.disk is not None:
            try:
                kept = aside(slot.disk)
            except OSError as exc:
                self._state.note_error(slot.number, exc.errno or errno.EIO)
                return None
            self._asides[slot.number] = (now_s + _ASIDE_S, kept)
        return kept

    def _arrive(self, parts: list[bytes]) -> None:
        """Look for a path on disks that are still being read."""
        arriving, parent = self._state.arriving, ROOT_ID
        if arriving is None:
            return
        for part in parts:
            arriving.name(parent, part)
            with self._state.catalog.read() as txn:
                entry = txn.entry(parent, part)
            if entry is None:
                return
            parent = entry[0]

    def locate(self, key: bytes) -> dict[str, Any]:
        """Return where the file at *key* is and why; ENOENT when the pool has nothing there.

        A stale file is shown as such, although clients do not see it.
        """
        state = self._state
        parts = [part for part in key.split(b"/") if part]
        self._arrive(parts)
        with state.catalog.read() as txn:
            node = txn.node(ROOT_ID)
            parent = ROOT_ID
            for part in parts:
                parent = node.id if node is not None else 0
                node = _shown_child(state, txn, parent, part)
                if node is None:
                    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            condemned = self._condemned(txn)
        assert node is not None, "the root is always there"
        shown = b"/".join(parts).decode(errors="backslashreplace")
        slot = state.slots.get(node.disk)
        if slot is None:
            return {"path": shown, "key": shown, "disk": None, "why": "directory", "id": node.id}
        owner = state.owner(parent, parts[-1])
        why = _why(node, slot.disk_id, owner)
        copies = {*condemned.get(b"/".join(parts), ()), *((node.disk,) if node.is_stale else ())}
        return {
            "path": shown,
            "key": shown,
            "id": node.id,
            "disk": slot.disk_id,
            "disk_path": f"{slot.path}/{shown}",
            "owner": owner or slot.disk_id,
            "at_home": why not in ("displaced", "stale"),
            "why": why,
            "size_bytes": node.size,
            "last_access": node.atime_ns / 1e9,
            "state": "stale" if node.is_stale else State(node.state).name.lower(),
            "pinned": state.rules.pins.hold(b"/".join(parts)),
            "stale_copies": sorted(self._disk_ids[number] for number in copies),
        }

    def _condemned(self, txn: Txn) -> dict[bytes, set[int]]:
        """Return which disks have copies to be unlinked; read once for many questions."""
        if self._backlog_seen[0] != txn.number:
            self._disk_ids = txn.disks()
            self._backlog_seen = (txn.number, condemned(txn))
        return self._backlog_seen[1]


def _shown_child(state: PoolState, txn: Txn, parent: int, name: bytes) -> Node | None:
    """Return what clients see at a name, or what is stale there."""
    node = txn.child(parent, name)
    if node is None or state.visible(node):
        return node
    return node if node.is_stale and state.visible(node.replace(flags=0)) else None


def _why(node: Node, disk_id: str, owner: str | None) -> str:
    """Return why a file is where it is."""
    if node.is_stale:
        return "stale"
    if owner is None:
        return "index"
    if owner == disk_id:
        return "owner"
    return "resident" if node.flags & RESIDENT else "displaced"
