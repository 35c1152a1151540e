"""A supervisor keeps a mount alive through whatever happens to its servers; with fake servers."""

import array
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.supervision import processes
from kvfuse.supervision.restarts import Restarts
from kvfuse.system import fdstore
from kvfuse.system.fdstore import MESSAGE_BYTES_MAX, Channel, ChannelError, FdStore
from tests.faultdisk import FaultDisk

PROJECT = Path(__file__).resolve().parents[2]
FAKE = PROJECT / "tests" / "fakeserver.py"
WAIT_S = 60.0
# What a supervisor may load beyond a bare interpreter with these; measured, never timed.
ALLOWED = "socket struct signal os select json time contextlib array runpy"
RUN = """
import sys
from kvfuse.supervision.notify import kept
from kvfuse.supervision.supervisor import Supervisor
directory, report_fd, check = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
sys.exit(Supervisor(
    task=b"the task", report_fd=report_fd, kept=kept(), check=check,
    command=[sys.executable, FAKE, directory],
).run())
"""


def wait_until(condition, timeout_s: float = WAIT_S) -> None:
    """Wait until *condition* holds; fail when it does not within *timeout_s*."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.01)


def open_at_rest(pid: int) -> int:
    """Return how many descriptors a process has open when that has not changed for a second."""
    counts = [0]
    deadline_s = time.monotonic() + 30
    while len(counts) < 50:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
        count = len(os.listdir(f"/proc/{pid}/fd"))
        counts = [*counts, count] if count == counts[-1] else [count]
    return counts[-1]


def has_ended(pid: int) -> bool:
    """Whether no code of a process runs any longer; whoever is its parent may not have noticed."""
    return processes.thread_state(pid, pid) in "ZX"


class Trial:
    """A supervisor of fake servers in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        self.check = [sys.executable, "-c", "pass"]
        (directory / "version").write_text("1")
        self.wish("")

    def wish(self, words: str) -> None:
        """Say what servers are to do that start from now on."""
        temporary = self.directory / "wish.new"
        temporary.write_text(words)
        temporary.rename(self.directory / "wish")

    def begin(self, words: str = "") -> None:
        """Start the supervisor; return when its first server is ready, or has failed."""
        self.wish(words)
        here, there = os.pipe()
        code = RUN.replace("FAKE", repr(str(FAKE)))
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(self.directory), str(there), *self.check],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                pass_fds=[there],
            )  # fmt: skip
        os.close(there)
        with os.fdopen(here, "rb") as report:
            report.readline()

    @property
    def starts(self) -> list[dict]:
        """What each server got, in the order they started."""
        try:
            lines = (self.directory / "starts").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def ledger(self) -> dict:
        """What the supervisor tells of itself."""
        try:
            return json.loads((self.directory / "supervisor.json").read_text())
        except FileNotFoundError:
            return {}

    def is_ready(self, number: int) -> bool:
        """Whether the server with this number, from 1, is ready."""
        server = self.ledger().get("server")
        return (
            len(self.starts) >= number
            and bool(server)
            and server["ready"]
            and server["pid"] == self.starts[number - 1]["pid"]
        )

    def wait_ready(self, number: int) -> dict:
        """Wait for the server with this number; return what it got."""
        wait_until(lambda: self.is_ready(number))
        return self.starts[number - 1]

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to the server that runs; return its pid."""
        pid = self.ledger()["server"]["pid"]
        os.kill(pid, number)
        return pid

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if os.fsencode(FAKE) in words and os.fsencode(self.directory) in words:
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """A supervisor to be started; nothing of it is left."""
    trial = Trial(tmp_path)
    try:
        yield trial
    finally:
        trial.clean()


# -- the life of a server --------------------------------------------------------------------------


def test_a_supervisor_loads_little(tmp_path: Path) -> None:
    """It must not fail for a reason of its own, and starts in no time: no module is unused."""
    list_modules = "; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}

    def modules(code: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-S", "-c", code + list_modules],
            env=environment, capture_output=True, text=True, check=True, cwd="/",
        )  # fmt: skip
        return set(done.stdout.split())

    bare = modules(f"import sys, {ALLOWED.replace(' ', ', ')}")
    loaded = modules("import sys, kvfuse.supervision.supervisor")

    ours = {name for name in loaded if name.partition(".")[0] == "kvfuse"}
    assert loaded - ours - bare == set()
    assert not {"ctypes", "logging", "subprocess", "threading", "click", "trio"} & loaded


def test_a_killed_server_is_followed_at_once(trial: Trial) -> None:
    """The next one resumes, with the descriptors the first has stored, and they hold the same."""
    trial.begin()
    first = trial.wait_ready(1)
    trial.kill()
    second = trial.wait_ready(2)

    assert (first["attempt"], first["resume"], first["fds"]) == (1, False, {})
    assert (second["attempt"], second["resume"]) == (2, True)
    assert second["fds"] == {
        "fuse": f"fuse of {first['pid']}", "lock-1": f"lock-1 of {first['pid']}",
    }  # fmt: skip
    assert first["task"] == second["task"] == "the task"
    assert (first["report"] >= 0, second["report"]) == (True, -1)
    assert second["cwd"] == "/"
    assert second["sid"] == second["pid"]
    ledger = trial.ledger()
    assert ledger["restarts"] == 1
    assert ledger["pid"] == trial.process.pid
    assert [(row["pid"], row["reason"]) for row in ledger["last_restarts"]] == [
        (first["pid"], "signal 9")
    ]
    trial.send(signal.SIGTERM)
    assert trial.wait() == 0
    assert trial.ledger() == {}


def test_no_descriptor_leaks_from_server_to_server(trial: Trial) -> None:
    """The sixth server has as many open as the second; the supervisor keeps none of theirs."""
    trial.begin()
    trial.wait_ready(1)
    trial.kill()
    trial.wait_ready(2)
    before = open_at_rest(trial.process.pid)
    for number in range(3, 7):
        trial.kill()
        trial.wait_ready(number)

    assert trial.starts[1]["open"] == trial.starts[5]["open"]
    assert open_at_rest(trial.process.pid) == before
    assert len(trial.ledger()["last_restarts"]) == 5


@pytest.mark.parametrize(
    ("words", "number"), [("", signal.SIGSTOP), ("hang", None)], ids=["stopped", "silent"]
)
def test_a_server_that_hangs_is_killed_and_followed(trial: Trial, words: str, number) -> None:
    """No beat for a second is a death, of a stopped process or of one whose loop does not run."""
    trial.begin(words)
    first = trial.wait_ready(1)
    trial.wish("")
    if number is not None:
        trial.kill(number)
    second = trial.wait_ready(2)

    assert second["resume"]
    assert has_ended(first["pid"])
    assert "no heartbeat" in trial.ledger()["last_restarts"][0]["reason"]


def test_a_server_that_exits_without_having_ended_is_followed(trial: Trial) -> None:
    """Its exit code is the reason that is kept."""
    trial.begin("exit")
    wait_until(lambda: len(trial.starts) >= 2)
    trial.wish("")
    wait_until(lambda: trial.is_ready(len(trial.starts)))

    assert trial.ledger()["last_restarts"][0]["reason"] == "exit 3"


def test_a_server_that_talks_nonsense_is_replaced(trial: Trial) -> None:
    """Bytes that are no message end it."""
    trial.begin("babble")
    wait_until(lambda: len(trial.starts) >= 2)
    trial.wish("")
    wait_until(lambda: trial.is_ready(len(trial.starts)))

    assert "does not speak" in trial.ledger()["last_restarts"][0]["reason"]


def test_a_first_server_that_fails_is_final(trial: Trial) -> None:
    """Its exit code is passed on, and nothing is started again."""
    trial.begin("refuse")

    assert trial.wait() == 4
    assert len(trial.starts) == 1
    assert "refused" in trial.log()


def test_a_first_server_that_is_killed_is_final_and_said(trial: Trial) -> None:
    """There is no message of its own, so the supervisor has one."""
    trial.begin("die")

    assert trial.wait() == 1
    assert len(trial.starts) == 1
    assert "before the mount answered: signal 9" in trial.log()


def test_an_end_that_is_wanted_ends_the_supervisor_with_its_code(trial: Trial) -> None:
    """SIGTERM reaches the server, which says that it ended, and how."""
    trial.begin("end-7")
    trial.wait_ready(1)
    trial.send(signal.SIGTERM)

    assert trial.wait() == 7
    assert len(trial.starts) == 1


def test_a_server_that_crashes_while_it_ends_is_not_followed(trial: Trial) -> None:
    """The supervisor fails with it."""
    trial.begin("stubborn")
    trial.wait_ready(1)
    trial.send(signal.SIGTERM)
    time.sleep(0.3)
    trial.kill()

    assert trial.wait() == 1
    assert len(trial.starts) == 1


def test_a_server_that_cannot_be_resumed_is_followed_by_a_cold_one(trial: Trial) -> None:
    """It gets no descriptor, the old ones are closed."""
    trial.begin("cold")
    trial.wait_ready(1)
    trial.kill()
    second = trial.wait_ready(2)

    assert (second["resume"], second["fds"]) == (False, {})


def test_a_crash_loop_backs_off_and_is_told(trial: Trial) -> None:
    """Three deaths in a row are followed at once, then the pauses grow; all are counted."""
    trial.begin()
    trial.wait_ready(1)
    trial.wish("exit")
    trial.kill()
    wait_until(lambda: len(trial.starts) >= 7)
    assert trial.process.poll() is None

    ats = [start["at"] for start in trial.starts]
    assert ats[6] - ats[5] > 0.2  # by then the pause alone is longer
    assert "the next server starts in 0.2 s" in trial.log()
    ledger = trial.ledger()
    assert ledger["restarts"] >= 6
    assert {row["reason"] for row in ledger["last_restarts"][1:]} == {"exit 3"}


def test_a_connection_nobody_resumes_is_given_up(trial: Trial) -> None:
    """After eight servers in a row that did not come up the next one mounts anew."""
    trial.begin()
    trial.wait_ready(1)
    trial.wish("die-resumed")
    trial.kill()
    wait_until(lambda: not trial.starts[-1]["resume"] and len(trial.starts) > 1)

    assert trial.wait_ready(len(trial.starts))["fds"] == {}
    assert len(trial.starts) == 10
    assert "mounting anew" in trial.log()


@pytest.fixture
def bad_disk(tmp_path: Path) -> Iterator[FaultDisk]:
    """A disk that can be told to hang."""
    for name in ("backing", "disk"):
        (tmp_path / name).mkdir()
    with FaultDisk(tmp_path / "backing", tmp_path / "disk") as disk:
        yield disk


@pytest.mark.fuse
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse")
def test_a_server_with_a_thread_stuck_on_a_disk_is_left_behind(
    trial: Trial, bad_disk: FaultDisk
) -> None:
    """It cannot be reaped and is not waited for; its followers know of it until it is gone."""
    (bad_disk.mountpoint / "lock").touch()
    trial.begin(f"keep={bad_disk.mountpoint}/lock mkdir={bad_disk.mountpoint}/late")
    first = trial.wait_ready(1)
    bad_disk.hang("*")  # closing a descriptor too
    (trial.directory / "go").touch()
    bad_disk.wait_hanging()
    trial.wish("")
    trial.kill()
    second = trial.wait_ready(2)
    trial.kill()
    third = trial.wait_ready(3)

    assert second["stuck"] == [first["pid"]]
    assert first["pid"] in third["stuck"]
    assert {*second["fds"], *third["fds"]} == {"fuse", "lock-1", "lock-2"}
    assert "D" in processes.thread_states(first["pid"])
    bad_disk.release()
    stuck = trial.directory / f"stuck-{third['pid']}"
    wait_until(lambda: stuck.exists() and stuck.read_text() == "[]")
    wait_until(lambda: trial.ledger()["stuck"] == [])
    assert processes.start_ticks(first["pid"]) == 0


# -- upgrade ---------------------------------------------------------------------------------------


def test_an_upgrade_replaces_the_server(trial: Trial) -> None:
    """After a check of the installed code the next server resumes; versions and stall are told."""
    trial.check = [sys.executable, "-c", "import sys; assert sys.argv[1] == '{\"fake\": 1}'"]
    trial.begin()
    trial.wait_ready(1)
    (trial.directory / "version").write_text("2")
    trial.send(signal.SIGHUP)
    second = trial.wait_ready(2)

    assert second["resume"]
    upgrade = trial.ledger()["upgrade"]
    assert (upgrade["number"], upgrade["result"], upgrade["reason"]) == (1, "done", "")
    assert (upgrade["from"], upgrade["to"]) == ("1", "2")
    assert upgrade["stall_s"] >= 0
    assert trial.ledger()["last_restarts"][0]["reason"] == "upgrade"


def test_an_upgrade_that_fails_its_check_changes_nothing(trial: Trial) -> None:
    """The server goes on; the last line of the check is the reason."""
    trial.check = [sys.executable, "-c", "print('x'); exit('the catalog has another format')"]
    trial.begin()
    first = trial.wait_ready(1)
    trial.send(signal.SIGHUP)
    wait_until(lambda: (trial.ledger()["upgrade"] or {}).get("result") == "refused")

    assert trial.ledger()["upgrade"]["reason"] == "the catalog has another format"
    assert trial.ledger()["restarts"] == 0
    assert trial.ledger()["server"]["pid"] == first["pid"]
    assert "upgrade refused" in trial.log()


def test_an_upgrade_of_a_mount_that_cannot_be_handed_over_is_refused(trial: Trial) -> None:
    """With what is in the way."""
    trial.begin("cold")
    trial.wait_ready(1)
    trial.send(signal.SIGHUP)
    wait_until(lambda: trial.ledger()["upgrade"] is not None)

    upgrade = trial.ledger()["upgrade"]
    assert upgrade["result"] == "refused"
    assert "a fake one is cold" in upgrade["reason"]


# -- the end of the supervisor itself --------------------------------------------------------------


def test_a_server_goes_on_without_its_supervisor(trial: Trial) -> None:
    """It notices and is told so, and does not end."""
    trial.begin()
    first = trial.wait_ready(1)
    trial.send(signal.SIGKILL)
    trial.wait()
    wait_until((trial.directory / "lost").exists)

    assert not has_ended(first["pid"])


class Manager:
    """A service manager: it keeps descriptors by name, and starts the service again with them."""

    def __init__(self, address: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(str(address))
        self.socket.settimeout(WAIT_S)
        self.said: list[str] = []
        self.kept: list[tuple[str, int]] = []

    def hear(self, line: str) -> None:
        """Take messages until one holds *line*."""
        while line not in (text := self._receive()):
            assert text

    def _receive(self) -> list[str]:
        space = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * 253)
        data, ancillary, flags, _ = self.socket.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
        assert not flags & socket.MSG_CTRUNC
        fds = array.array("i")
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(value)
        lines = data.decode().split("\n")
        self.said += lines
        (name,) = [line[7:] for line in lines if line.startswith("FDNAME=")] or [""]
        if "FDSTOREREMOVE=1" in lines:
            for kept, fd in [pair for pair in self.kept if pair[0] == name]:
                self.kept.remove((kept, fd))
                os.close(fd)
        if "FDSTORE=1" in lines:
            assert "FDPOLL=0" in lines
            self.kept += [(name, fd) for fd in fds]
        return lines

    def close(self) -> None:
        for _, fd in self.kept:
            os.close(fd)
        self.socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A service manager that listens at ``notify``."""
    manager = Manager(tmp_path / "notify")
    try:
        yield manager
    finally:
        manager.close()


def begin_again(trial: Trial, manager: Manager, words: str = "") -> None:
    """Start a supervisor as the manager does, with what it keeps."""
    names = ":".join(name for name, _ in manager.kept)
    trial.wish(words)
    trial.environment |= {"LISTEN_FDS": str(len(manager.kept)), "LISTEN_FDNAMES": names}
    code = RUN.replace("FAKE", repr(str(FAKE)))
    # a process that only arranges descriptors stands for the manager's child before its exec
    arrange = (
        "import os, sys\n"
        "fds = [int(word) for word in sys.argv[1].split(',')]\n"
        "for number, fd in enumerate(fds): os.dup2(fd, 400 + number)\n"
        "for number in range(len(fds)): os.dup2(400 + number, 3 + number, inheritable=True)\n"
        "os.closerange(3 + len(fds), 1000)\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
    )
    fds = [fd for _, fd in manager.kept]
    with (trial.directory / "log").open("ab") as log:
        trial.process = subprocess.Popen(
            [sys.executable, "-c", arrange, ",".join(map(str, fds)),
             "-c", code, str(trial.directory), "-1", *trial.check],
            env=trial.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            pass_fds=fds,
        )  # fmt: skip


def test_a_service_manager_keeps_the_mount_when_the_supervisor_is_killed(
    trial: Trial, manager: Manager
) -> None:
    """The next supervisor ends the old server, and the next server resumes with all descriptors."""
    trial.environment["NOTIFY_SOCKET"] = str(trial.directory / "notify")
    trial.begin()
    first = trial.wait_ready(1)
    manager.hear("READY=1")
    assert f"MAINPID={trial.process.pid}" in manager.said
    assert {name for name, _ in manager.kept} == {"supervisor", "fuse", "lock-1"}

    trial.send(signal.SIGKILL)
    trial.wait()
    begin_again(trial, manager)
    second = trial.wait_ready(2)

    assert has_ended(first["pid"])
    assert second["resume"]
    assert second["fds"] == {
        "fuse": f"fuse of {first['pid']}", "lock-1": f"lock-1 of {first['pid']}",
    }  # fmt: skip
    manager.hear("READY=1")
    trial.send(signal.SIGTERM)
    assert trial.wait() == 0
    manager.hear("FDNAME=supervisor")
    assert manager.kept == []


# -- the channel -----------------------------------------------------------------------------------


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a channel."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = Channel(pair[0]), Channel(pair[1])
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_with_their_descriptors(channels) -> None:
    """As many as a pool of 256 disks has, closed on exec."""
    here, there = channels
    store, got = FdStore(), FdStore()
    for number in range(513):
        store.put(f"name-{number}", os.memfd_create(str(number)))
    store.send(here)
    here.send("start", {"attempt": 1})

    while (message := there.receive()).kind == "fds":
        got.take(message)
    assert message.number("attempt") == 1
    assert got.names() == store.names()
    fds = got.release()
    assert not any(os.get_inheritable(fd) for fd in fds.values())
    assert os.readlink(f"/proc/self/fd/{fds['name-512']}").startswith("/memfd:512")
    for fd in fds.values():
        os.close(fd)
    store.close()


def test_what_is_no_message_is_told_from_an_end(channels) -> None:
    """Cut, malformed, of no kind: an error, and no descriptor is left open."""
    here, there = channels
    raw = here._socket
    gc.collect()  # what other tests left to it must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("x")
    for data in (b"{", b"[]", b"{}", b'{"kind":1}', b'"' + b"x" * MESSAGE_BYTES_MAX + b'"'):
        socket.send_fds(raw, [data], [fd])
        with pytest.raises(ChannelError):
            there.receive()
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChannelError, match="over"):
        here.send("facts", {"text": "x" * MESSAGE_BYTES_MAX})
    here.send("store", {"names": "x"})
    message = there.receive()
    with pytest.raises(ChannelError, match="without"):
        message.texts("names")
    here.close()
    with pytest.raises(ConnectionError):
        there.receive()


def test_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over the bound is closed and refused; a name that is there is replaced."""
    monkeypatch.setattr(fdstore, "FDS_MAX", 100)
    store = FdStore()
    for number in range(100):
        store.put(str(number), os.memfd_create("x"))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert not store.put("one more", os.memfd_create("x"))
    assert store.put("0", os.memfd_create("x"))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)
    store.close()


# -- when to start the next ------------------------------------------------------------------------


def test_a_server_killed_every_second_is_never_waited_for() -> None:
    """Lives of a second are no crash loop, however many."""
    restarts = Restarts()
    for number in range(100):
        restarts.note(number, "signal 9", time_s=number, age_s=1.0, was_ready=number % 3 > 0)
        assert restarts.delay_s == 0
        assert not restarts.is_hopeless
    assert restarts.count == 100
    assert len(restarts.last) == 16


def test_short_lives_double_the_pause_up_to_ten_seconds() -> None:
    """Three are free; one long life, and it begins anew."""
    restarts = Restarts()
    delays = []
    for number in range(30):
        restarts.note(number, "exit 1", time_s=0, age_s=0.1, was_ready=True)
        delays.append(restarts.delay_s)
    assert delays[:12] == [0, 0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    restarts.note(1, "exit 1", time_s=0, age_s=5, was_ready=True)
    assert restarts.delay_s == 0
