"""The control socket: one request a line, one reply a line, the caller's credentials checked.

Concurrency: one thread accepts, a bounded number serve; none of them holds anything of the pool
while it waits for a client. A client that is silent, slow or sends too much is dropped.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvfuse.control.address import socket_address
from kvfuse.control.messages import (
    REQUEST_BYTES_MAX,
    CleanArgs,
    FindingsArgs,
    FsckArgs,
    LocateArgs,
    NoArgs,
    Reply,
    Request,
    TasksArgs,
    encoder,
    request_decoder,
)
from kvfuse.control.service import ControlService
from kvfuse.core.errors import EXIT_FAILED, EXIT_USAGE, KvfuseError

CONNECTIONS_MAX = 8
WAITING_MAX = 64
CONNECTION_TIMEOUT_S = 10.0

_log = logging.getLogger("kvfuse.control")
_CREDENTIALS = struct.Struct("iII")


class ControlServer:
    """Serves *service* on a Unix socket at *path* until :meth:`close`.

    Raises:
        ConfigError: *path* can be no socket.
        OSError: the socket cannot be made.
    """

    def __init__(self, service: ControlService, path: Path) -> None:
        self._service = service
        self.path = path
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._closing = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Before bind, so that there is no moment at which others could connect.
            os.fchmod(self._socket.fileno(), 0o600)
            with socket_address(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
            self._socket.listen(WAITING_MAX)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, daemon=True, name="control")
        self._thread.start()

    def close(self) -> None:
        """Stop to accept, and remove the socket; calls being answered are finished."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECTION_TIMEOUT_S)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError as exc:
                if not self._closing:
                    _log.error("control socket: %s; commands do not answer", exc.strerror)
                return
            if not self._slots.acquire(timeout=CONNECTION_TIMEOUT_S):
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), daemon=True, name="control-call"
            )
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(CONNECTION_TIMEOUT_S)
                uid = _peer_uid(connection)
                with connection.makefile("rb") as file:
                    line = file.readline(REQUEST_BYTES_MAX + 1)
                connection.sendall(encoder.encode(self._answer(line, uid)) + b"\n")
        except OSError:
            _log.debug("control socket: a client went away")
        finally:
            self._slots.release()

    def _answer(self, line: bytes, uid: int) -> Reply:
        if len(line) > REQUEST_BYTES_MAX:
            return Reply(
                error=f"request longer than {REQUEST_BYTES_MAX} bytes", exit_code=EXIT_USAGE
            )
        try:
            request = request_decoder.decode(line)
            self._check(request, uid)
            return Reply(result=self._call(request))
        except msgspec.MsgspecError as exc:
            return Reply(error=f"control request not understood: {exc}", exit_code=EXIT_USAGE)
        except KvfuseError as exc:
            return Reply(error=str(exc), exit_code=exc.exit_code)
        except Exception:  # noqa: BLE001 - the guard of the socket: a bug must not end the daemon
            _log.exception("bug in a control verb")
            return Reply(error="internal error, see the log of the daemon", exit_code=EXIT_FAILED)

    def _check(self, request: Request, uid: int) -> None:
        reader = self._service.owner_uid
        if uid == 0 or (uid == reader and request.verb in ControlService.READING_VERBS):
            return
        raise KvfuseError(f"{request.verb}: not allowed for user {uid}; run it as root")

    def _call(self, request: Request) -> Any:  # noqa: ANN401 - what the verb returns, JSON-ready
        service = self._service
        verbs: dict[str, Callable[[], Any]] = {
            "status": service.status,
            "disks": service.disks,
            "config": service.config,
            "stop": service.stop,
        }
        if request.verb == "locate":
            return service.locate(msgspec.json.decode(request.args, type=LocateArgs).keys)
        if request.verb == "clean":
            return service.clean(msgspec.json.decode(request.args, type=CleanArgs))
        if request.verb == "tasks":
            return service.tasks(msgspec.json.decode(request.args, type=TasksArgs).id)
        if request.verb == "fsck":
            return service.fsck(repair=msgspec.json.decode(request.args, type=FsckArgs).repair)
        if request.verb == "findings":
            return service.findings(msgspec.json.decode(request.args, type=FindingsArgs).id)
        if request.verb not in verbs:
            raise KvfuseError(f"{request.verb}: the running daemon does not know this command")
        msgspec.json.decode(request.args, type=NoArgs)
        return verbs[request.verb]()


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)
