"""The process that outlives the server of a mount: keeps its descriptors, starts the next one.

A mount lives as long as somebody holds the descriptor of its connection, and a disk stays locked as
long as somebody holds its lock. The server stores both here; when it dies, the next one gets them
and goes on where it was, and clients see no more than a pause. A server is judged by its beats: one
that hangs is killed, one whose threads hang in a system call is left behind.

It never touches the mount or a path below it, waits for nothing without a deadline, and imports
little: it must not fail for a reason of its own.

``facts`` of a server: *mountpoint*; *mounted*, whether it has mounted there; *hot*, whether a next
server can resume, else *obstacle*; *status_file*; *log*, "" for stderr; *version*; *formats*, for
the check before an upgrade. A next server is told them too, with whatever else was said.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

from kvfuse.supervision import launch, ledger, processes
from kvfuse.supervision.estate import Estate, formers
from kvfuse.supervision.launch import Server
from kvfuse.supervision.notify import kept, notify
from kvfuse.supervision.restarts import Restarts
from kvfuse.supervision.spare import Spare
from kvfuse.supervision.teller import Teller
from kvfuse.supervision.upgrades import Upgrades
from kvfuse.system.fdstore import FDS_MAX, FORMAT, ChannelError, Message

STOP_TIMEOUT_S = 100.0
EXIT_FAILED = 1
_TICK_MS = 100
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Supervisor:
    """The supervisor of one mount.

    *command* starts a server; three numbers are added: its end of the channel, *task* as a file,
    and where it reports to until it is ready (-1 for none). *check* says with exit code 0 whether
    the code it runs can take over from a server with the formats that are added. *kept* is what a
    service manager kept of a supervisor before this one. *hangup_ends*: SIGHUP is no upgrade.
    """

    def __init__(
        self,
        *,
        task: bytes,
        report_fd: int,
        command: list[str],
        check: list[str],
        kept: list[tuple[str, int]],
        hangup_ends: bool = False,
    ) -> None:
        self._task = task
        self._report_fd = report_fd
        self._command = command
        self._hangup_ends = hangup_ends
        self._server: Server | None = None
        self._estate = Estate(kept)
        self._facts, pids = self._estate.recall()
        self._formers = formers(pids)
        self._restarts = Restarts()
        self._upgrades = Upgrades(check)
        self._spare = Spare(lambda: launch.start_server(command, task, -1, self._estate.store))
        self._teller = Teller()
        self._attempt = 0
        # From then on the mount is kept, whatever happens.
        self._was_ready = self._estate.has_connection
        self._is_announced = False
        self._is_cold = not self._estate.has_connection
        self._start_s: float | None = 0.0
        self._down_since_s = time.monotonic()
        self._stop_by_s: float | None = None
        self._ended_code: int | None = None
        self._code: int | None = None
        self._wakeup = _catch_signals()

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Supervise until the mount has ended; return the exit code."""
        while self._code is None:
            self._start_if_due()
            self._wait()
            self._hear_signals()
            self._hear_server()
            self._judge_server()
            self._judge_upgrade()
            self._tend_spare()
            self._bury()
        self._finish()
        return self._code

    def _wait(self) -> None:
        if self._code is not None:
            return
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if self._server is not None:
            poller.register(self._server.channel, select.POLLIN)
            poller.register(self._server.process.pidfd, select.POLLIN)
        timeout_ms: float = _TICK_MS
        if self._start_s is not None:
            timeout_ms = min(timeout_ms, max(0.0, self._start_s - time.monotonic()) * 1000)
        poller.poll(timeout_ms)

    def _hear_signals(self) -> None:
        try:
            numbers = self._wakeup.recv(4096)
        except BlockingIOError:
            return
        for number in sorted(set(numbers)):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(signal.Signals(number).name)
            elif number == signal.SIGHUP:
                if self._hangup_ends:
                    self._stop("SIGHUP")
                else:
                    self._ask_upgrade()

    def _stop(self, why: str) -> None:
        if self._stop_by_s is not None:
            return
        self._stop_by_s = time.monotonic() + STOP_TIMEOUT_S
        notify("STOPPING=1")
        if self._server is None:
            self._say(f"{why}: there is no server to end the mount in good order")
            self._give_up_connection()
            self._code = EXIT_FAILED
        else:
            self._server.process.send(signal.SIGTERM)

    # -- the server --------------------------------------------------------------------------------

    def _start_if_due(self) -> None:
        if self._start_s is None or time.monotonic() < self._start_s:
            return
        self._start_s = None
        try:
            self._server = self._start()
        except OSError as exc:
            self._say(f"a server cannot be started: {exc.strerror}")
            self._follow(0, f"not started: {exc.strerror}", age_s=0.0, code=None)
            return
        self._write()

    def _start(self) -> Server:
        server = self._spare.take()
        if server is None:
            server = launch.start_server(
                self._command, self._task, self._report_fd, self._estate.store
            )
        server.begin(resumes=not self._is_cold)
        if self._report_fd >= 0:
            os.close(self._report_fd)
            self._report_fd = -1
        self._attempt += 1
        # what it does not take it will be judged for
        with contextlib.suppress(ChannelError, ConnectionError):
            self._estate.store.send(server.channel)
            server.channel.send(
                "start",
                {
                    "format": FORMAT,
                    "attempt": self._attempt,
                    "resume": server.resumes,
                    "stuck": self._stuck(),
                    "facts": self._facts,
                },
            )
        return server

    def _hear_server(self) -> None:
        server = self._server
        if server is None:
            return
        try:
            self._hear(server)
        except ChannelError as exc:
            self._lose(server, f"it does not speak as a server does: {exc}")

    def _hear(self, server: Server) -> None:
        """Heed what *server* has said; one that is gone is judged by that, not here."""
        with contextlib.suppress(ConnectionError):
            while (message := server.channel.receive()) is not None:
                with contextlib.closing(message):
                    self._heed(server, message)

    def _heed(self, server: Server, message: Message) -> None:
        match message.kind:
            case "beat":
                server.beat_s = time.monotonic()
            case "store" | "drop":
                if not self._estate.change(message):
                    self._say(f"no more than {FDS_MAX} descriptors are kept; some are not")
            case "facts":
                self._facts |= message.fields
            case "starting":
                notify(f"STATUS={message.text('text')}", "EXTEND_TIMEOUT_USEC=60000000")
            case "cold":
                self._say(f"the connection cannot be resumed: {message.text('text')}")
                self._facts["hot"] = False
            case "ready":
                self._on_ready(server)
            case "ended":
                self._ended_code = message.number("code")
                server.ended_s = time.monotonic()
                notify("STOPPING=1")
            case _:
                pass  # of a newer server

    def _on_ready(self, server: Server) -> None:
        now_s = time.monotonic()
        server.is_ready = True
        server.beat_s = now_s
        stall_s = round(now_s - self._down_since_s, 3)
        self._is_cold = False
        if not self._was_ready:
            self._was_ready = True
            log = self._facts.get("log")
            if isinstance(log, str) and log:
                self._teller.move_to(log)
        if not self._is_announced:
            self._is_announced = True
            notify("READY=1", f"MAINPID={os.getpid()}")
        notify(f"STATUS=serving, {self._restarts.count} restarts")
        self._spare.allow()
        if self._upgrades.is_running:
            version = self._facts.get("version")
            self._upgrades.end("done", to=version, stall_s=stall_s)
            self._say(f"upgraded to kvfuse {version} in {stall_s} s")
        self._teller.pass_on(server.channel)
        self._write()

    def _judge_server(self) -> None:
        server = self._server
        if server is None:
            return
        if server.has_died():
            self._lose(server, "")
            return
        is_told_to_end = self._stop_by_s is not None
        complaint = server.complaint(
            is_hot=self._facts.get("hot") is True, is_told_to_end=is_told_to_end
        )
        if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
            complaint = f"not ended {STOP_TIMEOUT_S:.0f} s after it was told to"
        if complaint:
            self._lose(server, complaint)

    def _lose(self, server: Server, reason: str) -> None:
        """Make an end of *server*; what comes after it is decided by how it ended."""
        self._down_since_s = time.monotonic()
        self._server = None
        process = server.process
        is_gone = process.kill()
        with contextlib.suppress(ChannelError):
            self._hear(server)
        server.channel.close()
        reason = reason or process.end
        code = process.exit_code
        self._formers.append(process)
        if not is_gone:
            self._say(f"server {process.pid}: threads of it are stuck in system calls")
        self._follow(process.pid, reason, age_s=self._down_since_s - server.started_s, code=code,
                     was_ready=server.is_ready)  # fmt: skip

    def _follow(
        self, pid: int, reason: str, *, age_s: float, code: int | None, was_ready: bool = False
    ) -> None:
        """Decide what follows the end of a server."""
        if self._ended_code is not None:
            if self._ended_code != 0:
                self._give_up_connection()
            self._code = self._ended_code
            return
        if self._stop_by_s is not None or not self._was_ready:
            if code is None or code == 0:
                when = "before the mount answered" if not self._was_ready else "while it ended"
                self._say(f"server {pid} was lost {when}: {reason}")
            self._give_up_connection()
            self._code = code or EXIT_FAILED
            return
        self._restarts.note(pid, reason, time_s=time.time(), age_s=age_s, was_ready=was_ready)
        self._say(f"server {pid} was lost: {reason}; restart {self._restarts.count}")
        if self._restarts.is_hopeless and not self._is_cold:
            self._say("no server resumes the connection; mounting anew")
            self._restarts.start_over()
            self._facts["hot"] = False
            if self._upgrades.is_running:
                self._upgrades.end("failed", "no server resumed the connection")
        if not self._facts.get("hot"):
            self._give_up_connection()
        if self._restarts.delay_s:
            self._say(f"the next server starts in {self._restarts.delay_s:.1f} s")
            notify(f"STATUS=backing off, {self._restarts.count} restarts")
        self._start_s = time.monotonic() + self._restarts.delay_s
        if self._restarts.delay_s:
            self._write()

    def _give_up_connection(self) -> None:
        """Close what was kept, and take the mount away; the next server mounts anew."""
        self._estate.clear()
        self._is_cold = True
        mountpoint = self._facts.get("mountpoint")
        if self._facts.pop("mounted", False) and isinstance(mountpoint, str):
            trouble = launch.detach(mountpoint, self._estate.store)
            if trouble:
                self._say(f"{mountpoint}: cannot be detached: {trouble}")

    def _stuck(self) -> list[int]:
        """Return the pids of former servers that have threads in system calls."""
        return [process.pid for process in self._formers if not process.is_gone()]

    def _bury(self) -> None:
        """Forget former servers whose last thread has ended, and tell the present one."""
        for process in [process for process in self._formers if process.is_gone()]:
            self._formers.remove(process)
            if self._server is not None:
                with contextlib.suppress(ChannelError, ConnectionError):
                    self._server.channel.send("gone", {"pid": process.pid})
            process.close()
            self._write()

    # -- upgrade -----------------------------------------------------------------------------------

    def _ask_upgrade(self) -> None:
        if self._stop_by_s is not None:
            return
        obstacle = ""
        if self._server is None or not self._server.is_ready:
            obstacle = "no server is ready; look at its restarts first"
        elif not self._facts.get("hot"):
            obstacle = f"this mount cannot be handed over: {self._facts.get('obstacle')}"
        self._upgrades.ask(
            self._facts.get("version"), self._facts.get("formats"), obstacle, self._estate.store
        )
        self._say_refusal()
        self._write()

    def _judge_upgrade(self) -> None:
        if not self._upgrades.is_checked():
            return
        if self._upgrades.is_running:
            self._spare.renew()
        self._say_refusal()
        self._write()

    def _tend_spare(self) -> None:
        """See to it that a server waits for its turn; in an upgrade it is the new one."""
        self._spare.tend()
        server = self._server
        if server is None or not server.is_ready or self._stop_by_s is not None:
            return
        if self._upgrades.is_running:
            if self._spare.has_failed or self._upgrades.is_late:
                self._upgrades.end("failed", "the new server did not come up")
            elif self._spare.is_prepared:
                self._lose(server, "upgrade")
            self._write()
        elif self._facts.get("hot"):
            self._spare.start()

    def _say_refusal(self) -> None:
        last = self._upgrades.last
        if last is not None and last["result"] == "refused":
            self._say(f"upgrade refused: {last['reason']}")

    # -- telling -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._teller.say(text)
        if self._server is not None and self._server.is_ready:
            self._teller.pass_on(self._server.channel)

    def _write(self) -> None:
        server = self._server
        running = [] if server is None else [server.process]
        self._estate.note(self._facts, [*running, *self._formers])
        path = self._facts.get("status_file")
        if not isinstance(path, str):
            return
        ledger.write(path, {
            "pid": os.getpid(),
            "started": processes.start_ticks(os.getpid()),
            "mountpoint": self._facts.get("mountpoint"),
            "server": None if server is None else {
                "pid": server.process.pid, "ready": server.is_ready,
                "version": self._facts.get("version"),
            },
            "restarts": self._restarts.count,
            "last_restarts": self._restarts.last,
            "backing_off": server is None and self._restarts.delay_s > 0,
            "stuck": self._stuck(),
            "upgrade": self._upgrades.last,
        })  # fmt: skip

    def _finish(self) -> None:
        self._spare.drop()
        self._estate.end()
        path = self._facts.get("status_file")
        if isinstance(path, str):
            ledger.remove(path)


def _catch_signals() -> socket.socket:
    """Return what can be read, a byte each, when a signal came."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    for number in _HANDLED:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(there.detach(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    return here


def main(arguments: list[str]) -> int:
    """Supervise a mount: TASK_FD, REPORT_FD (or -1), and "hangup-ends" or nothing."""
    task_fd, report_fd = int(arguments[0]), int(arguments[1])
    os.chdir("/")  # a working directory on a disk, or below the mountpoint, would pin it
    with open(task_fd, "rb") as file:
        task = file.read()
    if report_fd >= 0:
        os.set_inheritable(report_fd, False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-900")
    return Supervisor(
        task=task,
        report_fd=report_fd,
        command=[sys.executable, "-m", "kvfuse", "daemon", "--"],
        check=[sys.executable, "-m", "kvfuse", "takeover-check"],
        kept=kept(),
        hangup_ends="hangup-ends" in arguments[2:],
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
