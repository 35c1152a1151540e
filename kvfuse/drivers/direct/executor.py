"""The one place where requests are executed: a request in, the reply out, never an exception.

Concurrency: any thread. Counters are plain integers; readers see numbers of different moments.
"""

import errno
import logging
import time
from collections.abc import Callable

from kvfuse.drivers.direct import abi, replies
from kvfuse.drivers.direct.abi import OPCODES_MAX, Opcode, opcode_name
from kvfuse.drivers.direct.contents import Contents, Reply
from kvfuse.drivers.direct.names import Names
from kvfuse.drivers.direct.protocol import WITHOUT_REPLY, Request
from kvfuse.drivers.direct.resent import RESENT, Resent
from kvfuse.heart.state import Request as RequestName

log = logging.getLogger(__name__)

_ERRNO_END = 512  # the kernel takes no larger errno, and its client would wait for ever

# What is not to be done twice: the pool notes it under the request's unique, or its open handle.
_ONCE = frozenset(
    {
        Opcode.CREATE,
        Opcode.LINK,
        Opcode.MKDIR,
        Opcode.MKNOD,
        Opcode.OPEN,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.RMDIR,
        Opcode.SYMLINK,
        Opcode.UNLINK,
    }
)

# Always left to a thread of the disk: they may wait for it however healthy it is.
_WAITING = frozenset(
    {
        Opcode.COPY_FILE_RANGE,
        Opcode.COPY_FILE_RANGE_64,
        Opcode.FALLOCATE,
        Opcode.FSYNC,
        Opcode.FSYNCDIR,
        Opcode.READ,
        Opcode.SYNCFS,
        Opcode.WRITE,
    }
)


def reply_errno(exc: OSError) -> int:
    """Return the errno a client gets for *exc*: one the kernel accepts and does not remember."""
    code = exc.errno
    if code is None or not 0 < code < _ERRNO_END:
        return errno.EIO
    # The kernel takes ENOSYS as "never ask again", for the life of the mount.
    return errno.EOPNOTSUPP if code == errno.ENOSYS else code


class Executor:
    """Executes requests by their opcode, behind one guard."""

    def __init__(
        self,
        names: Names,
        contents: Contents,
        resent: Resent,
        request: RequestName,
    ) -> None:
        self._contents = contents
        self._resent = resent
        self._request = request
        self._handlers: list[Callable[[Request], Reply]] = [_unknown] * OPCODES_MAX
        for opcode in WITHOUT_REPLY:
            self._handlers[opcode] = _ignored
        self._handlers[Opcode.IOCTL] = _ioctl
        for opcode, handler in {**names.handlers(), **contents.handlers()}.items():
            self._handlers[opcode] = handler
        self._waits: list[bool | Callable[[Request], bool]] = [
            number in _WAITING for number in range(OPCODES_MAX)
        ]
        self._waits[Opcode.OPEN] = lambda request: contents.is_cold(request.node)
        self._waits[Opcode.SETATTR] = lambda request: bool(request.args.valid & abi.ATTR_SIZE)
        self._once = [number in _ONCE for number in range(OPCODES_MAX)]
        self._requests = [0] * OPCODES_MAX
        self._failed = [0] * OPCODES_MAX
        self._duration_ns = [0] * OPCODES_MAX

    def may_wait(self, request: Request) -> bool:
        """Return whether *request* may wait for its disk even when the disk is healthy."""
        rule = self._waits[request.opcode]
        return rule and (rule is True or rule(request))

    def execute(self, request: Request) -> Reply:
        """Execute *request*; return its reply, empty when it takes none.

        A reply of two parts holds a view of a buffer of this thread: send it before the next call.
        """
        opcode = request.opcode
        begin_ns = time.perf_counter_ns()
        try:
            if request.unique & RESENT:
                reply = self._resent.execute(request, self._handlers[opcode])
            else:
                if self._once[opcode]:
                    self._request.unique = request.unique
                reply = self._handlers[opcode](request)
        except OSError as exc:
            self._failed[opcode] += 1
            reply = replies.error(request.unique, reply_errno(exc))
        except Exception:
            self._failed[opcode] += 1
            log.exception("bug in %s", opcode_name(opcode))
            reply = replies.error(request.unique, errno.EIO)
        self._duration_ns[opcode] += time.perf_counter_ns() - begin_ns
        self._requests[opcode] += 1
        return reply

    def unsent(self, request: Request, reply: Reply) -> None:
        """Undo what only the client of *request* could end: the kernel did not take the reply."""
        if request.opcode not in (Opcode.OPEN, Opcode.CREATE) or not isinstance(reply, bytes):
            return
        fh = replies.opened_fh(reply)
        if fh is None:
            return
        try:
            self._contents.close_unsent(fh)
        except OSError as exc:
            log.warning("a handle nobody received: %s", exc)

    def counters(self) -> dict[str, dict[str, int]]:
        """Return by kind of request: how many, how many of them failed, and their summed ns."""
        return {
            opcode.name.lower(): {
                "requests": self._requests[opcode],
                "failed": self._failed[opcode],
                "duration_ns": self._duration_ns[opcode],
            }
            for opcode in Opcode
            if self._requests[opcode]
        }


def _unknown(request: Request) -> bytes:
    # The kernel asks once and never again. Of the opcodes it knows these are ACCESS and locks, its
    # own matter here; POLL and BMAP, for which nothing here is fit; and DAX.
    return replies.error(request.unique, errno.ENOSYS)


def _ignored(request: Request) -> bytes:
    return b""  # FORGET counts nothing here: an id is a key of the catalog


def _ioctl(request: Request) -> bytes:
    return replies.error(request.unique, errno.ENOTTY)
