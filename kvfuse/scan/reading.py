"""What the server and the steward of a disk say to each other: frames on a stream socket.

A frame is its length, four bytes, and a message in msgpack. The server sends a :class:`Job`, then
:class:`Work` as it is asked for; the steward sends a :class:`Report` for each haul. When the socket
closes, each is done with the other.
"""

import socket
import struct
from typing import TypeVar

import msgspec

from kvfuse.disks.sighting import Haul, Terms

_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 64 << 20
T = TypeVar("T")


class Job(msgspec.Struct, array_like=True):
    """The disk to read: what the server found out about it, and how to understand it."""

    path: str
    device: int
    filesystem: str
    use_openat2: bool
    label_name: str
    terms: Terms
    files_per_s: float  # 0: as fast as it goes


class Work(msgspec.Struct, array_like=True):
    """Directories to read now: ids, and paths below the root."""

    directories: list[tuple[int, bytes]]


class Report(msgspec.Struct, array_like=True):
    """What was read; *asks* for more work."""

    haul: Haul
    asks: bool


class Line:
    """One end of the socket; each direction is used by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._stream = end.makefile("rb", buffering=1 << 18)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; raises OSError when the other end has gone."""
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[T]) -> T | None:
        """Return the next message, None when the other end has gone.

        Raises:
            ValueError: it is not a *kind*.
        """
        head = self._stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        length = _LENGTH.unpack(head)[0]
        if length > _FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length} bytes")
        data = self._stream.read(length)
        if len(data) < length:
            return None
        return msgspec.msgpack.decode(data, type=kind)

    def close(self) -> None:
        """Close it."""
        self._stream.close()
        self._socket.close()
