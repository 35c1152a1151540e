"""Taking over a mount whose server has died: its disks, its open files.

The facts of the mount lie on tmpfs beside the live catalog (``mount.json``); the descriptors of the
disks' roots and locks come from whoever kept them. Nothing is scanned, nothing is written to a disk
before the mount answers again. A disk the old server still hangs on comes up fenced.
"""

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvfuse.core.errors import KvfuseError
from kvfuse.core.health import Health
from kvfuse.core.records import Node
from kvfuse.core.topology import Topology
from kvfuse.disks.disk import Disk, DiskTraits
from kvfuse.disks.diskset import DiskSet, Slot
from kvfuse.heart.handles import OpenFile
from kvfuse.heart.handletable import HandleTable, OpenSlot
from kvfuse.heart.inflight import stuck_disks
from kvfuse.heart.namespace import ORPHAN_FD, orphan_name
from kvfuse.heart.state import PoolState

_log = logging.getLogger(__name__)

FORMAT = 1  # of mount.json, and of everything else a successor reads
_PROBE_S = 0.3  # patience with each disk; all are asked at once
ROOT_FD = "root-"  # names of kept descriptors
LOCK_FD = "lock-"


class _SlotFacts(msgspec.Struct, frozen=True):
    number: int
    disk_id: str
    path: str
    weight: float
    writable: bool
    traits: DiskTraits | None  # None: it was not there


class MountFacts(msgspec.Struct, frozen=True):
    """The content of ``mount.json``."""

    format: int
    pool_id: str
    session: int
    last_session: int
    topology: dict[str, object]
    slots: list[_SlotFacts]


def kept_fds(disks: DiskSet) -> dict[str, int]:
    """Return the descriptors that have to outlive the server, by name."""
    fds = {f"{ROOT_FD}{s.disk_id}": s.disk.root_fd for s in disks.slots if s.disk is not None}
    fds |= {f"{LOCK_FD}{number}": fd for number, fd in enumerate(disks.lock_fds)}
    return fds


def write_facts(disks: DiskSet, run_dir: Path) -> None:
    """Note what the next server has to know of the disks."""
    facts = MountFacts(
        format=FORMAT,
        pool_id=disks.pool_id,
        session=disks.session,
        last_session=disks.last_session,
        topology=disks.topology.to_json(),
        slots=[
            _SlotFacts(
                number=slot.number,
                disk_id=slot.disk_id,
                path=slot.path,
                weight=slot.weight,
                writable=slot.health.writable,
                traits=None if slot.disk is None else slot.disk.traits,
            )
            for slot in disks.slots
        ],
    )
    path = run_dir / "mount.json"
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(facts))
    os.replace(fresh, path)


def read_facts(run_dir: Path) -> MountFacts:
    """Return what the server before noted.

    Raises:
        KvfuseError: nothing readable, or another format.
    """
    path = run_dir / "mount.json"
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=MountFacts)
    except (OSError, msgspec.MsgspecError) as exc:
        raise KvfuseError(f"{path}: the mount cannot be taken over: {exc}") from exc
    if facts.format != FORMAT:
        raise KvfuseError(f"{path}: format {facts.format}, this version takes over {FORMAT}")
    return facts


def resume_disks(run_dir: Path, fds: dict[str, int], stuck_pids: Sequence[int] = ()) -> DiskSet:
    """Return the disks of the mount whose facts lie in *run_dir*, over kept descriptors.

    Threads of *stuck_pids* are still inside system calls of the server before: the disks they hang
    on, and others that do not answer, come up fenced. To be called before the pool is opened.

    Raises:
        KvfuseError: the facts are missing or of another format.
    """
    facts = read_facts(run_dir)
    stuck = stuck_disks(run_dir / "inflight", list(stuck_pids))
    slots = [_slot(found, fds, stuck=stuck, asks=bool(stuck_pids)) for found in facts.slots]
    return DiskSet(
        pool_id=facts.pool_id,
        topology=Topology.from_json(facts.topology),
        slots=slots,
        session=facts.session,
        last_session=facts.last_session,
        lock_fds=[fd for name, fd in fds.items() if name.startswith(LOCK_FD)],
    )


def _slot(facts: _SlotFacts, fds: dict[str, int], *, stuck: set[int], asks: bool) -> Slot:
    now_s = time.monotonic()
    fd = fds.get(f"{ROOT_FD}{facts.disk_id}")
    disk: Disk | None = None
    health = Health.failed("was not usable when the mount was taken over", now_s=now_s)
    if fd is not None and facts.traits is not None:
        disk = Disk.known(facts.path, fd, facts.traits)
        health = Health.healthy(now_s=now_s, read_only=not facts.writable)
        if facts.number in stuck or (asks and not answers(disk)):
            health = health.on_timeout(now_s=now_s, what="a request of the server before")
    return Slot(
        number=facts.number, disk_id=facts.disk_id, path=facts.path, weight=facts.weight,
        disk=disk, health=health, session=0, is_new=False,
    )  # fmt: skip


def answers(disk: Disk) -> bool:
    """Whether the disk answers soon."""
    done = threading.Event()

    def probe() -> None:
        try:
            disk.space()
            disk.stat(disk.root_fd, b".kvfuse")
        except OSError as exc:
            _log.warning("disk %s: %s", disk.path, exc.strerror)
        done.set()  # an error is an answer: what it means is for its health to learn

    threading.Thread(target=probe, daemon=True, name="probe").start()
    return done.wait(_PROBE_S)


def restore_handles(state: PoolState, table: HandleTable) -> dict[int, list[OpenSlot]]:
    """Open again what was open; return the opens of each inode, those being closed included.

    A file on a fenced disk keeps no descriptor: what needs one is answered EIO until it is back.
    """
    by_inode: dict[int, list[OpenSlot]] = {}
    still_open: set[int] = set()
    for slot in table.slots():
        by_inode.setdefault(slot.id, []).append(slot)
        if slot.is_closing:
            continue
        still_open.add(slot.id)
        with state.catalog.read() as txn:
            node, orphan = txn.node(slot.id), txn.orphan(slot.id)
        fd = -1
        if slot.disk in state.carriers and state.slots[slot.disk].health.readable:
            try:
                fd = _reopen(state, slot, node, orphan)
            except OSError as exc:
                _log.warning("open file %d of id %d is lost: %s", slot.fh, slot.id, exc)
        state.handles.restore(slot, fd, None if node is not None or orphan is None else orphan[0])
    with state.catalog.write() as txn:
        for node_id in txn.orphans():
            if node_id not in still_open:
                txn.drop_orphan(node_id)
    if state.keeper is not None:
        wanted = {orphan_name(node_id) for node_id in still_open}
        for name in [name for name in state.keeper.fds if name.startswith(ORPHAN_FD)]:
            if name not in wanted:
                state.keeper.drop(name)
    return by_inode


def _reopen(
    state: PoolState, slot: OpenSlot, node: Node | None, orphan: tuple[Node, bytes] | None
) -> int:
    access = os.O_RDWR if slot.writable else os.O_RDONLY
    carriers = state.carriers[slot.disk]
    disk = carriers.disk
    if node is None:
        if orphan is None:
            raise OSError(errno.ESTALE, "no record")
        kept = None if state.keeper is None else state.keeper.fds.get(orphan_name(slot.id))
        if kept is not None:
            return os.open(f"/proc/self/fd/{kept}", access | os.O_CLOEXEC)
        return disk.open_handle(orphan[1], access)
    fd = carriers.at(node.parent, lambda dir_fd: disk.open(dir_fd, node.name, access))
    if os.fstat(fd).st_ino != node.ino or not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ESTALE, "replaced behind our back")
    return fd


def reopen_lost(state: PoolState, file: OpenFile) -> None:
    """Give an open file of a disk that was fenced its descriptor back."""
    with state.catalog.read() as txn:
        node, orphan = txn.node(file.id), txn.orphan(file.id)
    slot = OpenSlot(file.fh, file.id, 0, 0, file.disk, file.writable, file.reader, False)
    file.fd = _reopen(state, slot, node, orphan)
