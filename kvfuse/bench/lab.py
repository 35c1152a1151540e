"""Fresh file systems and the mounts over them, for a run of the bench; all undone at its end.

Every target has directories of its own on the same file systems, so that all have the same disks.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvfuse.bench.rounds import Target
from kvfuse.core.errors import KernelError, KvfuseError
from kvfuse.system.syscalls import MNT_DETACH, umount

DISKS = 2
IMAGE_BYTES = 4 << 30  # sparse
_MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
}
_PACKAGE_PATH = str(Path(__file__).resolve().parents[2])  # this kvfuse, not one installed
_START_S = 60.0
_END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of kvfuse as a target."""

    driver: str = "direct"
    access: str = "posix"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Union:
    """Another union file system as a target: its command for disks and a mountpoint."""

    command: str
    options: str
    branch: str = ""  # appended to each disk

    def argv(self, disks: Sequence[Path], mountpoint: Path) -> list[str]:
        """Return the command that mounts it."""
        branches = ":".join(f"{disk}{self.branch}" for disk in disks)
        return [self.command, "-o", self.options, branches, str(mountpoint)]


# What a user would take: caches as each recommends them for programs that map files.
SYSTEMS: dict[str, Pool | Union] = {
    "kvfuse": Pool(),
    "kvfuse owner": Pool(access="owner"),
    "kvfuse nopass": Pool(environment={"KVFUSE_TEST_PASSTHROUGH": "off"}),
    "kvfuse pyfuse3": Pool(driver="pyfuse3"),
    "mergerfs": Union(
        command="mergerfs",
        options="allow_other,use_ino,cache.files=auto-full,category.create=mfs,minfreespace=64M",
    ),
    "unionfs": Union(command="unionfs-fuse", options="cow,allow_other,use_ino", branch="=RW"),
}
NATIVE = "native"


def obstacle(name: str) -> str | None:
    """Return why the system *name* cannot be measured here, None when it can."""
    system = SYSTEMS[name]
    if isinstance(system, Union) and shutil.which(system.command) is None:
        return f"{system.command} is not installed"
    return None


class Lab:
    """File systems and mounts below one new directory, from ``with`` to its end."""

    def __init__(self, filesystem: str, images: Path | None = None) -> None:
        if os.geteuid() != 0:
            raise KernelError("the bench makes loop devices and mounts; run it as root")
        if shutil.which(_MKFS[filesystem][0]) is None:
            raise KernelError(f"{_MKFS[filesystem][0]} is not installed; choose another --fs")
        self.filesystem = filesystem
        self.base = Path(
            tempfile.mkdtemp(prefix=f"kvfuse-bench.{os.getpid()}.", dir=images or _images_dir())
        )
        self.disks: list[Path] = []
        self._mounts: list[Path] = []
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Lab":
        try:
            for number in range(DISKS):
                self.disks.append(self._make_disk(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_disk(self, number: int) -> Path:
        image = self.base / f"{number}.img"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        do([*_MKFS[self.filesystem], str(image)])
        path = self.base / f"disk{number}"
        path.mkdir()
        do(["mount", "-o", "loop,noatime", str(image), str(path)])
        self._mounts.append(path)
        return path

    def native(self) -> Target:
        """Return a directory of one of the file systems itself."""
        base = self.disks[0] / NATIVE
        base.mkdir()
        return Target(NATIVE, base)

    def mount(self, name: str) -> Target:
        """Mount the system *name* and return it as a target.

        Raises:
            KvfuseError: it does not come up.
        """
        system = SYSTEMS[name]
        word = name.replace(" ", "-")
        disks = [disk / word for disk in self.disks]
        mountpoint = self.base / "mnt" / word
        for path in (*disks, mountpoint):
            path.mkdir(parents=True)
        if isinstance(system, Union):
            argv, environment = system.argv(disks, mountpoint), dict(os.environ)
        else:
            argv = self._pool_argv(word, system, disks, mountpoint)
            environment = {**os.environ, "PYTHONPATH": _PACKAGE_PATH, **system.environment}
        self._start(name, argv, environment, mountpoint)
        base = mountpoint / "bench"
        base.mkdir()
        return Target(name, base)

    def _pool_argv(
        self, word: str, pool: Pool, disks: Sequence[Path], mountpoint: Path
    ) -> list[str]:
        state = self.base / "state" / word
        settings = {
            "mountpoint": str(mountpoint),
            "disks": [str(disk) for disk in disks],
            "driver": pool.driver,
            "access": pool.access,
            "state_dir": str(state),
            "run_dir": str(self.base / "run" / word),
        }
        state.mkdir(parents=True)
        config = state / "kvfuse.toml"
        # a JSON string or list of strings is one of TOML too
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        config.write_text("[pool]\n" + "".join(lines))
        mount = ["mount", "--config", str(config), "--init", "--foreground"]
        return [sys.executable, "-m", "kvfuse", *mount]

    def _start(
        self, name: str, argv: list[str], environment: dict[str, str], mountpoint: Path
    ) -> None:
        log = self.base / f"{mountpoint.name}.log"
        before = os.stat(mountpoint).st_dev
        self._mounts.append(mountpoint)
        with log.open("wb") as output:
            server = subprocess.Popen(  # noqa: S603 - one of SYSTEMS
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        self._servers.append(server)
        deadline_s = time.monotonic() + _START_S
        while os.stat(mountpoint).st_dev == before:
            failed = server.poll() not in (None, 0)  # 0: it went to the background
            if failed or time.monotonic() > deadline_s:
                said = log.read_text(errors="backslashreplace").strip().splitlines()
                raise KvfuseError(f"{name} does not come up: {said[-1] if said else argv[0]}")
            time.sleep(0.02)

    def close(self) -> None:
        """Unmount everything and remove it, whatever state it is in."""
        for server in self._servers:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        for path in reversed(self._mounts[len(self.disks) :]):
            with contextlib.suppress(OSError):
                umount(str(path), MNT_DETACH)
        for server in self._servers:
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        for path in self._mounts[: len(self.disks)]:
            _unmount_patiently(path)
        self._mounts.clear()
        self._servers.clear()
        shutil.rmtree(self.base, ignore_errors=True)


def _unmount_patiently(path: Path) -> None:
    """Unmount *path* when its last user has gone; a server in the background needs a moment."""
    deadline_s = time.monotonic() + _END_S
    while True:
        try:
            umount(str(path), 0)
        except OSError:
            if time.monotonic() < deadline_s:
                time.sleep(0.05)
                continue
            with contextlib.suppress(OSError):
                umount(str(path), MNT_DETACH)
        return


def _images_dir() -> Path:
    """Return where images lie: in memory if it has the room, so that no real disk is measured."""
    memory = Path("/dev/shm")  # noqa: S108 - a fresh directory is made in it
    needed = DISKS * IMAGE_BYTES
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed:
        return memory
    return Path(tempfile.gettempdir())


def do(argv: list[str]) -> None:
    """Run a command to its end.

    Raises:
        KvfuseError: it failed.
    """
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise KvfuseError(f"{argv[0]}: {said[-1] if said else 'it failed and said nothing'}")
