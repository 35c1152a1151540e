"""What a daemon tells whoever started it: one JSON object a line on a pipe, or calls."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Literal

import msgspec

Kind = Literal["warning", "progress", "ready", "recovery", "error"]


class Event(msgspec.Struct, frozen=True):
    """One thing that happened; *exit_code* is of an error, *share* of what is done of a recovery.

    A recovery goes on after the mount is ready; its share is negative while nobody can tell.
    """

    kind: Kind
    text: str = ""
    exit_code: int = 0
    share: float = 0.0


class ProgressPipe:
    """The daemon's end. Nothing is raised when the reader has gone: the daemon goes on.

    After ``ready`` or ``error`` the pipe is closed and further events are dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: Event) -> None:
        """Send *event*."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        if event.kind in ("ready", "error"):
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def read_events(pipe: IO[bytes]) -> Iterator[Event]:
    """Yield the events of a starting daemon until it is ready, has failed, or is gone."""
    decoder = msgspec.json.Decoder(Event)
    for line in pipe:
        event = decoder.decode(line)
        yield event
        if event.kind in ("ready", "error"):
            return
