"""``kvfuse daemon``: what ``kvfuse mount`` starts in the background. Not for people."""

import json
import os

import click

from kvfuse.config import Resolved
from kvfuse.daemon import Daemon
from kvfuse.errors import EXIT_FAILED, KvfuseError
from kvfuse.progress import Event, ProgressPipe


@click.command(hidden=True)
@click.argument("task_fd", type=int)
@click.argument("progress_fd", type=int)
@click.pass_context
def command(ctx: click.Context, task_fd: int, progress_fd: int) -> None:
    """Serve the pool described by the file TASK_FD; tell PROGRESS_FD how it goes."""
    os.set_inheritable(progress_fd, False)
    report = ProgressPipe(progress_fd)
    with os.fdopen(task_fd, "rb") as file:
        task = json.load(file)
    try:
        Daemon(
            Resolved.from_json(task["resolved"]),
            init=task["init"],
            report=report,
            foreground=False,
        ).run()
    except KvfuseError as exc:
        report(Event("error", str(exc), exc.exit_code))
        ctx.exit(exc.exit_code)
    except Exception as exc:
        report(Event("error", f"the daemon failed: {_cause(exc)}", EXIT_FAILED))
        raise


def _cause(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    return f"{type(exc).__name__}: {exc}"
