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
from pathlib import Path

from kvfuse import durability, records
from kvfuse.catalog import Catalog
from kvfuse.diskset import DiskSet, Slot
from kvfuse.errors import CatalogDamagedError
from kvfuse.numbers import Numbers
from kvfuse.records import NO_DISK, ROOT_ID, Node, State
from kvfuse.scan import DiskScan, Findings

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
    fresh = catalog is None
    if catalog is None:
        _set_aside(live)
        catalog = Catalog(live)
        _make_root(catalog)
    _number(catalog, disks)
    numbers = Numbers(catalog, floor=disks.session)
    findings = _scan(catalog, disks, numbers, progress, everything=fresh)
    with catalog.write() as txn:
        txn.put_meta(b"boot_id", durability.boot_id().encode())
        txn.put_meta(b"session", b"%d" % disks.session)
        txn.put_meta(b"clean", b"0")
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


def _number(catalog: Catalog, disks: DiskSet) -> None:
    """Give each disk its number in this catalog; one that was here before keeps it."""
    with catalog.write() as txn:
        known = {disk_id: number for number, disk_id in txn.disks().items()}
        for slot in disks.slots:
            if slot.disk_id not in known:
                number = max(known.values(), default=-1) + 1
                if number >= records.NO_DISK:
                    raise CatalogDamagedError("catalog: more disks than there are numbers")
                txn.put_disk(number, slot.disk_id)
                known[slot.disk_id] = number
    disks.renumber(known)


def _is_stale(slot: Slot, disks: DiskSet) -> bool:
    """Whether the pool lived on without the disk: nothing on it can be believed by itself."""
    return slot.session < disks.last_session and not slot.is_new


def _scan(
    catalog: Catalog,
    disks: DiskSet,
    numbers: Numbers,
    progress: Callable[[str], None],
    *,
    everything: bool,
) -> dict[str, Findings]:
    """Scan the disks the catalog knows nothing of."""
    findings: dict[str, Findings] = {}
    total = 0
    # What is not believed comes last: only then is it known what of it is gone.
    for slot in sorted(disks.slots, key=lambda slot: _is_stale(slot, disks)):
        if slot.disk is None or not (everything or slot.is_new):
            continue
        shown_s = 0.0

        def show(files: int, path: str = slot.path, before: int = total) -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s >= _PROGRESS_INTERVAL_S:
                shown_s = time.monotonic()
                progress(f"scanning {path}: {before + files} files found")

        scan = DiskScan(
            catalog, numbers, slot, adopting=slot.is_new, stale=_is_stale(slot, disks),
            progress=show,
        )  # fmt: skip
        show(0)
        try:
            findings[slot.disk_id] = scan.run()
        except OSError as exc:
            slot.health = slot.health.on_error(exc.errno or 5, now_s=time.monotonic())
            _log.warning("disk %s: cannot be scanned: %s", slot.path, exc.strerror)
            continue
        total += findings[slot.disk_id].files
        _log.info("disk %s: scanned: %s", slot.path, findings[slot.disk_id])
    return findings
