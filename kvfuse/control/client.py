"""The command line's side of the control socket."""

import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from kvfuse.control.address import socket_address
from kvfuse.control.messages import REPLY_BYTES_MAX, Request, encoder, reply_decoder
from kvfuse.control.registry import Registration
from kvfuse.core.errors import KvfuseError, NotMountedError

CALL_TIMEOUT_S = 15.0
_RETRY_S = 0.05
_BROKEN = "{}: the server broke off its answer, as one does that is followed by another; ask again"


class CallError(KvfuseError):
    """The daemon refused or failed a call; its exit code is passed on."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def call(
    entry: Registration,
    verb: str,
    args: dict[str, Any] | None = None,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Any:  # noqa: ANN401 - what the verb returns
    """Return what *verb* answers in the daemon of *entry*.

    Raises:
        NotMountedError: the daemon has gone.
        CallError: it refused the call, or the call failed there.
        KvfuseError: it does not answer within *timeout_s*.
    """
    request = encoder.encode(Request(verb, msgspec.Raw(encoder.encode(args or {})))) + b"\n"
    try:
        line = _exchange(entry, request, timeout_s)
    except (FileNotFoundError, ConnectionError) as exc:
        if entry.is_alive:
            raise KvfuseError(_BROKEN.format(entry.mountpoint)) from exc
        raise NotMountedError(
            f"{entry.mountpoint}: the daemon (pid {entry.pid}) is not there; "
            f"clear the mount: kvfuse umount {entry.mountpoint}"
        ) from exc
    except PermissionError as exc:
        raise KvfuseError(f"{entry.socket}: permission denied; run this command as root") from exc
    except TimeoutError as exc:
        raise KvfuseError(
            f"{entry.mountpoint}: the daemon (pid {entry.pid}) does not answer; "
            f"its log: {entry.log or 'the journal'}"
        ) from exc
    try:
        reply = reply_decoder.decode(line)
    except msgspec.MsgspecError as exc:
        raise KvfuseError(_BROKEN.format(entry.mountpoint)) from exc
    if reply.error:
        raise CallError(reply.error, reply.exit_code)
    return reply.result


def _exchange(entry: Registration, request: bytes, timeout_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with socket_address(Path(entry.socket)) as address:
            _connect(connection, address, entry, timeout_s)
        connection.sendall(request)
        with connection.makefile("rb") as file:
            return file.readline(REPLY_BYTES_MAX)


def _connect(
    connection: socket.socket, address: str, entry: Registration, timeout_s: float
) -> None:
    """Connect within *timeout_s*.

    A Unix socket whose queue is full answers EAGAIN at once. Between a server that died and the
    next one nobody listens: that is waited for as long as there is a supervisor.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:
            pass
        except (FileNotFoundError, ConnectionRefusedError):
            if not entry.is_alive:
                raise
        else:
            return
        if time.monotonic() >= deadline_s:
            raise TimeoutError
        time.sleep(_RETRY_S)
