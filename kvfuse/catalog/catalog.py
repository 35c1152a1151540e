"""The catalog: the namespace of the pool and the record of every file, in LMDB.

Tables: ``entries`` (directory id, name) -> child, ``children`` (directory id, cookie) -> entry,
``nodes`` id -> record, ``pending`` ids being written, ``links`` id -> further names, ``xattrs``
(directory id, attribute) -> value, ``intents`` (most are said in :mod:`kvfuse.catalog.intenttable`
instead), ``chores`` and ``parked`` chores, ``disks`` number
-> disk id, ``usage`` number -> (files, blocks), ``results`` ring slot -> request
done, ``orphans`` id -> file without a name that is open, ``recency`` (disk number, access, id) of
every committed file, in order of last use, ``meta``. While disks are scanned: ``todo`` (disk
number, directory id) still to be read, ``scanned`` directory id -> disks on which it was read,
``gone`` ids of records that were dropped meanwhile.

Concurrency: any number of reading threads; one writer at a time, who neither waits nor does I/O
inside a transaction. Only one process writes a catalog; others may read it (``reader``).
Durability: none by itself (``sync=False``): the live catalog lies on tmpfs and survives processes,
not boots. ``snapshot`` writes a copy that does.

Transactions change the mapped file in place (WRITEMAP: half the time of a commit). A page the file
system cannot give would then be a SIGBUS, so that every page is allocated before it is used:
``AHEAD_BYTES`` beyond the last page in use, far more than one transaction takes. The pages of one
are new ones, hence a process that dies inside leaves the catalog as it was before.
"""

import errno
import os
import struct
from pathlib import Path
from typing import Any

import lmdb

from kvfuse.catalog import soundness
from kvfuse.catalog.intenttable import IntentTable
from kvfuse.catalog.transaction import Txn
from kvfuse.core import records
from kvfuse.core.errors import CatalogDamagedError
from kvfuse.core.intents import Create, Intent, Move, pack

MAP_BYTES = 64 << 30  # address space only: the file is sparse, and filled as it is used
AHEAD_BYTES = 16 << 20  # a batch of 256 records takes one or two of these
_ALLOCATED_BYTES = 16 << 20  # at a time, so that it is rare
_PAGE_BYTES = 4096
_COMPRESSED_MAX = 4  # by a file system that holds a copy
TABLES = (
    b"entries", b"children", b"nodes", b"pending", b"xattrs", b"intents", b"chores", b"disks",
    b"usage", b"meta", b"results", b"orphans", b"attempts", b"recency", b"todo", b"scanned",
    b"gone", b"parked",
)  # fmt: skip


class Catalog:
    """The LMDB environment of one pool."""

    def __init__(self, path: Path, *, map_bytes: int = MAP_BYTES) -> None:
        """Open or make the catalog in directory *path*.

        Raises:
            CatalogDamagedError: what lies there is not a catalog of this format.
        """
        self.path = path
        self.floor = 0  # while disks are scanned: dropped records with an id below are noted
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._said = IntentTable(path)
        _refuse_truncated(path / "data.mdb")
        try:
            # lib_version: the two engines inside py-lmdb cannot read each other's files, and an
            # environment variable could otherwise choose.
            self._env = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=32, sync=False, metasync=False,
                max_readers=512, lib_version=0, readahead=False, writemap=True,
            )  # fmt: skip
            self._data_fd = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
            self._allocated_bytes = 0
            self._allocate()
            self.db: dict[bytes, Any] = {name: self._env.open_db(name) for name in TABLES}
            self.db[b"links"] = self._env.open_db(b"links", dupsort=True)
            self._env.reader_check()
            with self.read() as txn:
                found = txn.meta(b"format")
        except lmdb.Error as exc:
            raise CatalogDamagedError(f"catalog {path}: {exc}") from exc
        if found is None:
            with self.write() as txn:
                txn.put_meta(b"format", b"%d" % records.FORMAT)
        elif found != b"%d" % records.FORMAT:
            self.close()
            raise CatalogDamagedError(f"catalog {path}: format {found!r}, need {records.FORMAT}")

    def read(self) -> Txn:
        """Begin a reading transaction: one consistent view."""
        return Txn(self.db, self._env.begin(), self._said, None)

    def write(self) -> Txn:
        """Begin the writing transaction; waits for the other writer."""
        txn = self._env.begin(write=True)
        try:
            self._allocate()
        except BaseException:
            txn.abort()
            raise
        return Txn(self.db, txn, self._said, self.commit, self.floor)

    def say(self, number: int, intent: Intent) -> None:
        """Say what is about to be done: a step of every protocol, like :meth:`commit`.

        Of exchanges and links nobody could tell later whether they have been recorded: they are
        said in a transaction, and dropped in that which records them.

        Raises:
            OSError: ENOSPC, the catalog takes no more.
        """
        is_telling = isinstance(intent, Create | Move)
        if not (is_telling and self._said.say(number, pack(intent))):
            with self.write() as txn:
                txn.put_intent(number, intent)

    def settled(self, number: int) -> None:
        """Forget what was said: it did not happen, or is recorded."""
        if number in self._said:
            self._said.drop(number)
        else:
            with self.write() as txn:
                txn.drop_intent(number)

    def _allocate(self) -> None:
        """Let every page the next transaction can take be there; the caller is the writer.

        Raises:
            OSError: ENOSPC, the file system is full.
        """
        last_page: int = self._env.info()["last_pgno"]
        needed_bytes = (last_page + 1) * _PAGE_BYTES + AHEAD_BYTES
        if needed_bytes <= self._allocated_bytes:
            return
        wanted_bytes = needed_bytes + _ALLOCATED_BYTES
        try:
            os.posix_fallocate(self._data_fd, 0, wanted_bytes)
        except OSError as exc:
            raise OSError(
                exc.errno or errno.ENOSPC, f"catalog {self.path}: {exc.strerror}"
            ) from exc
        self._allocated_bytes = wanted_bytes

    def commit(self, txn: lmdb.Transaction) -> None:
        """End a writing transaction: a step of every protocol, that a test can fail or die in."""
        txn.commit()

    def check_readers(self) -> None:
        """Free the pages that dead readers hold."""
        self._env.reader_check()

    def bytes_used(self) -> int:
        """Return the size of the catalog's file."""
        return os.stat(self.path / "data.mdb").st_blocks * records.BLOCK_BYTES

    def snapshot(self, target: Path) -> None:
        """Write a copy that survives a boot to directory *target*, atomically.

        Raises:
            OSError: it could not be written; what was there stays.
        """
        fresh = target.with_name(target.name + ".new")
        _clear(fresh)
        fresh.mkdir(mode=0o700, parents=True)
        try:
            self._env.copy(str(fresh), compact=True)
        except lmdb.Error as exc:
            raise OSError(errno.EIO, f"catalog {fresh}: {exc}") from exc
        _sync(fresh / "data.mdb")
        target.mkdir(mode=0o700, exist_ok=True)
        soundness.break_seal(target)
        os.replace(fresh / "data.mdb", target / "data.mdb")
        soundness.seal(target)
        _sync(target)
        _clear(fresh)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
        self._said.close()
        os.close(self._data_fd)


def _refuse_truncated(data: Path) -> None:
    """LMDB maps the file: reading past a cut end is SIGBUS, so compare the sizes first.

    The two meta pages of an LMDB file hold the last page number; their layout is fixed by its
    format (lmdb.h, MDB_meta): magic at 16, page size at 40, last page at 136 of each page.
    """
    try:
        size_bytes, blocks = data.stat().st_size, data.stat().st_blocks
    except FileNotFoundError:
        return
    if size_bytes == 0:
        return
    with data.open("rb") as file:
        head = file.read(8192)
    if len(head) < 8192 or head[16:20] != struct.pack("<I", 0xBEEFC0DE):
        raise CatalogDamagedError(f"catalog {data}: not an LMDB file, or cut short")
    page_bytes = struct.unpack_from("<I", head, 40)[0]
    if page_bytes != 4096:
        raise CatalogDamagedError(f"catalog {data}: pages of {page_bytes} bytes")
    last_page = max(struct.unpack_from("<Q", head, offset + 136)[0] for offset in (0, 4096))
    needed_bytes = (last_page + 1) * page_bytes
    if size_bytes < needed_bytes:
        raise CatalogDamagedError(
            f"catalog {data}: {size_bytes} bytes, its last page needs {needed_bytes}"
        )
    # The file is sparse, and as large as its map. What is used is there, maybe compressed.
    there_bytes = blocks * records.BLOCK_BYTES
    if needed_bytes > _COMPRESSED_MAX * there_bytes + AHEAD_BYTES:
        raise CatalogDamagedError(
            f"catalog {data}: {there_bytes} bytes of it are there, its last page is far beyond"
        )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _clear(directory: Path) -> None:
    """Remove a catalog's directory, if there is one."""
    for name in ("data.mdb", "lock.mdb"):
        (directory / name).unlink(missing_ok=True)
    if directory.is_dir():
        directory.rmdir()
