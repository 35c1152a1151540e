"""The pyfuse3 driver: mounts a pool and answers until it is unmounted.

Works with every kernel and privilege libfuse works with; the bytes of files pass through this
process. pyfuse3 keeps its session in a global: one mount in a process.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyfuse3
import trio

from kvfuse.core.errors import KernelError
from kvfuse.drivers.counters import RequestCounters
from kvfuse.drivers.operations import PoolOperations, Timeouts
from kvfuse.pool.pool import Pool
from kvfuse.system import syscalls
from kvfuse.system.mounts import mount_at, mountpoint_of

log = logging.getLogger(__name__)

DEVICE = "/dev/fuse"
FILESYSTEM = "kvfuse"

# One task waits for each unanswered request. A hung disk keeps at most its threads and its queue
# (``threads.WAITING_MAX``), so this leaves room for the others while several disks hang.
TASKS_MAX = 4096
QUIET_INTERVAL_S = 0.01
QUIET_LOOKS = 5
QUIET_TIMEOUT_S = 2.0
READ_AHEAD_KB = 1024  # the largest request libfuse takes: eight times fewer than by default


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """How a pool is mounted.

    *access* is "posix" (everybody, the kernel checks permissions) or "owner" (only the user who
    mounts). The rest are seconds: how long the kernel may keep "no such name", a name and its
    attributes, and how long a client waits for a disk.
    """

    access: str = "posix"
    negative_ttl_s: float = 1.0
    entry_timeout_s: float = 1.0
    op_timeout_s: float = 5.0
    fsname: str = FILESYSTEM


def can_run() -> str | None:
    """Return why this driver cannot run here, None when it can."""
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
    return None


async def serve(
    pool: Pool,
    mountpoint: str,
    *,
    options: MountOptions,
    ready: Callable[[], None],
    stop: trio.Event,
    counters: RequestCounters | None = None,
) -> None:
    """Mount *pool* at *mountpoint* and answer until somebody unmounts it or *stop* is set.

    *ready* is called in the loop once the kernel has begun to ask; it must not touch the mount.
    *counters* counts the requests. The mount is gone when this returns or raises, also by
    cancellation; the pool stays open.

    Raises:
        KernelError: there is no usable FUSE device, or the mount or its connection failed.
    """
    reason = can_run()
    if reason is not None:
        raise KernelError(reason)
    timeouts = Timeouts(
        entry_s=options.entry_timeout_s,
        negative_s=options.negative_ttl_s,
        op_s=options.op_timeout_s,
    )
    pool.kernel_answers(options.entry_timeout_s)
    operations = PoolOperations(pool, timeouts=timeouts, counters=counters or RequestCounters())
    _mount(operations, mountpoint, options)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_announce, operations.answering, mountpoint, ready)
            nursery.start_soon(_unmount_when, stop, mountpoint, operations.counters)
            failure = await _answer()
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.close(unmount=True)
        operations.threads.pay_all()
    if failure is not None:
        raise KernelError(f"{mountpoint}: the FUSE connection broke: {failure}") from failure


def _mount(operations: PoolOperations, mountpoint: str, options: MountOptions) -> None:
    chosen = {
        f"fsname={options.fsname}",
        f"subtype={FILESYSTEM}",
        "default_permissions",
        "nosuid",
        "nodev",
    }
    if options.access == "posix":
        chosen.add("allow_other")
    try:
        pyfuse3.init(operations, mountpoint, chosen)
    except RuntimeError as exc:
        hint = "run as root"
        if os.geteuid() != 0 and options.access == "posix":
            hint = "run as root, or put user_allow_other into /etc/fuse.conf, or use access=owner"
        elif os.geteuid() == 0:
            hint = "it takes CAP_SYS_ADMIN (in a container: --cap-add SYS_ADMIN); see kvfuse doctor"
        raise KernelError(f"{mountpoint}: cannot be mounted ({exc}); {hint}") from exc


def _read_ahead(mountpoint: str) -> None:
    """Let the kernel ask for larger pieces when a file is read from start to end."""
    mount = mount_at(mountpoint_of(mountpoint))
    if mount is None:
        return
    with contextlib.suppress(OSError):  # /sys is read-only in containers; slower, no more
        Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").write_text(str(READ_AHEAD_KB))


async def _announce(answering: trio.Event, mountpoint: str, ready: Callable[[], None]) -> None:
    await answering.wait()
    _read_ahead(mountpoint)  # not earlier: the kernel's first request sets it back
    ready()


async def _answer() -> BaseException | None:
    """Answer requests until the connection is closed, or ``terminate`` is called, or it breaks.

    Returns:
        What broke it, None when it ended well.
    """
    first: BaseException | None = None
    try:
        await pyfuse3.main(max_tasks=TASKS_MAX)
    except* OSError as group:
        first = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    return first


async def _unmount_when(stop: trio.Event, mountpoint: str, counters: RequestCounters) -> None:
    """Unmount in peace while requests are still answered; when it is busy, stop answering."""
    await stop.wait()
    try:
        await trio.to_thread.run_sync(_leave, mountpoint, abandon_on_cancel=True)
    except OSError as exc:
        log.info("%s: clients are cut off: %s", mountpoint, exc.strerror)
        with trio.move_on_after(QUIET_TIMEOUT_S):
            await _quiet(counters)
        pyfuse3.terminate()


async def _quiet(counters: RequestCounters) -> None:
    """Wait until nothing is asked for a moment: syncfs returns before its writes have come."""
    calm = 0
    while calm < QUIET_LOOKS:
        await trio.sleep(QUIET_INTERVAL_S)
        calm = 0 if counters.active else calm + 1


def _leave(mountpoint: str) -> None:
    """Unmount, or write back what clients have mapped and raise why it stays mounted."""
    found = mount_at(mountpoint_of(mountpoint))
    if found is None or not found.is_kvfuse:  # detached already, and still held by somebody
        raise OSError(errno.EINVAL, "not mounted there any more")
    try:
        syscalls.umount(mountpoint)
    except OSError:
        with contextlib.suppress(OSError):
            fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                syscalls.syncfs(fd)
            finally:
                os.close(fd)
        raise
