"""Keeps a steward at work on every disk that is still to be read, and takes in what it finds.

Concurrency: a thread for each disk; it ends when the disk was read. A steward that dies is started
again and goes on where it was; one that dies again and again over the same directories is done
without, and the server reads these itself.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import kvfuse
from kvfuse.heart.state import PoolState
from kvfuse.scan.arrivals import Arrivals
from kvfuse.scan.reading import Job, Line, Report, Work

_log = logging.getLogger(__name__)
_DIRECTORIES = 8  # of one piece of work: what is asked for waits for two of them
_AHEAD = 2  # pieces of work a steward has at once
_DEATHS_MAX = 3  # of stewards that brought nothing
_POLL_S = 0.1
_REST = 5  # times as long as a haul took, while verbs have to ask
_REST_S_MAX = 0.02
_RETRY_S = 1.0


class Scanner:
    """The stewards of one mounted pool. *files_per_s* limits each, 0 does not."""

    def __init__(self, state: PoolState, arrivals: Arrivals, files_per_s: float) -> None:
        self._state = state
        self._arrivals = arrivals
        self._files_per_s = files_per_s
        self._stopping = threading.Event()
        self._lives: dict[int, _Life] = {}
        self._pace = _Pace(arrivals, self._stopping)
        self.restarts = 0
        self._threads = [
            threading.Thread(
                target=self._disk_loop, args=(number,), daemon=True, name=f"scan-{number}"
            )
            for number in arrivals.takers
        ]

    def start(self) -> None:
        """Start."""
        for thread in self._threads:
            thread.start()

    def summary(self) -> dict[str, Any]:
        """Return the JSON-ready progress, and the pids of the stewards at work."""
        pids = [life.process.pid for life in list(self._lives.values())]
        return {**self._arrivals.summary(), "stewards": pids, "restarts": self.restarts}

    def wait(self, timeout_s: float) -> bool:
        """Wait until all disks were read; return whether they were."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:  # started
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return self._arrivals.is_complete

    def stop(self, *, timeout_s: float) -> None:
        """End all stewards and wait that long for the threads."""
        self._stopping.set()
        for life in list(self._lives.values()):
            life.kill()
        self.wait(timeout_s)

    def _disk_loop(self, number: int) -> None:
        deaths = 0
        while not self._stopping.is_set() and number in self._arrivals.takers:
            if not self._is_its_turn(number):
                self._stopping.wait(_POLL_S)
                continue
            try:
                life = _Life(self._state, self._arrivals, number, self._files_per_s, self._pace)
                self._lives[number] = life
                if self._stopping.is_set():
                    life.kill()
                try:
                    life.run()
                finally:
                    life.kill()
                    del self._lives[number]
                deaths = 0 if life.brought else deaths + 1
                if deaths == _DEATHS_MAX:
                    self._read_oneself(number, life)
            except (OSError, ValueError) as exc:
                _log.warning("disk %s: reading it: %s", self._state.slots[number].path, exc)
                self._stopping.wait(_RETRY_S)
            if number in self._arrivals.takers and not self._stopping.is_set():
                self.restarts += 1

    def _is_its_turn(self, number: int) -> bool:
        """Whether a disk can be read now: one that is not believed comes after the others."""
        slot = self._state.slots[number]
        takers = dict(self._arrivals.takers)
        if slot.disk is None or not slot.health.readable:
            return False
        if number not in takers or not takers[number].terms.stale:
            return True
        return not any(
            not taker.terms.stale and self._state.slots[other].health.readable
            for other, taker in takers.items()
        )

    def _read_oneself(self, number: int, life: "_Life") -> None:
        for dir_id in list(life.handed):
            self._arrivals.read(number, dir_id)


class _Pace:
    """One haul at a time; while verbs have to ask, most of the time none.

    A client's lookup needs this interpreter, the catalog's writer and a processor: each haul that
    is taken in, and each that stewards read meanwhile, makes it wait.
    """

    def __init__(self, arrivals: Arrivals, stopping: threading.Event) -> None:
        self._arrivals = arrivals
        self._stopping = stopping
        self._mutex = threading.Lock()
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._mutex.acquire()
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        try:
            if self._arrivals.is_asked():
                taken_s = time.monotonic() - self._began_s
                self._stopping.wait(min(_REST_S_MAX, _REST * taken_s))
        finally:
            self._mutex.release()


class _Life:
    """One steward, from its start to its end."""

    def __init__(
        self, state: PoolState, arrivals: Arrivals, number: int, files_per_s: float, pace: "_Pace"
    ) -> None:
        self._pace = pace
        self._arrivals = arrivals
        self._number = number
        self._after = 0
        self.handed: set[int] = set()
        self.brought = False
        disk = state.carriers[number].disk
        traits, terms = disk.traits, arrivals.takers[number].terms
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "kvfuse.steward", str(theirs.fileno()), str(disk.root_fd)],
                pass_fds=(theirs.fileno(), disk.root_fd),
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(Path(kvfuse.__file__).resolve().parents[1])},
            )
        self._line = Line(ours)
        self._job = Job(
            disk.path, traits.device, traits.filesystem, traits.use_openat2, traits.label_name,
            terms, files_per_s,
        )  # fmt: skip

    def kill(self) -> None:
        """End the process; one that hangs on its disk is left."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)

    def run(self) -> None:
        """Let it work until its disk was read, or it ends.

        Raises:
            OSError: the disk failed, or the catalog takes no more.
            ValueError: it does not speak as it should.
        """
        with contextlib.closing(self._line), contextlib.suppress(ConnectionError):
            self._line.send(self._job)
            waiting = _AHEAD - self._hand_out(_AHEAD)
            # All may have been read before a piece is handed out: nothing would be reported.
            while self.handed or not waiting:
                report = self._line.receive(Report)
                if report is None:
                    return
                waiting += report.asks
                self._take(report)
                waiting -= self._hand_out(waiting)
            self._arrivals.finish(self._number)

    def _take(self, report: Report) -> None:
        haul = report.haul
        with self._pace:
            self._arrivals.take(self._number, haul)
        self.handed.difference_update(haul.done, (dir_id for dir_id, _ in haul.lost))
        self.brought = self.brought or haul.size > 0

    def _hand_out(self, pieces: int) -> int:
        """Send up to *pieces* pieces of work; return how many there were."""
        for number in range(pieces):
            found = self._next()
            if not found:
                return number
            self.handed.update(dir_id for dir_id, _ in found)
            self._line.send(Work(found))
        return pieces

    def _next(self) -> list[tuple[int, bytes]]:
        """Return directories that are still to be read and that nobody reads."""
        urgent = self._arrivals.urgent(self._number, _DIRECTORIES)
        urgent = [item for item in urgent if item[0] not in self.handed]
        if urgent:
            return urgent
        for start in (self._after, 0):
            after = start
            while found := self._arrivals.work(self._number, after, _DIRECTORIES):
                after = found[-1][0]
                fresh = [item for item in found if item[0] not in self.handed]
                if fresh:
                    self._after = after
                    return fresh
        return []
