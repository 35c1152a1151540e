"""Catalog against disks while nothing is mounted.

:func:`examine` changes nothing on any disk. :func:`repair` opens the pool as a mount does, without
one: what was begun is finished, and what is wrong then is mended as in a pool that serves.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import error as StructError
from typing import Any

import lmdb
import msgspec

from kvfuse.catalog import soundness
from kvfuse.catalog.catalog import Catalog
from kvfuse.core.config import Config
from kvfuse.core.errors import CatalogDamagedError, DiskRefusedError, KvfuseError
from kvfuse.disks.candidates import DiskSpec, look_at, refuse_identities
from kvfuse.disks.disk import Disk
from kvfuse.disks.diskset import open_disks
from kvfuse.pool.check import check, set_aside
from kvfuse.pool.findings import Finding
from kvfuse.pool.pool import Pool, open_pool

_POLL_S = 0.1
_STUCK_S = 120.0  # without a further file, while disks are read


@dataclass(frozen=True, slots=True)
class Examined:
    """What was looked at, and what was found there."""

    pool_id: str
    catalog: str
    disks: dict[str, str]  # path by id, of the disks that were looked at
    absent: list[str]  # ids of disks the catalog knows, and that were not
    findings: list[Finding]

    def result(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "pool": self.pool_id,
            "catalog": self.catalog,
            "disks": [{"id": disk_id, "path": path} for disk_id, path in self.disks.items()],
            "absent": self.absent,
            "faults": sum(found.is_fault for found in self.findings),
            "omitted": {},
            "findings": [found.to_json() for found in self.findings],
        }


def repair(config: Config, tell: Callable[[str], None]) -> dict[str, Any]:
    """Mend the pool of the configured disks; return what was found, and done, JSON-ready.

    *tell* is told, now and then, how far it is.

    Raises:
        DiskRefusedError: one is no disk, or a disk of the pool is not named.
        BusyError: one is mounted.
        KvfuseError: it did not come to an end.
    """
    run_dir, state_dir = config.pool.run_dir, config.pool.state_dir
    disks = open_disks(
        _as_members([DiskSpec(disk.path, mode=disk.mode) for disk in config.pool.disks]),
        mountpoint=config.pool.mountpoint or f"{run_dir}/fsck",
        state_dir=state_dir,
        run_dir=run_dir,
        require_all=True,
        allow_shared_device=True,
    )
    with contextlib.closing(disks):
        pool = open_pool(config, disks, progress=tell)
        is_done = False
        try:
            _wait_read(pool, tell)
            result = pool.fsck(repair=True)
            while result["state"] == "running":
                time.sleep(_POLL_S)
                result = pool.findings(result["id"])
                tell(f"{result['compared']} rows and names compared")
            if result["state"] != "done":
                raise KvfuseError(f"pool {disks.pool_id}: {result['error']}")
            is_done = True
        finally:
            pool.close(clean=is_done)
        return {"pool": disks.pool_id, **result}


def _as_members(specs: Sequence[DiskSpec]) -> list[DiskSpec]:
    """Return *specs* with the weights of the pool's topology; all of its disks must be there.

    Raises:
        DiskRefusedError: one is no disk of a pool, or one of the pool is not named.
    """
    candidates = look_at(specs)
    try:
        for candidate in candidates:
            if candidate.identity is None:
                reason = candidate.reason or "not a disk of kvfuse"
                raise DiskRefusedError(f"{candidate.path}: {reason}: name the disks of one pool")
        known = [each.topology for each in candidates if each.topology is not None]
        newest = max(known, key=lambda topology: topology.epoch, default=None)
        weights = {m.disk_id: m.weight for m in newest.members} if newest is not None else {}
        ids = [each.identity.disk_id for each in candidates if each.identity is not None]
        if missing := sorted(set(weights) - set(ids)):
            raise DiskRefusedError(
                f"{specs[0].path}: disk {missing[0]} of the pool is not named: repairing without"
                " it would take it out of the pool; name all disks, or mount and repair then"
            )
        return [
            spec._replace(weight=weights.get(disk_id, 1.0))
            for spec, disk_id in zip(specs, ids, strict=True)
        ]
    finally:
        for candidate in candidates:
            candidate.close()


def _wait_read(pool: Pool, tell: Callable[[str], None]) -> None:
    """Wait until disks that have to be read were; KvfuseError when nothing moves any more."""
    files, until_s = -1, time.monotonic() + _STUCK_S
    while not pool.wait_complete(_POLL_S):
        recovery = pool.status()["recovery"]
        if recovery["files"] != files:
            files, until_s = recovery["files"], time.monotonic() + _STUCK_S
            tell(f"the disks are read: {files} files")
        if time.monotonic() > until_s:
            raise KvfuseError(f"reading the disks does not go on after {files} files")


def examine(
    paths: Sequence[str],
    *,
    state_dir: str,
    run_dir: str,
    tick: Callable[[int], None] = lambda _done: None,
) -> Examined:
    """Compare the disks at *paths* with the catalog of their last mount.

    *tick* is told how many more rows and names were compared.

    Raises:
        DiskRefusedError: one is no disk, or they are not all of one pool.
        BusyError: one is mounted.
        CatalogDamagedError: the catalog cannot be read.
        KvfuseError: there is no catalog that saw their last mount.
    """
    candidates = look_at([DiskSpec(path) for path in paths])
    with contextlib.ExitStack() as held:
        found: dict[str, Disk] = {}
        session = 0
        for candidate in candidates:
            held.callback(candidate.close)
        for candidate in candidates:
            if candidate.damage is not None and candidate.disk is None:
                raise candidate.damage
            if candidate.disk is None or candidate.identity is None:
                reason = candidate.reason or "not a disk of kvfuse"
                raise DiskRefusedError(f"{candidate.path}: {reason}: name the disks of one pool")
            found[candidate.identity.disk_id] = candidate.disk
            session = max(session, candidate.identity.session)
        pool_id = refuse_identities(candidates)
        if pool_id is None:
            raise DiskRefusedError(f"{paths[0]}: of no pool yet: nothing to compare it with")
        for candidate in candidates:
            candidate.take_lock()
        held.enter_context(_damage_told(pool_id))
        catalog = _catalog_of(pool_id, session, (run_dir, state_dir))
        held.callback(_close, catalog, is_sealed=soundness.is_sealed(catalog.path))
        with catalog.read() as txn:
            numbers = {disk_id: number for number, disk_id in txn.disks().items()}
        known = {numbers[i]: disk for i, disk in found.items() if i in numbers}
        return Examined(
            pool_id=pool_id,
            catalog=str(catalog.path),
            disks={disk_id: disk.path for disk_id, disk in found.items()},
            absent=sorted(set(numbers) - set(found)),
            findings=[
                *check(catalog, known, tick),
                *(each for disk in known.values() for each in set_aside(disk)),
            ],
        )


@contextlib.contextmanager
def _damage_told(pool_id: str) -> Iterator[None]:
    """Turn what a damaged catalog makes of its readers into one line."""
    try:
        yield
    except CatalogDamagedError as exc:
        raise CatalogDamagedError(f"{exc}: the next mount scans the disks") from exc
    except (lmdb.Error, msgspec.DecodeError, StructError, ValueError, IndexError) as exc:
        raise CatalogDamagedError(
            f"pool {pool_id}: the catalog is damaged ({exc}): delete it, and the next mount scans"
            " the disks"
        ) from exc


def _close(catalog: Catalog, *, is_sealed: bool) -> None:
    """Close a catalog as it was found: to open one may add a table of this version."""
    catalog.close()
    if is_sealed:
        soundness.seal(catalog.path)


def _catalog_of(pool_id: str, session: int, directories: Sequence[str]) -> Catalog:
    """Open the catalog that saw mount number *session*."""
    looked = []
    for directory in directories:
        path = Path(directory) / pool_id / "catalog"
        looked.append(str(path))
        if not (path / "data.mdb").exists():
            continue
        soundness.check(path)
        catalog = Catalog(path)
        with catalog.read() as txn:
            seen = int(txn.meta(b"session") or -1)
        if seen == session:
            return catalog
        catalog.close()
    raise KvfuseError(
        f"pool {pool_id}: no catalog of its last mount in {' or '.join(looked)}:"
        " the next mount scans the disks"
    )
