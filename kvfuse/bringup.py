"""Which catalog a mount begins with, and what has to be scanned for it.

The live catalog lies in the run directory (tmpfs) and is right for as long as the machine is up,
however the daemon ended. A clean stop leaves a copy in the state directory, which is right after a
boot. Either is believed only if it saw the last mount of these disks; otherwise it is kept aside
and the disks are scanned.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from kvfuse import durability, records
from kvfuse.catalog import Catalog
from kvfuse.diskset import DiskSet, Slot
from kvfuse.errors import CatalogDamagedError
from kvfuse.health import Health
from kvfuse.numbers import Numbers
from kvfuse.records import NO_DISK, ROOT_ID, Node, State
from kvfuse.scan import DiskScan, Findings
from kvfuse.transaction import Txn

_log = logging.getLogger(__name__)
_PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Brought:
    """A catalog that is ready: what was scanned for it, and how long that took."""

    catalog: Catalog
    findings: dict[str, Findings]
    seconds: float


def bring_up(
    disks: DiskSet, live: Path, snapshot: Path, progress: Callable[[str], None]
) -> Brought:
    """Return the catalog of the pool in directory *live*, rebuilt by a scan where it must be.

    The disks get the numbers the catalog knows them by.
    """
    began_s = time.monotonic()
    catalog = _trusted(live, disks, same_boot=True)
    if catalog is None and snapshot.is_dir():
        _set_aside(live)
        with contextlib.suppress(OSError):
            live.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(snapshot, live)
        catalog = _trusted(live, disks, same_boot=False)
    if catalog is None:
        _set_aside(live)
        catalog = Catalog(live)
        _make_root(catalog)
    _attach(catalog, disks)
    numbers = Numbers(catalog, floor=disks.session)
    findings = _scan(catalog, disks, numbers, progress)
    with catalog.write() as txn:
        txn.put_meta(b"floor", b"%d" % numbers.floor())
    return Brought(catalog, findings, time.monotonic() - began_s)


def _trusted(path: Path, disks: DiskSet, *, same_boot: bool) -> Catalog | None:
    """Open the catalog at *path* if it is there, whole, and saw the last mount of these disks."""
    if not (path / "data.mdb").exists():
        return None
    try:
        catalog = Catalog(path)
    except CatalogDamagedError as exc:
        _log.warning("%s; the disks are scanned instead", exc)
        return None
    with catalog.read() as txn:
        session = int(txn.meta(b"session") or -1)
        in_this_boot = txn.meta(b"boot_id") == durability.boot_id().encode()
        clean = txn.meta(b"clean") == b"1"
    if session == disks.last_session and (in_this_boot if same_boot else clean):
        return catalog
    catalog.close()
    why = "of another boot" if session == disks.last_session else f"of session {session}"
    _log.info("catalog %s: %s, the disks are in session %d", path, why, disks.last_session)
    return None


def _set_aside(live: Path) -> None:
    """Keep what is not believed, once, for whoever wants to know why."""
    if live.exists():
        old = live.with_name(live.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(live, old)


def _make_root(catalog: Catalog) -> None:
    now_ns = time.time_ns()
    root = Node(
        id=ROOT_ID, mode=0o040755, uid=os.geteuid(), gid=os.getegid(), nlink=1,
        state=State.COMMITTED, flags=0, disk=NO_DISK, ino=0, size=4096, blocks=0, atime_ns=now_ns,
        mtime_ns=now_ns, ctime_ns=now_ns, generation=0, access=0, parent=ROOT_ID, name=b"",
    )  # fmt: skip
    with catalog.write() as txn:
        txn.put_node(root, None)


def _attach(catalog: Catalog, disks: DiskSet) -> None:
    """Let the catalog know this mount and its disks, in one step.

    Each disk gets its number; one that was here before keeps it. What has to be scanned is noted
    until it was: a daemon may die meanwhile, and a disk be away.
    """
    with catalog.write() as txn:
        known = {disk_id: number for number, disk_id in txn.disks().items()}
        scans = _scans(txn)
        for slot in disks.slots:
            if slot.disk_id not in known:
                number = max(known.values(), default=-1) + 1
                if number >= records.NO_DISK:
                    raise CatalogDamagedError("catalog: more disks than there are numbers")
                txn.put_disk(number, slot.disk_id)
                known[slot.disk_id] = number
                scans[slot.disk_id] = _how_to_scan(slot, disks)
        _put_scans(txn, scans)
        txn.put_meta(b"boot_id", durability.boot_id().encode())
        txn.put_meta(b"session", b"%d" % disks.session)
        txn.put_meta(b"clean", b"0")
    disks.renumber(known)


class _Scan(StrEnum):
    """How a disk is to be scanned, in the order in which disks are."""

    LIVE = "live"
    ADOPT = "adopt"
    STALE = "stale"


def _how_to_scan(slot: Slot, disks: DiskSet) -> _Scan:
    if slot.is_new:
        return _Scan.ADOPT
    # The pool may have lived on without it: what was removed meanwhile must not come back.
    return _Scan.STALE if slot.session < disks.last_session else _Scan.LIVE


def _scans(txn: Txn) -> dict[str, _Scan]:
    """Return the disks that have to be scanned, and how."""
    return msgspec.json.decode(txn.meta(b"scans") or b"{}", type=dict[str, _Scan])


def _put_scans(txn: Txn, scans: dict[str, _Scan]) -> None:
    txn.put_meta(b"scans", msgspec.json.encode(scans))


def _scan(
    catalog: Catalog, disks: DiskSet, numbers: Numbers, progress: Callable[[str], None]
) -> dict[str, Findings]:
    """Scan the disks the catalog knows nothing of."""
    with catalog.read() as txn:
        scans = _scans(txn)
    slots = [slot for slot in disks.slots if slot.disk is not None and slot.disk_id in scans]
    findings: dict[str, Findings] = {}
    for slot in sorted(slots, key=lambda slot: list(_Scan).index(scans[slot.disk_id])):
        how = scans[slot.disk_id]
        before = sum(found.files for found in findings.values())
        scan = DiskScan(
            catalog, numbers, slot, adopting=how is _Scan.ADOPT, stale=how is _Scan.STALE,
            progress=_Progress(slot.path, before, progress),
        )  # fmt: skip
        try:
            findings[slot.disk_id] = scan.run()
        except OSError as exc:
            _give_up(slot, f"cannot be scanned: {exc.strerror}")
            continue
        del scans[slot.disk_id]
        with catalog.write() as txn:
            _put_scans(txn, scans)
        _log.info("disk %s: scanned: %s", slot.path, findings[slot.disk_id])
    return findings


def _give_up(slot: Slot, reason: str) -> None:
    """Do without a disk of which nothing is known; the next mount scans it."""
    _log.warning("disk %s: %s", slot.path, reason)
    assert slot.disk is not None, "only disks that are there are scanned"
    slot.disk.close()
    slot.disk = None
    slot.health = Health.failed(reason, now_s=time.monotonic())


class _Progress:
    """Tells how many files were found, at once and then twice a second."""

    def __init__(self, path: str, before: int, tell: Callable[[str], None]) -> None:
        self._path = path
        self._before = before
        self._tell = tell
        self._told_s = 0.0
        self(0)

    def __call__(self, files: int) -> None:
        if time.monotonic() - self._told_s >= _PROGRESS_INTERVAL_S:
            self._told_s = time.monotonic()
            self._tell(f"scanning {self._path}: {self._before + files} files found")
