"""Requests the kernel sends again because a server died before it answered them.

Each is done exactly once. What a mutation did is in the catalog under the request's ``unique``, put
there by the transaction that did it; what an open got is in the table of open files. A request that
is in neither was not done, and is executed. One that has met the end of several servers may be
their cause: it is answered EIO.

Concurrency: any thread.
"""

import errno
import logging
from collections.abc import Callable

from kvfuse.drivers.direct import replies
from kvfuse.drivers.direct.abi import Opcode
from kvfuse.drivers.direct.contents import Contents, Reply
from kvfuse.drivers.direct.protocol import Request, SetXattr
from kvfuse.drivers.direct.replies import Timeouts
from kvfuse.pool.pool import Pool

log = logging.getLogger(__name__)

RESENT = 1 << 63  # FUSE_UNIQUE_RESEND
ATTEMPTS_MAX = 3

# What the reply of a mutation that is done already carries: the node it made, or nothing.
_MAKE = frozenset({Opcode.LINK, Opcode.MKDIR, Opcode.MKNOD, Opcode.SYMLINK})


class Resent:
    """Answers re-sent requests."""

    def __init__(self, pool: Pool, contents: Contents, timeouts: Timeouts) -> None:
        self._pool = pool
        self._contents = contents
        self._timeouts = timeouts

    def execute(self, request: Request, handler: Callable[[Request], Reply]) -> Reply:
        """Return the reply *request* would have got, executing it by *handler* if need be.

        Raises:
            OSError: the errno of its reply.
        """
        unique = request.unique & ~RESENT
        self._pool.request.unique = unique
        if self._pool.count_attempt(unique) > ATTEMPTS_MAX:
            log.error("%s met the end of servers again: answered EIO", Opcode(request.opcode).name)
            raise OSError(errno.EIO, "servers died of it")
        made = self._pool.result(unique)
        if made is not None:
            return self._done(request, made)
        match request.opcode:
            case Opcode.OPEN:
                reply = self._contents.opened_before(request, unique)
                return handler(request) if reply is None else reply
            case Opcode.RELEASE | Opcode.SETXATTR | Opcode.REMOVEXATTR:
                return self._tolerant(request, handler)
            case _:
                return handler(request)

    def _done(self, request: Request, made: int) -> Reply:
        if request.opcode == Opcode.CREATE:
            return self._contents.created_before(request, request.unique & ~RESENT, made)
        if request.opcode in _MAKE:
            return replies.entry(request.unique, self._pool.getattr(made), self._timeouts)
        return replies.done(request.unique)

    def _tolerant(self, request: Request, handler: Callable[[Request], Reply]) -> Reply:
        """Execute what may have been done with no trace but its effect."""
        try:
            return handler(request)
        except OSError as exc:
            if not self._is_effect(request, exc.errno or 0):
                raise
            return replies.done(request.unique)

    def _is_effect(self, request: Request, code: int) -> bool:
        """Whether errno *code* is what doing *request* a second time gives."""
        if request.opcode == Opcode.RELEASE:
            return code == errno.EBADF
        if request.opcode == Opcode.REMOVEXATTR:
            return code == errno.ENODATA
        args: SetXattr = request.args
        if code != errno.EEXIST:
            return False
        return self._pool.getxattr(request.node, args.name) == bytes(args.value)
