"""Compare a running pool for its server: ``python -m kvfuse.steward.check SOCKET [ROOT]``.

*SOCKET* and *ROOT*, that of a disk, are descriptors. The pool changes meanwhile: what seems wrong
with a disk is looked at once more a moment later, and what is left goes to the server, which looks
at it under the lock of its name.
"""

import contextlib
import os
import resource
import socket
import sys
import time
from pathlib import Path

from kvfuse.catalog.reader import CatalogReader
from kvfuse.core.errors import KvfuseError
from kvfuse.disks.disk import Disk, DiskTraits
from kvfuse.pool.check import DiskCheck, Where, judge, look_at_name
from kvfuse.pool.checker import TABLES, CheckJob, CheckReport
from kvfuse.pool.findings import Finding, Spot
from kvfuse.pool.tables import check_tables
from kvfuse.scan.reading import Line

_NICE = 19
_REPORT_S = 0.25
_DOUBT_S = 0.25  # until a suspect is looked at again
_DOUBTED_MAX = 1000
_FINDINGS_MAX = 200  # in one report


class _Work:
    """What was found and is not reported yet, and what is doubted."""

    def __init__(self, line: Line, reader: CatalogReader) -> None:
        self._line = line
        self._reader = reader
        self._findings: list[Finding] = []
        self._done = 0
        self._next_s = time.monotonic() + _REPORT_S
        self._doubted: list[tuple[float, Finding]] = []
        self.disk: Disk | None = None

    def tick(self, done: int) -> None:
        """Count what was compared; report now and then."""
        self._done += done
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._settle(now_s)
            self._send(CheckReport(self._done, self._findings))

    def found(self, finding: Finding) -> None:
        """Report a finding."""
        self._findings.append(finding)
        if len(self._findings) >= _FINDINGS_MAX:
            self._send(CheckReport(self._done, self._findings))

    def doubt(self, finding: Finding) -> None:
        """Look at what seems wrong again, later."""
        if not isinstance(finding.mend, Spot):
            self.found(finding)
            return
        if len(self._doubted) >= _DOUBTED_MAX:
            time.sleep(_DOUBT_S)
            self._settle(time.monotonic())
        self._doubted.append((time.monotonic() + _DOUBT_S, finding))

    def end(self, error: str = "") -> None:
        """Say all that is left to say."""
        if self._doubted:
            time.sleep(_DOUBT_S)
            self._settle(time.monotonic())
        self._send(CheckReport(self._done, self._findings, is_end=True, error=error))

    def _settle(self, now_s: float) -> None:
        """Look again at what was doubted long enough ago."""
        due = [finding for at_s, finding in self._doubted if at_s <= now_s]
        self._doubted = self._doubted[len(due) :]
        for finding in due:
            if self._is_still_so(finding):
                self.found(finding)

    def _is_still_so(self, finding: Finding) -> bool:
        assert self.disk is not None, "only disks are doubted"
        assert isinstance(finding.mend, Spot), "seen when it came"
        above, _, name = finding.path.rpartition(b"/")
        try:
            dir_fd = self.disk.open_dir(above)
            try:
                seen = look_at_name(self.disk, dir_fd, name)
            finally:
                os.close(dir_fd)
        except OSError:
            return True  # the server decides
        spot = finding.mend
        with self._reader.read() as txn:
            found = judge(txn, spot.number, self.disk, Where(spot.dir_id, above), name, seen)
        return any(each.kind == finding.kind for each in found)

    def _send(self, report: CheckReport) -> None:
        self._findings, self._done = [], 0
        self._next_s = time.monotonic() + _REPORT_S
        self._line.send(report)


def main(socket_fd: int, root_fd: int) -> None:
    """Compare what the server asks for."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    line = Line(socket.socket(fileno=socket_fd))
    job = line.receive(CheckJob)
    if job is None:
        return
    with contextlib.suppress(ConnectionError), contextlib.closing(line):
        try:
            reader = CatalogReader(Path(job.catalog))
        except KvfuseError as exc:
            line.send(CheckReport(0, [], is_end=True, error=str(exc)))
            return
        work = _Work(line, reader)
        if job.number == TABLES:
            for finding in check_tables(reader, work.tick):
                work.found(finding)
        else:
            traits = DiskTraits(job.device, job.filesystem, job.use_openat2, job.label_name)
            work.disk = Disk.known(job.path, root_fd, traits)
            DiskCheck(reader, job.number, work.disk, work.doubt, work.tick).run()
        work.end()
        reader.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
