"""Room that is spoken for: by files that are being written, on the disk where they are.

Also whose turn it is among equally used disks, and what was promised to a driver that had to know
the disk of a creation before it.

Concurrency: one mutex; no call blocks.
"""

import threading
from typing import NamedTuple

from kvfuse.admission import Kind, Sizes

PROMISES_MAX = 4096


class _Held(NamedTuple):
    disk: int
    size_bytes: int


class Reservations:
    """The reservations of a mounted pool. They do not outlive the server."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sizes = Sizes()
        self._held: dict[int, _Held] = {}
        self._by_disk: dict[int, int] = {}
        self._promised: dict[tuple[int, bytes], int] = {}
        self._turn = -1

    def begin(self, node_id: int, disk: int, kind: Kind) -> None:
        """File *node_id* is about to be made on *disk*: keep room for one of its *kind*."""
        with self._mutex:
            self._replace(node_id, _Held(disk, self._sizes.estimate(kind)))

    def end(self, node_id: int) -> None:
        """The file takes no more room than its record says."""
        with self._mutex:
            self._replace(node_id, None)

    def recorded(self, node_id: int, size_bytes: int) -> None:
        """The record of a file that is still written counts *size_bytes* of it by now."""
        with self._mutex:
            held = self._held.get(node_id)
            if held is not None:
                left_bytes = max(0, held.size_bytes - size_bytes)
                self._replace(node_id, held._replace(size_bytes=left_bytes))

    def learn(self, kind: Kind, size_bytes: int) -> None:
        """A file of *kind* was finished with *size_bytes*."""
        with self._mutex:
            self._sizes.note(kind, size_bytes)

    def on_disk(self, disk: int) -> int:
        """Return how many bytes are reserved on *disk*."""
        return self._by_disk.get(disk, 0)

    def _replace(self, node_id: int, held: _Held | None) -> None:
        before = self._held.pop(node_id, None)
        if before is not None:
            self._by_disk[before.disk] -= before.size_bytes
        if held is not None:
            self._held[node_id] = held
            self._by_disk[held.disk] = self._by_disk.get(held.disk, 0) + held.size_bytes

    # -- whose turn it is

    def take_turn(self) -> int:
        """Return a number that grows by one with each placement."""
        with self._mutex:
            self._turn += 1
            return self._turn

    def promise(self, place: tuple[int, bytes], disk: int) -> None:
        """The file that is about to be made at *place* will be tried on *disk* first."""
        with self._mutex:
            self._promised[place] = disk
            while len(self._promised) > PROMISES_MAX:  # nothing came of the oldest
                del self._promised[next(iter(self._promised))]

    def promised(self, place: tuple[int, bytes]) -> int | None:
        """Return the disk promised to *place*, which ends the promise; None without one."""
        with self._mutex:
            return self._promised.pop(place, None)
