"""The open files of a mount in memory that outlives the server: a mapped file on tmpfs.

The kernel goes on using handles whose server has died; the next server must know them. A slot holds
one open: handle number, id, disk, the backing id the kernel was given, and the ``unique`` of the
request that opened it, by which a re-sent request finds what it already did. The state byte is
written last when a slot is filled and first when it is emptied.

Concurrency: one mutex; a store is half a microsecond.
"""

import errno
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FORMAT = 1
SLOTS = 1 << 17  # files open at once
_INDEX_BITS = 17
_SLOT = struct.Struct("<QQQIHBB")  # fh, id, unique, backing id, disk, flags, state
_BACKING = struct.Struct("<I")
_BACKING_OFFSET = 24
_STATE_OFFSET = _SLOT.size - 1
_FREE, _OPEN, _CLOSING = 0, 1, 2
# backing ids that are none: the kernel was told nothing yet, or that the server moves the bytes
UNDECIDED, MEDIATED = 0, 0xFFFFFFFF
_WRITABLE, _READER = 1, 2


class OpenSlot(NamedTuple):
    """One open file, as the table keeps it.

    *is_closing*: released, its backing id maybe closed; or opened by the server for itself.
    """

    fh: int
    id: int
    unique: int
    backing_id: int
    disk: int
    writable: bool
    reader: bool
    is_closing: bool


class HandleTable:
    """The table of one mount, in the file *path*."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Map the table; without *resume* whatever it held is forgotten.

        Raises:
            OSError: there is no room for it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
        fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(fd, SLOTS * _SLOT.size)
            self._map = mmap.mmap(fd, SLOTS * _SLOT.size)
        finally:
            os.close(fd)
        self._mutex = threading.Lock()
        self._serial = 0
        self._free: deque[int] = deque()
        self._unused = 0
        self._scan()

    def _scan(self) -> None:
        """Find the free slots below the last one in use, and the newest handle number."""
        used: list[int] = []
        for index, slot in self._slots():
            used.append(index)
            self._serial = max(self._serial, slot.fh >> _INDEX_BITS)
        self._unused = max(used, default=-1) + 1
        self._free.extend(set(range(self._unused)).difference(used))

    def _slots(self) -> Iterator[tuple[int, OpenSlot]]:
        data = self._map
        for index in range(SLOTS):
            offset = index * _SLOT.size
            if data[offset + _STATE_OFFSET] != _FREE:
                fh, node_id, unique, backing_id, disk, flags, state = _SLOT.unpack_from(
                    data, offset
                )
                is_own = unique == 0 and backing_id == UNDECIDED
                yield (
                    index,
                    OpenSlot(
                        fh, node_id, unique, backing_id, disk, bool(flags & _WRITABLE),
                        bool(flags & _READER), state == _CLOSING or is_own,
                    ),
                )  # fmt: skip

    def slots(self) -> list[OpenSlot]:
        """Return every open file, and those whose release was not finished."""
        return [slot for _, slot in self._slots()]

    def add(self, node_id: int, disk: int, unique: int, *, writable: bool, reader: bool) -> int:
        """Take a slot and return its handle number, never given before in this mount.

        Raises:
            OSError: ENFILE when all slots are taken.
        """
        with self._mutex:
            if self._free:
                index = self._free.popleft()
            elif self._unused < SLOTS:
                index = self._unused
                self._unused += 1
            else:
                raise OSError(errno.ENFILE, f"{SLOTS} files are open")
            self._serial += 1
            fh = self._serial << _INDEX_BITS | index
        flags = (_WRITABLE if writable else 0) | (_READER if reader else 0)
        offset = index * _SLOT.size
        _SLOT.pack_into(self._map, offset, fh, node_id, unique, 0, disk, flags, _FREE)
        self._map[offset + _STATE_OFFSET] = _OPEN
        return fh

    def note_backing(self, fh: int, backing_id: int) -> None:
        """Note what the kernel calls the file behind an open."""
        _BACKING.pack_into(self._map, self._offset(fh) + _BACKING_OFFSET, backing_id)

    def closing(self, fh: int) -> None:
        """Note that the open is released: only its backing id may still have to be closed."""
        self._map[self._offset(fh) + _STATE_OFFSET] = _CLOSING

    def free(self, fh: int) -> None:
        """Give the slot back."""
        self._map[self._offset(fh) + _STATE_OFFSET] = _FREE
        with self._mutex:
            self._free.append(fh & (SLOTS - 1))

    @staticmethod
    def _offset(fh: int) -> int:
        return (fh & (SLOTS - 1)) * _SLOT.size

    def close(self) -> None:
        """Unmap the table."""
        self._map.close()
