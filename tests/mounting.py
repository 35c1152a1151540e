"""A kvfuse mount for tests: the real command in a process of its own, taken down for certain."""

import atexit
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvfuse.system.mounts import is_covered

START_S = 60.0
END_S = 60.0
PROJECT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class DriverSetup:
    """A way to serve a mount: the driver, and what the environment makes of it."""

    name: str
    driver: str
    environment: Mapping[str, str] = field(default_factory=dict)


SETUPS = {
    "pyfuse3": DriverSetup("pyfuse3", "pyfuse3"),
    "direct": DriverSetup("direct", "direct"),
    "direct-nopass": DriverSetup("direct-nopass", "direct", {"KVFUSE_TEST_PASSTHROUGH": "off"}),
}


def runnable_setups() -> dict[str, str | None]:
    """Return each setup with the reason why it cannot run here, or None when it can."""
    found: dict[str, str | None] = dict.fromkeys(SETUPS)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return dict.fromkeys(SETUPS, "/dev/fuse is missing or not accessible")
    try:
        from kvfuse.drivers.direct.session import can_run
    except ImportError:
        obstacle: str | None = "this kvfuse has no direct driver"
    else:
        obstacle = can_run()
    found["direct"] = found["direct-nopass"] = obstacle
    return found


class Mounted:
    """A pool mounted at ``path``, from ``with`` to its end; ``stop`` and ``start`` again between.

    *settings* are sections of the configuration file. *build* is a directory that Python looks
    into first: its ``sitecustomize`` makes another build of the daemon. *environment* is the
    daemon's. The daemon's log is in ``log``; it is printed when the daemon ends otherwise than with
    exit code 0.
    """

    def __init__(
        self,
        base: Path,
        disks: Sequence[Path] | int = 2,
        *,
        setup: str = "pyfuse3",
        settings: Mapping[str, Mapping[str, object]] | None = None,
        arguments: Sequence[str] = (),
        build: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.base = base
        self.path = base / "mount"
        self.log = base / "daemon.log"
        self.setup = SETUPS[setup]
        self.arguments = list(arguments)
        if isinstance(disks, int):
            self.disks = [base / f"disk{number}" for number in range(disks)]
        else:
            self.disks = list(disks)
        self._settings = settings or {}
        path = [str(PROJECT)] if build is None else [str(build), str(PROJECT)]
        self._environment = {
            "PYTHONPATH": os.pathsep.join(path), **self.setup.environment, **(environment or {}),
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.base.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        for disk in self.disks:
            disk.mkdir(exist_ok=True)
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failed = error is not None and not isinstance(error, GeneratorExit)
        if failed:
            print(f"--- log of {self.path} ---\n{self.tail()}")  # noqa: T201 - pytest shows it
        try:
            self.stop(check=not failed)
        finally:
            self.clean()

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the daemon runs."""
        return self._process is not None and self._process.poll() is None

    def config_file(self) -> Path:
        """Write the configuration and return its file."""
        sections: dict[str, dict[str, object]] = {
            "pool": {
                "mountpoint": str(self.path),
                "disks": [str(disk) for disk in self.disks],
                "driver": self.setup.driver,
                "state_dir": str(self.base / "state"),
                "run_dir": str(self.base / "run"),
                "allow_shared_device": True,
            }
        }
        for name, section in self._settings.items():
            sections.setdefault(name, {}).update(section)
        lines = []
        for name, section in sections.items():
            lines.append(f"[{name}]")
            # a JSON value of these types is a TOML value too
            lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
        path = self.base / "kvfuse.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self) -> None:
        """Mount, and return when the mount answers."""
        command = [sys.executable, "-m", "kvfuse", "mount", "--config", str(self.config_file())]
        command += ["--init", "--foreground", *self.arguments]
        environment = {**os.environ, **self._environment}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/"
            )
        _running.add(self)
        deadline = time.monotonic() + START_S
        while not self._is_served():
            if self._process.poll() is not None:
                raise AssertionError(f"kvfuse mount ended early:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"kvfuse mount is not there after {START_S} s:\n{self.tail()}")
            time.sleep(0.02)
        os.statvfs(self.path)

    def _is_served(self) -> bool:
        """Whether the file system itself is mounted, not just the cover that comes before it."""
        return os.path.ismount(self.path) and not is_covered(str(self.path))

    def stop(self, *, check: bool = True) -> None:
        """Unmount and wait for the daemon's end, which must be a clean one if *check*."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.clean()
            if check:
                raise AssertionError(
                    f"the daemon did not end within {END_S} s of SIGTERM:\n{self.tail()}"
                ) from None
            return
        self._process = None
        still_there = is_mountpoint(self.path)
        self.clean()
        if check:
            assert code == 0, f"the daemon ended with exit code {code}:\n{self.tail()}"
            assert not still_there, f"{self.path} is still mounted after the daemon's end"

    def kill(self) -> None:
        """End the daemon as a crash would; the mount stays, dead."""
        self._kill()

    def _kill(self) -> None:
        """End the supervisor, then its servers, which nobody starts again then."""
        assert self._process is not None
        servers = self.servers()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _wait_for_end(pid)
        self._process = None

    def servers(self) -> list[int]:
        """Return the pids of the servers that the supervisor has started and that are there."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            return [int(word) for word in path.read_text().split()]
        except FileNotFoundError:
            return []

    def restart(self) -> None:
        """Unmount cleanly and mount again."""
        self.stop()
        self.start()

    def clean(self) -> None:
        """Leave nothing mounted and nothing running, whatever happened."""
        while is_mountpoint(self.path):
            if subprocess.run(["umount", "-l", self.path], check=False).returncode:
                break
        if self._process is not None:
            self._kill()
        _running.discard(self)

    def tail(self, lines: int = 80) -> str:
        """Return the end of the daemon's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def command(self, *arguments: str) -> Any:
        """Run ``kvfuse`` with *arguments* and ``--json``; return the object it prints."""
        environment = dict(
            os.environ, PYTHONPATH=str(PROJECT), KVFUSE_POOL_RUN_DIR=str(self.base / "run"),
            KVFUSE_POOL_STATE_DIR=str(self.base / "state"),
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "kvfuse", *arguments, "--json"],
            capture_output=True, text=True, check=False, env=environment, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"kvfuse {' '.join(arguments)}: {done.stderr}"
        return json.loads(done.stdout)

    def status(self) -> Any:
        """Return the object of ``kvfuse status``."""
        return self.command("status", str(self.path))

    def disk_of(self, name: str) -> Path:
        """Return the disk on which the file *name* of the mount lies, by looking at the disks."""
        holders = [disk for disk in self.disks if os.path.lexists(disk / name)]
        assert len(holders) == 1, f"{name} is on {len(holders)} disks"
        return holders[0]


_running: set[Mounted] = set()


@atexit.register
def _sweep() -> None:
    for mounted in list(_running):
        mounted.clean()


def _wait_for_end(pid: int) -> None:
    """Wait until no code of a process runs; one that a disk holds is left behind."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)


def is_mountpoint(path: Path) -> bool:
    """Whether something is mounted at *path*, dead or alive."""
    try:
        return os.path.ismount(path)
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ESTALE, errno.EIO)


def main(arguments: Sequence[str]) -> int:
    """List the setups that run here, or run a command on a mount with its path appended."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--driver", choices=list(SETUPS))
    parser.add_argument("--base", type=Path, help="directory for the pool, made if missing")
    parser.add_argument("command", nargs="*")
    given = parser.parse_args(arguments)
    if given.driver is None:
        sys.stdout.writelines(
            f"{name}\n" for name, obstacle in runnable_setups().items() if obstacle is None
        )
        return 0
    with Mounted(given.base, setup=given.driver) as mount:
        return subprocess.run([*given.command, mount.path], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
