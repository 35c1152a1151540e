"""The threads that read requests and answer them.

One thread at a time leads: it reads a request, executes it and sends the reply, and reads on.
Several readers would only wait for each other at the interpreter's lock. Before it executes what
may wait for a disk, the leader passes the lead on and becomes a follower afterwards; what waits
unexpectedly is noticed by the watchdog, which passes the lead on in its name. How many threads may
wait for one disk, and who waits for such a thread, is a matter of `Lanes`.

A request that outlives its deadline is answered EIO by the watchdog. Its thread goes on; the reply
it sends in the end is refused by the kernel, which then makes it undo what it opened.

Concurrency: the mutex guards who follows, and what the watchdog says of a worker.
"""

import errno
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable

from kvfuse.drivers.direct import replies
from kvfuse.drivers.direct.abi import Opcode, opcode_name
from kvfuse.drivers.direct.contents import Reply
from kvfuse.drivers.direct.executor import Executor
from kvfuse.drivers.direct.lanes import Lanes, Waiting
from kvfuse.drivers.direct.negotiation import MAX_WRITE_BYTES
from kvfuse.drivers.direct.protocol import (
    WRITE_HEADER_BYTES,
    ProtocolError,
    Request,
    parse,
)
from kvfuse.drivers.direct.targets import Targets

log = logging.getLogger(__name__)

THREADS_MAX = 256
FOLLOWERS_MAX = 8  # more of them end when they have nothing to do
TICK_S = 0.004  # how often the watchdog looks; a leader keeps the lead for one to two ticks
IDLE_TICK_S = 0.02  # ... when nothing was asked lately
SILENT_S = 1.0  # for so long without a tick, or without a leader, the crew is not alive
_IDLE_AFTER_TICKS = 50

_PAGE_BYTES = 4096
_UNLINK = int(Opcode.UNLINK)
_SYNC_FACTOR = 6  # these wait for all that was written before, or write much: slow is not sick
_LONG = frozenset(
    {
        Opcode.COPY_FILE_RANGE,
        Opcode.COPY_FILE_RANGE_64,
        Opcode.FALLOCATE,
        Opcode.FSYNC,
        Opcode.FSYNCDIR,
        Opcode.SYNCFS,
    }
)
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.ENOENT)  # ENOENT: the request went away while being read


class _Worker:
    """One thread, and what the watchdog has to know of it."""

    __slots__ = (
        "deposed",
        "disk",
        "expired",
        "hint",
        "kept",
        "request",
        "seen",
        "seen_s",
        "vector",
        "view",
    )

    def __init__(self) -> None:
        # The bytes of a WRITE begin on a page: they go to the disk straight from here.
        buffer = mmap.mmap(-1, _PAGE_BYTES + MAX_WRITE_BYTES + _PAGE_BYTES)
        self.view = memoryview(buffer)[_PAGE_BYTES - WRITE_HEADER_BYTES :]
        self.vector = [self.view]
        self.request: Request | None = None  # being executed now
        self.disk: int | None = None  # whose place in the lanes this thread has
        self.hint: int | None = None  # disk of an UNLINK: later nobody knows it
        self.deposed = True  # it does not lead, or not any more
        self.kept = False  # it was deposed while it executed, and is slow on its disk
        self.expired = False  # the watchdog answered in its name and gave its place away
        self.seen: Request | None = None
        self.seen_s = 0.0


class Crew:
    """Answers the requests of one connection until it ends."""

    def __init__(
        self,
        device_fd: int,
        executor: Executor,
        targets: Targets,
        *,
        op_timeout_s: float,
        note_timeout: Callable[[int], None],
    ) -> None:
        self._fd = device_fd
        self._executor = executor
        self._targets = targets
        self._op_timeout_s = op_timeout_s
        self._note_timeout = note_timeout
        self._lanes = Lanes()
        self._lead = threading.Lock()
        self._lead.acquire()  # free only from `start` on
        self._leader: _Worker | None = None
        self._mutex = threading.Lock()
        self._workers: set[_Worker] = set()
        self._followers = 0
        self._beats = 0
        self._tick_s = self._led_s = math.inf  # until it begins
        self._on_closed: Callable[[], None] = lambda: None
        self.closed = threading.Event()  # the kernel ended the connection

    def start(self, on_closed: Callable[[], None]) -> None:
        """Begin to answer; *on_closed* is called, in some thread, when the connection has ended."""
        self._on_closed = on_closed
        self._tick_s = self._led_s = time.monotonic()
        self._hire(self._follow)
        threading.Thread(target=self._watch, daemon=True, name="fuse-watchdog").start()
        self._lead.release()

    def is_alive(self) -> bool:
        """Whether requests are answered, as far as can be told without a wait.

        They are not when the watchdog stopped looking, or nobody reads them.
        """
        late_s = time.monotonic() - SILENT_S
        return self.closed.is_set() or (self._tick_s > late_s and self._led_s > late_s)

    # ------------------------------------------------------------------ threads

    def _hire(self, task: Callable[[_Worker], None]) -> None:
        """Start a thread that does *task*."""
        worker = _Worker()
        with self._mutex:
            self._workers.add(worker)

        def work() -> None:
            try:
                task(worker)
            finally:
                with self._mutex:
                    self._workers.discard(worker)

        try:
            threading.Thread(target=work, daemon=True, name="fuse").start()
        except RuntimeError as exc:  # the system has no more threads to give
            log.warning("no further thread: %s", exc)
            with self._mutex:
                self._workers.discard(worker)

    def _follow(self, worker: _Worker) -> None:
        """Wait for the lead, take it, lose it, and so on."""
        while not self.closed.is_set():
            with self._mutex:
                if self._followers >= FOLLOWERS_MAX:
                    return
                self._followers += 1
            self._lead.acquire()
            with self._mutex:
                self._followers -= 1
                worker.deposed = worker.kept = False
                self._leader = worker
            try:
                if self._followers == 0 and len(self._workers) < THREADS_MAX:
                    self._hire(self._follow)  # somebody must stand by before he is needed
                self._read_and_answer(worker)
            except Exception:
                log.exception("bug in the crew")
            self._pass_on(worker)

    def _pass_on(self, worker: _Worker) -> None:
        """Give the lead to a follower, if *worker* has it."""
        with self._mutex:
            if not worker.deposed:
                worker.deposed = True
                self._leader = None
                self._lead.release()

    def _read_and_answer(self, worker: _Worker) -> None:
        """Lead, until the lead is passed on or the connection ended."""
        executor, lanes = self._executor, self._lanes
        while not self.closed.is_set() and (size := self._read(worker)):
            self._beats += 1
            request = self._parsed(worker.view[:size])
            if request is None:
                continue
            waits = executor.may_wait(request)
            if waits or lanes.any_slow:
                disk = self._targets.disk_of(request)
                if waits or (disk is not None and lanes.is_slow(disk)):
                    if not self._admit(worker, request, disk, size):
                        continue
                    self._pass_on(worker)
                    self._run(worker, request, disk)
                    return
            if request.opcode == _UNLINK:
                worker.hint = self._targets.disk_of(request)
            worker.request = request
            self._answer(request)
            worker.request = None
            if worker.deposed:
                self._return(worker)
                return

    def _read(self, worker: _Worker) -> int:
        """Return the size of the next request in the worker's buffer; 0 when there is no more."""
        while True:
            try:
                return os.readv(self._fd, worker.vector)
            except OSError as exc:
                if exc.errno in _AGAIN:
                    continue
                if exc.errno != errno.ENODEV:
                    log.warning("the FUSE connection broke: %s", exc.strerror)
                if not self.closed.is_set():
                    self.closed.set()
                    self._on_closed()
                return 0

    def _parsed(self, message: memoryview) -> Request | None:
        """Return the request in *message*, None when there is nothing to execute."""
        try:
            request = parse(message)
        except ProtocolError as exc:
            log.warning("a request cannot be read: %s", exc)
            if exc.unique:
                self._send_error(exc.unique, errno.EIO)
            return None
        if request.opcode == Opcode.INTERRUPT:
            if self._lanes.withdraw(request.args):
                self._send_error(request.args, errno.EINTR)
            return None
        return request

    # ------------------------------------------------------------------ lanes

    def _admit(self, worker: _Worker, request: Request, disk: int | None, size: int) -> bool:
        """Return whether *request* has a place on *disk*; if not it is queued or refused."""
        crowded = self._followers == 0 and len(self._workers) >= THREADS_MAX
        if not crowded and self._lanes.enter(disk):
            return True
        # The buffer is about to be read into again, and a WRITE is a view of it.
        kept = parse(memoryview(bytes(worker.view[:size])))
        if not self._lanes.wait(disk, Waiting(kept, time.monotonic())):
            self._send_error(request.unique, errno.EIO)
        return False

    def _run(self, worker: _Worker, request: Request | None, disk: int | None) -> None:
        """Execute *request*, then what waits for the same disk, on the place that was taken."""
        while request is not None:
            with self._mutex:
                worker.disk = disk
                worker.expired = False
                worker.request = request
            self._answer(request)
            worker.request = None
            request = self._next(worker)

    def _next(self, worker: _Worker) -> Request | None:
        """Return what waits for the worker's disk, or give its place back if it still has it."""
        with self._mutex:
            if worker.expired:
                return None
        return self._lanes.next_or_leave(worker.disk)

    def _return(self, worker: _Worker) -> None:
        """Come back from a request that took so long that the lead was passed on."""
        with self._mutex:
            kept, worker.kept = worker.kept, False
        if kept:
            self._lanes.speed_up(worker.disk)
            self._run(worker, self._next(worker), worker.disk)

    # ------------------------------------------------------------------ replies

    def _answer(self, request: Request) -> None:
        reply = self._executor.execute(request)
        if reply:
            self._send(request, reply)

    def _send(self, request: Request, reply: Reply) -> None:
        try:
            if isinstance(reply, bytes):
                os.write(self._fd, reply)
            else:
                os.writev(self._fd, reply)
        except OSError as exc:
            # ENOENT: nobody waits any more. ENODEV: the connection ended.
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                name = opcode_name(request.opcode)
                log.exception("bug: the kernel refused a reply to %s", name)
                self._send_error(request.unique, errno.EIO)
            self._executor.unsent(request, reply)

    def _send_error(self, unique: int, code: int) -> None:
        try:
            os.write(self._fd, replies.error(unique, code))
        except OSError as exc:
            log.debug("nobody waits for %d any more: %s", unique, exc.strerror)

    # ------------------------------------------------------------------ watchdog

    def _watch(self) -> None:
        """Look, at each tick, what every thread is doing."""
        beats = idle_ticks = 0
        while not self.closed.wait(IDLE_TICK_S if idle_ticks > _IDLE_AFTER_TICKS else TICK_S):
            idle_ticks = idle_ticks + 1 if beats == self._beats else 0
            beats = self._beats
            try:
                self._look(time.monotonic())
            except Exception:
                log.exception("bug in the watchdog")

    def _look(self, now_s: float) -> None:
        with self._mutex:
            workers = list(self._workers)
            if self._leader in self._workers:  # whose thread ended is not among them
                self._led_s = now_s
        self._tick_s = now_s
        for worker in workers:
            request = worker.request
            if request is None:
                continue
            if request is not worker.seen:
                worker.seen, worker.seen_s = request, now_s
                continue
            if worker is self._leader:
                self._depose(worker, request)
            elif not worker.expired and now_s - worker.seen_s > self._patience_s(request):
                self._expire(worker, request)
        for request in self._lanes.expired(now_s - self._op_timeout_s):
            self._send_error(request.unique, errno.EIO)

    def _patience_s(self, request: Request) -> float:
        return self._op_timeout_s * (_SYNC_FACTOR if request.opcode in _LONG else 1)

    def _depose(self, worker: _Worker, request: Request) -> None:
        """Pass the lead on in the name of *worker*, which has executed *request* for a tick."""
        is_unlink = request.opcode == _UNLINK
        disk = worker.hint if is_unlink else self._targets.disk_of(request)
        with self._mutex:
            if worker.deposed or worker.request is not request:
                return
            worker.deposed = worker.kept = True
            worker.disk = disk
            worker.expired = False
            self._leader = None
            self._lanes.slow_down(disk)
            self._lead.release()

    def _expire(self, worker: _Worker, request: Request) -> None:
        """Answer in the name of *worker*, which has executed *request* beyond its deadline."""
        with self._mutex:
            if worker.request is not request or worker.expired:
                return
            worker.expired = True
            disk = worker.disk
        self._send_error(request.unique, errno.EIO)
        name = opcode_name(request.opcode)
        log.warning(
            "%s waits for disk %s beyond %g s: answered EIO", name, disk, self._op_timeout_s
        )
        waiting = self._lanes.next_or_leave(disk)
        if waiting is not None:
            self._hire(lambda successor: self._run(successor, waiting, disk))
        if disk is not None:
            self._note_timeout(disk)
