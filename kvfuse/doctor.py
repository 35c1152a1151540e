"""What this machine lacks to mount a pool, and how to mend it.

Every check is a fact with a level: ``ok``, ``warn`` (it works, worse) or ``fail`` (no mount).
Nothing is changed on the machine.
"""

import ctypes.util
import gzip
import os
import platform
import re
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvfuse.system import syscalls

Level = Literal["ok", "warn", "fail"]

KERNEL_MIN = (4, 18)
KERNEL_PASSTHROUGH = (6, 9)
KERNEL_PASSTHROUGH_WRITE = (6, 12)
DESCRIPTORS_WANTED = 65_536
MEMORY_WANTED_BYTES = 512 << 20
RUN_DIR = Path("/run")
_CAP_SYS_ADMIN = 21
_DATA_FILESYSTEMS = ("ext4", "xfs", "btrfs")


@dataclass(frozen=True, slots=True)
class Check:
    """One fact: *text* says what is, *remedy* what to do when *level* is not ``ok``."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def examine(disks: Sequence[str] = ()) -> list[Check]:
    """Return all checks of this machine, and of the directories *disks*."""
    return [
        check_python(),
        check_kernel(platform.release()),
        *check_device(Path("/dev/fuse")),
        check_privilege(),
        *check_libfuse(),
        check_passthrough(platform.release()),
        check_openat2(),
        check_descriptors(),
        *check_run_dir(RUN_DIR),
        check_memory(Path("/proc/meminfo").read_text(encoding="utf-8")),
        check_io_timeout(disks),
        *(check_disk(path) for path in disks),
    ]


def can_mount(checks: Sequence[Check]) -> bool:
    """Whether none of *checks* says that a mount is impossible."""
    return all(check.level != "fail" for check in checks)


def kernel_version(release: str) -> tuple[int, int]:
    """Return (major, minor) of a kernel *release* such as "6.18.2-amd64"."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_python() -> Check:
    """Check the interpreter."""
    return Check("python", "ok", f"Python {platform.python_version()} at {sys.executable}")


def check_kernel(release: str) -> Check:
    """Check that the kernel is new enough for FUSE as kvfuse uses it."""
    version = kernel_version(release)
    if version < KERNEL_MIN:
        needed = ".".join(map(str, KERNEL_MIN))
        return Check(
            "kernel", "fail", f"Linux {release} is too old", f"install Linux {needed} or newer"
        )
    if version < KERNEL_PASSTHROUGH:
        return Check(
            "kernel",
            "warn",
            f"Linux {release}: no passthrough; no hot restart: open files are lost with a server",
            "Linux 6.12 or newer has both",
        )
    if version < KERNEL_PASSTHROUGH_WRITE:
        return Check(
            "kernel",
            "warn",
            f"Linux {release}: files opened for writing are not passed through",
            "Linux 6.12 or newer writes at the speed of the disks",
        )
    return Check("kernel", "ok", f"Linux {release}")


def check_device(device: Path) -> Iterator[Check]:
    """Check that the FUSE device is there and opens."""
    name = str(device)
    try:
        descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        remedy = "modprobe fuse; in a container: start it with --device /dev/fuse"
        yield Check(name, "fail", "missing", remedy)
    except OSError as exc:
        remedy = "run as root; in a container: start it with --device /dev/fuse"
        yield Check(name, "fail", f"does not open: {exc.strerror}", remedy)
    else:
        os.close(descriptor)
        yield Check(name, "ok", "opens for reading and writing")


def check_privilege() -> Check:
    """Check for root with CAP_SYS_ADMIN, which labels on files and mounting need."""
    remedy = "run as root; in a container: start it with --cap-add SYS_ADMIN"
    if os.geteuid() != 0:
        return Check("privilege", "fail", f"user {os.geteuid()} is not root", remedy)
    if not effective_capabilities() >> _CAP_SYS_ADMIN & 1:
        return Check("privilege", "fail", "root without CAP_SYS_ADMIN", remedy)
    return Check("privilege", "ok", "root with CAP_SYS_ADMIN")


def effective_capabilities() -> int:
    """Return the effective capabilities of this process as a bit set."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def check_libfuse() -> Iterator[Check]:
    """Check what the pyfuse3 driver needs: libfuse 3, its Python binding, fusermount3."""
    install = "apt install fuse3 libfuse3-dev pkg-config gcc python3-dev"
    library = ctypes.util.find_library("fuse3")
    if library is None:
        yield Check("libfuse", "warn", "libfuse 3 not found: no pyfuse3 driver", install)
    else:
        yield Check("libfuse", "ok", library)
    try:
        import pyfuse3
    except ImportError as exc:
        yield Check("pyfuse3", "warn", f"does not import: {exc}", f"{install}; pip install pyfuse3")
    else:
        yield Check("pyfuse3", "ok", f"pyfuse3 {pyfuse3.__version__}")
    helper = shutil.which("fusermount3")
    if helper is None:
        yield Check("fusermount3", "warn", "not found; only root can mount", "apt install fuse3")
    else:
        yield Check("fusermount3", "ok", helper)


def check_passthrough(release: str) -> Check:
    """Check whether the kernel can read and write past the daemon."""
    version = kernel_version(release)
    if version < KERNEL_PASSTHROUGH:
        return Check("passthrough", "warn", "off: needs Linux 6.9", "install Linux 6.12 or newer")
    option = _kernel_option("CONFIG_FUSE_PASSTHROUGH", release)
    if option == "n":
        return Check(
            "passthrough",
            "warn",
            "off: this kernel was built without CONFIG_FUSE_PASSTHROUGH",
            "use a kernel that has it",
        )
    known = "built in" if option == "y" else "Linux is new enough; its build is not known"
    return Check("passthrough", "ok", known)


def check_openat2() -> Check:
    """Check for openat2, which keeps every path inside its disk in one call."""
    try:
        # RESOLVE_NO_SYMLINKS; any directory will do
        os.close(syscalls.openat2(os.open("/", os.O_PATH), b".", os.O_PATH, 0x04))
    except OSError as exc:
        return Check(
            "openat2",
            "warn",
            f"not available ({exc.strerror}): each part of a path is opened by itself",
            "Linux 5.6 or newer; in a container: a seccomp profile that allows openat2",
        )
    return Check("openat2", "ok", "available")


def check_descriptors() -> Check:
    """Check the limit of open files; the daemon raises the soft limit to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_WANTED:
        return Check(
            "open files",
            "warn",
            f"limit {hard}: about as many files of the mount can be open at once",
            f"ulimit -Hn {DESCRIPTORS_WANTED}, or LimitNOFILE= in the unit",
        )
    return Check("open files", "ok", f"limit {hard}")


def check_run_dir(path: Path) -> Iterator[Check]:
    """Check that the live catalog will be in memory, and that there is room for it."""
    filesystem = filesystem_of(path)
    space = os.statvfs(path)
    free_bytes = space.f_bavail * space.f_frsize
    if filesystem != "tmpfs":
        yield Check(
            str(path),
            "warn",
            f"is on {filesystem}, not tmpfs: the catalog waits for that disk",
            f"mount -t tmpfs tmpfs {path}/kvfuse, or set pool.run_dir to a directory on tmpfs",
        )
        return
    level: Level = "ok" if free_bytes >= MEMORY_WANTED_BYTES else "warn"
    yield Check(
        str(path),
        level,
        f"tmpfs with {free_bytes >> 20} MiB free for the catalog (about 250 bytes a file)",
        "" if level == "ok" else f"mount -o remount,size=1G {path}",
    )


def check_memory(meminfo: str) -> Check:
    """Check the memory that is available now; *meminfo* is the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) * 1024
            break
    else:
        return Check("memory", "warn", "the kernel does not say what is available")
    text = f"{available_bytes >> 20} MiB available"
    if available_bytes < MEMORY_WANTED_BYTES:
        return Check("memory", "warn", text, "the catalog and its daemon want 512 MiB")
    return Check("memory", "ok", text)


def check_io_timeout(disks: Sequence[str]) -> Check:
    """Tell how long the kernel itself waits for a disk that hangs."""
    timeouts = {
        name: ms for path in disks if (name := _block_device(path)) if (ms := _timeout(name))
    }
    if not timeouts:
        return Check("I/O timeout", "ok", "30 s by default for disks that hang under an open file")
    listed = ", ".join(f"{name} {ms / 1000:g} s" for name, ms in sorted(timeouts.items()))
    return Check("I/O timeout", "ok", f"{listed}: reads of files open on a hung disk wait so long")


def check_disk(path: str) -> Check:
    """Check that the directory *path* can serve as a disk; nothing is written to it."""
    name = f"disk {path}"
    try:
        found = os.stat(path)
        space = os.statvfs(path)
    except OSError as exc:
        return Check(name, "warn", f"{exc.strerror}: the pool mounts without it", "mount it")
    if not stat.S_ISDIR(found.st_mode):
        return Check(name, "fail", "not a directory", "name the directory it is mounted at")
    filesystem = filesystem_of(Path(path))
    text = f"{filesystem}, {space.f_bavail * space.f_frsize >> 20} MiB available"
    if space.f_flag & os.ST_RDONLY:
        return Check(name, "warn", f"{text}, read-only: nothing is written to it", "remount it rw")
    if filesystem not in _DATA_FILESYSTEMS:
        return Check(name, "warn", f"{text}: not tried with kvfuse", "use ext4, XFS or btrfs")
    return Check(name, "ok", text)


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that *path* is on, "unknown" when it cannot be told."""
    # Imported here: mounts is not needed by a check that was given its facts.
    from kvfuse.system.mounts import read_mounts

    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    resolved = os.path.realpath(path)
    matching = [mount for mount in read_mounts() if mount.device == number]
    around = [
        mount
        for mount in matching or read_mounts()
        if resolved == mount.mountpoint or resolved.startswith(mount.mountpoint.rstrip("/") + "/")
    ]
    if not around:
        return matching[0].fstype if matching else "unknown"
    return max(around, key=lambda mount: len(mount.mountpoint)).fstype


def _kernel_option(name: str, release: str) -> str | None:
    """Return "y", "m" or "n" for a build option of the running kernel, None when not known."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{release}")):
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        for line in text.decode(errors="replace").splitlines():
            if line.startswith(f"{name}="):
                return line.partition("=")[2]
        return "n"
    return None


def _block_device(path: str) -> str | None:
    """Return the name of the whole block device below *path*, None when there is none."""
    try:
        device = os.stat(path).st_dev
        link = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None
    return link.parent.name if (link / "partition").exists() else link.name


def _timeout(name: str) -> int | None:
    try:
        return int(Path(f"/sys/block/{name}/queue/io_timeout").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
