"""Threads of a disk: bounded, with a deadline, and never in the way of another disk."""

import errno
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import trio_test, wait_all_tasks_blocked

from kvfuse.drivers.threads import DiskThreads

SOON_S = 0.05  # a deadline that is meant to pass
LATER_S = 60.0  # one that is not


class Stuck:
    """A verb that waits until it is let go, and how often it began."""

    def __init__(self) -> None:
        self.calls = 0
        self._go = threading.Event()

    def __call__(self, result: str = "late") -> str:
        self.calls += 1
        assert self._go.wait(LATER_S)
        return result

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def stuck():
    """A stuck verb, let go at the end so that no thread stays."""
    verb = Stuck()
    yield verb
    verb.let_go()


def make(told: list[int] | None = None, **options) -> DiskThreads:
    """Threads that note timeouts in *told*."""

    def note(disk: int, thread: int) -> None:
        assert thread != threading.get_native_id(), "the loop is not to blame"
        if told is not None:
            told.append(disk)

    return DiskThreads(note, **{"op_timeout_s": LATER_S, **options})


async def failure(call: Awaitable[object]) -> int:
    """Return the errno *call* raises."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what is looked at
        await call
    return caught.value.errno


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread is about to do."""
    with trio.fail_after(LATER_S):
        while not condition():  # noqa: ASYNC110 - the thread knows no trio
            await trio.sleep(0.001)


@trio_test
async def test_a_verb_of_no_disk_runs_in_the_loop() -> None:
    """What is answered from memory costs no thread."""
    assert await make().run(None, threading.get_ident) == threading.get_ident()


@trio_test
async def test_a_verb_of_a_disk_runs_in_a_thread_and_returns_its_result() -> None:
    """Arguments go in, the result comes out, the loop does not run it."""
    threads = make()

    assert await threads.run(0, divmod, 7, 2) == (3, 1)
    assert await threads.run(0, threading.get_ident) != threading.get_ident()


@trio_test
async def test_what_a_verb_raises_reaches_the_waiter() -> None:
    """The errno of the disk is the errno of the request."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    assert await failure(make().run(0, fail)) == errno.ENOSPC


@trio_test
async def test_a_disk_has_at_most_its_threads(stuck: Stuck) -> None:
    """With a limit of two, a third verb waits and another disk does not."""
    threads = make(limit_per_disk=2)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(threads.run, 0, stuck)
        await until(lambda: stuck.calls == 2)
        await wait_all_tasks_blocked()

        assert await threads.run(1, int, "7") == 7
        assert stuck.calls == 2
        stuck.let_go()
    assert stuck.calls == 3


@trio_test
async def test_a_late_verb_is_answered_eio_and_its_disk_is_named(stuck: Stuck) -> None:
    """Past the deadline the client gets EIO, and the pool learns which disk was slow."""
    told: list[int] = []
    late: list[str] = []
    threads = make(told, op_timeout_s=SOON_S)

    assert await failure(threads.run(7, stuck, "fh", on_late=late.append)) == errno.EIO
    assert told == [7]
    assert late == []
    stuck.let_go()
    await until(lambda: late == ["fh"])


@trio_test
async def test_a_verb_that_never_began_never_will(stuck: Stuck) -> None:
    """Who was told EIO before a thread was free finds nothing done later, and blames no disk."""
    told: list[int] = []
    done: list[int] = []
    threads = make(told, limit_per_disk=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, 0, stuck)
        await until(lambda: stuck.calls == 1)

        assert await failure(threads.run(0, done.append, 1, timeout_s=SOON_S)) == errno.EIO
        stuck.let_go()
    await threads.run(0, done.append, 2)
    assert done == [2]
    assert told == []


@trio_test
async def test_a_disk_whose_threads_are_all_late_is_answered_at_once(stuck: Stuck) -> None:
    """Nobody queues behind a hung disk; when it lets go, it is used again."""
    threads = make(limit_per_disk=2)
    for _ in range(2):
        assert await failure(threads.run(0, stuck, timeout_s=SOON_S)) == errno.EIO

    with trio.fail_after(LATER_S / 2):
        assert await failure(threads.run(0, int)) == errno.EIO
    stuck.let_go()
    with trio.fail_after(LATER_S):
        while True:
            try:
                assert await threads.run(0, int) == 0
                break
            except OSError:
                await trio.sleep(0.001)


@trio_test
async def test_too_long_a_queue_is_answered_at_once(stuck: Stuck) -> None:
    """One runs, one waits, the third is refused."""
    threads = make(limit_per_disk=1, waiting_max=1)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(threads.run, 0, stuck)
        await wait_all_tasks_blocked()

        assert await failure(threads.run(0, int)) == errno.EIO
        stuck.let_go()


@trio_test
async def test_a_release_is_done_once_even_if_the_disk_hangs(stuck: Stuck) -> None:
    """What must run is owed: it returns in time, runs when a thread is free, and only once."""
    done: list[int] = []
    threads = make(limit_per_disk=1)
    assert await failure(threads.run(0, stuck, timeout_s=SOON_S)) == errno.EIO

    await threads.run_surely(0, done.append, 1)
    assert done == []
    stuck.let_go()
    await until(lambda: done == [1])
    threads.pay_all()
    assert done == [1]


@trio_test
async def test_a_release_that_waits_in_vain_is_done_later(stuck: Stuck) -> None:
    """Also when the deadline passes in the queue."""
    done: list[int] = []
    threads = make(limit_per_disk=1, op_timeout_s=SOON_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: threads.run(0, stuck, timeout_s=LATER_S))
        await until(lambda: stuck.calls == 1)

        await threads.run_surely(0, done.append, 1)
        assert done == []
        stuck.let_go()
    await until(lambda: done == [1])


@trio_test
async def test_a_release_that_fails_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The client cannot be told; the log is."""

    def fail() -> None:
        raise OSError(errno.EIO, "gone")

    await make().run_surely(0, fail)
    assert "gone" in caplog.text


@trio_test
async def test_the_result_of_a_cancelled_verb_is_handed_over(stuck: Stuck) -> None:
    """At shutdown an open that nobody waits for any more is still released."""
    late: list[str] = []
    threads = make()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: threads.run(0, stuck, "fh", on_late=late.append))
            await until(lambda: stuck.calls == 1)
            scope.cancel()

    assert scope.cancelled_caught
    stuck.let_go()
    await until(lambda: late == ["fh"])
