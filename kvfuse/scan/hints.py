"""What an older catalog still tells while disks are read: when their files were last used.

The copy that was made last before the machine went down is not believed: since then files came and
went. But a file that is found with the id and the generation it has there is the same version, and
was last used then, or later. Nothing else is taken from it: no name, no size, no file.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import lmdb

from kvfuse.core import records

_MARK = "hints"  # in the directory of a catalog that is sound, and not believed


class Hints:
    """Records of an older catalog; thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the catalog in directory *path* for reading; raises lmdb.Error."""
        self._env = lmdb.open(
            str(path), readonly=True, lock=False, max_dbs=32, lib_version=0, readahead=False,
            create=False,
        )  # fmt: skip
        self._nodes = self._env.open_db(b"nodes", create=False)

    def records(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the packed records it has of these packed ids."""
        with self._env.begin() as txn:
            return dict(txn.cursor(self._nodes).getmulti(keys))

    def last_use(self, node_id: int, value: bytes) -> bytes:
        """Return the packed record *value*, with the last use if it is known."""
        key = records.pack_id(node_id)
        old = self.records([key]).get(key)
        return value if old is None else records.with_last_use(value, old)


def may_hint(catalog: Path) -> None:
    """Note that the catalog in this directory is sound, though not believed."""
    with contextlib.suppress(OSError):
        (catalog / _MARK).touch()


def open_hints(live: Path) -> Hints | None:
    """Return the hints beside the live catalog in directory *live*; None without."""
    old = live.with_name(live.name + ".old")
    if not (old / _MARK).exists():
        return None
    try:
        return Hints(old)
    except lmdb.Error:
        return None
