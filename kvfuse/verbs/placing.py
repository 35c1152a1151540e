"""On which disk a new file is made: where there is room for it, or where room can be made in time.

The best disk is waited for a moment while it is cleaned, each other is asked for room as it is,
then all are waited for. A file for which no room was found is ENOSPC before a byte of it
is written, which for a cache is a miss.
"""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvfuse.core.health import Fault, fault_of
from kvfuse.core.records import Node
from kvfuse.heart.state import PoolState

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_SHARE = 0.2  # of a request's deadline: for the best disk
WAIT_SHARE = 0.6  # in all


def place(state: PoolState, fresh: Node, make: Callable[[Node], T]) -> T:
    """Make *fresh* with *make* on the best disk that has room; keep that room reserved.

    The reservation ends with the last writer; on failure *make* has ended it.

    Raises:
        OSError: ENOSPC when there is no room, or what the last disk said.
    """
    kind = state.kind(fresh.parent, fresh.name)
    timeout_s = state.rules.op_timeout_s
    end_s = time.monotonic() + WAIT_SHARE * timeout_s
    failure: OSError | None = None
    refused: set[int] = set()
    numbers = state.candidates(fresh.parent, fresh.name, even_full=True)
    for is_last in (False, True):
        for number in numbers:
            if number in refused:
                continue
            wait_s = _wait_s(is_last, number == numbers[0], end_s, timeout_s)
            if not state.rooms.promise(fresh.id, number, kind, wait_s=wait_s):
                continue
            try:
                return make(fresh.replace(disk=number))
            except OSError as exc:
                # The next candidate helps against what the disk says of itself, nothing else.
                fault = None if exc.errno is None else fault_of(exc.errno)
                if fault is None:
                    raise
                failure = exc
                refused.add(number)
                if fault is Fault.CAPACITY:
                    _look_again(state, number)
    state.rooms.rejected += 1
    raise failure or OSError(errno.ENOSPC, "no disk has room for a new file")


def _wait_s(is_last: bool, is_best: bool, end_s: float, timeout_s: float) -> float:
    if is_last:
        return max(0.0, end_s - time.monotonic())
    return FIRST_SHARE * timeout_s if is_best else 0.0


def _look_again(state: PoolState, number: int) -> None:
    """A disk has said that it is full; what is full may be one directory."""
    try:
        state.measure_room(number)
    except OSError:
        return  # noted in its health
    if state.slots[number].health.schedulable:
        _log.warning(
            "disk %s: a directory takes no more names; other disks take them"
            " (ext4: tune2fs -O large_dir)", state.slots[number].path,
        )  # fmt: skip
