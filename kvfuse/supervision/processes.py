"""A process that may not end when it is killed: started, judged by its threads, never waited for.

A thread inside a system call on a disk that hangs (state D) keeps its process from being reaped,
whatever is sent to it. So a process counts as over when no thread of it can run code any more.

Standard library only, and little of it: the supervisor imports this.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

# Only after this long in D with nothing else running is a thread taken to be stuck: one that waits
# for a disk that works is back sooner, and its system call must not take effect after a successor.
STUCK_S = 0.2
SETTLE_S = 1.0
_STEP_MS = 2


class Process:
    """A process, told by a descriptor of it, so that its number is never mistaken for another's."""

    __slots__ = ("_gone", "_status", "pid", "pidfd", "started")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.started = start_ticks(pid)
        self._gone = False
        self._status: tuple[int, int] | None = None

    def send(self, number: int) -> None:
        """Send a signal; a process that is gone gets none."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def is_gone(self) -> bool:
        """Whether all its threads have ended; then it is reaped."""
        if self._gone:
            return True
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(0):
            return False
        with contextlib.suppress(ChildProcessError):  # of a supervisor before this one
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                self._status = (ended.si_code, ended.si_status)
        self._gone = True
        return True

    def is_dying(self) -> bool:
        """Whether its first thread has ended, though others may be stuck."""
        return thread_state(self.pid, self.pid) in "ZX"

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None when it was killed, or has not ended."""
        if self._status is None or self._status[0] != os.CLD_EXITED:
            return None
        return self._status[1]

    @property
    def end(self) -> str:
        """How it ended: "exit 1", "signal 9"."""
        if self._status is None:
            return "signal 9" if self.is_dying() else "gone"
        code, status = self._status
        return f"exit {status}" if code == os.CLD_EXITED else f"signal {status}"

    def kill(self) -> bool:
        """Kill it, and wait until no thread of it runs; at most 1 s.

        Return whether it is gone: else threads of it are stuck in system calls, whose effects may
        still come.
        """
        self.send(signal.SIGKILL)
        deadline_s = time.monotonic() + SETTLE_S
        stuck_since_s: float | None = None
        while not self.is_gone():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return False
            if any(state not in "DZX" for state in thread_states(self.pid)):
                stuck_since_s = None
            elif stuck_since_s is None:
                stuck_since_s = now_s
            elif now_s - stuck_since_s >= STUCK_S:
                return False
            select.select([self.pidfd], [], [], _STEP_MS / 1000)
        return True

    def close(self) -> None:
        """Forget it; it goes on, if it does."""
        os.close(self.pidfd)


def start(
    command: list[str],
    *,
    environment: Mapping[str, str],
    fds: Sequence[int],
    output: int | None = None,
    blocked: Sequence[int] = (),
) -> Process:
    """Start *command* in a session of its own, with *fds* under their own numbers.

    *output* becomes its stdout and stderr. The signals *blocked* wait until it wants them.

    Raises:
        OSError: it cannot be started.
    """
    actions = [] if output is None else [(os.POSIX_SPAWN_DUP2, output, fd) for fd in (1, 2)]
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        pid = os.posix_spawn(
            command[0], command, environment, file_actions=actions, setsid=True,
            setsigmask=blocked, setsigdef=[signal.SIGHUP, signal.SIGTERM, signal.SIGINT],
        )  # fmt: skip
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)
    return Process(pid, os.pidfd_open(pid))


def find(pid: int, started: int) -> Process | None:
    """Return the process *pid* that began at *started* (clock ticks), None when it is gone."""
    try:
        process = Process(pid, os.pidfd_open(pid))
    except OSError:
        return None
    if process.started == started and not process.is_gone():
        return process
    process.close()
    return None


def thread_states(pid: int) -> list[str]:
    """Return the state of each thread of *pid*, a letter of proc(5)."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [thread_state(pid, int(thread)) for thread in threads]


def thread_state(pid: int, thread: int) -> str:
    """Return the state of a thread, "X" when it is gone."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    return fields[0] if fields else "X"


def start_ticks(pid: int) -> int:
    """Return when *pid* began, in clock ticks since boot; 0 when it is gone."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[19]) if len(fields) > 19 else 0


def _stat(path: str) -> list[str]:
    """Return the fields of a stat file from the state on."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
