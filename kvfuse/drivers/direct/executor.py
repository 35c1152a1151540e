"""The one place where requests are executed: a request in, the reply out, never an exception.

Concurrency: any thread. Counters are plain integers; readers see numbers of different moments.
"""

import errno
import logging
import time
from collections.abc import Callable
from typing import Protocol

from kvfuse.drivers.direct import abi, replies
from kvfuse.drivers.direct.abi import OPCODES_MAX, Opcode
from kvfuse.drivers.direct.contents import Contents, Reply
from kvfuse.drivers.direct.names import Names
from kvfuse.drivers.direct.protocol import WITHOUT_REPLY, Request

log = logging.getLogger(__name__)

_ERRNO_END = 512  # the kernel takes no larger errno, and its client would wait for ever

# What a process that takes a connection over must not execute twice.
JOURNALED = frozenset(
    {
        Opcode.CREATE,
        Opcode.LINK,
        Opcode.MKDIR,
        Opcode.MKNOD,
        Opcode.OPEN,
        Opcode.RELEASE,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.RMDIR,
        Opcode.SETATTR,
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


class Journal(Protocol):
    """Where mutations, opens and releases are written down around their execution."""

    def begin(self, request: Request) -> bytes | None:
        """Note that *request* will be executed; return its reply when it was before."""
        ...

    def end(self, request: Request, reply: bytes) -> None:
        """Note that *request* was executed and that *reply* is about to be sent."""
        ...


def reply_errno(exc: OSError) -> int:
    """Return the errno a client gets for *exc*: one the kernel accepts and does not remember."""
    code = exc.errno
    if code is None or not 0 < code < _ERRNO_END:
        return errno.EIO
    # The kernel takes ENOSYS as "never ask again", for the life of the mount.
    return errno.EOPNOTSUPP if code == errno.ENOSYS else code


class Executor:
    """Executes requests by their opcode, behind one guard."""

    def __init__(self, names: Names, contents: Contents, journal: Journal | None = None) -> None:
        self._contents = contents
        self._journal = journal
        self._handlers: list[Callable[[Request], Reply]] = [_unknown] * OPCODES_MAX
        for opcode in WITHOUT_REPLY:
            self._handlers[opcode] = _ignored
        self._handlers[Opcode.IOCTL] = _ioctl
        for opcode, handler in {**names.handlers(), **contents.handlers()}.items():
            self._handlers[opcode] = handler
        self._waits = [number in _WAITING for number in range(OPCODES_MAX)]
        self._journaled = [
            number in JOURNALED and journal is not None for number in range(OPCODES_MAX)
        ]
        self._requests = [0] * OPCODES_MAX
        self._failed = [0] * OPCODES_MAX
        self._duration_ns = [0] * OPCODES_MAX

    def may_wait(self, request: Request) -> bool:
        """Return whether *request* may wait for its disk even when the disk is healthy."""
        opcode = request.opcode
        if opcode >= OPCODES_MAX:
            return False
        if opcode == Opcode.OPEN:
            return self._contents.is_cold(request.node)
        if opcode == Opcode.SETATTR:
            return bool(request.args.valid & abi.ATTR_SIZE)
        return self._waits[opcode]

    def execute(self, request: Request) -> Reply:
        """Execute *request*; return its reply, empty when it takes none.

        A reply of two parts holds a view of a buffer of this thread: send it before the next call.
        """
        opcode = request.opcode
        if opcode >= OPCODES_MAX:
            return replies.error(request.unique, errno.ENOSYS)
        begin_ns = time.perf_counter_ns()
        try:
            if self._journaled[opcode]:
                reply = self._execute_once(request)
            else:
                reply = self._handlers[opcode](request)
        except OSError as exc:
            self._failed[opcode] += 1
            reply = replies.error(request.unique, reply_errno(exc))
        except Exception:
            self._failed[opcode] += 1
            log.exception("bug in %s", Opcode(opcode).name)
            reply = replies.error(request.unique, errno.EIO)
        self._duration_ns[opcode] += time.perf_counter_ns() - begin_ns
        self._requests[opcode] += 1
        return reply

    def _execute_once(self, request: Request) -> Reply:
        journal = self._journal
        assert journal is not None, "journaled only with a journal"
        known = journal.begin(request)
        if known is not None:
            return known
        try:
            reply = self._handlers[request.opcode](request)
        except OSError as exc:
            reply = replies.error(request.unique, reply_errno(exc))
        assert isinstance(reply, bytes), "no journaled reply carries file data"
        journal.end(request, reply)
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
