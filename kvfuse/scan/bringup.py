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
from enum import StrEnum
from pathlib import Path

import msgspec

from kvfuse.catalog import soundness
from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.numbers import Numbers
from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.errors import CatalogDamagedError
from kvfuse.core.records import NO_DISK, ROOT_ID, Node, State
from kvfuse.disks import durability
from kvfuse.disks.diskset import DiskSet, Slot
from kvfuse.scan.hints import may_hint

_log = logging.getLogger(__name__)
_SYNC_LAG = 120 * 1_000_000_000  # generations given after the last that is noted on a disk, at most


def bring_up(disks: DiskSet, live: Path, snapshot: Path) -> Catalog:
    """Return the catalog of the pool in directory *live*, a new one where none can be believed.

    The disks get the numbers the catalog knows them by. Which of them have to be scanned, and how,
    is in the catalog.
    """
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
    numbers = Numbers(catalog, floor=max(disks.session, _highest_noted(disks)))
    with catalog.write() as txn:
        txn.put_meta(b"floor", b"%d" % numbers.floor())
    return catalog


def _highest_noted(disks: DiskSet) -> int:
    """Return a number above all ever given, as far as disks know: a clock may have gone back."""
    noted = [durability.read_synced(slot.disk) for slot in disks.slots if slot.disk is not None]
    return max((note.generation + _SYNC_LAG for note in noted if note is not None), default=0)


def _trusted(path: Path, disks: DiskSet, *, same_boot: bool) -> Catalog | None:
    """Open the catalog at *path* if it is there, whole, and saw the last mount of these disks."""
    if not (path / "data.mdb").exists():
        return None
    try:
        soundness.check(path)
        catalog = Catalog(path)
        soundness.break_seal(path)
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
    may_hint(path)
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
        wanted = scans(txn)
        for slot in disks.slots:
            if slot.disk_id not in known:
                number = max(known.values(), default=-1) + 1
                if number >= records.NO_DISK:
                    raise CatalogDamagedError("catalog: more disks than there are numbers")
                txn.put_disk(number, slot.disk_id)
                known[slot.disk_id] = number
                wanted[slot.disk_id] = _how_to_scan(slot, disks)
        put_scans(txn, wanted)
        txn.put_meta(b"boot_id", durability.boot_id().encode())
        txn.put_meta(b"session", b"%d" % disks.session)
        txn.put_meta(b"clean", b"0")
    disks.renumber(known)
    for slot in disks.slots:
        if slot.disk is not None and slot.disk_id not in wanted:
            with contextlib.suppress(OSError):  # it is doubted once more then
                durability.trust(slot.disk)


class How(StrEnum):
    """How a disk is to be scanned."""

    LIVE = "live"
    ADOPT = "adopt"
    STALE = "stale"


def _how_to_scan(slot: Slot, disks: DiskSet) -> How:
    if slot.is_new:
        return How.ADOPT
    # The pool may have lived on without it: what was removed meanwhile must not come back.
    missed = slot.session < disks.last_session
    if not missed and slot.disk is not None:
        with contextlib.suppress(OSError):  # it will fail again when it is read
            missed = durability.is_doubted(slot.disk)
    return How.STALE if missed else How.LIVE


def scans(txn: Txn) -> dict[str, How]:
    """Return the disks that have to be scanned, and how."""
    return msgspec.json.decode(txn.meta(b"scans") or b"{}", type=dict[str, How])


def put_scans(txn: Txn, wanted: dict[str, How]) -> None:
    """Note the disks that have to be scanned, and how."""
    txn.put_meta(b"scans", msgspec.json.encode(wanted))
