"""Replacing a running server by the code that is installed now: asked, checked, then done.

Standard library only, and little of it: the supervisor imports this.
"""

import json
import os
import time

from kvfuse.supervision import processes
from kvfuse.supervision.launch import environment
from kvfuse.supervision.processes import Process
from kvfuse.system.fdstore import FdStore

CHECK_TIMEOUT_S = 30.0
PREPARE_TIMEOUT_S = 60.0
_OUTPUT_BYTES_MAX = 64 * 1024


class Upgrades:
    """The upgrades of one mount, one at a time.

    *command* says with exit code 0 whether the code it runs can take over from a server with the
    formats that are added to it, else in its last line why not.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._number = 0
        self._check: tuple[Process, int, float] | None = None
        self._by_s = 0.0
        self.last: dict[str, object] | None = None  # the last one, for the status

    @property
    def is_running(self) -> bool:
        """Whether a new server is awaited."""
        return self.last is not None and self.last["result"] == "running"

    @property
    def is_late(self) -> bool:
        """Whether a new server is awaited for too long."""
        return self.is_running and time.monotonic() > self._by_s

    def ask(self, version: object, formats: object, obstacle: str, store: FdStore) -> None:
        """Begin one, from *version*; with an *obstacle* it is refused. One that runs goes on.

        What is started inherits *store*; see :mod:`kvfuse.supervision.launch`.
        """
        if self._check is not None or self.is_running:
            return
        self._number += 1
        self.last = {
            "number": self._number,
            "time": round(time.time(), 3),
            "result": "checking",
            "reason": "",
            "from": version,
            "to": None,
            "stall_s": None,
        }
        if obstacle:
            self.end("refused", obstacle)
            return
        output, there = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [*self._command, json.dumps(formats)]
        try:
            process = processes.start(
                command,
                environment=environment(),
                fds=list(store.numbers().values()),
                output=there,
            )
        except OSError as exc:
            os.close(output)
            self.end("refused", f"the installed kvfuse cannot be started: {exc.strerror}")
        else:
            self._check = (process, output, time.monotonic() + CHECK_TIMEOUT_S)
        finally:
            os.close(there)

    def is_checked(self) -> bool:
        """Whether the answer has come just now: then ``last`` says "running" or "refused"."""
        if self._check is None:
            return False
        process, output, deadline_s = self._check
        is_late = time.monotonic() > deadline_s
        if not is_late and not process.is_gone():
            return False
        self._check = None
        process.kill()
        code = process.exit_code
        process.close()
        said = _read(output).strip().splitlines()
        if is_late:
            reason = f"the installed kvfuse did not answer within {CHECK_TIMEOUT_S:.0f} s"
            self.end("refused", reason)
        elif code != 0:
            self.end("refused", said[-1] if said else f"the installed kvfuse: exit {code}")
        elif self.last is not None:
            self.last["result"] = "running"
            self._by_s = time.monotonic() + PREPARE_TIMEOUT_S
        return True

    def end(self, result: str, reason: str = "", **facts: object) -> None:
        """Note how it went: "done", "refused" or "failed"."""
        if self.last is not None:
            self.last |= {"result": result, "reason": reason, **facts}


def _read(fd: int) -> str:
    try:
        return os.read(fd, _OUTPUT_BYTES_MAX).decode(errors="backslashreplace")
    except OSError:
        return ""
    finally:
        os.close(fd)
