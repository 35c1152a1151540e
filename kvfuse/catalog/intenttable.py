"""Intents of verbs under way, in a mapped file beside the catalog: said in a microsecond.

An intent is said before a step on a disk, and dropped when the transaction that records the step
is committed: one that a dead server left may have been recorded already. What does not fit goes
into the catalog's own table.

The state byte of a slot is written last when it is filled and first when it is emptied, and the
file is allocated as a whole: a process may die at any point.

Concurrency: any thread; single operations of a deque and a dict.
"""

import mmap
import os
import struct
from collections import deque
from pathlib import Path

FILE = "intents"
SLOTS = 512
SLOT_BYTES = 1024
_HEAD = struct.Struct("<BxHxxxxQ")  # state, length of the intent, its number
_FREE, _SAID = 0, 1


class IntentTable:
    """The table in directory *directory*; what a server before said is still there."""

    def __init__(self, directory: Path) -> None:
        """Map the table, made if need be.

        Raises:
            OSError: there is no room for it.
        """
        size_bytes = SLOTS * SLOT_BYTES
        fd = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self._offsets: dict[int, int] = {}
        self._free: deque[int] = deque()
        for offset in range(0, size_bytes, SLOT_BYTES):
            state, _, number = _HEAD.unpack_from(self._map, offset)
            if state == _SAID:
                self._offsets[number] = offset
            else:
                self._free.append(offset)

    def __contains__(self, number: int) -> bool:
        return number in self._offsets

    def say(self, number: int, intent: bytes) -> bool:
        """Note *intent* under *number*; False when it does not fit."""
        length = len(intent)
        if length > SLOT_BYTES - _HEAD.size:
            return False
        try:
            offset = self._free.popleft()
        except IndexError:
            return False
        begin = offset + _HEAD.size
        self._map[begin : begin + length] = intent
        _HEAD.pack_into(self._map, offset, _FREE, length, number)
        self._map[offset] = _SAID
        self._offsets[number] = offset
        return True

    def drop(self, number: int) -> None:
        """Forget what was said under *number*, if it is here."""
        offset = self._offsets.pop(number, None)
        if offset is not None:
            self._map[offset] = _FREE
            self._free.append(offset)

    def get(self, number: int) -> bytes | None:
        """Return what was said under *number*, None when it is not here."""
        offset = self._offsets.get(number)
        if offset is None:
            return None
        head = _HEAD.unpack_from(self._map, offset)
        begin = offset + _HEAD.size
        intent = self._map[begin : begin + head[1]]
        # Read in another process the slot may be another's by now.
        is_whole = head == _HEAD.unpack_from(self._map, offset) == (_SAID, len(intent), number)
        return intent if is_whole else None

    def all(self) -> list[tuple[int, bytes]]:
        """Return (number, intent) of all that is said."""
        said = ((number, self.get(number)) for number in list(self._offsets))
        return [(number, intent) for number, intent in said if intent is not None]

    def close(self) -> None:
        """Unmap the table."""
        self._map.close()
