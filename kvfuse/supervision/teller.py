"""Where a supervisor's words go: its stderr, or, in the background, the log, by way of a server.

Standard library only, and little of it: the supervisor imports this.
"""

import contextlib
import os
import sys

from kvfuse.system.fdstore import Channel, ChannelError

_NOTES_MAX = 64


class Teller:
    """What a supervisor has to tell; what nobody takes at once waits, the newest 64 lines."""

    def __init__(self) -> None:
        self._has_stderr = True
        self._notes: list[str] = []

    def say(self, text: str) -> None:
        """Write *text* to stderr, and have it waiting for a server."""
        if self._has_stderr:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"kvfuse supervisor: {text}\n")
                sys.stderr.flush()
        self._notes = [*self._notes, text][-_NOTES_MAX:]

    def pass_on(self, channel: Channel) -> None:
        """Let a server write to the log what waits."""
        with contextlib.suppress(ChannelError, ConnectionError):
            while self._notes:
                channel.send("note", {"text": self._notes[0]})
                del self._notes[0]

    def move_to(self, log_path: str) -> None:
        """Let what servers write to stderr go to the log; own words go through a server."""
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            log_fd = os.open(log_path, flags, 0o600)
            for fd in (1, 2):
                os.dup2(log_fd, fd)
            os.close(log_fd)
            self._has_stderr = False
