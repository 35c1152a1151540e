"""What a server and its supervisor say to each other, and the descriptors they hand over.

Messages on a SOCK_SEQPACKET socket: a JSON object each, with descriptors beside it where the table
says so. A server may be newer than its supervisor, so what is not known is passed over.

==========  =================  ====================================================================
from        kind               says
==========  =================  ====================================================================
supervisor  ``inherited``      the server has inherited *numbers*, which it has to close
supervisor  ``fds``            *names*, and a descriptor for each: what former servers stored
supervisor  ``start``          it may begin: see :class:`kvfuse.supervision.supervised.Start`
supervisor  ``gone``           the last thread of the former server *pid* has ended
supervisor  ``note``           *text* for the log
server      ``prepared``       all is loaded, it waits for ``start``
server      ``beat``           it is alive
server      ``store``          keep the descriptors beside this as *names*, for the next server
server      ``drop``           close what is kept as *names*
server      ``facts``          what is to be known of it: see :mod:`kvfuse.supervision.supervisor`
server      ``starting``       *text*: how far it is
server      ``ready``          the mount answers
server      ``cold``           *text*: the connection cannot be resumed, the next must mount anew
server      ``ended``          the end was wanted: the mount is gone, the pool closed; exit *code*
==========  =================  ====================================================================

Standard library only, and little of it: the supervisor imports this.
"""

import _thread
import array
import contextlib
import json
import os
import select
import socket
from collections.abc import Sequence

FORMAT = 1
MESSAGE_BYTES_MAX = 64 * 1024
FDS_MAX = 4096  # a lock and a directory for each of 256 disks, files that are open but unlinked
FDS_PER_MESSAGE = 128  # the kernel takes up to 253
BEAT_INTERVAL_S = 0.1
SEND_TIMEOUT_S = 5.0
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_PER_MESSAGE * 4)

# Names: of the connection, and how those of the locks and directories of disks begin.
FUSE, LOCK, ROOT = "fuse", "lock-", "root-"
_BEAT = b'{"kind":"beat"}'


class ChannelError(Exception):
    """The other side said what no version of this protocol says, or does not read."""


class Message:
    """One message: its *kind*, its *fields*, and its *fds*, which belong to the receiver."""

    __slots__ = ("fds", "fields", "kind")

    def __init__(self, kind: str, fields: dict[str, object], fds: list[int]) -> None:
        self.kind = kind
        self.fields = fields
        self.fds = fds

    def text(self, name: str) -> str:
        """Return the field *name*, a string.

        Raises:
            ChannelError: it is missing or none.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ChannelError(f"{self.kind} without {name}")
        return value

    def number(self, name: str) -> int:
        """Return the field *name*, an integer; raises as :meth:`text`."""
        value = self.fields.get(name)
        if not isinstance(value, int):
            raise ChannelError(f"{self.kind} without {name}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return the field *name*, a list of strings; raises as :meth:`text`."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ChannelError(f"{self.kind} without {name}")
        return value

    def numbers(self, name: str) -> list[int]:
        """Return the field *name*, a list of integers; raises as :meth:`text`."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ChannelError(f"{self.kind} without {name}")
        return value

    def close(self) -> None:
        """Close the descriptors that came with it and nobody took."""
        _close(self.fds)


class Channel:
    """One end of the socket.

    Concurrency: one thread receives, any may send: a message is one system call.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages on."""
        return self._socket.fileno()

    def send(
        self, kind: str, fields: dict[str, object] | None = None, fds: Sequence[int] = ()
    ) -> None:
        """Send a message with copies of *fds*.

        Raises:
            ConnectionError: the other side is gone.
            ChannelError: it has not read for 5 s, or the message is too long.
        """
        data = _encode(kind, fields or {})
        rights = array.array("i", fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            self._socket.sendmsg([data], ancillary)
        except TimeoutError as exc:
            raise ChannelError(f"{kind} is not taken for {SEND_TIMEOUT_S:.0f} s") from exc

    def beat(self) -> None:
        """Say that this server lives; never waits.

        Raises:
            ConnectionError: the supervisor is gone.
        """
        with contextlib.suppress(BlockingIOError):  # it has enough beats to read
            self._socket.sendmsg([_BEAT], [], socket.MSG_DONTWAIT)

    def receive(self, *, wait_s: float | None = 0.0) -> Message | None:
        """Return the next message, None when none comes within *wait_s* (None: for ever).

        Raises:
            ConnectionError: the other side is gone and has said nothing more.
            ChannelError: what came is no message.
        """
        if not self._poller.poll(None if wait_s is None else wait_s * 1000):
            return None
        data, ancillary, flags, _ = self._socket.recvmsg(
            MESSAGE_BYTES_MAX, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        fds = _descriptors(ancillary)
        try:
            kind, fields = _decode(data, flags)
        except BaseException:
            _close(fds)
            raise
        return Message(kind, fields, fds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    return fds.tolist()


def _encode(kind: str, fields: dict[str, object]) -> bytes:
    data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise ChannelError(f"{kind} takes {len(data)} bytes, over {MESSAGE_BYTES_MAX}")
    return data


def _decode(data: bytes, flags: int) -> tuple[str, dict[str, object]]:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ChannelError("a message came cut short")
    if not data:
        raise ConnectionError("the other side is gone")
    try:
        fields = json.loads(data)
    except ValueError as exc:
        raise ChannelError(f"a message is no JSON: {exc}") from exc
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ChannelError("a message is of no kind")
    return kind, fields


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class FdStore:
    """Descriptors by name: what outlives a server."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._fds

    def __len__(self) -> int:
        return len(self._fds)

    def numbers(self) -> dict[str, int]:
        """Return the descriptors by name; they stay here."""
        return dict(self._fds)

    def names(self) -> list[str]:
        """Return the names, in the order they were put in."""
        return list(self._fds)

    def put(self, name: str, fd: int) -> bool:
        """Take *fd* over as *name*, in the place of one of that name.

        Return whether there was room: else *fd* is closed.
        """
        if name not in self._fds and len(self._fds) >= FDS_MAX:
            os.close(fd)
            return False
        self.drop(name)
        self._fds[name] = fd
        return True

    def drop(self, name: str) -> None:
        """Close the descriptor *name*, if there is one; never waits for a disk."""
        fd = self._fds.pop(name, None)
        if fd is not None and name == FUSE:
            os.close(fd)
        elif fd is not None:
            _thread.start_new_thread(os.close, (fd,))  # on a disk that hangs it would hang

    def close(self) -> None:
        """Close all."""
        for name in self.names():
            self.drop(name)

    def send(self, channel: Channel) -> None:
        """Send copies of all; raises as :meth:`Channel.send`."""
        items = list(self._fds.items())
        for first in range(0, len(items), FDS_PER_MESSAGE):
            part = items[first : first + FDS_PER_MESSAGE]
            channel.send("fds", {"names": [name for name, _ in part]}, [fd for _, fd in part])

    def take(self, message: Message) -> bool:
        """Put in what *message* brought: ``fds`` or ``store``; return whether there was room.

        Raises:
            ChannelError: names and descriptors do not match.
        """
        names = message.texts("names")
        if len(names) != len(message.fds):
            raise ChannelError(f"{len(names)} names for {len(message.fds)} descriptors")
        has_room = True
        for name in names:
            has_room = self.put(name, message.fds.pop(0)) and has_room
        return has_room

    def release(self) -> dict[str, int]:
        """Return the descriptors by name; they are the caller's from now on."""
        fds, self._fds = self._fds, {}
        return fds
