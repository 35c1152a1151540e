"""The catalog of a running pool, read by another process than its server.

LMDB shares its table of readers between processes, so that what is read is one state and stays
whole. It also keeps the pages of that state: whoever reads must come to an end soon.
"""

from pathlib import Path
from typing import Any

import lmdb

from kvfuse.catalog.catalog import MAP_BYTES, TABLES
from kvfuse.catalog.intenttable import IntentTable
from kvfuse.catalog.transaction import Txn
from kvfuse.core.errors import CatalogDamagedError


class CatalogReader:
    """Reads the catalog in directory *path*; writes nothing but its place among the readers."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            CatalogDamagedError: it cannot be opened.
        """
        self._path = path
        try:
            self._env = lmdb.open(
                str(path), map_size=MAP_BYTES, max_dbs=32, readonly=True, create=False,
                max_readers=512, lib_version=0, readahead=False,
            )  # fmt: skip
            self._db: dict[bytes, Any] = {
                name: self._env.open_db(name, create=False) for name in TABLES
            }
            self._db[b"links"] = self._env.open_db(b"links", dupsort=True, create=False)
        except lmdb.Error as exc:
            raise CatalogDamagedError(f"catalog {path}: {exc}") from exc

    def read(self) -> Txn:
        """Begin a reading transaction: one consistent view."""
        # The table first: what is dropped from it meanwhile is recorded in what is seen then.
        said = IntentTable(self._path)
        return Txn(self._db, self._env.begin(), said, None)

    def bytes_used(self) -> int:
        """Return how far into its file the catalog reaches; grows while an old state is read."""
        last_page: int = self._env.info()["last_pgno"]
        return (last_page + 1) * 4096

    def close(self) -> None:
        """Close it."""
        self._env.close()
