"""A server without a pool for tests of the supervisor: it beats, stores, ends, or fails as told.

``python fakeserver.py DIRECTORY CHANNEL_FD TASK_FD REPORT_FD``. Each run appends what it got at its
start to ``DIRECTORY/starts``; it does what the words in ``DIRECTORY/wish`` say, read at its start.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from kvfuse.supervision.supervised import Supervised, wait_for_start
from kvfuse.system.fdstore import Channel


def make(path: str, go: Path) -> None:
    """Make the directory *path* once *go* is there."""
    while not go.exists():
        time.sleep(0.01)
    os.mkdir(path)


def main(directory: Path, channel_fd: int, task_fd: int, report_fd: int) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    channel = Channel(socket.socket(fileno=channel_fd))
    start = wait_for_start(channel)
    if start is None:
        return 0
    supervised = Supervised(channel, start)
    wish = (directory / "wish").read_text().split()
    contents = {
        name: "" if name == "lock-2" else os.pread(fd, 100, 0).decode()
        for name, fd in start.fds.items()
    }
    row = {
        "pid": os.getpid(), "attempt": start.attempt, "resume": start.resume, "fds": contents,
        "stuck": sorted(start.stuck), "report": report_fd, "at": time.monotonic(),
        "task": os.pread(task_fd, 100, 0).decode(), "open": len(os.listdir("/proc/self/fd")),
        "cwd": os.getcwd(), "sid": os.getsid(0),
    }  # fmt: skip
    with (directory / "starts").open("a") as file:
        file.write(json.dumps(row) + "\n")
    if "refuse" in wish:
        print("fake server: refused", file=sys.stderr)  # noqa: T201
        return 4
    supervised.facts(
        mountpoint=str(directory / "mount"), mounted=False, hot="cold" not in wish,
        obstacle="a fake one is cold", status_file=str(directory / "supervisor.json"),
        version=(directory / "version").read_text(), formats={"fake": 1},
    )  # fmt: skip
    if not start.resume:
        for name in ("fuse", "lock-1", "extra"):
            fd = os.memfd_create(name)
            os.write(fd, f"{name} of {os.getpid()}".encode())
            supervised.store({name: fd})
            os.close(fd)
        supervised.drop(["extra"])
    for word in wish:
        if word.startswith("keep="):
            supervised.store({"lock-2": os.open(word[5:], os.O_RDWR)})
    if "die" in wish or ("die-resumed" in wish and start.resume):
        os.kill(os.getpid(), signal.SIGKILL)
    if report_fd >= 0:
        os.write(report_fd, b"ready\n")
    supervised.ready()
    if "babble" in wish:
        supervised._channel._socket.send(b"no message")
    if "exit" in wish:
        return 3
    if "hang" in wish:
        supervised.judge_by(lambda: False)
    for word in wish:
        if word.startswith("mkdir="):
            threading.Thread(target=make, args=(word[6:], directory / "go"), daemon=True).start()
    supervised.when_lost((directory / "lost").touch)

    def follow() -> None:
        while True:
            stuck = directory / f"stuck-{os.getpid()}"
            stuck.with_suffix(".new").write_text(json.dumps(sorted(supervised.stuck)))
            stuck.with_suffix(".new").rename(stuck)
            time.sleep(0.05)

    threading.Thread(target=follow, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    if "stubborn" in wish:
        signal.sigwait([signal.SIGTERM])
    supervised.ended(7 if "end-7" in wish else 0)
    return 7 if "end-7" in wish else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
