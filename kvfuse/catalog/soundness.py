"""Whether a catalog's file is as it was left.

LMDB maps its file and has no checksums: noise in it is wrong answers, or the death of whoever reads
it. So a file that was closed has a digest beside it, the *seal*. One whose daemon died has none;
another process reads through it first, and may die instead.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import time
from pathlib import Path

import lmdb
from blake3 import blake3

from kvfuse.core.errors import CatalogDamagedError

_SEAL = "seal.json"
_DATA = "data.mdb"
_PAGE_BYTES = 4096
_LAST_PAGE_AT = 136  # in each of the two meta pages (lmdb.h, MDB_meta)
_POLL_S = 0.002
_READ_TIMEOUT_S = 1.5  # a mount must not wait longer


def seal(directory: Path) -> None:
    """Note the digest of a catalog that was closed; raises OSError."""
    data = directory / _DATA
    used_bytes = _used_bytes(data)
    digest = _digest(data, used_bytes)
    fresh = directory / (_SEAL + ".new")
    fresh.write_text(json.dumps({"bytes": used_bytes, "blake3": digest}), encoding="ascii")
    os.replace(fresh, directory / _SEAL)


def break_seal(directory: Path) -> None:
    """The catalog is going to be changed."""
    with contextlib.suppress(FileNotFoundError):
        (directory / _SEAL).unlink()


def is_sealed(directory: Path) -> bool:
    """Whether a catalog was closed."""
    return (directory / _SEAL).exists()


def check(directory: Path) -> None:
    """Check the catalog in *directory*, which nobody has open.

    Raises:
        CatalogDamagedError: it is not as it was left, or cannot be read through.
    """
    data = directory / _DATA
    try:
        noted = json.loads((directory / _SEAL).read_text(encoding="ascii"))
        wanted = (int(noted["bytes"]), str(noted["blake3"]))
    except FileNotFoundError:
        _read_through(directory)
        return
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CatalogDamagedError(f"catalog {data}: its seal cannot be read: {exc}") from exc
    try:
        used_bytes = _used_bytes(data)
        # The size first: of noise it may be all of a sparse file of many gigabytes.
        found = (used_bytes, _digest(data, used_bytes) if used_bytes == wanted[0] else "")
    except OSError as exc:
        raise CatalogDamagedError(f"catalog {data}: {exc.strerror}") from exc
    if found != wanted:
        raise CatalogDamagedError(f"catalog {data}: not as it was closed; its digest differs")


def _used_bytes(data: Path) -> int:
    """Return how many bytes of the file its newest state uses."""
    with data.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(2 * _PAGE_BYTES)
    if len(head) < 2 * _PAGE_BYTES:
        return size_bytes
    last_page = max(
        int.from_bytes(head[offset + _LAST_PAGE_AT :][:8], "little") for offset in (0, _PAGE_BYTES)
    )
    return min(size_bytes, (last_page + 1) * _PAGE_BYTES)


def _digest(data: Path, used_bytes: int) -> str:
    """Return the digest of the first *used_bytes* of the file."""
    if used_bytes == 0:
        return ""
    with (
        data.open("rb") as file,
        mmap.mmap(file.fileno(), used_bytes, prot=mmap.PROT_READ) as pages,
        memoryview(pages) as view,
    ):
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update(view)
        return hasher.hexdigest()


def _read_through(directory: Path) -> None:
    """Let a child of this process read every record; a file too large for the time there is passes.

    Nobody has the catalog open in this process.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.disable()  # its death is an answer
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB says there what it dies of
            _read_all(directory)
            code = 0
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + _READ_TIMEOUT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(_POLL_S)
    if status:
        raise CatalogDamagedError(f"catalog {directory}: cannot be read through")


def _read_all(directory: Path) -> None:
    env = lmdb.open(
        str(directory), readonly=True, lock=False, max_dbs=64, lib_version=0, create=False
    )
    with env.begin() as txn:
        names = list(txn.cursor().iternext(values=False))
    for name in names:
        table = env.open_db(name, create=False)
        with env.begin() as txn:
            for _ in txn.cursor(db=table):
                pass
