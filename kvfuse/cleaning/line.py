"""The line of victims of one disk: who goes next, condemned and waiting for silence.

It is filled from the catalog's order by the configured policy, stale files first. What is open,
pinned or leased is passed over until the order was gone through once; the few small files beside
the blocks are looked at last.

Concurrency: the evictor's thread only.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Iterator

from kvfuse.catalog.transaction import Txn
from kvfuse.cleaning.removal import Unit
from kvfuse.core import eviction, records
from kvfuse.core.eviction import MAIN, Entry, Need
from kvfuse.core.records import BLOCK_BYTES, Node
from kvfuse.core.routing import is_temp
from kvfuse.heart.state import PoolState

LOOKED_AT_MAX = 256  # files in one step: requests wait for the interpreter meanwhile
RIPE_LOOKED_AT_MAX = 256
STALE_MAX = 4096  # stale files put into the order of the others at once
AGAIN_S = 0.2  # the least time before the whole order is gone through again


def is_abandoned(node: Node, max_age_s: float, now_ns: int) -> bool:
    """Whether nobody has touched a file for longer than a temp is kept."""
    return now_ns - max(node.ctime_ns, node.atime_ns) > max_age_s * 1e9


def is_young_temp(state: PoolState, node: Node) -> bool:
    """Whether a file that may be closed by now is still to be renamed."""
    return is_temp(node.name, patterns=state.rules.temp_patterns) and not is_abandoned(
        node, state.rules.temp_max_age_s, time.time_ns()
    )


def is_pinned(state: PoolState, node: Node) -> bool:
    """Whether a file is never evicted, by its name; so is one whose directory is just going."""
    pins = state.rules.pins
    if not pins.need_keys:
        return pins.hold(node.name)
    try:
        return pins.hold(state.key(node))
    except OSError:
        return True


def unit_of(state: PoolState, txn: Txn, node: Node) -> Unit | None:
    """Return *node* with those that go with it; None while one of them is being written."""
    members = [node]
    if not node.is_stale:
        for name in eviction.partners(node.name):
            partner = txn.child(node.parent, name)
            if partner is None or not state.visible(partner) or partner.id == node.id:
                continue
            if not partner.is_evictable:
                return None
            members.append(partner)
    return Unit(tuple(members))


class Line:
    """The line of the disk with *number*."""

    def __init__(self, state: PoolState, number: int) -> None:
        self._state = state
        self._number = number
        self._units: deque[Unit] = deque()
        self._ids: set[int] = set()
        self._size_bytes = 0
        self._at = {False: (0, 0), True: (MAIN, 0)}  # how far, by queue (is it the main one)
        self._is_last_round = False
        self._next_round_s = 0.0
        self._is_exhausted = False  # the whole order was gone through, and nothing more may go
        self._soonest_s = math.inf  # when something that was passed over may go
        self.again_s = math.inf  # the same, of the last time the whole order was gone through

    def __len__(self) -> int:
        """Return how many units wait."""
        return len(self._units)

    @property
    def is_vain(self) -> bool:
        """Whether nothing is in the line, and nothing of the whole order can be put there now."""
        return self._is_exhausted and not self._units

    @property
    def size_bytes(self) -> int:
        """What the files in the line take."""
        return self._size_bytes

    def keep(self, wanted_bytes: int) -> None:
        """Condemn more files, until those in the line take *wanted_bytes*; with 0, let all go."""
        if wanted_bytes <= 0:
            self._pardon()
            return
        if self._size_bytes >= wanted_bytes or time.monotonic() < self._next_round_s:
            return
        moved: list[Node] = []
        with self._state.catalog.read() as txn:
            for _, (node, entry) in zip(range(LOOKED_AT_MAX), self._order(txn), strict=False):
                self._at[entry.is_main] = (entry.place, entry.id)
                if entry.id in self._ids:
                    continue
                verdict = self._state.order.judge(entry)
                if not verdict.evict and not node.is_stale:
                    moved.append(node.replace(flags=records.with_hits(node.flags, verdict.hits)))
                    continue
                self._consider(txn, node)
                if self._size_bytes >= wanted_bytes:
                    break
            else:
                self._went_through(txn)
        self._move(moved)

    def take_ripe(self, need: Need, limit: int) -> list[Unit]:
        """Take up to *limit* units out of the line that may go now and are needed."""
        now_s = time.monotonic()
        taken: list[Unit] = []
        waiting: list[Unit] = []
        for _ in range(min(len(self._units), RIPE_LOOKED_AT_MAX)):
            if not need or len(taken) == limit:
                break
            unit = self._units.popleft()
            ripe = [self._state.leases.ripe_s(node_id) for node_id in unit.ids]
            if any(at_s is None for at_s in ripe):
                self._leave(unit)  # spared
            elif any(at_s is not None and at_s > now_s for at_s in ripe):
                waiting.append(unit)
            else:
                self._leave(unit)
                taken.append(unit)
                need = need.less(unit.size_bytes, len(unit.nodes))
        self._units.extendleft(reversed(waiting))
        return taken

    def went(self, units: list[Unit]) -> None:
        """These were removed."""
        if not units:
            return
        self._is_exhausted = False
        if not self._state.order.uses_ghosts:
            return
        with self._state.catalog.read() as txn:
            files = sum(txn.usage(number)[0] for number in self._state.carriers)
        for unit in units:
            for node in unit.nodes:
                if not node.access & MAIN:
                    self._state.ghosts.add(node.parent, node.name, at_most=files)

    # -- the order

    def _order(self, txn: Txn) -> Iterator[tuple[Node, Entry]]:
        """Yield the files of the disk from where the last step ended, in the policy's order."""
        first, main = self._first(txn), self._queue(txn, main=True)
        all_bytes = txn.usage(self._number)[1] * BLOCK_BYTES
        main_bytes = txn.main_usage(self._number)[1] * BLOCK_BYTES
        queues = {False: first, True: main}
        left = {False: max(0, all_bytes - main_bytes), True: main_bytes}
        while queues:
            is_main = self._state.order.takes_main(left[False], left[True])
            if is_main not in queues:
                is_main = not is_main
            found = next(queues[is_main], None)
            if found is None:
                del queues[is_main]
                left[is_main] = 0
                continue
            left[is_main] = max(0, left[is_main] - found[1].size_bytes)
            yield found

    def _first(self, txn: Txn) -> Iterator[tuple[Node, Entry]]:
        """Yield the first queue; stale files before the others, or among them."""
        queue = self._queue(txn, main=False)
        if self._state.rules.stale_first or not txn.stale_usage(self._number)[0]:
            return queue
        stale = [
            (node, self._entry(node, node.access))
            for _, node_id in zip(range(STALE_MAX), txn.recent(self._number), strict=False)
            if (node := txn.node(node_id[1])) is not None and node.is_stale
        ]
        stale.sort(key=lambda found: found[1].place)
        live = (found for found in queue if not found[0].is_stale)
        return heapq.merge(stale, live, key=lambda found: found[1].place)

    def _queue(self, txn: Txn, *, main: bool) -> Iterator[tuple[Node, Entry]]:
        for place, node_id in txn.recent(self._number, self._at[main]):
            if bool(place & MAIN) is not main:
                return
            node = txn.node(node_id)
            if node is not None:
                yield node, self._entry(node, place)

    @staticmethod
    def _entry(node: Node, place: int) -> Entry:
        return Entry(node.id, place, node.blocks * BLOCK_BYTES, records.hits_of(node.flags))

    def _went_through(self, txn: Txn) -> None:
        """The step ended without finding enough: at its limit, or at the end of the order."""
        if next(self._order(txn), None) is not None:
            return
        self._at = {False: (0, 0), True: (MAIN, 0)}
        was_last, self._is_last_round = self._is_last_round, not self._is_last_round
        if was_last:
            self._is_exhausted = True  # until something is found
            self._next_round_s = time.monotonic() + AGAIN_S
            self.again_s, self._soonest_s = self._soonest_s, math.inf

    def _move(self, nodes: list[Node]) -> None:
        """Put files to the end of the main queue, as the policy judged."""
        if not nodes:
            return
        with self._state.catalog.write() as txn:
            for node in nodes:
                now = txn.node(node.id)
                if now is not None and now.is_evictable and now.access == node.access:
                    place = self._state.generation() | MAIN
                    flags = records.with_hits(now.flags, records.hits_of(node.flags))
                    txn.put_node(now.replace(access=place, flags=flags), now)

    # -- condemning

    def _consider(self, txn: Txn, node: Node) -> None:
        """Condemn a file with those that go with it, unless one of them is protected."""
        state = self._state
        unit = unit_of(state, txn, node)
        if unit is None or not self._ids.isdisjoint(unit.ids):
            return
        aside = eviction.goes_last(node.name, node.size) and not node.is_stale
        if aside and not self._is_last_round:
            return
        if any(self._is_protected(member) for member in unit.nodes):
            return
        for member in unit.nodes:
            if not state.leases.condemn(member.id) and state.leases.ripe_s(member.id) is None:
                self._soonest_s = min(self._soonest_s, state.leases.again_s(member.id))
                return
        for member in unit.nodes:
            for parent, name in [(member.parent, member.name), *txn.links(member.id)]:
                self._expire(member, parent, name)
        self._is_exhausted = False
        self._units.append(unit)
        self._ids.update(unit.ids)
        self._size_bytes += unit.size_bytes

    def _is_protected(self, node: Node) -> bool:
        state = self._state
        return (
            state.handles.inode(node.id) is not None
            or is_young_temp(state, node)
            or is_pinned(state, node)
        )

    def _expire(self, node: Node, parent: int, name: bytes) -> None:
        """Have the kernel forget a name; who can do that says when it is done."""
        expire = self._state.expire
        if expire is not None:
            node_id, leases = node.id, self._state.leases
            expire(node.disk, parent, name, lambda: leases.expired(node_id))

    def _pardon(self) -> None:
        for unit in self._units:
            for node_id in unit.ids:
                self._state.leases.pardon(node_id)
        self._units.clear()
        self._ids.clear()
        self._size_bytes = 0
        self._at = {False: (0, 0), True: (MAIN, 0)}
        self._is_last_round = self._is_exhausted = False

    def _leave(self, unit: Unit) -> None:
        self._ids.difference_update(unit.ids)
        self._size_bytes -= unit.size_bytes
