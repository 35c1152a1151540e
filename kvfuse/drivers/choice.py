"""Which driver serves a mount, and serving with it until the mount ends."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import trio

from kvfuse.config import Config
from kvfuse.drivers import trio_pyfuse3
from kvfuse.drivers.counters import RequestCounters
from kvfuse.errors import KernelError
from kvfuse.pool import Pool
from kvfuse.stop import Stop


class Driver(Protocol):
    """A driver that does not serve yet. *reason* says why it was chosen, "" when it was named."""

    name: str
    reason: str

    @property
    def passthrough(self) -> bool:
        """Whether reads and writes go past the daemon; known once it serves."""
        ...

    def serve(self, pool: Pool, ready: Callable[[], None], stop: Stop) -> None:
        """Mount, call *ready* when the mount answers, return when it is gone."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return what was counted of each kind of request, JSON-ready."""
        ...


def choose_driver(config: Config) -> Driver:
    """Return the driver that *config* asks for; for ``auto`` the fastest that can run here.

    Raises:
        KernelError: the driver that was named cannot run here.
    """
    wanted = config.pool.driver
    if wanted == "pyfuse3":
        return _Pyfuse3(config, "")
    obstacle = "it is not part of this version"
    if wanted == "direct":
        raise KernelError(f"driver direct cannot run: {obstacle}; use --driver auto")
    return _Pyfuse3(config, f"driver direct cannot run: {obstacle}")


class _Pyfuse3:
    name = "pyfuse3"
    passthrough = False

    def __init__(self, config: Config, reason: str) -> None:
        self.reason = reason
        self._mountpoint = config.pool.mountpoint
        self._counters = RequestCounters()
        self._options = trio_pyfuse3.MountOptions(
            access=config.pool.access,
            negative_ttl_s=config.metadata_cache.negative_ttl_secs,
            op_timeout_s=config.health.op_timeout,
        )

    def serve(self, pool: Pool, ready: Callable[[], None], stop: Stop) -> None:
        try:
            trio.run(self._serve, pool, ready, stop)
        except BaseExceptionGroup as group:
            raise _first(group) from group

    def counters(self) -> dict[str, Any]:
        return self._counters.to_json()

    async def _serve(self, pool: Pool, ready: Callable[[], None], stop: Stop) -> None:
        token = trio.lowlevel.current_trio_token()
        stopped = trio.Event()

        def wake() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(stopped.set)

        stop.listen(wake)
        await trio_pyfuse3.serve(
            pool,
            self._mountpoint,
            options=self._options,
            ready=ready,
            stop=stopped,
            counters=self._counters,
        )


def _first(error: BaseException) -> BaseException:
    """Return the first single exception in *error*: the cause that a person is told."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
