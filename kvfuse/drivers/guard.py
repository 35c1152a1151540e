"""The guard around every pyfuse3 handler: an exception becomes an errno, a request is counted.

Anything but ``FUSEError`` that leaves a handler ends the mount, so no handler goes without it.
"""

import errno
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyfuse3

from kvfuse.drivers.counters import RequestCounters

log = logging.getLogger(__name__)

_ERRNO_END = 512  # the kernel takes no larger errno, and its client would wait for ever


class Counted(Protocol):
    """What counts its requests."""

    counters: RequestCounters


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Counted)
_Method = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]


def reply_errno(exc: OSError) -> int:
    """Return the errno a client gets for *exc*: one the kernel accepts and does not remember."""
    code = exc.errno
    if code is None or not 0 < code < _ERRNO_END:
        return errno.EIO
    # The kernel takes ENOSYS as "never ask again", for the life of the mount.
    return errno.EOPNOTSUPP if code == errno.ENOSYS else code


def handler(method: _Method[S, P, R]) -> _Method[S, P, R]:
    """Guard a handler: what it raises becomes ``FUSEError``; ``trio.Cancelled`` passes."""
    op = method.__name__

    @functools.wraps(method)
    async def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        counters = self.counters
        counters.active += 1
        begin_ns = time.perf_counter_ns()
        failed = True
        try:
            result = await method(self, *args, **kwargs)
            failed = False
        except pyfuse3.FUSEError:
            raise
        except OSError as exc:
            code = reply_errno(exc)
        except Exception:
            log.exception("bug in %s", op)
            code = errno.EIO
        else:
            return result
        finally:
            counters.active -= 1
            counters.of(op).add(time.perf_counter_ns() - begin_ns, failed=failed)
        raise pyfuse3.FUSEError(code)

    return cast("_Method[S, P, R]", guarded)  # wraps() forgets that self has no keyword
