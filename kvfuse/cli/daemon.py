"""``kvfuse daemon``: what a supervisor starts. Not for people."""

import json
import os
import socket
import sys
from typing import Any

import click

from kvfuse.core.config import Resolved
from kvfuse.core.errors import EXIT_FAILED, KvfuseError
from kvfuse.daemon import Daemon
from kvfuse.output import fail, show_bar
from kvfuse.supervision.supervised import Supervised, wait_for_start
from kvfuse.system.fdstore import Channel
from kvfuse.system.progress import Event, ProgressPipe


@click.command(hidden=True)
@click.argument("channel_fd", type=int)
@click.argument("task_fd", type=int)
@click.argument("report_fd", type=int)
def command(channel_fd: int, task_fd: int, report_fd: int) -> None:
    """Serve the pool described by the file TASK_FD; tell REPORT_FD how it goes."""
    with os.fdopen(task_fd, "rb") as file:
        task = json.load(file)
    for fd in (channel_fd, report_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    resolved = Resolved.from_json(task["resolved"])
    report = _Foreground(task) if task["foreground"] else ProgressPipe(report_fd)
    try:
        channel = Channel(socket.socket(fileno=channel_fd))
        start = wait_for_start(channel)
        if start is None:
            return
        Daemon(
            resolved,
            Supervised(channel, start),
            init=task["init"],
            report=report,
            foreground=task["foreground"],
        ).run()
    except KvfuseError as exc:
        report(Event("error", str(exc), exc.exit_code))
        sys.exit(exc.exit_code)
    except Exception as exc:
        report(Event("error", f"the daemon failed: {_cause(exc)}", EXIT_FAILED))
        raise


class _Foreground:
    """Tells who started ``kvfuse mount --foreground`` that the mount answers, or why it does not.

    Warnings and progress are in the log, which is on the same terminal. How far the disks were read
    is a bar there, on one line; where stderr is no terminal it is in ``status`` only.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._mountpoint = task["resolved"]["config"]["pool"]["mountpoint"]
        self._as_json = task["json"]
        self._warnings: list[str] = []

    def __call__(self, event: Event) -> None:
        from kvfuse.cli.mount import report

        if event.kind == "ready":
            report(self._mountpoint, self._warnings, as_json=self._as_json)
        elif event.kind == "warning":
            self._warnings.append(event.text)
        elif event.kind == "recovery":
            show_bar(f"reading disks: {event.text}", event.share)
        elif event.kind == "error":
            fail([event.text], event.exit_code, as_json=self._as_json)


def _cause(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    return f"{type(exc).__name__}: {exc}"
