"""Catalog against disks while nothing is mounted. Changes nothing on any disk."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import error as StructError

import lmdb
import msgspec

from kvfuse.catalog import soundness
from kvfuse.catalog.catalog import Catalog
from kvfuse.core.errors import CatalogDamagedError, DiskRefusedError, KvfuseError
from kvfuse.disks.candidates import DiskSpec, look_at, refuse_identities
from kvfuse.disks.disk import Disk
from kvfuse.pool.check import check, set_aside
from kvfuse.pool.findings import Finding


@dataclass(frozen=True, slots=True)
class Examined:
    """What was looked at, and what was found there."""

    pool_id: str
    catalog: str
    disks: dict[str, str]  # path by id, of the disks that were looked at
    absent: list[str]  # ids of disks the catalog knows, and that were not
    findings: list[Finding]

    @property
    def faults(self) -> list[Finding]:
        """Return what should not be."""
        return [found for found in self.findings if found.is_fault]


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
