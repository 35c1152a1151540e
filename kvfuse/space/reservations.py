"""Room that is spoken for: by files that are being written, on the disk where they are.

Also whose turn it is among equally used disks, and what was promised to a driver that had to know
the disk of a creation before it.

Concurrency: one mutex; no call blocks.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvfuse.core.admission import Kind, Sizes

PROMISES_MAX = 4096


class _Held(NamedTuple):
    disk: int
    estimate_bytes: int
    recorded_bytes: int = 0  # of it the catalog counts
    written_bytes: int = 0  # of it the disk counts
    seen_bytes: int = 0  # what the file takes, counted or not

    @property
    def unrecorded_bytes(self) -> int:
        return max(0, self.estimate_bytes - self.recorded_bytes)

    @property
    def unwritten_bytes(self) -> int:
        return max(0, self.estimate_bytes - self.written_bytes)


class Reservations:
    """The reservations of a mounted pool. They do not outlive the server."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sizes = Sizes()
        self._held: dict[int, _Held] = {}
        self._by_disk: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # promised to files that ended, ever
        self._covered: dict[int, int] = {}  # of these what a measurement covers
        self._grown: dict[int, int] = {}
        self.learned = 0  # sizes of finished files
        self._promised: dict[tuple[int, bytes], int] = {}
        self._turn = -1

    def begin(
        self,
        node_id: int,
        disk: int,
        kind: Kind,
        *,
        room_bytes: int | None = None,
        scale: Callable[[int], int] = lambda estimate_bytes: estimate_bytes,
    ) -> bool:
        """File *node_id* is about to be made on *disk*: keep room for one of its *kind*.

        With *room_bytes* only if that much, less what is kept already, suffices; return whether it
        is kept. *scale* adapts the estimate to the disk.
        """
        with self._mutex:
            estimate_bytes = scale(self._sizes.estimate(kind))
            if room_bytes is not None and self.unwritten(disk) + estimate_bytes > room_bytes:
                return False
            self._replace(node_id, _Held(disk, estimate_bytes))
            return True

    def estimate(self, kind: Kind) -> int:
        """Return how many bytes a file of *kind* will take at most, as far as one can tell."""
        with self._mutex:
            return self._sizes.estimate(kind)

    def end(self, node_id: int) -> None:
        """The file takes no more room than its record says, and the disk when it is next asked."""
        with self._mutex:
            held = self._held.get(node_id)
            if held is not None:
                self._ended[held.disk] = self._ended.get(held.disk, 0) + held.unwritten_bytes
            self._replace(node_id, None)

    def finished(self, node_id: int, size_bytes: int) -> None:
        """A file is written, and takes *size_bytes*."""
        with self._mutex:
            held = self._held.get(node_id)
            if held is not None:
                written_bytes = min(held.written_bytes, size_bytes)
                held = self._seen(held, size_bytes)
                held = held._replace(estimate_bytes=size_bytes, written_bytes=written_bytes)
                self._replace(node_id, held)

    def ended(self, disk: int) -> int:
        """Return how many bytes were promised on *disk* to files that ended meanwhile, ever."""
        return self._ended.get(disk, 0)

    def unmeasured(self, disk: int) -> int:
        """Return how many of the :meth:`ended` bytes no measurement of *disk* covers yet."""
        return self._ended.get(disk, 0) - self._covered.get(disk, 0)

    def measured(self, disk: int, ended_bytes: int) -> None:
        """A measurement of *disk*, begun when that much was :meth:`ended`, covers it."""
        with self._mutex:
            self._covered[disk] = max(self._covered.get(disk, 0), ended_bytes)

    def grown(self, disk: int) -> int:
        """Return how many bytes files with a reservation on *disk* were seen to take, ever."""
        return self._grown.get(disk, 0)

    def recorded(self, node_id: int, size_bytes: int) -> None:
        """The record of a file that is still written counts *size_bytes* of it by now."""
        with self._mutex:
            held = self._held.get(node_id)
            if held is not None:
                self._replace(node_id, held._replace(recorded_bytes=size_bytes))

    def written(self, node_id: int, size_bytes: int, *, is_counted: bool = True) -> None:
        """A file that is still written has *size_bytes* by now; does the disk count them?"""
        with self._mutex:
            held = self._held.get(node_id)
            if held is None:
                return
            held = self._seen(held, size_bytes)
            if is_counted:
                held = held._replace(written_bytes=size_bytes)
            elif size_bytes > held.estimate_bytes:
                held = held._replace(estimate_bytes=size_bytes)
            self._replace(node_id, held)

    def learn(self, kind: Kind, size_bytes: int) -> None:
        """A file of *kind* was finished with *size_bytes*."""
        with self._mutex:
            self.learned += 1
            self._sizes.note(kind, size_bytes)

    def on_disk(self, disk: int) -> int:
        """Return how many bytes are reserved on *disk* that the catalog does not count yet."""
        return self._by_disk.get(disk, 0)

    def unwritten(self, disk: int) -> int:
        """Return how many bytes are reserved on *disk* that no measurement of it covers yet."""
        return self._unwritten.get(disk, 0) + self.unmeasured(disk)

    def files(self, disk: int) -> int:
        """Return how many files that are written on *disk* have a reservation."""
        return self._files.get(disk, 0)

    def _seen(self, held: _Held, size_bytes: int) -> _Held:
        grown_bytes = self._grown.get(held.disk, 0) + size_bytes - held.seen_bytes
        self._grown[held.disk] = grown_bytes
        return held._replace(seen_bytes=size_bytes)

    def _replace(self, node_id: int, held: _Held | None) -> None:
        before = self._held.pop(node_id, None)
        if before is not None:
            self._count(before, -1)
        if held is not None:
            self._held[node_id] = held
            self._count(held, 1)

    def _count(self, held: _Held, sign: int) -> None:
        for counts, amount in (
            (self._by_disk, held.unrecorded_bytes),
            (self._unwritten, held.unwritten_bytes),
            (self._files, 1),
        ):
            counts[held.disk] = counts.get(held.disk, 0) + sign * amount

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
