"""Room that comes back late: files that were removed, and whose bytes a disk still counts as used.

XFS frees what was unlinked in the background, btrfs at its next commit. Who removed until the
disk says that there is room would remove the same bytes twice.

What a disk counts as used, less what was written, plus what was removed, is its *level*: it only
falls, as removed bytes return. What it stands above its lowest of late is still to come.

Concurrency: one thread.
"""

from collections import deque
from typing import NamedTuple

PATIENCE_S = 5.0  # what has not come back by then will not: somebody else holds it, or wrote


class _Sample(NamedTuple):
    at_s: float
    level_bytes: int
    removed_bytes: int


class Returning:
    """What is still to come back on one disk. Amounts in bytes, instants monotonic."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._others_bytes = 0  # level without what was removed
        self._removed_bytes = 0

    @property
    def removed_bytes(self) -> int:
        """What was removed, ever."""
        return self._removed_bytes

    def removed(self, size_bytes: int) -> None:
        """So much was removed."""
        self._removed_bytes += size_bytes

    def measured(self, now_s: float, used_bytes: int, grown_bytes: int, counted_bytes: int) -> None:
        """The disk counts *used_bytes*; *grown_bytes* were written to it, ever.

        Of these it counts *counted_bytes* at least. What is in between is taken for written when
        this is compared with a later measurement, and for not written when with an earlier one:
        rather too little is to come than too much.
        """
        self._others_bytes = used_bytes - grown_bytes
        level_bytes = used_bytes - counted_bytes + self._removed_bytes
        self._samples.append(_Sample(now_s, level_bytes, self._removed_bytes))
        while self._samples[0].at_s < now_s - PATIENCE_S:
            self._samples.popleft()

    def still_bytes(self, now_s: float, within_s: float = PATIENCE_S) -> int:
        """Return how much of what was removed in the last *within_s* is still to come back."""
        late = [sample for sample in self._samples if sample.at_s >= now_s - within_s]
        if not late:
            return 0
        lowest_bytes = min(sample.level_bytes for sample in self._samples)
        removed_bytes = self._removed_bytes - late[0].removed_bytes
        return max(0, min(self._level_bytes - lowest_bytes, removed_bytes))

    @property
    def _level_bytes(self) -> int:
        return self._others_bytes + self._removed_bytes
