"""Starting a server, and what else a supervisor starts: it inherits what it must have, no more.

Standard library only, and little of it: the supervisor imports this.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

from kvfuse.supervision import processes
from kvfuse.supervision.processes import Process
from kvfuse.system.fdstore import LOCK, ROOT, Channel, ChannelError, FdStore

HEARTBEAT_TIMEOUT_S = 1.0
HEARTBEAT_TIMEOUT_STARTING_S = 30.0
HEARTBEAT_TIMEOUT_COLD_S = 30.0  # where a kill costs the mount
STARVED_FACTOR = 10  # more patience with one that would run, if the machine let it
RESUME_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 10.0  # from "ended" to the end
DETACH_TIMEOUT_S = 5.0
_DYING_S = 0.3

# A server begins with these blocked: they wait until it can end in good order.
_BLOCKED = (signal.SIGTERM, signal.SIGINT)
# The supervisor alone speaks to the service manager.
_MANAGERS = ("NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC")


class Server:
    """A server, as its supervisor sees it; from ``begin`` on it *resumes* or mounts anew."""

    __slots__ = (
        "beat_s", "channel", "ended_s", "is_prepared", "is_ready", "process", "resumes",
        "started_s",
    )  # fmt: skip

    def __init__(self, process: Process, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.is_prepared = False
        self.is_ready = False
        self.ended_s: float | None = None
        self.begin(resumes=False)

    def begin(self, *, resumes: bool) -> None:
        """From now on it is judged."""
        self.resumes = resumes
        self.started_s = self.beat_s = time.monotonic()

    def close(self) -> None:
        """Forget it."""
        self.channel.close()
        self.process.close()

    def has_died(self) -> bool:
        """Whether it ended by itself; also when threads of it are stuck and it is not reaped."""
        silent_s = time.monotonic() - self.beat_s
        return self.process.is_gone() or (silent_s > _DYING_S and self.process.is_dying())

    def complaint(self, *, is_hot: bool, is_told_to_end: bool) -> str:
        """Return why it is not to be waited for any longer, "" when it is fine."""
        now_s = time.monotonic()
        if self.ended_s is not None or is_told_to_end or not self.is_ready:
            patience_s = HEARTBEAT_TIMEOUT_STARTING_S
        else:
            patience_s = HEARTBEAT_TIMEOUT_S if is_hot else HEARTBEAT_TIMEOUT_COLD_S
        silent_s = now_s - self.beat_s
        if silent_s > patience_s and (
            silent_s > STARVED_FACTOR * patience_s or not self._is_starved()
        ):
            return f"no heartbeat for {silent_s:.1f} s"
        if (
            self.resumes
            and not self.is_ready
            and now_s - self.started_s > RESUME_TIMEOUT_S
            and silent_s < HEARTBEAT_TIMEOUT_S  # else it is judged by its beats
        ):
            return f"not ready {RESUME_TIMEOUT_S:.0f} s after its start"
        if self.ended_s is not None and now_s - self.ended_s > EXIT_TIMEOUT_S:
            return f"still there {EXIT_TIMEOUT_S:.0f} s after its end"
        return ""

    def _is_starved(self) -> bool:
        """Whether it waits for a processor, or for memory: to kill it would make that worse."""
        return any(state in "RD" for state in processes.thread_states(self.process.pid))


def start_server(command: list[str], task: bytes, report_fd: int, store: FdStore) -> Server:
    """Start *command* with three numbers added: its end of the channel, *task* as a file, report.

    It inherits all of *store*, although it gets the descriptors it needs with its start: those of a
    disk that hangs would hang who closes them, and that is for the new process to risk, not for the
    supervisor that waits for its exec.

    Raises:
        OSError: it cannot be started.
    """
    inherited = store.numbers()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    task_fd = os.memfd_create("kvfuse-task")
    try:
        os.write(task_fd, task)
        os.lseek(task_fd, 0, os.SEEK_SET)
        process = processes.start(
            [*command, str(there.fileno()), str(task_fd), str(report_fd)],
            environment=environment(),
            fds=[
                *inherited.values(),
                there.fileno(),
                task_fd,
                *([report_fd] if report_fd >= 0 else []),
            ],
            blocked=_BLOCKED,
        )
    except BaseException:
        here.close()
        raise
    finally:
        there.close()
        os.close(task_fd)
    server = Server(process, Channel(here))
    # Directories and locks of disks stay open for as long as the mount lives, wherever.
    closed = [fd for name, fd in inherited.items() if not name.startswith((LOCK, ROOT))]
    with contextlib.suppress(ChannelError, ConnectionError):
        server.channel.send("inherited", {"numbers": closed})
    return server


def detach(mountpoint: str, store: FdStore) -> str:
    """Take the mount at *mountpoint* away; return what is wrong, "" when it is gone.

    A program of its own does it, for at most 5 s: what it touches may hang. It inherits *store*.
    """
    command = [sys.executable, "-m", "kvfuse.supervision.detach", mountpoint]
    try:
        process = processes.start(
            command, environment=environment(), fds=list(store.numbers().values())
        )
    except OSError as exc:
        return exc.strerror or "not started"
    if not select.select([process.pidfd], [], [], DETACH_TIMEOUT_S)[0]:
        process.kill()
    trouble = "" if process.is_gone() and process.exit_code == 0 else process.end
    process.close()
    return trouble


def environment() -> dict[str, str]:
    """Return the environment of what a supervisor starts."""
    return {name: value for name, value in os.environ.items() if name not in _MANAGERS}
