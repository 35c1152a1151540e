"""The control socket: who may ask, what a question may look like, what a silent client costs."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.control import registry, rpc
from kvfuse.control.client import CallError, call
from kvfuse.control.messages import REQUEST_BYTES_MAX
from kvfuse.control.rpc import ControlServer
from kvfuse.control.service import ControlService, MountFacts
from kvfuse.core.errors import KvfuseError, NotMountedError


class Shown:
    """What the service shows of a pool and a driver, with fixed values."""

    name, reason, passthrough_obstacle = "pyfuse3", "", "moves the bytes itself"

    def counters(self) -> dict[str, object]:
        return {"lookup": {"requests": 1}}

    def status(self) -> dict[str, object]:
        return {"pool": {"id": "p"}, "disks": [{"id": "d"}]}

    def locate(self, key: bytes) -> dict[str, object]:
        if key == b"bug":
            raise RuntimeError("a bug")
        if key != b"there":
            raise FileNotFoundError(2, "No such file or directory")
        return {"key": "there", "disk": "d"}


@pytest.fixture
def stopped() -> list[str]:
    """What was asked to stop."""
    return []


@pytest.fixture
def server(tmp_path: Path, stopped: list[str]) -> Iterator[registry.Registration]:
    """A control server; the registration leads to it."""
    facts = MountFacts(mountpoint="/kv", owner_uid=os.geteuid(), log="", config=[("k", 1, "here")])
    service = ControlService(Shown(), Shown(), facts, stop=lambda: stopped.append("stop"))
    server = ControlServer(service, tmp_path / "control.sock")
    yield registry.Registration(
        mountpoint="/kv", pool_id="p", pid=os.getpid(), started=0, socket=str(server.path), log=""
    )
    server.close()
    assert not server.path.exists()


def ask(entry: registry.Registration, raw: bytes) -> dict[str, object]:
    """Send *raw* and return the reply."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(entry.socket)
        connection.sendall(raw)
        return json.loads(connection.makefile("rb").readline())


def test_verbs_answer(server: registry.Registration, stopped: list[str]) -> None:
    """Status, disks, configuration, places, and the wish to stop."""
    status = call(server, "status")

    assert status["pool"]["mountpoint"] == "/kv"
    assert status["pool"]["driver"] == "pyfuse3"
    assert status["processes"]["server"]["pid"] == os.getpid()
    assert call(server, "disks") == [{"id": "d"}]
    assert call(server, "config") == [["k", 1, "here"]]
    assert call(server, "locate", {"keys": [b"there"]})[0]["path"] == "/kv/there"
    assert call(server, "stop") == {"pid": os.getpid()}
    assert stopped == ["stop"]


def test_a_key_that_is_not_text_is_carried_and_shown(server: registry.Registration) -> None:
    """Any byte may be in a name."""
    with pytest.raises(CallError, match=r"/kv/\\xff.*no such file"):
        call(server, "locate", {"keys": [b"\xff"]})


def test_a_bug_in_a_verb_ends_neither_the_server_nor_the_connection(
    server: registry.Registration,
) -> None:
    """It is an answer, and the next call works."""
    with pytest.raises(CallError, match="internal error"):
        call(server, "locate", {"keys": [b"bug"]})

    assert call(server, "disks")


@pytest.mark.parametrize(
    "raw",
    [
        b"\n", b"{}\n", b"nonsense\n", b'{"verb": 3}\n', b"\xff\xfe\n", b'{"verb":"shutdown"}\n',
        b'{"verb":"status","args":{"x":1}}\n', b'{"verb":"locate","args":{}}\n',
        b'{"verb":"locate","args":{"keys":["%"]}}\n', b'{"verb":"status","more":1}\n',
        b"[" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_a_question_that_is_none_is_answered_with_an_error(
    server: registry.Registration, raw: bytes
) -> None:
    """Garbage, unknown verbs, wrong arguments: an error and an exit code."""
    reply = ask(server, raw)

    assert reply["error"]
    assert reply["exit_code"] in (1, 2)
    assert call(server, "disks")


def test_a_question_that_is_too_long_is_refused(server: registry.Registration) -> None:
    """Reading stops at the bound."""
    try:
        reply = ask(server, b'{"verb":"' + b"x" * REQUEST_BYTES_MAX * 2)
    except ConnectionError:  # the server closed while we were still sending
        return
    assert "longer" in str(reply["error"])


def test_silent_clients_are_dropped_and_do_not_keep_others_out(
    server: registry.Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than connections are allowed, and a call still comes through."""
    monkeypatch.setattr(rpc, "CONNECTION_TIMEOUT_S", 0.2)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(rpc.CONNECTIONS_MAX + 2)]
    try:
        for connection in silent:
            connection.settimeout(30)
            connection.connect(server.socket)
        assert call(server, "disks", timeout_s=60)
    finally:
        for connection in silent:
            connection.close()


def test_only_root_reaches_the_socket(server: registry.Registration) -> None:
    """The socket is 0600 and belongs to the daemon's user."""
    found = os.stat(server.socket)

    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_credentials_of_the_caller_are_checked(server: registry.Registration) -> None:
    """Somebody who was handed a way to the socket is refused all the same."""
    program = (
        "import os, socket, sys\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        f"connection.connect({server.socket!r})\n"
        'connection.sendall(b\'{"verb":"stop"}\\n\')\n'
        "sys.stdout.write(connection.makefile().readline())\n"
    )
    path = Path(server.socket)
    path.chmod(0o666)
    for parent in list(path.parents)[:-2]:
        parent.chmod(0o755)

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert "not allowed for user 65534" in json.loads(result.stdout)["error"]


def test_a_daemon_that_has_gone_or_hangs_is_told_apart(tmp_path: Path) -> None:
    """No socket: not mounted. A socket nobody serves: no answer within the time."""
    entry = registry.Registration(
        mountpoint="/kv", pool_id="p", pid=1, started=0, socket=str(tmp_path / "s"), log=""
    )
    with pytest.raises(NotMountedError):
        call(entry, "status")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(entry.socket)
        listener.listen(1)
        with pytest.raises(KvfuseError, match="does not answer"):
            call(entry, "status", timeout_s=0.1)


def test_a_socket_left_by_a_killed_daemon_is_replaced(tmp_path: Path, stopped: list[str]) -> None:
    """The next daemon takes its place."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    facts = MountFacts(mountpoint="/kv", owner_uid=0, log="", config=[])

    server = ControlServer(
        ControlService(Shown(), Shown(), facts, stop=lambda: stopped.append("stop")), path
    )
    server.close()

    assert not path.exists()
