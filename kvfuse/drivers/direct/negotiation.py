"""What the driver and the kernel agree on when a connection begins. Pure."""

from dataclasses import dataclass

from kvfuse.drivers.direct import abi
from kvfuse.drivers.direct.protocol import Init
from kvfuse.drivers.direct.replies import InitReply

MAX_WRITE_BYTES = 1 << 20  # the largest request without raising fs.fuse.max_pages_limit
_MAX_PAGES = MAX_WRITE_BYTES // 4096
_MAX_BACKGROUND = 256  # readahead and RELEASE in flight; the kernel's default is 12
_CONGESTION = _MAX_BACKGROUND * 3 // 4
_MAX_READAHEAD_BYTES = MAX_WRITE_BYTES

# No WRITEBACK_CACHE: it switches passthrough off. No POSIX_ACL: it implies default_permissions.
# KILLPRIV_V2 promises what holds anyway: setuid and setgid are masked on regular files, and the
# mount is nosuid.
_WANTED = (
    abi.ASYNC_READ
    | abi.ATOMIC_O_TRUNC
    | abi.EXPORT_SUPPORT
    | abi.BIG_WRITES
    | abi.AUTO_INVAL_DATA
    | abi.DO_READDIRPLUS
    | abi.READDIRPLUS_AUTO
    | abi.ASYNC_DIO
    | abi.PARALLEL_DIROPS
    | abi.MAX_PAGES
    | abi.CACHE_SYMLINKS
    | abi.HANDLE_KILLPRIV_V2
    | abi.INIT_EXT
    | abi.HAS_EXPIRE_ONLY
    | abi.DIRECT_IO_ALLOW_MMAP
    | abi.HAS_RESEND
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What holds for the life of a connection: a process that takes it over needs to know it.

    *flags* is flags and flags2 as one number. *obstacle* says why there is no passthrough, None
    when there is.
    """

    minor: int
    flags: int
    stack_depth: int
    obstacle: str | None

    @property
    def passthrough(self) -> bool:
        """Whether files may be read and written past the server."""
        return self.obstacle is None

    @property
    def mediates_writers(self) -> bool:
        """Whether writes must come to the server, or the kernel would not see the file grow."""
        return self.minor < abi.MINOR_PASSTHROUGH_WRITES

    @property
    def has_resend(self) -> bool:
        """Whether unanswered requests can be asked for again: what hot restart takes."""
        return bool(self.flags & abi.HAS_RESEND)

    @property
    def has_expire_only(self) -> bool:
        """Whether a name can be expired without dropping what hangs below it."""
        return bool(self.flags & abi.HAS_EXPIRE_ONLY)

    @property
    def has_epoch(self) -> bool:
        """Whether one notification can expire every name."""
        return self.minor >= abi.MINOR_EPOCH

    def reply(self, init: Init) -> InitReply:
        """Return the answer to *init*."""
        return InitReply(
            minor=self.minor,
            max_readahead_bytes=min(init.max_readahead_bytes, _MAX_READAHEAD_BYTES),
            flags=self.flags,
            max_background=_MAX_BACKGROUND,
            congestion_threshold=_CONGESTION,
            max_write_bytes=MAX_WRITE_BYTES,
            max_pages=_MAX_PAGES,
            stack_depth=self.stack_depth if self.passthrough else 0,
        )


def agree(
    init: Init, *, passthrough: bool, stack_depth: int, minor_max: int = abi.KERNEL_MINOR
) -> Agreement:
    """Return what to agree on with the kernel that sent *init*.

    *passthrough* says whether it is wanted, *stack_depth* how deep a disk may be stacked: 1, or 2
    when one lies on overlayfs. A lower *minor_max* makes the kernel behave like an older one.
    """
    minor = min(init.minor, minor_max)
    obstacle = None
    if not passthrough:
        obstacle = "passthrough is switched off"
    elif minor < abi.MINOR_PASSTHROUGH or not init.flags & abi.PASSTHROUGH:
        obstacle = "this kernel has no FUSE passthrough: it takes Linux 6.9 or newer"
    flags = init.flags & _WANTED
    if obstacle is None:
        flags |= abi.PASSTHROUGH
    return Agreement(minor=minor, flags=flags, stack_depth=stack_depth, obstacle=obstacle)
