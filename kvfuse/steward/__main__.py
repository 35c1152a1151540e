"""Read one disk for the server that started this: ``python -m kvfuse.steward SOCKET ROOT``.

*SOCKET* and *ROOT* are descriptors. Nothing is decided here and nothing is written: what is found
goes to the server, and so does every question. It may be killed at any time; the next one goes on
with the directories whose contents the server does not have yet.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable

from kvfuse.disks.disk import Disk, DiskTraits
from kvfuse.disks.sighting import Haul, Reader
from kvfuse.scan.reading import Job, Line, Report, Work

_HAUL = 512  # records: the server takes them in with one transaction of a millisecond or two
_NICE = 10
_HAULS_PER_S = 10  # where files are read slowly: what clients ask for waits for one of them at most


class Steward:
    """Reads directories as it is told."""

    def __init__(
        self,
        line: Line,
        job: Job,
        root_fd: int,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._line = line
        self._rate = job.files_per_s
        self._now_s, self._sleep = now_s, sleep
        traits = DiskTraits(job.device, job.filesystem, job.use_openat2, job.label_name)
        self._disk = Disk.known(job.path, root_fd, traits)
        full = min(_HAUL, max(1, int(self._rate / _HAULS_PER_S))) if self._rate else _HAUL
        self._reader = Reader(self._disk, job.terms, self._send, full)
        self._next_s = now_s()

    def run(self) -> None:
        """Work until the server has no more."""
        while (work := self._line.receive(Work)) is not None:
            for dir_id, path in work.directories:
                self._read(dir_id, path)
            self._send(self._reader.taken(), asks=True)
            os.chdir("/")

    def _read(self, dir_id: int, path: bytes) -> None:
        try:
            dir_fd = self._disk.open_dir(path, readable=True)
        except OSError as exc:
            self._reader.haul.lost.append((dir_id, exc.errno or 0))
            return
        try:
            self._reader.directory(dir_id, dir_fd, chdir=True)
        finally:
            os.close(dir_fd)

    def _send(self, haul: Haul, *, asks: bool = False) -> None:
        """Send what was read; then rest as long as the rate wants."""
        self._line.send(Report(haul, asks=asks))
        if self._rate:
            self._next_s = max(self._next_s, self._now_s()) + haul.size / self._rate
            self._sleep(max(0.0, self._next_s - self._now_s()))


def main(socket_fd: int, root_fd: int) -> None:
    """Be the steward of one disk."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    line = Line(socket.socket(fileno=socket_fd))
    job = line.receive(Job)
    if job is not None:
        with contextlib.suppress(ConnectionError):
            Steward(line, job, root_fd).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
