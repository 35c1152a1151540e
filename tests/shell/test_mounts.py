"""Reading the mount table, the registry of mounts, the wish to stop, and systemd's socket."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvfuse import doctor
from kvfuse.control import registry
from kvfuse.core.errors import BusyError, ConfigError, NotMountedError
from kvfuse.supervision.notify import notify
from kvfuse.system import mounts
from kvfuse.system.stop import Stop, stop_on_signals

PROJECT = Path(__file__).resolve().parents[2]
MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /kv\\040cache rw,nosuid,nodev - fuse.kvfuse kvfuse rw,user_id=0
31 22 0:41 / /kv\\040cache rw master:1 propagate_from:2 - tmpfs a\\134b rw
short line
"""


def entry(path: Path, **changes) -> registry.Registration:
    """Return a registration of this process for the mountpoint *path*."""
    facts = {
        "mountpoint": str(path), "pool_id": "p", "pid": os.getpid(), "socket": "/s", "log": "",
        "started": registry.start_time(os.getpid()),
    }  # fmt: skip
    return registry.Registration(**{**facts, **changes})


def test_the_mount_table_is_read_with_escapes_and_optional_fields() -> None:
    """Blanks and backslashes come back; lines that are none are passed over."""
    found = mounts.parse_mountinfo(MOUNTINFO)

    assert [(mount.mountpoint, mount.fstype) for mount in found] == [
        ("/", "ext4"), ("/kv cache", "fuse.kvfuse"), ("/kv cache", "tmpfs"),
    ]  # fmt: skip
    assert found[1].is_kvfuse
    assert found[2].source == "a\\b"


def test_a_mountpoint_is_named_without_touching_it(tmp_path: Path) -> None:
    """Links above are followed, the last component stays as it was typed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    assert mounts.mountpoint_of(f"{tmp_path}/link/../link/x") == f"{tmp_path}/real/x"
    assert mounts.mountpoint_of("/") == "/"


def test_what_keeps_a_directory_busy_is_named(tmp_path: Path) -> None:
    """A process with its working directory there is found with pid and command."""
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        try:
            found = mounts.holders(str(tmp_path))
        finally:
            process.kill()

    assert [(holder.pid, holder.path) for holder in found] == [(process.pid, str(tmp_path))]
    assert str(process.pid) in mounts.describe(found[0])


def test_only_an_empty_directory_can_be_a_mountpoint(tmp_path: Path) -> None:
    """Everything else is refused with what to do."""
    mounts.check_mountpoint(str(tmp_path))

    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(path)):
            mounts.check_mountpoint(str(path))
    with pytest.raises(BusyError):
        mounts.check_mountpoint("/proc")


def test_the_registry_finds_a_mount_by_name_by_being_the_only_one_and_by_path(
    tmp_path: Path,
) -> None:
    """One mount needs no name; of several the innermost around a path is taken."""
    directory = tmp_path / "registry"
    registry.register(entry(tmp_path / "a"), directory)

    assert registry.choose(None, directory).mountpoint == f"{tmp_path}/a"
    registry.register(entry(tmp_path / "a" / "b"), directory)
    with pytest.raises(NotMountedError, match="several"):
        registry.choose(None, directory)
    assert registry.choose(f"{tmp_path}/a", directory).mountpoint == f"{tmp_path}/a"
    assert registry.enclosing(f"{tmp_path}/a/b/c", directory).mountpoint == f"{tmp_path}/a/b"
    assert registry.enclosing(f"{tmp_path}/a/bc", directory).mountpoint == f"{tmp_path}/a"
    with pytest.raises(NotMountedError):
        registry.enclosing(f"{tmp_path}/ab", directory)


def test_a_registration_of_a_daemon_that_died_counts_for_nothing(tmp_path: Path) -> None:
    """A pid that was given to another process since is not taken for the daemon."""
    registry.register(entry(tmp_path, started=1), tmp_path)

    assert registry.registrations(tmp_path) == []
    with pytest.raises(NotMountedError):
        registry.choose(str(tmp_path), tmp_path)
    registry.register(entry(tmp_path / "next"), tmp_path)
    assert registry.registration(str(tmp_path), tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\x00" * 70_000])
def test_a_registration_that_cannot_be_read_counts_for_nothing(
    tmp_path: Path, content: bytes
) -> None:
    """Garbage in the directory disturbs nobody."""
    (tmp_path / "x.json").write_bytes(content)

    assert registry.registrations(tmp_path) == []


def test_a_daemon_removes_only_its_own_registration(tmp_path: Path) -> None:
    """One that ends late leaves the registration of its successor alone."""
    registry.register(entry(tmp_path), tmp_path)

    registry.unregister(entry(tmp_path, pid=1), tmp_path)
    assert registry.registration(str(tmp_path), tmp_path) is not None
    registry.unregister(entry(tmp_path), tmp_path)
    assert registry.registration(str(tmp_path), tmp_path) is None


def test_a_wish_to_stop_is_heard_once_by_every_listener() -> None:
    """Also by one that comes after it was said."""
    heard = []
    stop = Stop()
    stop.listen(lambda: heard.append("before"))

    stop.request()
    stop.request()
    stop.listen(lambda: heard.append("after"))

    assert heard == ["before", "after"]
    assert stop.is_requested


def test_a_signal_says_the_wish_to_stop() -> None:
    """In a process of its own: signals belong to the process."""
    program = (
        "import os, signal, threading\n"
        "from kvfuse.system.stop import Stop, stop_on_signals\n"
        "stop, heard = Stop(), threading.Event()\n"
        "stop_on_signals(stop, [signal.SIGTERM])\n"
        "stop.listen(heard.set)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert heard.wait(30)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROJECT)}, timeout=60, check=False,
    )  # fmt: skip

    assert result.returncode == 0


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    """The lines arrive as one datagram, at a path or an abstract address."""
    name = f"@kvfuse-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)

        assert notify("READY=1", "MAINPID=7")
        assert manager.recv(100) == b"READY=1\nMAINPID=7"


def test_without_a_service_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address, no datagram, no complaint."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    assert not notify("READY=1")


def test_a_service_manager_that_has_gone_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged; the daemon goes on."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))

    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("release", "level"),
    [("4.4.0", "fail"), ("5.15.0-91-generic", "warn"), ("6.9.1", "warn"), ("6.12-rc1", "ok"),
     ("6.18.2-fc", "ok"), ("7.0.0", "ok"), ("nonsense", "fail")],
)  # fmt: skip
def test_doctor_judges_a_kernel_by_its_version(release: str, level: str) -> None:
    """Too old, without passthrough, with it for reading only, good."""
    assert doctor.check_kernel(release).level == level


def test_doctor_judges_a_device_and_memory(tmp_path: Path) -> None:
    """A device that is missing makes a mount impossible, little memory does not."""
    missing = list(doctor.check_device(tmp_path / "fuse"))
    little = doctor.check_memory("MemTotal: 9 kB\nMemAvailable: 1024 kB\n")

    assert not doctor.can_mount(missing)
    assert little.level == "warn"
    assert doctor.can_mount([little])
    assert doctor.check_memory("").level == "warn"


def test_doctor_judges_a_disk_without_writing_to_it(tmp_path: Path) -> None:
    """A directory is fine, a file is not, a missing one is only missed."""
    (tmp_path / "file").touch()
    before = os.stat(tmp_path)

    assert doctor.check_disk(str(tmp_path)).level in ("ok", "warn")
    assert doctor.check_disk(str(tmp_path / "file")).level == "fail"
    assert doctor.check_disk(str(tmp_path / "missing")).level == "warn"
    assert os.stat(tmp_path).st_mtime_ns == before.st_mtime_ns


def test_signals_are_blocked_in_threads_made_later() -> None:
    """Only the thread that waits for them sees them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    seen = []
    try:
        stop_on_signals(Stop(), [signal.SIGUSR2])
        thread = threading.Thread(
            target=lambda: seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        )
        thread.start()
        thread.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert signal.SIGUSR2 in seen[0]


def test_a_dead_mount_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, by a path in it, and as the only one there is."""
    path, directory = f"{tmp_path}/pool", tmp_path / "registry"
    mount = mounts.Mount(path, "0:40", mounts.FSTYPE, "kvfuse")
    monkeypatch.setattr(mounts, "read_mounts", lambda: [mount])
    monkeypatch.setattr(mounts, "stat_error", lambda _path: errno.ENOTCONN)

    for choose in (
        lambda: registry.choose(path, directory),
        lambda: registry.choose(None, directory),
        lambda: registry.enclosing(f"{path}/a/b", directory),
    ):
        with pytest.raises(NotMountedError, match=f"dead mount.*kvfuse umount {path}"):
            choose()
    with pytest.raises(NotMountedError, match="no kvfuse pool is mounted here"):
        registry.choose(f"{tmp_path}/other", directory)


def test_what_killed_processes_left_in_the_registry_goes_at_the_next_mount(tmp_path: Path) -> None:
    """Half-written files of dead processes go, those of living ones stay."""
    with subprocess.Popen(["true"]) as dead:
        pass
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f"0123.{pid}.tmp").touch()

    registry.register(entry(tmp_path / "pool"), tmp_path)

    assert [path.name for path in tmp_path.glob("*.tmp")] == [f"0123.{os.getppid()}.tmp"]
