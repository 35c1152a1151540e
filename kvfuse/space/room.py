"""How much room the disks have, as last measured, and who may use it.

What the kernel writes past the server is not seen, so room is promised before it is used: a file is
made on a disk only if what is used there, what is promised there, and its estimate leave the
reserve. When they do not, the disk's evictor is urged, and its creator waits a bounded time.

Concurrency: any thread. A measurement wakes whoever waits; no disk is asked here.
"""

import threading
import time
from collections.abc import Callable, Sequence

from kvfuse.core.admission import UNKNOWN_BYTES, Kind
from kvfuse.core.eviction import Usage, Watermarks
from kvfuse.disks.disk import Space
from kvfuse.space.reservations import Reservations

XFS_FACTOR = 1.6  # it preallocates beyond the end of a file that is written
LARGEST_SHARE = 8  # an estimate is at most this part of a disk: one huge file closes none
FEW = 32  # the largest of fewer files says nothing of the next
INODES_KEPT = 16
HOPELESS_S = 0.5
OLD_S = 0.05  # a measurement, for who is about to use the room: others write there, too
TIGHT_BYTES = 64 << 20  # left of a disk: what is written past the server may be more
TIGHT_S = 0.5  # the same at the rate at which the disk is written
WAITING_MAX = 12  # creations waiting for one disk: its threads are needed for reads, too


class Rooms:
    """The room of every disk of a mounted pool."""

    def __init__(
        self,
        reservations: Reservations,
        reserve_bytes: Callable[[int], int],
        watermarks: Watermarks,
    ) -> None:
        self._reservations = reservations
        self._reserve_bytes = reserve_bytes
        self.watermarks = watermarks
        self._spaces: dict[int, Space] = {}
        self._measured_s: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._filesystems: dict[int, str] = {}
        self._changed = threading.Condition()
        self._waiting: dict[int, int] = {}
        self._short: dict[int, int] = {}
        self._hopeless: dict[int, tuple[float, float]] = {}  # until when, and when to hope again
        self.pinned_bytes: dict[int, int] = {}  # by disk, when its files were last looked through
        self.rejected = 0  # creations that found no room anywhere
        self.urge: Callable[[int], None] = lambda _number: None

    # -- what was measured

    def measured(self, number: int, space: Space, filesystem: str, asked_s: float) -> None:
        """A disk that was asked at *asked_s* (monotonic) has said how much room it has."""
        with self._changed:
            if asked_s < self._measured_s.get(number, 0.0):
                return  # somebody asked later, and knows better
            self._spaces[number] = space
            self._measured_s[number] = asked_s
            self._filesystems[number] = filesystem
            self._changed.notify_all()

    def is_old(self, number: int) -> bool:
        """Whether a disk has not been measured for so long that its room may be gone."""
        return time.monotonic() - self._measured_s.get(number, 0.0) > OLD_S

    def written(self, number: int, bytes_per_s: float) -> None:
        """A disk is written that fast of late."""
        self._rates[number] = bytes_per_s

    def usage(self, number: int) -> Usage | None:
        """Return what a disk held when it was last asked, None if it never was."""
        space = self._spaces.get(number)
        if space is None:
            return None
        used_inodes = space.inodes_total - space.inodes_free
        return Usage(space.capacity_bytes, space.used_bytes, space.inodes_total, used_inodes)

    def is_tight(self, number: int) -> bool:
        """Whether writes on a disk may fail for want of room: it is nearly full, or soon will be.

        Nearly: above its high watermark, or with little left however large it is.
        """
        space, usage = self._spaces.get(number), self.usage(number)
        if space is None or usage is None:
            return False
        promised_bytes = self._reservations.unwritten(number)
        soon_bytes = max(TIGHT_BYTES, int(TIGHT_S * self._rates.get(number, 0.0)))
        return space.available_bytes - promised_bytes < soon_bytes or self.watermarks.exceeded(
            usage, promised_bytes
        )

    def is_filling(self, number: int) -> bool:
        """Whether a disk is above its low watermark: victims may be needed soon."""
        usage = self.usage(number)
        return usage is not None and bool(
            self.watermarks.need(usage, self._reservations.unwritten(number))
        )

    def largest_bytes(self, number: int) -> int | None:
        """Return the size no file on the disk can have; None where it was never asked."""
        space = self._spaces.get(number)
        return None if space is None else space.capacity_bytes

    # -- who may use it

    def promise(
        self, node_id: int, numbers: Sequence[int], kind: Kind, *, wait_s: float = 0.0
    ) -> int | None:
        """Reserve room for a file on the first of these disks that has it; return which.

        None when none has, or gets it, within *wait_s*.
        """
        found = self._first_with_room(node_id, numbers, kind)
        if found is not None or wait_s <= 0 or not numbers:
            return found
        deadline_s = time.monotonic() + wait_s
        lane = numbers[0]  # it is a thread of this disk that waits
        with self._changed:
            if self._waiting.get(lane, 0) >= WAITING_MAX:
                return None
            self._waiting[lane] = self._waiting.get(lane, 0) + 1
        try:
            while True:
                hoped = [n for n in numbers if not self.is_hopeless(n, deadline_s)]
                for number in hoped:
                    self._note_short(number, kind)
                with self._changed:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 or not hoped:
                        return None
                    self._changed.wait(left_s)
                found = self._first_with_room(node_id, numbers, kind)
                if found is not None:
                    return found
        finally:
            with self._changed:
                self._waiting[lane] -= 1

    def _first_with_room(self, node_id: int, numbers: Sequence[int], kind: Kind) -> int | None:
        return next((n for n in numbers if self._try_promise(node_id, n, kind)), None)

    def _try_promise(self, node_id: int, number: int, kind: Kind) -> bool:
        space = self._spaces.get(number)
        if space is None:
            return self._reservations.begin(node_id, number, kind)
        if space.inodes_total:
            coming = self._reservations.files(number)
            if space.inodes_free <= min(INODES_KEPT, space.inodes_total // 64) + coming:
                return False
        return self._reservations.begin(
            node_id, number, kind, room_bytes=self._room_bytes(space),
            scale=lambda estimate_bytes: self._scaled(number, space, estimate_bytes),
        )  # fmt: skip

    def _room_bytes(self, space: Space) -> int:
        return max(0, space.available_bytes - self._reserve_bytes(space.capacity_bytes))

    def _scaled(self, number: int, space: Space, estimate_bytes: int) -> int:
        if self._reservations.learned < FEW:
            estimate_bytes = max(estimate_bytes, UNKNOWN_BYTES)
        factor = XFS_FACTOR if self._filesystems.get(number) == "xfs" else 1.0
        return min(int(estimate_bytes * factor), space.capacity_bytes // LARGEST_SHARE)

    def _note_short(self, number: int, kind: Kind) -> None:
        space = self._spaces[number]
        wanted_bytes = self._scaled(number, space, self._reservations.estimate(kind))
        with self._changed:
            waiting = max(1, self._waiting.get(number, 1))
        missing_bytes = (
            self._reservations.unwritten(number) + waiting * wanted_bytes - self._room_bytes(space)
        )
        self._short[number] = max(1, missing_bytes)
        self.urge(number)

    def make_room(self, number: int, size_bytes: int, *, deadline_s: float) -> bool:
        """A write on a disk found no room for *size_bytes*: have it cleaned; whether it was.

        *deadline_s* is monotonic.
        """
        # What was measured before the disk said ENOSPC is not to be believed.
        before = self._spaces.get(number)
        while before is not None and not self.is_hopeless(number, deadline_s):
            space = self._spaces.get(number)
            is_new = space is not None and space is not before
            if is_new and space is not None and space.available_bytes > 2 * size_bytes:
                return True
            self._short[number] = max(self._short.get(number, 0), 2 * size_bytes)
            self.urge(number)
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return False

    def give_up(self, number: int, again_s: float) -> None:
        """All that may go from a disk has gone; something else may from *again_s* on (monotonic).

        For a moment nobody shall wait for more who cannot wait for that.
        """
        self._hopeless[number] = (time.monotonic() + HOPELESS_S, again_s)
        with self._changed:
            self._changed.notify_all()

    def is_hopeless(self, number: int, deadline_s: float) -> bool:
        """Whether waiting until *deadline_s* (monotonic) for room on a disk is vain just now."""
        until_s, again_s = self._hopeless.get(number, (0.0, 0.0))
        return until_s > time.monotonic() and again_s >= deadline_s

    def short(self, number: int) -> int:
        """Return how many bytes somebody misses on a disk, and forget it."""
        return self._short.pop(number, 0)
