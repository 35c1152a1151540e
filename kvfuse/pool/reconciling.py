"""Catalog and disks are compared once after a start that believed its catalog.

Nothing was read before the pool served, so that a mount costs nothing. What the disks went through
meanwhile (another machine, a file system check, a hand) is found by this comparison: the one of
``fsck --repair``, read by processes of the lowest priority.

Concurrency: a thread that waits, begins the comparison, and follows it to its end.
"""

import logging
import threading
from typing import Any

from kvfuse.core.errors import BusyError
from kvfuse.pool.audit import Audits

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_RETRY_S = 60.0  # while somebody else compares, or disks are read


class Reconciling:
    """The comparison of one mounted pool, *after_s* seconds after its start; 0: none."""

    def __init__(self, audits: Audits, after_s: float) -> None:
        self._audits = audits
        self._after_s = after_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reconcile")
        self._summary: dict[str, Any] = {"state": "waiting" if after_s else "off"}

    def start(self) -> None:
        """Start."""
        if self._after_s:
            self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Begin no comparison any more, follow none, and wait that long for the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def summary(self) -> dict[str, Any]:
        """Return JSON-ready how far it is."""
        return dict(self._summary)

    def _run(self) -> None:
        wait_s = self._after_s
        while not self._stopping.wait(wait_s):
            try:
                number = int(self._audits.fsck(repair=True)["id"])
            except BusyError:
                wait_s = _RETRY_S
                continue
            self._follow(number)
            return

    def _follow(self, number: int) -> None:
        while True:
            found = self._audits.findings(number)
            mended = sum(1 for each in found.get("findings", ()) if each.get("repair"))
            self._summary = {
                key: found[key] for key in ("state", "compared", "faults", "seconds", "error")
            } | {"mended": mended}  # fmt: skip
            if found["state"] != "running":
                break
            if self._stopping.wait(_POLL_S):
                return
        if found["error"]:
            _log.warning("catalog and disks could not be compared: %s", found["error"])
        elif found["faults"] or mended:
            _log.warning(
                "catalog and disks: %d differences mended, %d left (kvfuse fsck)",
                mended, found["faults"],
            )  # fmt: skip
        else:
            _log.info("catalog and disks agree: %d names compared", found["compared"])
