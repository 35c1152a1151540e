"""Mounting and unmounting with the real command, in the background as people use it."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.control import registry
from kvfuse.drivers.direct import session
from kvfuse.system import mounts

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse"),
]


class Trial:
    """A pool of two directories at ``path``; ``mount`` and the others run the real command."""

    def __init__(self, base: Path, driver: str) -> None:
        self.base = base
        self.path = base / "mount"
        self.path.mkdir()
        self.disks = [base / "disk0", base / "disk1"]
        for disk in self.disks:
            disk.mkdir()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "KVFUSE_POOL_STATE_DIR": str(base / "state"),
            "KVFUSE_POOL_RUN_DIR": str(base / "run"),
            "KVFUSE_POOL_ALLOW_SHARED_DEVICE": "true",
            "KVFUSE_POOL_DRIVER": driver,
        }

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "kvfuse", *map(str, arguments)]

    def kvfuse(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment, cwd="/", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    def arguments(self, *more: str | Path) -> list[str | Path]:
        disks = [word for disk in self.disks for word in ("--disk", disk)]
        return ["mount", self.path, *disks, *more]

    def mount(self, *more: str | Path) -> dict[str, object]:
        done = self.kvfuse(*self.arguments("--json", *more))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def umount(self, *more: str) -> None:
        done = self.kvfuse("umount", self.path, *more)
        assert done.returncode == 0, done.stderr

    def status(self) -> dict:
        return json.loads(self.kvfuse("status", self.path, "--json").stdout)

    @property
    def daemon(self) -> int:
        entry = registry.registration(str(self.path))
        assert entry is not None
        return entry.pid

    def kill(self) -> None:
        """Kill the daemon, its supervisor first, and wait until both have ended."""
        kill_all(self.daemon)

    def clean(self) -> None:
        """Take away whatever a failed test left."""
        entry = registry.registration(str(self.path))
        while mounts.mount_at(str(self.path)):
            subprocess.run(["umount", "-l", self.path], check=False)
        if entry is not None:
            if entry.is_alive:
                kill_all(entry.pid)
            registry.unregister(entry)


def kill_all(supervisor: int) -> None:
    """Kill a supervisor and then its server, which nobody starts again then."""
    try:
        text = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    except OSError:
        text = ""
    for pid in (supervisor, *map(int, text.split())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: registry.start_time(pid) is None)


def wait_until(condition, timeout_s: float = 60.0) -> None:
    """Wait until *condition* holds; fail when it does not within *timeout_s*."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.02)


@pytest.fixture(params=["pyfuse3", "direct"])
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    """Two directories to be disks, and a mountpoint; taken down in any case."""
    obstacle = session.can_run() if request.param == "direct" else None
    if obstacle is not None:
        pytest.skip(f"driver direct: {obstacle}")
    trial = Trial(tmp_path, request.param)
    try:
        yield trial
    finally:
        trial.clean()


def test_a_pool_is_mounted_used_and_unmounted(trial: Trial) -> None:
    """Mount returns when the mount answers; umount when the daemon is gone; files stay."""
    answer = trial.mount("--init")
    (trial.path / "file").write_bytes(b"data")

    status = trial.status()
    assert status["pool"]["mountpoint"] == str(trial.path)
    assert status["pool"]["id"] == answer["pool"]
    assert status["processes"]["supervisor"]["pid"] == answer["pid"]
    assert {disk["path"] for disk in status["disks"]} == {str(disk) for disk in trial.disks}
    assert {disk["state"] for disk in status["disks"]} == {"HEALTHY"}
    assert status["recovery"]["state"] == "complete"

    trial.umount()
    assert registry.start_time(answer["pid"]) is None
    assert mounts.mount_at(str(trial.path)) is None
    assert registry.registration(str(trial.path)) is None

    trial.mount()
    assert (trial.path / "file").read_bytes() == b"data"


def test_status_has_every_field_it_promises(trial: Trial) -> None:
    """Scripts rely on the names."""
    trial.mount("--init")

    status = trial.status()

    wanted = {
        "pool": {"id", "epoch", "mountpoint", "driver", "passthrough", "placement", "version"},
        "recovery": {"state", "files", "seconds"},
        "space": {"capacity_bytes", "used_bytes", "available_bytes"},
    }
    for section, fields in wanted.items():
        assert fields <= status[section].keys(), section
    assert status["disks"][0].keys() >= {
        "id", "path", "state", "runtime_state", "reason", "since", "capacity_bytes", "used_bytes",
        "free_bytes", "files", "inodes_free", "errors", "filesystem",
    }  # fmt: skip
    assert trial.kvfuse("status", trial.path).returncode == 0
    assert trial.kvfuse("disk", "list", trial.path).returncode == 0
    shown = json.loads(trial.kvfuse("config", "show", trial.path, "--json").stdout)
    assert shown["pool.mountpoint"]["value"] == str(trial.path)


def test_locate_tells_the_disk_a_file_is_on(trial: Trial) -> None:
    """The path on the disk holds the same bytes; a name that is not there is an error."""
    trial.mount("--init")
    (trial.path / "dir").mkdir()
    names = [trial.path / "dir" / "one.bin", trial.path / "[b]two.bin"]
    for name in names:
        name.write_bytes(os.fsencode(name))

    found = json.loads(trial.kvfuse("locate", *names, "--json").stdout)

    assert [item["path"] for item in found] == [str(name) for name in names]
    for item, name in zip(found, names, strict=True):
        assert Path(item["disk_path"]).read_bytes() == name.read_bytes()
        assert item["why"] == "owner"
        assert item["disk"] == item["owner"]
        assert item["size_bytes"] == len(os.fsencode(name))
    assert "[b]two.bin" in trial.kvfuse("locate", *names).stdout
    directory = json.loads(trial.kvfuse("locate", trial.path / "dir", "--json").stdout)[0]
    assert (directory["disk"], directory["why"]) == (None, "directory")
    assert directory.keys() == found[0].keys()
    assert trial.kvfuse("locate", trial.path / "dir").returncode == 0
    missing = trial.kvfuse("locate", trial.path / "missing")
    assert missing.returncode == 1
    assert "missing: no such file" in missing.stderr


def test_locate_takes_a_name_that_is_not_text(trial: Trial) -> None:
    """It is found, and shown with escapes."""
    trial.mount("--init")
    name = os.fsencode(trial.path) + b"/\xff\xfe.bin"
    Path(os.fsdecode(name)).write_bytes(b"x")

    done = trial.kvfuse("locate", os.fsdecode(name))

    assert done.returncode == 0, done.stderr
    assert "\\xff\\xfe.bin" in done.stdout


def test_a_mount_in_use_is_not_unmounted_and_says_by_whom(trial: Trial) -> None:
    """Exit code 5 with the process; --lazy ends mount and daemon all the same."""
    daemon = trial.mount("--init")["pid"]
    (trial.path / "file").touch()
    held = os.open(trial.path / "file", os.O_RDONLY)
    try:
        busy = trial.kvfuse("umount", trial.path)
        assert busy.returncode == 5
        assert str(os.getpid()) in busy.stderr
        assert trial.kvfuse("status", trial.path).returncode == 0

        trial.umount("--lazy")
        assert mounts.mount_at(str(trial.path)) is None
        assert registry.start_time(daemon) is None
    finally:
        with contextlib.suppress(OSError):  # its daemon has gone
            os.close(held)


def test_a_dead_mount_is_cleared_by_the_next_mount(trial: Trial) -> None:
    """After SIGKILL: a message, the mount works again, what was stored is there."""
    trial.mount("--init")
    (trial.path / "file.tmp").write_bytes(b"data")
    (trial.path / "file.tmp").rename(trial.path / "file")
    trial.kill()
    with pytest.raises(OSError, match="connect"):
        os.stat(trial.path)

    done = trial.kvfuse(*trial.arguments())

    assert done.returncode == 0, done.stderr
    assert "cleared" in done.stderr
    assert (trial.path / "file").read_bytes() == b"data"
    there = [m for m in mounts.read_mounts() if m.mountpoint == str(trial.path)]
    assert len([m for m in there if m.is_kvfuse]) == 1


def test_a_dead_mount_is_cleared_by_umount(trial: Trial) -> None:
    """The directory is ordinary again; a second umount finds nothing."""
    trial.mount("--init")
    trial.kill()

    done = trial.kvfuse("umount", trial.path)

    assert done.returncode == 0, done.stderr
    assert "cleared" in done.stdout
    assert os.listdir(trial.path) == []
    assert trial.kvfuse("umount", trial.path).returncode == 3


@pytest.mark.parametrize("tool", ["umount", "fusermount3"])
def test_a_daemon_ends_when_somebody_else_unmounts(trial: Trial, tool: str) -> None:
    """umount(8) and fusermount3 -u end it as cleanly as kvfuse umount."""
    daemon = trial.mount("--init")["pid"]

    subprocess.run([tool, *(["-u"] if tool == "fusermount3" else []), trial.path], check=True)

    wait_until(lambda: registry.start_time(daemon) is None)
    assert registry.registration(str(trial.path)) is None
    trial.mount()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_unmounts_when_it_is_told_to_end(trial: Trial, number: signal.Signals) -> None:
    """Nothing is left at the mountpoint."""
    daemon = trial.mount("--init")["pid"]

    os.kill(daemon, number)

    wait_until(lambda: registry.start_time(daemon) is None)
    assert mounts.mount_at(str(trial.path)) is None
    assert registry.registration(str(trial.path)) is None


def test_a_daemon_in_the_foreground_ends_with_code_0(trial: Trial) -> None:
    """It logs to stderr, tells the service manager, and SIGTERM is a good end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = trial.base / "notify"
        manager.bind(str(address))
        manager.settimeout(60)
        process = subprocess.Popen(
            trial.command(*trial.arguments("--init", "--foreground")),
            env={**trial.environment, "NOTIFY_SOCKET": str(address)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said = b""
            while b"READY=1" not in said:
                said = manager.recv(4096)
            assert f"MAINPID={process.pid}".encode() in said
            assert os.path.ismount(trial.path)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            process.communicate()
            raise

    assert process.returncode == 0, log
    assert "unmounted" in log
    assert mounts.mount_at(str(trial.path)) is None


def test_a_bar_in_the_foreground_shows_how_far_the_disks_were_read(trial: Trial) -> None:
    """On a terminal, from its beginning to its end, while the mount serves."""
    trial.mount("--init")
    for number in range(40):
        (trial.path / f"{number}.bin").write_bytes(b"data")
    trial.umount()
    for place in ("run", "state"):
        for catalog in (trial.base / place).glob("*/catalog*"):
            shutil.rmtree(catalog)
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(
            trial.command(*trial.arguments("--foreground")),
            env={**trial.environment, "KVFUSE_RECOVERY_SCAN_FILES_PER_S": "20"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs,
        )  # fmt: skip
        try:
            os.close(theirs)
            said = read_until(ours, b"100 % reading disks: 40 files found")
            assert b"] 100 %" not in said[: said.index(b"reading disks")]
            assert trial.status()["recovery"]["share"] == 1
            assert len(list(trial.path.iterdir())) == 40
        finally:
            process.terminate()
            read_until(ours, None)
            assert process.wait(60) == 0
    finally:
        os.close(ours)


def read_until(terminal: int, wanted: bytes | None, timeout_s: float = 60.0) -> bytes:
    """Return what was written to a terminal until *wanted* was; None: until nobody has it open."""
    said, deadline_s = b"", time.monotonic() + timeout_s
    while wanted is None or wanted not in said:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"{wanted!r} was not said: {said!r}"
        try:
            said += os.read(terminal, 4096)
        except OSError:  # EIO: the other end has gone
            assert wanted is None, f"{wanted!r} was not said: {said!r}"
            break
    return said


def test_a_mountpoint_and_a_disk_serve_one_pool_at_a_time(trial: Trial) -> None:
    """A second mount there, and of the same disks elsewhere: exit code 5, the first undisturbed."""
    trial.mount("--init")
    elsewhere = trial.base / "elsewhere"
    elsewhere.mkdir()

    here = trial.kvfuse(*trial.arguments())
    there = trial.kvfuse("mount", elsewhere, "--disk", trial.disks[0])

    assert (here.returncode, there.returncode) == (5, 5)
    assert "mounted here already" in here.stderr
    assert str(trial.disks[0]) in there.stderr
    assert mounts.mount_at(str(elsewhere)) is None
    assert trial.kvfuse("status", trial.path).returncode == 0


def test_a_missing_disk_is_a_warning_and_a_refusal_when_all_are_required(trial: Trial) -> None:
    """One of two is enough to mount; it is shown as failed, with the reason."""
    trial.mount("--init")
    trial.umount()
    trial.disks[1].rename(trial.base / "away")

    refused = trial.kvfuse(*trial.arguments("--require-all-disks"))
    assert refused.returncode == 4
    assert str(trial.disks[1]) in refused.stderr
    assert mounts.mount_at(str(trial.path)) is None

    answer = trial.mount()
    states = {disk["path"]: disk for disk in trial.status()["disks"]}
    assert str(trial.disks[1]) in str(answer["warnings"])
    assert states[str(trial.disks[0])]["state"] == "HEALTHY"
    assert states[str(trial.disks[1])]["state"] == "FAILED"
    assert states[str(trial.disks[1])]["reason"]


def test_a_refused_disk_mounts_nothing_and_writes_nothing(trial: Trial) -> None:
    """A directory with files among the disks: one line, exit code 4, all as before."""
    (trial.disks[1] / "precious").write_text("data")

    done = trial.kvfuse(*trial.arguments("--init"))

    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert str(trial.disks[1]) in done.stderr
    assert mounts.mount_at(str(trial.path)) is None
    assert os.listdir(trial.disks[0]) == []
    assert os.listdir(trial.disks[1]) == ["precious"]
    assert not (trial.base / "state").exists()


def test_a_socket_path_that_is_too_long_is_refused(trial: Trial) -> None:
    """One line with what to set; nothing is mounted."""
    trial.environment["KVFUSE_CONTROL_SOCKET"] = str(trial.base / ("x" * 100))

    done = trial.kvfuse(*trial.arguments("--init"))

    assert done.returncode == 2
    assert "control.socket" in done.stderr
    assert mounts.mount_at(str(trial.path)) is None


def test_an_interrupted_mount_leaves_no_mount_and_no_daemon(trial: Trial) -> None:
    """Ctrl-C while it starts: the command ends, and nothing of it is left."""
    for delay_s in (0.15, 0.3, 0.5, 0.8):
        process = subprocess.Popen(
            trial.command(*trial.arguments("--init")), env=trial.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        if process.wait(60) == 0:  # it was ready before the signal came
            trial.umount()
        assert mounts.mount_at(str(trial.path)) is None
        assert registry.registration(str(trial.path)) is None
    trial.mount("--init")


def test_the_control_socket_belongs_to_root_alone(trial: Trial) -> None:
    """0600, in a directory that others may not write to."""
    answer = trial.mount("--init")
    entry = registry.registration(str(trial.path))
    assert entry is not None

    found, directory = os.stat(entry.socket), os.stat(Path(entry.socket).parent)

    assert found.st_mode & 0o777 == 0o600
    assert directory.st_mode & 0o022 == 0
    assert str(answer["pool"]) in entry.socket
    assert Path(str(answer["log"])).read_text().count("mounted") >= 1


def test_a_working_directory_below_the_mount_does_not_keep_the_daemon(trial: Trial) -> None:
    """The daemon started from inside another directory of the pool has / as its own."""
    trial.mount("--init")

    assert os.readlink(f"/proc/{trial.daemon}/cwd") == "/"
    with contextlib.suppress(FileNotFoundError):
        assert os.readlink(f"/proc/{trial.daemon}/fd/0") == "/dev/null"
