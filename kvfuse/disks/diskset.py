"""The disks of one mount: found, checked, and only then written to.

``open_disks`` looks at everything, decides, refuses with nothing written anywhere, and at last
writes the identities of new disks, the topology and the session.
"""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvfuse.core.errors import DiskRefusedError
from kvfuse.core.health import Health
from kvfuse.core.topology import Member, Topology, settle
from kvfuse.disks import durability
from kvfuse.disks.adoption import (
    Survey,
    failures_as_refusal,
    init_disk,
    mark_new,
    refuse_new,
    refuse_place,
    survey,
)
from kvfuse.disks.candidates import (
    Candidate,
    DiskSpec,
    look_at,
    refuse_identities,
    refuse_places,
    refuse_shared_filesystems,
    unwise,
)
from kvfuse.disks.disk import Disk
from kvfuse.disks.identity import remove_mark, write_identity, write_topology
from kvfuse.disks.whereabouts import (
    Place,
    is_mountpoint,
    pair_missing,
    recall,
    recall_all,
    remember,
)

__all__ = [
    "DiskSet", "DiskSpec", "Slot", "Survey", "init_disk", "open_disks", "survey",
]  # fmt: skip

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Slot:
    """One disk of the topology; *disk* is None while it is missing or dead.

    *number* is what the catalog calls it. *path* is "" when nobody knows where it would be.
    *is_new* says that it joined with this mount, *session* which mount had it last before this:
    without a catalog, what a disk holds that missed a session cannot be believed.
    """

    number: int
    disk_id: str
    path: str
    weight: float
    disk: Disk | None
    health: Health
    session: int = 0
    is_new: bool = False


@dataclass(slots=True)
class DiskSet:
    """The disks of a mount, locked until ``close``.

    *session* is this mount's number, above that of every mount before; *last_session* the highest
    found on a disk.
    """

    pool_id: str
    topology: Topology
    slots: list[Slot]
    session: int
    last_session: int
    warnings: list[str] = field(default_factory=list)
    lock_fds: list[int] = field(default_factory=list)

    def renumber(self, numbers: Mapping[str, int]) -> None:
        """Give every slot the number that *numbers* has for its disk id."""
        for slot in self.slots:
            slot.number = numbers[slot.disk_id]

    def close(self) -> None:
        """Close the disks and give the locks back."""
        for slot in self.slots:
            if slot.disk is not None:
                slot.disk.close()
                slot.disk = None
        while self.lock_fds:
            with contextlib.suppress(OSError):  # a dead disk says so once more; it is closed
                os.close(self.lock_fds.pop())


def open_disks(  # noqa: PLR0913 - what is configured, and two sources tests replace
    entries: Sequence[DiskSpec],
    *,
    mountpoint: str,
    state_dir: str,
    run_dir: str,
    require_all: bool = False,
    allow_shared_device: bool = False,
    init: bool = False,
    new_uuid: Callable[[], str] = lambda: str(uuid.uuid4()),
    now_ns: Callable[[], int] = time.time_ns,
) -> DiskSet:
    """Open, check and lock the disks of a pool, and note this mount on them.

    Disks that are missing, dead or read-only come up so, with a warning each. With *init*, empty
    directories become new disks. A disk that was prepared (``init_disk``) joins without it.

    Raises:
        DiskRefusedError: a disk must not be used, none can be, or with *require_all* one cannot.
        BusyError: a disk is in use. In both cases nothing was written.
    """
    if not entries:
        raise DiskRefusedError("no disk is configured: name at least one with --disk")
    candidates = look_at(entries)
    try:
        refuse_places(candidates, mountpoint, (state_dir, run_dir))
        if not allow_shared_device:
            refuse_shared_filesystems(candidates)
        plan = _decide(candidates, state_dir, new_uuid)
        _refuse_new_disks(plan, init=init)
        _lock(plan)
        _refuse_useless(plan, require_all=require_all)
        return _write(plan, state_dir, new_uuid, now_ns)
    except BaseException:
        for candidate in candidates:
            candidate.close()
        raise


@dataclass(slots=True)
class _Plan:
    """What was decided before anything is written."""

    candidates: list[Candidate]
    pool_id: str
    topology: Topology | None  # as found; None for a new pool
    places: dict[str, Place]
    other_places: dict[str, dict[str, Place]]
    absent: dict[str, str]  # disk id -> configured path, of members that were not found
    warnings: list[str]  # what is missing or takes no writes
    notes: list[str]  # what is unwise


def _decide(candidates: list[Candidate], state_dir: str, new_uuid: Callable[[], str]) -> _Plan:
    found_pool = refuse_identities(candidates)
    pool_id = found_pool or new_uuid()
    places = recall(state_dir, pool_id) if found_pool else {}
    found = [c.topology for c in candidates if c.topology is not None]
    topology = settle(found, new_uuid()) if found else None
    _refuse_damaged(candidates, topology)
    unavailable = {c.path: c for c in candidates if c.disk is None}
    here = {c.identity.disk_id for c in candidates if c.identity is not None}
    members = {m.disk_id for m in topology.members} if topology else set()
    absent, strangers, _ = pair_missing(members - here, unavailable, places)
    for path in strangers:
        damage = unavailable[path].damage
        if damage is not None:
            raise damage  # a disk, and not known to be the pool's
    if strangers and len(unavailable) < len(candidates) and topology is None:
        lost = unavailable[strangers[0]]
        raise DiskRefusedError(f"{lost.path}: {lost.reason}: mount it there, or leave it out")
    warnings = [f"{c.path}: disk is unavailable: {c.reason}" for c in unavailable.values()]
    warnings += [f"disk {i} of the pool is missing" for i, path in absent.items() if not path]
    warnings += [
        f"{c.path}: disk is read-only: {c.read_only}"
        for c in candidates
        if c.read_only and c.spec.mode != "ro"
    ]
    return _Plan(
        candidates=candidates,
        pool_id=pool_id,
        topology=topology,
        places=places,
        other_places=recall_all(state_dir),
        absent=absent,
        warnings=warnings,
        notes=[
            f"{c.damage.where}: {c.damage.what}: the topology of the other disks counts"
            for c in candidates
            if c.damage is not None and c.disk is not None
        ]
        + unwise(candidates, state_dir),
    )


def _refuse_damaged(candidates: Sequence[Candidate], topology: Topology | None) -> None:
    """Refuse a disk whose own files are damaged, unless others of its pool say what it is."""
    is_pool_known = any(c.identity is not None and c.identity.pool_id for c in candidates)
    for candidate in candidates:
        damage = candidate.damage
        if damage is not None and not (is_pool_known if candidate.disk is None else topology):
            raise damage


def _lock(plan: _Plan) -> None:
    for candidate in plan.candidates:
        if candidate.identity is None:
            continue
        try:
            candidate.take_lock()
        except OSError as e:
            _give_up(plan, candidate, e)


def _give_up(plan: _Plan, candidate: Candidate, failure: OSError) -> None:
    candidate.fail(failure.strerror or str(failure))
    plan.warnings.append(f"{candidate.path}: disk is unavailable: {candidate.reason}")


def _refuse_useless(plan: _Plan, *, require_all: bool) -> None:
    if require_all and plan.warnings:
        raise DiskRefusedError(f"{plan.warnings[0]}: mend it, or mount without requiring all disks")
    if all(c.disk is None for c in plan.candidates):
        reasons = "; ".join(f"{c.path}: {c.reason}" for c in plan.candidates)
        raise DiskRefusedError(f"no disk is usable: {reasons}")


def _refuse_new_disks(plan: _Plan, *, init: bool) -> None:
    """Refuse directories without identity that must not get one."""
    for candidate in plan.candidates:
        disk = candidate.disk
        if disk is None or not candidate.is_new:
            continue
        path = candidate.path
        with failures_as_refusal(path):
            refuse_place(disk)
        if not candidate.is_empty:
            raise DiskRefusedError(
                f"{path}: not a disk of kvfuse, and it holds files:"
                f" kvfuse disk init --adopt {path} makes them the pool's"
            )
        expected = _expected_at(plan, path)
        if expected:
            raise DiskRefusedError(
                f"{path}: empty, where {expected} is expected: is it mounted?"
                f" If this is a new disk: kvfuse disk init {path}"
            )
        if not init:
            raise DiskRefusedError(
                f"{path}: not a disk of kvfuse yet: mount with --init, or kvfuse disk init {path}"
            )
        with failures_as_refusal(path):
            refuse_new(disk)


def _expected_at(plan: _Plan, path: str) -> str:
    """Return which disk an empty directory may stand in for, "" when none."""
    for disk_id in _not_here(plan):
        place = plan.places.get(disk_id)
        if place is None or place.path == path:  # it could be this one
            return f"disk {disk_id}"
    if not is_mountpoint(path):
        for pool_id, places in plan.other_places.items():
            for disk_id, place in places.items():
                if place.path == path and place.is_mountpoint:
                    return f"disk {disk_id} of pool {pool_id}"
    return ""


def _not_here(plan: _Plan) -> list[str]:
    here = {c.identity.disk_id for c in plan.candidates if c.identity is not None}
    members = plan.topology.members if plan.topology else ()
    return [m.disk_id for m in members if m.disk_id not in here]


def _write(
    plan: _Plan, state_dir: str, new_uuid: Callable[[], str], now_ns: Callable[[], int]
) -> DiskSet:
    sessions = [c.identity.session for c in plan.candidates if c.identity is not None]
    last_session = max(sessions, default=0)
    # time makes two mounts of halves of a pool differ; the maximum makes it grow whatever the clock
    session = max(now_ns(), last_session + 1)
    joined = {c.path for c in plan.candidates if not c.identity or not c.identity.pool_id}
    _make_disks(plan, new_uuid, now_ns)
    topology = _next_topology(plan, new_uuid)
    for candidate in plan.candidates:
        _doubt(candidate, plan, last_session)
        _note(candidate, plan, topology, session)
    disks = DiskSet(
        pool_id=plan.pool_id,
        topology=topology,
        slots=_slots(plan, topology, joined, time.monotonic()),
        session=session,
        last_session=last_session,
        warnings=plan.warnings + plan.notes,
        lock_fds=[c.lock_fd for c in plan.candidates if c.lock_fd >= 0],
    )
    _refuse_useless(plan, require_all=False)
    _remember(disks, plan, state_dir)
    return disks


def _make_disks(plan: _Plan, new_uuid: Callable[[], str], now_ns: Callable[[], int]) -> None:
    """Make the new disks, all of them or none."""
    made: list[Disk] = []
    try:
        for candidate in plan.candidates:
            disk = candidate.disk
            if disk is None or not candidate.is_new:
                continue
            with failures_as_refusal(candidate.path):
                candidate.identity = mark_new(
                    disk, pool_id=plan.pool_id, new_uuid=new_uuid, now_ns=now_ns
                )
                made.append(disk)
                candidate.take_lock()
    except BaseException:
        for disk in made:
            remove_mark(disk)
        raise


def _next_topology(plan: _Plan, new_uuid: Callable[[], str]) -> Topology:
    before = {m.disk_id: m for m in plan.topology.members} if plan.topology else {}
    weights = {c.path: c.spec.weight for c in plan.candidates}
    members = {
        disk_id: Member(disk_id, weights.get(path, before[disk_id].weight))
        for disk_id, path in plan.absent.items()
    }
    for candidate in plan.candidates:
        if candidate.identity is not None:
            disk_id = candidate.identity.disk_id
            members[disk_id] = Member(disk_id, candidate.spec.weight)
    if plan.topology is None:
        return Topology.first(plan.pool_id, new_uuid(), members.values())
    if members == before:
        return plan.topology
    return plan.topology.changed(members.values(), new_uuid())


def _doubt(candidate: Candidate, plan: _Plan, last_session: int) -> None:
    """Note on a disk that it missed a mount, before this mount is noted on it."""
    disk, identity = candidate.disk, candidate.identity
    if disk is None or identity is None or candidate.read_only or not identity.pool_id:
        return
    if identity.session < last_session:
        try:
            durability.doubt(disk)
        except OSError as e:
            if e.errno not in _FULL:
                _give_up(plan, candidate, e)
                return
            plan.notes.append(f"{candidate.path}: full: that it was away could not be noted")


def _note(candidate: Candidate, plan: _Plan, topology: Topology, session: int) -> None:
    """Write topology and session to a disk; one that fails is given up, a full one is not."""
    disk, identity = candidate.disk, candidate.identity
    if disk is None or identity is None or candidate.read_only:
        return
    noted = msgspec.structs.replace(identity, pool_id=plan.pool_id, session=session)
    try:
        if candidate.topology != topology:
            _unless_full(plan, candidate, lambda: write_topology(disk, topology))
        _unless_full(plan, candidate, lambda: write_identity(disk, noted))
    except OSError as e:
        if e.errno == errno.EROFS:
            candidate.read_only = "takes no writes"
            plan.warnings.append(f"{candidate.path}: disk is read-only: {candidate.read_only}")
        else:
            _give_up(plan, candidate, e)


def _unless_full(plan: _Plan, candidate: Candidate, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as e:
        if e.errno not in _FULL:
            raise
        plan.notes.append(f"{candidate.path}: full: this mount could not be noted on it")


def _slots(plan: _Plan, topology: Topology, joined: set[str], now_s: float) -> list[Slot]:
    paths = {path: disk_id for disk_id, path in plan.absent.items() if path}
    weights = {m.disk_id: m.weight for m in topology.members}
    slots: list[Slot] = []
    for candidate in plan.candidates:
        identity = candidate.identity
        disk_id = identity.disk_id if identity else paths.get(candidate.path)
        if disk_id is None:
            continue  # not there, and of no disk of the pool
        slots.append(
            Slot(
                number=len(slots),
                disk_id=disk_id,
                path=candidate.path,
                weight=weights[disk_id],
                disk=candidate.disk,
                health=_health(candidate, now_s),
                session=identity.session if identity else 0,
                is_new=candidate.path in joined and candidate.disk is not None,
            )
        )
    for disk_id in sorted(i for i, path in plan.absent.items() if not path):
        health = Health.failed("missing, and where it was is not known", now_s=now_s)
        slots.append(Slot(len(slots), disk_id, "", weights[disk_id], None, health))
    return slots


def _health(candidate: Candidate, now_s: float) -> Health:
    if candidate.disk is None:
        return Health.failed(candidate.reason, now_s=now_s)
    # nothing is asked of a disk before the scan that open_pool makes is over: no REGISTERING needed
    is_forbidden = candidate.spec.mode == "ro"
    health = Health.healthy(now_s=now_s, read_only=is_forbidden)
    if candidate.read_only and not is_forbidden:
        health = health.on_read_only(now_s=now_s, reason=candidate.read_only)
    return health


def _remember(disks: DiskSet, plan: _Plan, state_dir: str) -> None:
    places = {i: plan.places[i] for i in plan.absent if i in plan.places}
    for slot in disks.slots:
        if slot.disk is not None:
            with contextlib.suppress(OSError):
                places[slot.disk_id] = Place(path=slot.path, is_mountpoint=is_mountpoint(slot.path))
    if places == plan.places:
        return
    try:
        remember(state_dir, disks.pool_id, places)
    except OSError as e:
        disks.warnings.append(f"{state_dir}: where the disks are could not be noted: {e.strerror}")
