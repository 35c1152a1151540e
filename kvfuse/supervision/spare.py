"""A server that is loaded and waits for its turn: the pause after a death is not spent on imports.

Standard library only, and little of it: the supervisor imports this.
"""

import contextlib
from collections.abc import Callable

from kvfuse.supervision.launch import Server
from kvfuse.system.fdstore import ChannelError


class Spare:
    """The spare server of a mount, if there is one now; *launch* starts it."""

    def __init__(self, launch: Callable[[], Server]) -> None:
        self._launch = launch
        self._server: Server | None = None
        self._has_failed = False

    @property
    def is_there(self) -> bool:
        """Whether one is loading or waiting."""
        return self._server is not None

    @property
    def is_prepared(self) -> bool:
        """Whether one waits."""
        return self._server is not None and self._server.is_prepared

    @property
    def has_failed(self) -> bool:
        """Whether the last one ended by itself; then there is none before ``allow``."""
        return self._has_failed

    def allow(self) -> None:
        """Forget that one has failed."""
        self._has_failed = False

    def start(self) -> None:
        """Start one, unless it is there or has failed."""
        if self._server is not None or self._has_failed:
            return
        try:
            self._server = self._launch()
        except OSError:
            self._has_failed = True

    def renew(self) -> None:
        """Start one with the code that is installed now, in the place of one that is there."""
        self.drop()
        self.start()

    def tend(self) -> None:
        """Heed what it says."""
        server = self._server
        if server is None:
            return
        try:
            while (message := server.channel.receive()) is not None:
                with contextlib.closing(message):
                    server.is_prepared |= message.kind == "prepared"
        except (ConnectionError, ChannelError):
            self.drop()
            self._has_failed = True

    def take(self) -> Server | None:
        """Return it, to begin now; None when there is none that lives."""
        server, self._server = self._server, None
        if server is not None and server.process.is_gone():
            server.close()
            return None
        return server

    def drop(self) -> None:
        """End it."""
        server, self._server = self._server, None
        self._has_failed = False
        if server is not None:
            server.process.kill()
            server.close()
