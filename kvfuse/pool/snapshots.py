"""Copies of the live catalog, now and then: after a boot without a clean stop they are hints.

Concurrency: one thread of low priority, which may block on the file system of the state directory.
It reads one view of the catalog: nobody waits for it, but while it copies no page that view needs
is used again, so the catalog grows by what is changed meanwhile.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from kvfuse.heart.state import PoolState

_log = logging.getLogger(__name__)
INTERVAL_S = 60.0
_REST = 20  # times as long as a copy took, at least: a large catalog is copied less often
_NICE = 15


class Snapshots:
    """Keeps a copy of the catalog in directory *target*, for as long as it changes.

    None is made while disks are read: the one before knows more.
    """

    def __init__(self, state: PoolState, target: Path) -> None:
        self._state = state
        self._target = target
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="snapshots")
        self._copied = -1  # the state of the catalog that was copied last
        self._has_failed = False

    def start(self) -> None:
        """Start."""
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Make no more copies; return whether one under way ended in that time."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def copy_if_changed(self) -> bool:
        """Make a copy, unless it would say what the last one did; return whether one was made."""
        catalog = self._state.catalog
        with catalog.read() as txn:
            number = txn.number
        if number == self._copied or self._state.arriving is not None:
            return False
        return self._copy(number)

    def copy_at_end(self) -> None:
        """Make the copy that is believed after a boot."""
        self._copy(-1)

    def _copy(self, number: int) -> bool:
        try:
            self._state.catalog.snapshot(self._target)
        except OSError as exc:
            if not self._has_failed:
                _log.warning("catalog: no copy for the next boot: %s", exc)
            self._has_failed = True
            return False
        self._has_failed = False
        self._copied = number
        return True

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        wait_s = INTERVAL_S
        while not self._stopping.wait(wait_s):
            began_s = time.monotonic()
            self.copy_if_changed()
            wait_s = max(INTERVAL_S, _REST * (time.monotonic() - began_s))
