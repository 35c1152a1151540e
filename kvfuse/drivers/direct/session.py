"""The direct driver: mounts a pool and speaks the kernel's protocol until it is unmounted.

Needs neither libfuse nor a compiler. As root on Linux 6.9 or newer the kernel passes the data of
files through to the disks; else, and for files it refuses, this process moves them.
"""

import errno
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfuse.core.errors import KernelError
from kvfuse.drivers.direct import abi, device, replies
from kvfuse.drivers.direct.connection import Connection
from kvfuse.drivers.direct.contents import Contents
from kvfuse.drivers.direct.crew import Crew
from kvfuse.drivers.direct.executor import Executor
from kvfuse.drivers.direct.names import Names
from kvfuse.drivers.direct.negotiation import Agreement, agree
from kvfuse.drivers.direct.notices import Notices
from kvfuse.drivers.direct.passthrough import DataModes
from kvfuse.drivers.direct.protocol import Init, ProtocolError, parse
from kvfuse.drivers.direct.replies import Timeouts
from kvfuse.drivers.direct.resent import Resent
from kvfuse.drivers.direct.targets import Targets
from kvfuse.pool.pool import Pool
from kvfuse.system.stop import Stop

log = logging.getLogger(__name__)

_FIRST_READ_BYTES = 8192  # the kernel refuses less, even for INIT
_OVERLAYFS = "overlay"
_UNTOLD_TIMEOUT_S = 1.0  # where the kernel cannot be told that a disk went or came
DRAIN_S = 5.0  # after a lazy unmount: for those who still have files open


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectOptions:
    """How a pool is mounted.

    *access* is "posix" (everybody; the kernel checks permissions) or "owner" (only *owner_uid* and
    *owner_gid*, this process's by default, who may do everything; the fastest). *mask_flags* are
    INIT flags, and *minor_max* the newest protocol minor, that the kernel is taken to offer.
    """

    access: str = "posix"
    owner_uid: int | None = None
    owner_gid: int | None = None
    negative_ttl_s: float = 1.0
    entry_timeout_s: float = 60.0
    attr_timeout_s: float = 60.0
    create_timeout_s: float = 0.0  # the first question about a new name reaches the pool
    temp_timeout_s: float = 0.2  # ... of a temp name too, but for the rename right after it
    op_timeout_s: float = 5.0
    passthrough: bool = True
    fsname: str = "kvfuse"
    mask_flags: int = (1 << 64) - 1
    minor_max: int = abi.KERNEL_MINOR


def can_run() -> str | None:
    """Return why this driver cannot run here, None when it can."""
    return device.obstacle()


def serve(
    pool: Pool, mountpoint: str, *, options: DirectOptions, ready: Callable[[], None], stop: Stop
) -> None:
    """Mount *pool* at *mountpoint* and answer until somebody unmounts it or *stop* is said.

    Raises:
        KernelError: this driver cannot run here, or the kernel refused the mount.
    """
    DirectSession(pool, mountpoint, options).serve(ready, stop)


class DirectSession:
    """One mount of a pool."""

    def __init__(
        self,
        pool: Pool,
        mountpoint: str,
        options: DirectOptions,
        connection: Connection | None = None,
    ) -> None:
        self._pool = pool
        self._mountpoint = mountpoint
        self._options = options
        self._connection = connection
        self._modes: DataModes | None = None
        self._executor: Executor | None = None
        self._contents: Contents | None = None
        self._crew: Crew | None = None
        self.notices: Notices | None = None  # from the mount on

    @property
    def obstacle(self) -> str | None:
        """Why files are read and written through this process; None when they are not."""
        return "not mounted yet" if self._modes is None else self._modes.obstacle

    @property
    def passthrough(self) -> bool:
        """Whether the kernel passes the data of files through to the disks."""
        return self.obstacle is None

    def is_alive(self) -> bool:
        """Whether the mount is answered, as far as can be told without a wait."""
        return self._crew is None or self._crew.is_alive()

    def counters(self) -> dict[str, Any]:
        """Return by kind of request: how many, how many of them failed, and their summed ns."""
        return {} if self._executor is None else self._executor.counters()

    def serve(self, ready: Callable[[], None], stop: Stop) -> None:
        """Mount, call *ready* when the mount answers, return when it is gone.

        Raises:
            KernelError: this driver cannot run here, or the kernel refused the mount.
        """
        reason = can_run()
        if reason is not None:
            raise KernelError(reason)
        if self._connection is not None and self._connection.fd is not None:
            self._go_on(self._connection, self._connection.fd, ready, stop)
            return
        options = self._options
        access = device.Access(
            posix=options.access == "posix",
            uid=os.geteuid() if options.owner_uid is None else options.owner_uid,
            gid=os.getegid() if options.owner_gid is None else options.owner_gid,
        )
        fd = device.mount(self._mountpoint, fsname=options.fsname, access=access)
        crew: Crew | None = None
        try:
            agreement = self._handshake(fd)
            crew = self.attach(fd, agreement)
            if self._connection is not None:
                self._connection.write(agreement)
                if agreement.has_resend:  # else nobody can go on with it
                    self._connection.keep(fd)
            self._answer(crew, ready, stop)
        finally:
            self._take_down(crew)
            if crew is None or crew.closed.is_set():
                os.close(fd)  # else a thread of the crew still reads from it

    def _go_on(
        self, connection: Connection, fd: int, ready: Callable[[], None], stop: Stop
    ) -> None:
        """Answer where the server before stopped; only a wanted end unmounts.

        What it had read and not answered is asked for again, once, before anything is read.
        """
        agreement = connection.read()
        if not agreement.has_resend:
            raise KernelError("the mount cannot be taken over: that takes Linux 6.9 or newer")
        crew = self.attach(fd, agreement)
        assert self._contents is not None, "attached"
        self._contents.restore(self._pool.opens)
        os.write(fd, replies.resend())
        # What is asked for again comes at once; a handle nobody asked for by then nobody has.
        sweep = threading.Timer(2 * self._options.op_timeout_s, self._contents.close_unanswered)
        sweep.daemon = True
        sweep.start()
        self._answer(crew, ready, stop)
        self._take_down(crew)

    def attach(self, fd: int, agreement: Agreement) -> Crew:
        """Make ready to answer on *fd*, an initialised connection; nothing is read from it yet."""
        options = self._options
        limit_s = math.inf if agreement.has_epoch else _UNTOLD_TIMEOUT_S
        attr_s = min(options.attr_timeout_s, limit_s)
        entry_s = min(options.entry_timeout_s, limit_s)
        timeouts = Timeouts.of(entry_s, attr_s)
        modes = DataModes(
            fd, obstacle=agreement.obstacle, mediates_writers=agreement.mediates_writers
        )
        contents = Contents(
            self._pool,
            modes,
            created=Timeouts.of(options.create_timeout_s, attr_s),
            temp=Timeouts.of(options.temp_timeout_s, attr_s),
        )
        executor = Executor(
            Names(self._pool, timeouts=timeouts, negative=Timeouts.of(options.negative_ttl_s, 0.0)),
            contents,
            Resent(self._pool, contents, timeouts),
            self._pool.request,
        )
        self._modes, self._executor, self._contents = modes, executor, contents
        # bytes pass the pool by, in the kernel or through here
        self._pool.data_in_kernel(on=True, passthrough=modes.obstacle is None)
        self.notices = notices = Notices(fd, agreement)
        self._pool.on_visibility(notices.everything_changed)
        self._pool.kernel_answers(entry_s, notices.name_expired, can_be_quiet=True)
        if modes.obstacle:
            log.info("files are read and written through the server: %s", modes.obstacle)
        return Crew(
            fd,
            executor,
            Targets(self._pool),
            op_timeout_s=options.op_timeout_s,
            note_timeout=self._pool.note_timeout,
        )

    def _handshake(self, fd: int) -> Agreement:
        """Answer INIT, the first request of a connection."""
        request = parse(memoryview(os.read(fd, _FIRST_READ_BYTES)))
        init = request.args
        if not isinstance(init, Init):
            raise ProtocolError(f"the connection begins with opcode {request.opcode}, not INIT")
        if init.major != abi.KERNEL_MAJOR:
            raise KernelError(
                f"the kernel speaks FUSE protocol {init.major}, this version {abi.KERNEL_MAJOR}"
            )
        init = init._replace(flags=init.flags & self._options.mask_flags)
        agreement = agree(
            init,
            passthrough=self._options.passthrough,
            stack_depth=self._stack_depth(),
            minor_max=self._options.minor_max,
        )
        os.write(fd, replies.init(request.unique, agreement.reply(init)))
        return agreement

    def _stack_depth(self) -> int:
        """Return how deep a file of the pool may be stacked: overlayfs is a level of its own.

        With 2, no overlayfs can be stacked on the mount: so only where a disk needs it.
        """
        disks = self._pool.status().get("disks", [])
        return 2 if any(disk.get("filesystem") == _OVERLAYFS for disk in disks) else 1

    def _answer(self, crew: Crew, ready: Callable[[], None], stop: Stop) -> None:
        ended = threading.Event()
        self._crew = crew
        crew.start(on_closed=ended.set)
        ready()
        stop.listen(ended.set)
        ended.wait()

    def _take_down(self, crew: Crew | None) -> None:
        """Unmount unless somebody did, in peace if nobody uses the mount."""
        if crew is not None and crew.closed.is_set():
            return
        try:
            device.unmount(self._mountpoint, lazy=crew is None)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # else somebody has detached it
                log.warning("%s: in use, detaching it: %s", self._mountpoint, exc.strerror)
                device.unmount(self._mountpoint, lazy=True)
        if crew is not None and not crew.closed.wait(DRAIN_S):
            log.warning("%s: files are still open; their users lose them now", self._mountpoint)
