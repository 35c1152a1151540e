"""On which disk a new file is made: where there is room for it, or where room can be made in time.

The best disk is waited for a moment while it is cleaned, each other is asked for room as it is,
then all are waited for. A file for which no room was found is ENOSPC before a byte of it
is written, which for a cache is a miss.
"""

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvfuse.core.admission import Kind
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
    end_s = time.monotonic() + WAIT_SHARE * state.rules.op_timeout_s
    failure: OSError | None = None
    numbers = state.candidates(fresh.parent, fresh.name, even_full=True)
    while numbers:
        number = _with_room(state, fresh.id, numbers, kind, end_s)
        if number is None:
            break
        try:
            return make(fresh.replace(disk=number))
        except OSError as exc:
            # The next candidate helps against what the disk says of itself, nothing else.
            fault = None if exc.errno is None else fault_of(exc.errno)
            if fault is None:
                raise
            failure = exc
            numbers.remove(number)
            if fault is Fault.CAPACITY:
                _look_again(state, number)
    state.rooms.rejected += 1
    raise failure or OSError(errno.ENOSPC, "no disk has room for a new file")


def _with_room(
    state: PoolState, node_id: int, numbers: list[int], kind: Kind, end_s: float
) -> int | None:
    """Return the first of *numbers* that has room, or gets some until *end_s*; it is reserved."""
    rooms = state.rooms
    _measure(state, numbers[:1])
    left_s = end_s - time.monotonic()
    first_s = min(left_s, FIRST_SHARE * state.rules.op_timeout_s)
    number = rooms.promise(node_id, numbers[:1], kind, wait_s=first_s)
    if number is None and len(numbers) > 1:
        _measure(state, numbers[1:])
        number = rooms.promise(node_id, numbers, kind, wait_s=end_s - time.monotonic())
    elif number is None:
        number = rooms.promise(node_id, numbers, kind, wait_s=left_s - first_s)
    return number


def _measure(state: PoolState, numbers: list[int]) -> None:
    """Ask disks for their room where it is not known of just now: others may have written there."""
    for number in numbers:
        if state.rooms.is_old(number):
            with contextlib.suppress(OSError):  # noted in its health
                state.measure_room(number)


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
