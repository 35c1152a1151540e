"""The process that compares a running pool: what is said to it, and what it says.

It reads the catalog and one disk, at the lowest priority, and changes nothing. It may hang on its
disk, or be killed: then its disk was not compared, and nothing else comes of it.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

import kvfuse
from kvfuse.disks.disk import Disk
from kvfuse.pool.findings import Finding
from kvfuse.scan.reading import Line

_MODULE = "kvfuse.steward.check"
TABLES = -1  # number of no disk: the tables of the catalog are to be compared


class CheckJob(msgspec.Struct, array_like=True):
    """What to compare: the catalog at *catalog*, with disk *number*, or by itself."""

    catalog: str
    number: int = TABLES
    path: str = ""
    device: int = 0
    filesystem: str = ""
    use_openat2: bool = True
    label_name: str = ""


class CheckReport(msgspec.Struct, array_like=True):
    """What was found since the last one, and how much was compared for it.

    *error* is why it ended before its time.
    """

    done: int
    findings: list[Finding]
    is_end: bool = False
    error: str = ""


class Checker:
    """One such process. *disk* None: it compares the tables of the catalog."""

    def __init__(self, catalog: Path, number: int = TABLES, disk: Disk | None = None) -> None:
        self._job = CheckJob(str(catalog))
        if disk is not None:
            traits = disk.traits
            self._job = CheckJob(
                str(catalog), number, disk.path, traits.device, traits.filesystem,
                traits.use_openat2, traits.label_name,
            )  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root_fds = () if disk is None else (disk.root_fd,)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), *map(str, root_fds)],
                pass_fds=(theirs.fileno(), *root_fds),
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(Path(kvfuse.__file__).resolve().parents[1])},
            )
        self._socket = ours
        self._line = Line(ours)

    def reports(self, silence_s: float) -> Iterator[CheckReport]:
        """Yield what it finds, until it is done.

        Raises:
            TimeoutError: nothing was heard of it for *silence_s*.
            ConnectionError: it is gone, and was not done.
        """
        self._socket.settimeout(silence_s)
        self._line.send(self._job)
        while True:
            report = self._line.receive(CheckReport)
            if report is None:
                raise ConnectionError("the process that compares has ended before its time")
            yield report
            if report.is_end:
                return

    def end(self) -> None:
        """End the process; one that hangs on its disk is left."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        with contextlib.suppress(OSError, ValueError):
            self._line.close()
