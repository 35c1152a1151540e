"""Which driver serves a mount, and serving with it until the mount ends.

A driver's libraries are imported when it is chosen: the direct one runs without trio and libfuse.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

from kvfuse.core.config import Config
from kvfuse.core.errors import KernelError
from kvfuse.drivers.direct import session
from kvfuse.drivers.direct.connection import Connection
from kvfuse.pool.pool import Pool
from kvfuse.system.stop import Stop

PASSTHROUGH_SWITCH = "KVFUSE_TEST_PASSTHROUGH"  # "off": as on a kernel that has none; for tests


class Driver(Protocol):
    """A driver that does not serve yet. *reason* says why it was chosen, "" when it was named.

    *can_resume*: a next process can go on with its mount.
    """

    name: str
    reason: str
    can_resume: bool

    @property
    def passthrough_obstacle(self) -> str | None:
        """Why reads and writes go through the daemon, None when they do not; known in a mount."""
        ...

    def serve(
        self,
        pool: Pool,
        ready: Callable[[], None],
        stop: Stop,
        connection: Connection | None = None,
    ) -> None:
        """Mount, call *ready* when the mount answers, return when it is gone.

        A driver that can resume goes on with *connection*, or keeps there what it has mounted.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the mount is answered, as far as can be told without a wait."""
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
    obstacle = session.can_run()
    if obstacle is None:
        return _Direct(config, "" if wanted == "direct" else "the fastest, and it can run here")
    if wanted == "direct":
        raise KernelError(f"driver direct cannot run here: {obstacle}; or use --driver auto")
    return _Pyfuse3(config, f"driver direct cannot run here: {obstacle}")


class _Direct:
    name = "direct"
    can_resume = True

    def __init__(self, config: Config, reason: str) -> None:
        self.reason = reason
        self._mountpoint = config.pool.mountpoint
        self._session: session.DirectSession | None = None
        self._options = session.DirectOptions(
            access=config.pool.access,
            negative_ttl_s=config.metadata_cache.negative_ttl_secs,
            entry_timeout_s=min(1.0, config.space.lease_ttl),
            op_timeout_s=config.health.op_timeout,
            passthrough=os.environ.get(PASSTHROUGH_SWITCH) != "off",
        )

    @property
    def passthrough_obstacle(self) -> str | None:
        return "not mounted yet" if self._session is None else self._session.obstacle

    def serve(
        self,
        pool: Pool,
        ready: Callable[[], None],
        stop: Stop,
        connection: Connection | None = None,
    ) -> None:
        self._session = session.DirectSession(pool, self._mountpoint, self._options, connection)
        self._session.serve(ready, stop)

    def is_alive(self) -> bool:
        return self._session is None or self._session.is_alive()

    def counters(self) -> dict[str, Any]:
        return {} if self._session is None else self._session.counters()


class _Pyfuse3:
    name = "pyfuse3"
    can_resume = False
    passthrough_obstacle = "driver pyfuse3 moves the bytes itself"

    def __init__(self, config: Config, reason: str) -> None:
        from kvfuse.drivers.counters import RequestCounters
        from kvfuse.drivers.trio_pyfuse3 import MountOptions

        self.reason = reason
        self._mountpoint = config.pool.mountpoint
        self._counters = RequestCounters()
        self._options = MountOptions(
            access=config.pool.access,
            negative_ttl_s=config.metadata_cache.negative_ttl_secs,
            entry_timeout_s=min(1.0, config.space.lease_ttl),
            op_timeout_s=config.health.op_timeout,
        )

    def serve(
        self,
        pool: Pool,
        ready: Callable[[], None],
        stop: Stop,
        connection: Connection | None = None,
    ) -> None:
        import trio

        try:
            trio.run(self._serve, pool, ready, stop)
        except BaseExceptionGroup as group:
            raise _first(group) from group

    def is_alive(self) -> bool:
        return True  # to follow its server would cost the mount: it may take its time

    def counters(self) -> dict[str, Any]:
        return self._counters.to_json()

    async def _serve(self, pool: Pool, ready: Callable[[], None], stop: Stop) -> None:
        import trio

        from kvfuse.drivers import trio_pyfuse3

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
