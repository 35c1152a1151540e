"""Under a real systemd the mount outlives even its supervisor: systemd keeps its descriptors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import PROJECT, runnable_setups

SYSTEMD = Path("/lib/systemd/systemd")
LOAD = Path(__file__).with_name("restart_load.py")
UNIT = PROJECT / "systemd" / "kvfuse@.service"
WAIT_S = 90.0
pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(300)]


def obstacle() -> str | None:
    """Return why this cannot run here."""
    if os.geteuid() != 0:
        return "only root makes namespaces"
    if not SYSTEMD.exists() or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "systemd, unshare or nsenter is missing"
    return runnable_setups()["direct"]


def wait_until(condition, timeout_s: float = WAIT_S) -> None:
    """Wait until *condition* holds; fail when it does not within *timeout_s*."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.05)


class Machine:
    """A systemd of its own, in namespaces of its own, with the unit of this project."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.mountpoint = base / "mount"
        for name in ("mount", "disk0", "disk1", "units", "etc"):
            (base / name).mkdir()
        (base / "etc" / "test.toml").write_text(
            f'[pool]\nmountpoint = "{self.mountpoint}"\n'
            f'disks = ["{base}/disk0", "{base}/disk1"]\n'
            f'state_dir = "{base}/state"\nrun_dir = "{base}/run"\n'
            "driver = 'direct'\nallow_shared_device = true\n"
        )
        kvfuse = f"{sys.executable} -m kvfuse"
        unit = UNIT.read_text().replace("/usr/local/bin/kvfuse", kvfuse)
        unit = unit.replace("/etc/kvfuse", str(base / "etc")).replace(
            "--foreground", "--foreground --init"
        )
        unit = unit.replace("[Service]", f"[Service]\nEnvironment=PYTHONPATH={PROJECT}")
        unit = unit.replace("RequiresMountsFor=/var/lib/kvfuse\n", "DefaultDependencies=no\n")
        unit = unit.replace("StateDirectory=kvfuse\n", "").replace("After=local-fs.target\n", "")
        unit += f"\n[Service]\nStandardOutput=append:{base}/log\nStandardError=append:{base}/log\n"
        (base / "units" / "kvfuse@.service").write_text(unit)
        (base / "units" / "test.target").write_text(
            "[Unit]\nDefaultDependencies=no\nWants=kvfuse@test.service\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        script = (
            "mount -t proc proc /proc && mount -t tmpfs tmpfs /run && "
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup && "
            f"exec env -i container=test SYSTEMD_UNIT_PATH={self.base}/units "
            f"PATH=/usr/sbin:/usr/bin:/sbin:/bin {SYSTEMD} --system --unit=test.target"
        )
        with (self.base / "systemd.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--kill-child", "-m", "-p", "-f", "-u", "-i", "-C", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(lambda: self.server() is not None)

    @property
    def init(self) -> int:
        """The pid of systemd, outside."""
        assert self.process is not None
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return int(text.split()[0])

    def inside(self, *command: str | Path) -> list[str]:
        return ["nsenter", "-t", str(self.init), "-m", "-p", "--", *map(str, command)]

    def ledger(self) -> dict:
        for path in (self.base / "run").glob("*/supervisor.json"):
            return json.loads(path.read_text())
        return {}

    def server(self) -> int | None:
        """The pid of the server that is ready, inside."""
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        found = self.ledger().get("server")
        return found["pid"] if found and found["ready"] else None

    def kill(self, pid: int) -> None:
        subprocess.run(self.inside("kill", f"-{signal.SIGKILL}", str(pid)), check=True)

    def log(self) -> str:
        paths = [self.base / "log", self.base / "systemd.log"]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine that has booted and mounted the pool."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    machine = Machine(tmp_path)
    try:
        machine.boot()
        yield machine
    except BaseException:
        print(machine.log())  # noqa: T201 - pytest shows it
        raise
    finally:
        machine.close()


def test_a_killed_supervisor_under_load_fails_no_call(machine: Machine) -> None:
    """Its next one gets the connection from systemd; after a stop nothing is left."""
    load = subprocess.Popen(
        machine.inside(sys.executable, LOAD, machine.mountpoint / "client", "1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    try:
        assert load.stdout is not None
        assert load.stdout.readline() == "begun\n"
        for _ in range(3):
            before = machine.ledger()["pid"]
            machine.kill(before)
            wait_until(lambda before=before: machine.ledger()["pid"] != before)
            wait_until(lambda: machine.server() is not None)
        told, _ = load.communicate("end\n", timeout=WAIT_S)
    finally:
        load.kill()
        load.wait()

    client = json.loads(told)
    assert not client["failures"], client["failures"][0]
    assert client["steps"] > 10
    subprocess.run(machine.inside("systemctl", "stop", "kvfuse@test"), check=True, timeout=WAIT_S)
    mounts = subprocess.run(
        machine.inside("cat", "/proc/self/mounts"), check=True, capture_output=True, text=True
    ).stdout
    assert str(machine.mountpoint) not in mounts
    assert machine.ledger() == {}


def test_umount_is_an_end_that_systemd_does_not_undo(machine: Machine) -> None:
    """Restart=always is for what nobody asked for."""
    subprocess.run(machine.inside("umount", machine.mountpoint), check=True)
    wait_until(lambda: machine.ledger() == {})
    time.sleep(1)

    state = subprocess.run(
        machine.inside("systemctl", "is-active", "kvfuse@test"), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert state.stdout.strip() == "inactive"
