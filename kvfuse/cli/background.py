"""Starting the daemon in the background, and waiting until its mount answers."""

import os
import signal
import subprocess
import sys
import tempfile
from typing import IO

from kvfuse.cli import handoff
from kvfuse.control.client import CallError
from kvfuse.core.config import Resolved
from kvfuse.core.errors import EXIT_FAILED, KvfuseError
from kvfuse.output import note
from kvfuse.system import mounts
from kvfuse.system.progress import Event, read_events

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
_STOP_TIMEOUT_S = 30.0
_LAST_WORDS_BYTES = 4096


def start(resolved: Resolved, *, init: bool) -> list[str]:
    """Start a daemon for *resolved*; return its warnings once the mount answers.

    Raises:
        KvfuseError: it could not mount; the text and the exit code are the daemon's.
    """
    # A command that is told to end ends its daemon too, until the mount is there; then it stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Not a pipe: what the daemon writes after this command has ended must go somewhere.
    with tempfile.TemporaryFile() as stderr:
        # Blocked, so that there is no moment at which the daemon runs and is not known here. The
        # daemon takes the mask over, and waits for these signals as soon as it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
        process, events = _spawn(resolved, init=init, stderr=stderr)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
            with events:
                warnings = _wait(events, process, stderr)
            _check_answer(resolved.config.pool.mountpoint)
            signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
        except BaseException:
            _stop(process)
            raise
    return warnings


def _check_answer(mountpoint: str) -> None:
    failure = mounts.stat_error(mountpoint)
    if failure:
        raise KvfuseError(f"{mountpoint}: mounted, but does not answer: {os.strerror(failure)}")


def _spawn(
    resolved: Resolved, *, init: bool, stderr: IO[bytes]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    read_end, write_end = os.pipe()
    task = handoff.task_fd(resolved, init=init, foreground=False)
    handoff.raise_limits()
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            handoff.command(task, write_end),
            env=handoff.environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=(task, write_end),
            start_new_session=True,
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(task)
        os.close(write_end)
    return process, os.fdopen(read_end, "rb")


def _wait(events: IO[bytes], process: subprocess.Popen[bytes], stderr: IO[bytes]) -> list[str]:
    warnings: list[str] = []
    for event in read_events(events):
        match event.kind:
            case "ready":
                return warnings
            case "error":
                process.wait()
                raise CallError(event.text, event.exit_code)
            case "warning":
                warnings.append(event.text)
                note(event.text)
            case "progress" | "recovery":
                _show_progress(event)
    code = process.wait()
    raise CallError(_last_words(stderr, code), EXIT_FAILED)


def _show_progress(event: Event) -> None:
    if sys.stderr.isatty():
        note(event.text)


def _last_words(stderr: IO[bytes], code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, stderr.tell() - _LAST_WORDS_BYTES))
    lines = stderr.read().decode(errors="backslashreplace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return f"the daemon {how} before the mount answered{said}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a daemon that was not waited for; it unmounts what it has mounted."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
