"""The guard: whatever a verb of the pool raises, the client gets an errno and the mount lives."""

import errno
import os
import threading
from collections.abc import Callable

import pyfuse3
import pytest
import trio
from trio.testing import trio_test

from kvfuse.drivers.counters import RequestCounters
from kvfuse.drivers.guard import reply_errno
from kvfuse.drivers.operations import PoolOperations, Timeouts

# answered by pyfuse3 itself: ENOSYS, after which the kernel asks no more; and its debugging aid
NOT_OURS = {"access", "poll", "stacktrace"}
NOT_GUARDED = {"init", "forget"}  # must not raise anything, FUSEError included

CTX = pyfuse3.RequestContext()
LONG = b"n" * 256

ARGUMENTS = {
    "lookup": (1, b"n", CTX),
    "getattr": (2, CTX),
    "setattr": (2, pyfuse3.EntryAttributes(), pyfuse3.SetattrFields(), None, CTX),
    "readlink": (2, CTX),
    "mknod": (1, b"n", 0o100644, 0, CTX),
    "mkdir": (1, b"n", 0o40755, CTX),
    "unlink": (1, b"n", CTX),
    "rmdir": (1, b"n", CTX),
    "symlink": (1, b"n", b"target", CTX),
    "rename": (1, b"n", 1, b"m", 0, CTX),
    "link": (2, 1, b"n", CTX),
    "open": (2, os.O_RDONLY, CTX),
    "read": (3, 0, 10),
    "write": (3, 0, b"data"),
    "flush": (3,),
    "release": (3,),
    "fsync": (3, False),
    "opendir": (1, CTX),
    "readdir": (1, 0, None),
    "releasedir": (1,),
    "fsyncdir": (1, False),
    "statfs": (CTX,),
    "setxattr": (2, b"user.n", b"value", CTX),
    "getxattr": (2, b"user.n", CTX),
    "listxattr": (2, CTX),
    "removexattr": (2, b"user.n", CTX),
    "create": (1, b"n", 0o100644, os.O_RDWR, CTX),
}
ALWAYS_DONE = {"release", "releasedir"}  # nobody can be told


class BrokenPool:
    """A pool in which every verb fails, in a thread of disk 0."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self._fail = fail

    def note_timeout(self, disk: int, thread: int) -> None:
        raise AssertionError("nothing takes long here")

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("disk_of"):
            return lambda *_: 0
        return lambda *_: self._fail()


def operations(fail: Callable[[], object], **timeouts: float) -> PoolOperations:
    """Handlers over a pool whose verbs all call *fail*."""
    defaults = {"entry_s": 1.0, "negative_s": 1.0, "op_s": 60.0}
    return PoolOperations(
        BrokenPool(fail),  # type: ignore[arg-type]
        timeouts=Timeouts(**{**defaults, **timeouts}),
        counters=RequestCounters(),
    )


def failing(exc: BaseException) -> Callable[[], object]:
    """Return what raises *exc*."""

    def fail() -> object:
        raise exc

    return fail


async def errno_of(handlers: PoolOperations, op: str, *args: object) -> int:
    """Call a handler that must fail; return the errno."""
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await getattr(handlers, op)(*(args or ARGUMENTS[op]))
    return caught.value.errno


def test_every_handler_wears_the_guard() -> None:
    """Each handler pyfuse3 knows is ours and guarded, or is left to pyfuse3 on purpose."""
    known = {name for name in vars(pyfuse3.Operations) if not name.startswith("_")}
    known -= {"supports_dot_lookup", "enable_writeback_cache", "enable_acl"}
    ours = {name for name in known if name in vars(PoolOperations)}

    assert known - ours == NOT_OURS
    assert ours - NOT_GUARDED == set(ARGUMENTS)
    for name in ARGUMENTS:
        assert vars(PoolOperations)[name].__code__.co_name == "guarded", name


@pytest.mark.parametrize("op", sorted(set(ARGUMENTS) - ALWAYS_DONE))
@trio_test
async def test_a_bug_in_the_pool_is_eio_and_logged(op: str, caplog: pytest.LogCaptureFixture):
    """An exception nobody expected ends one request, not the mount."""
    handlers = operations(failing(ZeroDivisionError("a bug")))

    assert await errno_of(handlers, op) == errno.EIO
    assert f"bug in {op}" in caplog.text


@pytest.mark.parametrize("op", sorted(set(ARGUMENTS) - ALWAYS_DONE))
@trio_test
async def test_the_errno_of_the_pool_is_the_errno_of_the_client(op: str) -> None:
    """What the pool says is passed on as it is."""
    handlers = operations(failing(OSError(errno.EDQUOT, "quota")))

    assert await errno_of(handlers, op) == errno.EDQUOT


@pytest.mark.parametrize("op", sorted(ALWAYS_DONE))
@trio_test
async def test_a_release_always_succeeds(op: str, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel forgets the handle whatever the answer; the failure is logged."""
    handlers = operations(failing(OSError(errno.EIO, "no disk")))

    await getattr(handlers, op)(*ARGUMENTS[op])
    assert op == "releasedir" or "no disk" in caplog.text


@trio_test
async def test_init_and_forget_raise_nothing() -> None:
    """pyfuse3 guards these two least: even FUSEError would end the mount."""
    handlers = operations(failing(RuntimeError()))

    handlers.init()
    await handlers.forget([(1, 1), (2, 7)])
    assert handlers.answering.is_set()


@trio_test
async def test_a_cancelled_handler_is_cancelled() -> None:
    """Shutdown is not an error of the request."""
    began, go = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go.wait()

    handlers = operations(wait)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handlers.flush, 3)
            await trio.to_thread.run_sync(began.wait)
            scope.cancel()

    go.set()
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("raised", "replied"),
    [
        (errno.ENOENT, errno.ENOENT),
        (None, errno.EIO),
        (0, errno.EIO),
        (-5, errno.EIO),
        (512, errno.EIO),
        (errno.ENOSYS, errno.EOPNOTSUPP),
    ],
)
def test_only_what_the_kernel_takes_is_replied(raised: int | None, replied: int) -> None:
    """An errno out of range would leave the client waiting; ENOSYS would be kept for ever."""
    exc = OSError("text") if raised is None else OSError(raised, "text")

    assert reply_errno(exc) == replied


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("lookup", (1, LONG, CTX)),
        ("mknod", (1, LONG, 0o100644, 0, CTX)),
        ("mkdir", (1, LONG, 0o755, CTX)),
        ("symlink", (1, LONG, b"t", CTX)),
        ("link", (2, 1, LONG, CTX)),
        ("rename", (1, b"n", 1, LONG, 0, CTX)),
        ("unlink", (1, LONG, CTX)),
        ("rmdir", (1, LONG, CTX)),
        ("create", (1, LONG, 0o644, os.O_RDWR, CTX)),
    ],
)
@trio_test
async def test_a_name_too_long_is_refused_before_anything_is_looked_up(op: str, args: tuple):
    """256 bytes are ENAMETOOLONG; the pool is not asked."""
    handlers = operations(failing(AssertionError("asked")))

    assert await errno_of(handlers, op, *args) == errno.ENAMETOOLONG


@pytest.mark.parametrize("name", [b"security.capability", b"trusted.x", b"system.posix_acl_access"])
@trio_test
async def test_attributes_that_are_not_kept_are_answered_without_the_pool(name: bytes) -> None:
    """The kernel asks for security.capability at every write: it must cost nothing."""
    handlers = operations(failing(AssertionError("asked")))

    assert await errno_of(handlers, "getxattr", 2, name, CTX) == errno.ENODATA
    assert await errno_of(handlers, "setxattr", 2, name, b"", CTX) == errno.EOPNOTSUPP
    assert await errno_of(handlers, "removexattr", 2, name, CTX) == errno.EOPNOTSUPP


@trio_test
async def test_an_absent_name_is_remembered_by_the_kernel() -> None:
    """Id 0 with a time to live is a negative entry; without a time it is ENOENT."""
    entry = await operations(lambda: None, negative_s=2.5).lookup(1, b"n", CTX)

    assert (entry.st_ino, entry.entry_timeout) == (0, 2.5)
    assert await errno_of(operations(lambda: None, negative_s=0), "lookup") == errno.ENOENT


@trio_test
async def test_requests_and_failures_are_counted() -> None:
    """Each kind of request has its numbers."""
    handlers = operations(lambda: None)
    for _ in range(3):
        await handlers.lookup(1, b"n", CTX)
    await errno_of(handlers, "lookup", 1, LONG, CTX)

    numbers = handlers.counters.to_json()["lookup"]
    assert (numbers["requests"], numbers["failed"]) == (4, 1)
    assert numbers["duration_ns"] > 0
