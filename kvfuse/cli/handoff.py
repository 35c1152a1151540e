"""What ``kvfuse mount`` hands to the supervisor that it starts or becomes."""

import json
import os
import resource
import sys
from pathlib import Path

import kvfuse
from kvfuse.core.config import Resolved


def task_fd(resolved: Resolved, *, init: bool, foreground: bool, as_json: bool = False) -> int:
    """Return a file, at its beginning, that tells the servers of a mount what to do."""
    task = {
        "resolved": resolved.to_json(),
        "init": init,
        "foreground": foreground,
        "json": as_json,
    }
    fd = os.memfd_create("kvfuse-task")
    os.write(fd, json.dumps(task).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def command(task: int, report: int, *, hangup_ends: bool = False) -> list[str]:
    """Return the command that supervises the mount described by the file *task*."""
    words = [sys.executable, "-m", "kvfuse.supervision.supervisor", str(task), str(report)]
    return [*words, "hangup-ends"] if hangup_ends else words


def environment() -> dict[str, str]:
    """Return the environment of a supervisor: it finds this code from whatever directory."""
    root = str(Path(kvfuse.__file__).resolve().parents[1])
    if sys.path[0] not in ("", root):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root}


def raise_limits() -> None:
    """Allow as many descriptors as the system lets this process and those it starts have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
