"""How much room a file that is about to be written will take. Pure.

Nobody says so when a file is created, and what the kernel writes past the server is not seen. KV
files of one kind are of one size, though: the largest of late is the estimate.

Concurrency: the caller's matter.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfuse.core.routing import DEFAULT_PATTERNS, TempPattern, final_extension

UNKNOWN_BYTES = 64 << 20  # the first file of a pool
WINDOW = 64  # files; a size is forgotten after one to two windows without such a file
KINDS_MAX = 4096


class Kind(NamedTuple):
    """What files of one size have in common; *extension* is None while the name does not tell."""

    top: bytes
    extension: bytes | None


def kind_of(
    directory: bytes, name: bytes, *, patterns: Sequence[TempPattern] = DEFAULT_PATTERNS
) -> Kind:
    """Return the kind of *name*, final or temporary, in *directory* (below the mountpoint)."""
    return Kind(directory.partition(b"/")[0], final_extension(name, patterns=patterns))


class Sizes:
    """The sizes of late: by kind, by extension, and of the pool."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind | bytes, _Largest] = {}
        self._pool = _Largest()

    def note(self, kind: Kind, size_bytes: int) -> None:
        """Learn that a file of *kind* has *size_bytes*."""
        self._pool.note(size_bytes)
        if kind.extension is None:
            return
        for key in (kind, kind.extension):
            largest = self._by_kind.pop(key, None) or _Largest()
            largest.note(size_bytes)
            self._by_kind[key] = largest  # last: the first is the one to go
        while len(self._by_kind) > KINDS_MAX:
            del self._by_kind[next(iter(self._by_kind))]

    def estimate(self, kind: Kind) -> int:
        """Return how many bytes a new file of *kind* will take at most, as far as one can tell."""
        if kind.extension is not None:
            for key in (kind, kind.extension):
                largest = self._by_kind.get(key)
                if largest is not None:
                    return largest.bytes
        return self._pool.bytes if self._pool.is_known else UNKNOWN_BYTES


class _Largest:
    """The largest of the last ``WINDOW`` to twice as many sizes."""

    __slots__ = ("_before", "_count", "_now")

    def __init__(self) -> None:
        self._before = self._now = -1
        self._count = 0

    @property
    def is_known(self) -> bool:
        return self._before >= 0 or self._now >= 0

    @property
    def bytes(self) -> int:
        return max(self._before, self._now)

    def note(self, size_bytes: int) -> None:
        self._now = max(self._now, size_bytes)
        self._count += 1
        if self._count == WINDOW:
            self._before, self._now, self._count = self._now, -1, 0
