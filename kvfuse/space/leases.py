"""Who may go, and when: a lookup that said yes stays true for the length of a lease.

No lease is kept for a lookup. A victim is *condemned* first: the kernel is made to ask for its name
again, and then there has to be silence for the length of a lease. Whoever asks meanwhile spares it;
asking alone does so at most ``SPARES_MAX`` times in a row, or a crawler would keep everything. A
file that nobody has asked for since its commit needs no silence.

A victim is claimed before its record goes. Claim and spare exclude each other: from the claim on
the answer is no.

Concurrency: any thread. ``watched`` is read without the mutex: what is not in it was never
condemned, or is long gone.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

SPARES_MAX = 3
FRESH_MAX = 1 << 16  # files not asked for yet; older ones count as asked
GONE_S = 20.0  # far longer than a request can be between reading a record and answering
_SLACK_S = 0.05  # between the clock of this process and the kernel's timeouts


class _Fresh(NamedTuple):
    """Nobody has asked since *since_s*; *quiet*: nor can the kernel have answered by itself."""

    since_s: float
    quiet: bool


class _Condemned(NamedTuple):
    ripe_s: float
    spares: int


class _Spared(NamedTuple):
    until_s: float
    spares: int


class _Gone(NamedTuple):
    since_s: float


class Leases:
    """What is condemned, spared and gone in a mounted pool. It does not outlive the server."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self.watched: dict[int, _Fresh | _Condemned | _Spared | _Gone] = {}
        self._entry_timeout_s = 0.0
        self._can_be_quiet = False
        self._clock = clock
        self._mutex = threading.Lock()
        self._fresh: dict[int, None] = {}  # the oldest first
        self._quiet_s: float | None = None
        self._passing: deque[tuple[float, int]] = deque()  # when to look at what of watched

    def answers_kept(self, entry_timeout_s: float, *, can_be_quiet: bool) -> None:
        """The kernel answers lookups by itself for so long after it was answered."""
        self._entry_timeout_s = entry_timeout_s
        self._can_be_quiet = can_be_quiet

    @property
    def silence_s(self) -> float:
        """How long a condemned file waits when nobody can say when the kernel forgot its name."""
        return self.ttl_s + self._entry_timeout_s + _SLACK_S

    @property
    def is_quiet(self) -> bool:
        """Whether the driver shall not let the kernel answer for files that are being written."""
        return self._quiet_s is not None

    def be_quiet(self, *, on: bool) -> None:
        """Ask for :attr:`is_quiet`, while room is short: new files may then go at once."""
        if on and self._can_be_quiet and self._quiet_s is None:
            self._quiet_s = self._clock()
        elif not on:
            self._quiet_s = None

    # -- what clients do

    def committed(self, node_id: int) -> None:
        """A new file has got its name, and nobody has asked for it yet."""
        now_s = self._clock()
        quiet_s = self._quiet_s
        quiet = quiet_s is not None and now_s >= quiet_s + self._entry_timeout_s + _SLACK_S
        with self._mutex:
            self.watched[node_id] = _Fresh(now_s, quiet)
            self._fresh[node_id] = None
            if len(self._fresh) > FRESH_MAX:
                self._drop(next(iter(self._fresh)))

    def asked(self, node_id: int) -> bool:
        """Somebody asks whether the file is there; return the answer."""
        with self._mutex:
            watch = self.watched.get(node_id)
            match watch:
                case _Gone():
                    return False
                case _Fresh():
                    self._drop(node_id)
                case _Condemned() if watch.spares < SPARES_MAX:
                    self._spare(node_id, self.silence_s, watch.spares + 1)
                case _:
                    pass
        return True

    def accessed(self, node_id: int) -> None:
        """The file is used: whatever was intended with it is off."""
        with self._mutex:
            if not isinstance(self.watched.get(node_id), _Gone):
                self._drop(node_id)

    # -- what the evictor does

    def condemn(self, node_id: int) -> bool:
        """Begin to wait for silence; False when that makes no sense now, it being spared or gone.

        The caller has the kernel forget the name, then calls :meth:`expired`.
        """
        now_s = self._clock()
        with self._mutex:
            watch = self.watched.get(node_id)
            spares = 0
            match watch:
                case _Gone() | _Condemned():
                    return False
                case _Fresh():
                    if watch.quiet:
                        return True
                    # The kernel can have answered until its timeout only, and not since.
                    ripe_s = max(now_s, watch.since_s + self.silence_s)
                    self._drop(node_id)
                    self.watched[node_id] = _Condemned(ripe_s, 0)
                    return True
                case _Spared():
                    if watch.until_s > now_s:
                        return False
                    spares = watch.spares
                case _:
                    pass
            self.watched[node_id] = _Condemned(now_s + self.silence_s, spares)
            return True

    def expired(self, node_id: int) -> None:
        """The kernel has forgotten the name of a condemned file: from now on it asks."""
        ripe_s = self._clock() + self.ttl_s
        with self._mutex:
            watch = self.watched.get(node_id)
            if isinstance(watch, _Condemned) and watch.ripe_s > ripe_s:
                self.watched[node_id] = watch._replace(ripe_s=ripe_s)

    def ripe_s(self, node_id: int) -> float | None:
        """Return when the file may go (monotonic); None when it is not condemned any more."""
        watch = self.watched.get(node_id)
        match watch:
            case _Condemned():
                return watch.ripe_s
            case _Fresh() if watch.quiet:
                return watch.since_s
            case _:
                return None

    def again_s(self, node_id: int) -> float:
        """Return when a file that is spared may go at the earliest (monotonic), else never."""
        watch = self.watched.get(node_id)
        return watch.until_s + self.ttl_s if isinstance(watch, _Spared) else math.inf

    def claim(self, node_ids: Collection[int]) -> bool:
        """Take files that may all go, to remove them; False when one may not: none is taken."""
        now_s = self._clock()
        with self._mutex:
            for node_id in node_ids:
                ripe_s = self.ripe_s(node_id)
                if ripe_s is None or ripe_s > now_s:
                    return False
            for node_id in node_ids:
                self._drop(node_id)
                self.watched[node_id] = _Gone(now_s)
                self._passing.append((now_s + GONE_S, node_id))
        return True

    def pardon(self, node_id: int) -> None:
        """A condemned file may stay: there is room."""
        with self._mutex:
            if isinstance(self.watched.get(node_id), _Condemned):
                self._drop(node_id)

    def unclaim(self, node_id: int) -> None:
        """A claimed file was not removed: another took its place, or it moved."""
        with self._mutex:
            self._drop(node_id)

    def spare(self, node_id: int) -> None:
        """A file stays after all, as it is in use; look again when a lease has passed."""
        with self._mutex:
            self._drop(node_id)
            self._spare(node_id, self.ttl_s, 0)

    def _spare(self, node_id: int, for_s: float, spares: int) -> None:
        until_s = self._clock() + for_s
        self.watched[node_id] = _Spared(until_s, spares)
        # Remembered beyond that: condemned again soon, it was spared in a row.
        self._passing.append((until_s + 2 * self.silence_s, node_id))

    def prune(self) -> None:
        """Forget what does not matter any more."""
        now_s = self._clock()
        with self._mutex:
            while self._passing and self._passing[0][0] <= now_s:
                _, node_id = self._passing.popleft()
                watch = self.watched.get(node_id)
                if isinstance(watch, _Gone) or (
                    isinstance(watch, _Spared) and watch.until_s + 2 * self.silence_s <= now_s
                ):
                    self._drop(node_id)

    def _drop(self, node_id: int) -> None:
        self.watched.pop(node_id, None)
        self._fresh.pop(node_id, None)
