"""``fsck`` of a pool that is in use: catalog and disks are compared while clients go on.

Processes of the lowest priority read the catalog and the disks, one after the other
(:mod:`kvfuse.pool.checker`). What they find of the catalog was so in one view of it. What they
find of a disk is looked at again here, under the lock of the name, before it is told.

Concurrency: one thread while one comparison runs; there is one at a time.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from kvfuse.core.errors import BusyError, KvfuseError
from kvfuse.heart.state import PoolState
from kvfuse.pool.check import set_aside, unfinished
from kvfuse.pool.checker import TABLES, Checker
from kvfuse.pool.findings import Count, Finding, Kind, Row, Spot
from kvfuse.pool.mending import Mender
from kvfuse.pool.spots import Spots

_log = logging.getLogger(__name__)
FINDINGS_MAX = 10_000  # kept of one comparison; the others are counted
_SILENCE_S = 60.0  # of a process that compares, until it is given up
_ORPHAN_S = 1.0  # between two looks at files without a name: one may be closed just then


class _StoppedError(Exception):
    """The pool is being closed."""


class Audit:
    """One comparison, and what it has found so far."""

    def __init__(self, number: int, *, repair: bool) -> None:
        self.number = number
        self.repair = repair
        self.state = "running"
        self.step = "catalog"
        self.error = ""
        self.compared = 0
        self.findings: list[Finding] = []
        self.omitted: Counter[str] = Counter()
        self.faults = 0
        self.disks: dict[str, str] = {}
        self.absent: list[str] = []
        self.last_spot: Spot | None = None
        self.began_s = self.moved_s = time.monotonic()
        self.seconds = 0.0

    def add(self, finding: Finding) -> None:
        """Keep a finding, or count it."""
        self.moved_s = time.monotonic()
        self.faults += finding.is_fault
        if finding.repair:
            _log.info(
                "fsck: %s %s: %s: %s", finding.disk or "catalog",
                finding.path.decode(errors="backslashreplace"), finding.text, finding.repair,
            )  # fmt: skip
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.omitted[finding.kind.value] += 1

    def progress(self) -> dict[str, Any]:
        """Return JSON-ready how far it is."""
        now_s = time.monotonic()
        return {
            "id": self.number,
            "state": self.state,
            "repair": self.repair,
            "step": self.step,
            "compared": self.compared,
            "faults": self.faults,
            "seconds": round(self.seconds or now_s - self.began_s, 3),
            "idle_s": round(now_s - self.moved_s, 3),
            "error": self.error,
        }

    def result(self) -> dict[str, Any]:
        """Return JSON-ready what was found, with the progress."""
        return {
            **self.progress(),
            "disks": [{"id": disk_id, "path": path} for disk_id, path in self.disks.items()],
            "absent": self.absent,
            "omitted": dict(self.omitted),
            "findings": [finding.to_json() for finding in self.findings],
        }


class Audits:
    """The comparisons of a mounted pool: one at a time, the last one remembered."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._mutex = threading.Lock()
        self._last: Audit | None = None
        self._number = state.next_id()  # of none of the server before
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._checker: Checker | None = None
        self._spots = Spots(state)
        self._mender = Mender(state)

    def fsck(self, *, repair: bool) -> dict[str, Any]:
        """Begin a comparison, or join an equal one that runs; return its progress.

        Raises:
            BusyError: another one runs, or disks are still being read.
        """
        with self._mutex:
            last = self._last
            if last is not None and last.state == "running":
                if last.repair is not repair:
                    raise BusyError("another fsck runs, one with --repair or one without: wait")
                return last.progress()
            if self._state.arriving is not None:
                raise BusyError("disks are still being read: wait until recovery is complete")
            self._number += 1
            self._last = audit = Audit(self._number, repair=repair)
            self._thread = threading.Thread(
                target=self._run, args=(audit,), daemon=True, name="fsck"
            )
            self._thread.start()
            return audit.progress()

    def findings(self, number: int) -> dict[str, Any]:
        """Return how far a comparison is, or what it found.

        Raises:
            KvfuseError: it is not remembered.
        """
        last = self._last
        if last is None or last.number != number:
            raise KvfuseError(
                f"fsck {number} is not remembered, the server was replaced: run it again"
            )
        return last.progress() if last.state == "running" else last.result()

    def stop(self, *, timeout_s: float) -> None:
        """End a comparison that runs, and wait that long for it."""
        self._stopping.set()
        checker, thread = self._checker, self._thread
        if checker is not None:
            checker.process.kill()
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, audit: Audit) -> None:
        state = "failed"
        try:
            self._compare(audit)
            state = "done"
        except _StoppedError:
            audit.error = "stopped: the pool is being unmounted"
        except (OSError, KvfuseError) as exc:
            audit.error = str(exc)
        except Exception:  # noqa: BLE001 - a bug in it must not end the daemon
            _log.exception("bug in fsck")
            audit.error = "internal error, see the log of the daemon"
        finally:
            audit.seconds = time.monotonic() - audit.began_s
            audit.state = state
            if audit.repair:
                self._state.forget_paths()
                self._state.visibility_changed()

    def _compare(self, audit: Audit) -> None:
        state = self._state
        for finding in self._found(audit, TABLES):
            audit.add(self._mended(finding) if audit.repair else finding)
        for finding in self._orphans():
            repair = self._mender.orphan(int(finding.path)) if audit.repair else ""
            audit.add(Finding(finding.kind, "", b"", finding.text, None, repair))
        for number, slot in sorted(state.slots.items()):
            if slot.disk is None or not slot.health.readable:
                audit.absent.append(slot.disk_id)
                continue
            audit.disks[slot.disk_id] = audit.step = slot.path
            for finding in self._found(audit, number):
                self._confirm(audit, finding)
            with state.on(number) as carriers:
                for finding in set_aside(carriers.disk):
                    audit.add(finding)
        for finding in self._unfinished():
            audit.add(finding)

    def _found(self, audit: Audit, number: int) -> Iterator[Finding]:
        """Yield what a process finds that compares a disk, or the catalog."""
        if self._stopping.is_set():
            raise _StoppedError
        disk = None if number == TABLES else self._state.carriers[number].disk
        self._checker = checker = Checker(self._state.catalog.path, number, disk)
        try:
            for report in checker.reports(_SILENCE_S):
                audit.compared += report.done
                audit.moved_s = time.monotonic()
                yield from report.findings
                if report.error:
                    raise KvfuseError(report.error)
        except (TimeoutError, ConnectionError, ValueError) as exc:
            if self._stopping.is_set():
                raise _StoppedError from exc
            silent = isinstance(exc, TimeoutError)
            text = f"nothing was heard for {_SILENCE_S:g} s" if silent else str(exc)
            where = "" if disk is None else disk.path
            yield Finding(Kind.UNREADABLE, where, b"", f"the rest was not compared: {text}")
        finally:
            self._checker = None
            checker.end()

    def _mended(self, finding: Finding) -> Finding:
        """Mend what the catalog says against itself; return the finding with what was done."""
        match finding.mend:
            case Row():
                done = self._mender.row(finding.mend)
            case Count():
                done = self._mender.count(finding.mend)
            case _:
                return finding
        return Finding(finding.kind, finding.disk, finding.path, finding.text, finding.mend, done)

    def _confirm(self, audit: Audit, finding: Finding) -> None:
        if self._stopping.is_set():
            raise _StoppedError
        if not isinstance(finding.mend, Spot):
            audit.add(finding)
            return
        if not self._state.slots[finding.mend.number].health.readable:
            return  # told by the health of the disk, and with what is unfinished
        if finding.mend == audit.last_spot:
            return  # all that is wrong there was told
        audit.last_spot = finding.mend
        try:
            for found in self._spots.confirm(finding.mend, repair=audit.repair):
                audit.add(found)
        except OSError as exc:
            text = f"could not be looked at again: {exc.strerror or exc}"
            audit.add(Finding(Kind.UNREADABLE, finding.disk, finding.path, text))

    def _orphans(self) -> Iterator[Finding]:
        """Tell of files without a name that are kept for nobody; the path is the id."""
        suspects = self._unheld()
        if suspects and not self._stopping.wait(_ORPHAN_S):
            for node_id in sorted(suspects & self._unheld()):
                text = f"{node_id}, a file without a name, is kept and nobody has it open"
                yield Finding(Kind.CATALOG, "", b"%d" % node_id, text)

    def _unheld(self) -> set[int]:
        with self._state.catalog.read() as txn:
            kept = txn.orphans()
        return {node_id for node_id in kept if self._state.handles.inode(node_id) is None}

    def _unfinished(self) -> Iterator[Finding]:
        """Tell what waits for a disk; what is being done now does not."""
        state = self._state
        paths = {number: slot.path for number, slot in state.slots.items()}
        at_work = {slot.path for slot in state.slots.values() if slot.health.writable}
        with state.catalog.read() as txn:
            try:
                waiting = list(unfinished(txn, paths, list(state.left.values())))
            except (msgspec.DecodeError, ValueError):
                return  # told with the tables
        yield from (each for each in waiting if each.path or each.disk not in at_work)
