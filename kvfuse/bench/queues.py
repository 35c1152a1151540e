"""The two queues of an eviction policy in memory, as the catalog keeps them for real files."""

from collections import OrderedDict

from kvfuse.core.eviction import MAIN, POLICIES, Entry


class Queues:
    """The files of one disk in the order of the policy called *policy*; sizes in bytes."""

    def __init__(self, policy: str, *, ghosts_max: int = 1 << 16) -> None:
        self._policy = POLICIES[policy]
        self._ghosts_max = ghosts_max
        self._queues: dict[bool, OrderedDict[int, tuple[int, int]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        self._bytes = {False: 0, True: 0}
        self._places: dict[int, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._number = 0

    def __contains__(self, key: int) -> bool:
        """Whether a file is there."""
        return key in self._places

    def __len__(self) -> int:
        """Return how many files there are."""
        return len(self._places)

    def stored(self, key: int, size_bytes: int) -> None:
        """A file was committed."""
        was_ghost = self._ghosts.pop(key, True) is None
        self._put(key, self._policy.committed(self._next(), was_ghost=was_ghost), size_bytes, 0)

    def used(self, key: int) -> None:
        """A file was read."""
        before = self._places[key]
        size_bytes, hits = self._queues[bool(before & MAIN)][key]
        place, hits = self._policy.accessed(before, hits, self._next())
        if place == before:
            self._queues[bool(place & MAIN)][key] = size_bytes, hits
        else:
            self.remove(key)
            self._put(key, place, size_bytes, hits)

    def evict(self) -> int:
        """Remove the file the policy gives up first; return it. There must be one."""
        while True:
            is_main = self._policy.takes_main(self._bytes[False], self._bytes[True])
            if not self._queues[is_main]:
                is_main = not is_main
            key, (size_bytes, hits) = next(iter(self._queues[is_main].items()))
            verdict = self._policy.judge(Entry(key, self._places[key], size_bytes, hits))
            self.remove(key)
            if verdict.evict:
                if not is_main and self._policy.uses_ghosts:
                    self._ghosts[key] = None
                    while len(self._ghosts) > min(self._ghosts_max, len(self._places)):
                        self._ghosts.popitem(last=False)
                return key
            self._put(key, self._next() | MAIN, size_bytes, verdict.hits)

    def remove(self, key: int) -> None:
        """Forget a file."""
        is_main = bool(self._places.pop(key) & MAIN)
        self._bytes[is_main] -= self._queues[is_main].pop(key)[0]

    def _put(self, key: int, place: int, size_bytes: int, hits: int) -> None:
        is_main = bool(place & MAIN)
        self._places[key] = place
        self._queues[is_main][key] = size_bytes, hits
        self._bytes[is_main] += size_bytes

    def _next(self) -> int:
        self._number += 1
        return self._number
