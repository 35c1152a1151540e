"""The server's end of its supervisor: what it got, what it stores there, and that it lives.

A server goes on without a supervisor: nothing here raises when that is gone.

Concurrency: any thread may call anything; a thread of its own beats, another one listens.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvfuse.core.errors import KvfuseError
from kvfuse.supervision import ledger
from kvfuse.system.fdstore import (
    BEAT_INTERVAL_S,
    FDS_PER_MESSAGE,
    FORMAT,
    Channel,
    ChannelError,
    FdStore,
    Message,
)

_log = logging.getLogger("kvfuse.supervision.supervised")
_LEDGER_OF_SUPERVISOR = ("backing_off", "stuck", "upgrade")


@dataclass(frozen=True, slots=True)
class Start:
    """How a server begins: as the *attempt*-th of its supervisor; *resume*: where another stopped.

    *fds* is what former servers stored, and now this one's. *stuck* are the pids of former servers
    that still have threads in system calls: those may still take effect. *facts* is what former
    servers told of the mount.
    """

    attempt: int
    resume: bool
    fds: Mapping[str, int]
    stuck: frozenset[int]
    facts: Mapping[str, object]


def wait_for_start(channel: Channel) -> Start | None:
    """Wait, loaded, until the supervisor says how to begin; None when it ends before.

    Raises:
        KvfuseError: it speaks another version of the protocol.
    """
    store = FdStore()
    try:
        channel.send("prepared")
        while (message := channel.receive(wait_s=None)) is not None:
            if message.kind == "fds":
                store.take(message)
            elif message.kind == "inherited":
                _close_later(message.numbers("numbers"))
            elif message.kind == "start":
                return _decode_start(message, store)
            message.close()
    except ConnectionError:
        store.close()
    except ChannelError as exc:
        raise KvfuseError(f"no supervisor to start under: {exc}; use kvfuse mount") from exc
    return None


def _close_later(fds: list[int]) -> None:
    """Close descriptors of files that may be on a disk that hangs."""

    def close() -> None:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    if fds:
        threading.Thread(target=close, daemon=True, name="close").start()


def _decode_start(message: Message, store: FdStore) -> Start:
    if message.number("format") != FORMAT:
        raise ChannelError(f"it speaks format {message.number('format')}, this kvfuse {FORMAT}")
    facts = message.fields.get("facts")
    return Start(
        attempt=message.number("attempt"),
        resume=message.fields.get("resume") is True,
        fds=store.release(),
        stuck=frozenset(message.numbers("stuck")),
        facts=facts if isinstance(facts, dict) else {},
    )


class Supervised:
    """The supervisor of this server. *shows_notes*: its lines are to be logged here."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self.start = start
        self._is_alive: Callable[[], bool] = lambda: True
        self._on_lost: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._is_lost = False
        self._has_ended = False
        self.shows_notes = False
        self._stuck = set(start.stuck)
        for target, name in ((self._beat, "heartbeat"), (self._listen, "supervisor")):
            threading.Thread(target=target, daemon=True, name=name).start()

    @property
    def is_lost(self) -> bool:
        """Whether there is no supervisor any longer."""
        return self._is_lost

    @property
    def stuck(self) -> frozenset[int]:
        """The pids of former servers that have threads in system calls now."""
        with self._lock:
            return frozenset(self._stuck)

    def processes(self, ledger_path: str) -> dict[str, object]:
        """Return the processes of the mount, JSON-ready; the supervisor is null when it is lost."""
        server: dict[str, object] = {"pid": os.getpid(), "restarts": self.start.attempt - 1}
        if self._is_lost:
            return {"supervisor": None, "server": server}
        noted = ledger.read(ledger_path) or {}
        supervisor = {name: noted.get(name) for name in _LEDGER_OF_SUPERVISOR}
        server |= {name: noted[name] for name in ("restarts", "last_restarts") if name in noted}
        return {"supervisor": {"pid": os.getppid(), **supervisor}, "server": server}

    def judge_by(self, is_alive: Callable[[], bool]) -> None:
        """Beat from now on only while *is_alive* says so; it must not wait."""
        self._is_alive = is_alive

    def when_lost(self, listener: Callable[[], None]) -> None:
        """Call *listener*, in a thread, when the supervisor is lost."""
        self._on_lost = listener

    def facts(self, **facts: object) -> None:
        """Tell what the supervisor must know; see :mod:`kvfuse.supervision.supervisor`."""
        self._send("facts", facts)

    def store(self, fds: Mapping[str, int]) -> None:
        """Let the supervisor keep copies of *fds* by their names, for the next server."""
        items = list(fds.items())
        for first in range(0, len(items), FDS_PER_MESSAGE):
            part = items[first : first + FDS_PER_MESSAGE]
            self._send("store", {"names": [name for name, _ in part]}, [fd for _, fd in part])

    def drop(self, names: Iterable[str]) -> None:
        """Let the supervisor close what it keeps by *names*."""
        self._send("drop", {"names": list(names)})

    def starting(self, text: str) -> None:
        """Tell how far the start is."""
        self._send("starting", {"text": text})

    def cold(self, reason: str) -> None:
        """Tell that the connection cannot be resumed; then end: the next server mounts anew."""
        self._send("cold", {"text": reason})

    def ready(self) -> None:
        """Tell that the mount answers."""
        self._send("ready", {})

    def ended(self, code: int) -> None:
        """Tell that the mount is gone and the pool closed, and that the end is wanted; once."""
        if not self._has_ended:
            self._has_ended = True
            self._send("ended", {"code": code})

    def _send(self, kind: str, fields: dict[str, object], fds: Sequence[int] = ()) -> None:
        if self._is_lost:
            return
        try:
            self._channel.send(kind, fields, fds)
        except ConnectionError:
            self._lose()
        except ChannelError as exc:
            _log.error("supervisor: %s", exc)

    def _beat(self) -> None:
        while not self._is_lost:
            if self._is_alive():
                try:
                    self._channel.beat()
                except ConnectionError:
                    self._lose()
            time.sleep(BEAT_INTERVAL_S)

    def _listen(self) -> None:
        while not self._is_lost:
            try:
                message = self._channel.receive(wait_s=None)
            except ConnectionError:
                self._lose()
            except ChannelError as exc:
                _log.error("supervisor: %s", exc)
            else:
                if message is not None:
                    self._heed(message)

    def _heed(self, message: Message) -> None:
        with contextlib.closing(message), contextlib.suppress(ChannelError):
            if message.kind == "gone":
                with self._lock:
                    self._stuck.discard(message.number("pid"))
            elif message.kind == "note" and self.shows_notes:
                _log.warning("supervisor: %s", message.text("text"))

    def _lose(self) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        _log.warning("the supervisor is lost; this server goes on, nothing will restart it")
        self._on_lost()


class Keeper:
    """Descriptors that nothing but the supervisor keeps for the next server."""

    def __init__(self, supervised: Supervised) -> None:
        self._supervised = supervised
        self._own = dict(supervised.start.fds)
        self.fds: Mapping[str, int] = self._own  # what former servers stored

    def keep(self, name: str, fd: int) -> None:
        """Keep a copy of *fd* as *name*."""
        self._supervised.store({name: fd})

    def drop(self, name: str) -> None:
        """Keep it no longer."""
        self._supervised.drop([name])
        fd = self._own.pop(name, None)
        if fd is not None:
            os.close(fd)
