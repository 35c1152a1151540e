"""The FUSE device: mounting with it and unmounting, as root or through fusermount3.

Concurrency: one thread mounts and unmounts; the descriptor may be used by any.
"""

import array
import contextlib
import errno
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvfuse.core.errors import KernelError
from kvfuse.drivers.direct.protocol import supported
from kvfuse.system import syscalls
from kvfuse.system.mounts import FSTYPE, mount_at

DEVICE = "/dev/fuse"
_FUSERMOUNT = "fusermount3"
_SUBTYPE = FSTYPE.removeprefix("fuse.")
_READ_AHEAD_KB = 1024  # for what is read through the server; otherwise the disk's own value counts
_CAP_SYS_ADMIN = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may use a mount: everybody, with permissions checked by the kernel, or one owner."""

    posix: bool
    uid: int
    gid: int

    def options(self) -> list[str]:
        """Return the mount options that say so."""
        return ["default_permissions", "allow_other"] if self.posix else []


def obstacle() -> str | None:
    """Return why nothing can be mounted here by this driver, None when it can."""
    if not supported():
        return "the direct driver is for little-endian machines"
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        if exc.errno in (errno.EPERM, errno.EACCES):
            return (
                f"{DEVICE}: {exc.strerror}; run as root, "
                f"in a container with --device {DEVICE} --cap-add SYS_ADMIN"
            )
        return (
            f"{DEVICE}: {exc.strerror}; load the kernel module (modprobe fuse), "
            f"in a container add --device {DEVICE}"
        )
    if not may_mount() and shutil.which(_FUSERMOUNT) is None:
        return f"mounting takes CAP_SYS_ADMIN or {_FUSERMOUNT}; run as root, or install fuse3"
    return None


def may_mount() -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which mount(2) and passthrough take."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_SYS_ADMIN)
    return False


def mount(mountpoint: str, *, fsname: str, access: Access) -> int:
    """Mount a new connection at *mountpoint*; return its descriptor. INIT is still unread.

    Raises:
        KernelError: the kernel, or fusermount3, refused.
    """
    if may_mount():
        return _mount_by_syscall(mountpoint, fsname, access)
    return _mount_by_fusermount(mountpoint, fsname, access)


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Take *mountpoint* out of the tree; *lazy* also when it is in use.

    Raises:
        OSError: EBUSY when it is in use.
    """
    if may_mount():
        syscalls.umount(mountpoint, syscalls.MNT_DETACH if lazy else 0)
        return
    command = [_FUSERMOUNT, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        raise OSError(errno.EBUSY, done.stderr.decode(errors="backslashreplace").strip())


def _mount_by_syscall(mountpoint: str, fsname: str, access: Access) -> int:
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = [
        f"fd={fd}",
        "rootmode=40000",
        f"user_id={access.uid}",
        f"group_id={access.gid}",
        *access.options(),
    ]
    try:
        syscalls.mount(
            fsname, mountpoint, FSTYPE, syscalls.MS_NOSUID | syscalls.MS_NODEV, ",".join(options)
        )
    except OSError as exc:
        os.close(fd)
        raise KernelError(
            f"{mountpoint}: cannot be mounted ({exc.strerror}); it takes CAP_SYS_ADMIN "
            f"(in a container: --cap-add SYS_ADMIN) and an existing directory; see kvfuse doctor"
        ) from exc
    _widen_read_ahead(mountpoint)
    return fd


def _mount_by_fusermount(mountpoint: str, fsname: str, access: Access) -> int:
    options = [f"fsname={fsname}", f"subtype={_SUBTYPE}", "nosuid", "nodev", *access.options()]
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        done = subprocess.run(  # noqa: S603
            [_FUSERMOUNT, "-o", ",".join(options), "--", mountpoint],
            env={**os.environ, "_FUSE_COMMFD": str(there.fileno())},
            pass_fds=(there.fileno(),),
            capture_output=True,
            check=False,
        )
        there.close()
        fd = _received_fd(here) if done.returncode == 0 else None
    if fd is None:
        said = done.stderr.decode(errors="backslashreplace").strip() or "it said nothing"
        raise KernelError(
            f"{mountpoint}: {_FUSERMOUNT} cannot mount: {said}; "
            f"run as root, or put user_allow_other into /etc/fuse.conf, or use access=owner"
        )
    os.set_inheritable(fd, False)
    return fd


def _received_fd(sock: socket.socket) -> int | None:
    fds = array.array("i")
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: fds.itemsize])
            return fds[0]
    return None


def _widen_read_ahead(mountpoint: str) -> None:
    mounted = mount_at(mountpoint)
    if mounted is None:
        return
    with contextlib.suppress(OSError):  # /sys is read-only in containers; slower, no more
        path = Path(f"/sys/class/bdi/{mounted.device}/read_ahead_kb")
        path.write_text(str(_READ_AHEAD_KB), encoding="ascii")
