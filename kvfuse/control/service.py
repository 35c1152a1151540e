"""What an operator can ask of a running pool, whichever way the question arrives.

Never in the data path. Verbs raise :class:`kvfuse.core.errors.KvfuseError` with the line to show,
and ``OSError`` where the pool does.

Concurrency: called from several threads at once; the pool's verbs are thread-safe.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvfuse import __version__
from kvfuse.control.messages import CleanArgs
from kvfuse.core.errors import KvfuseError

LOCATE_KEYS_MAX = 10_000

# A directory is a record of the pool and lies on no disk; its answer has the same fields.
_ON_NO_DISK: dict[str, Any] = {
    "disk": None,
    "disk_path": None,
    "owner": None,
    "at_home": True,
    "size_bytes": 0,
    "last_access": None,
    "state": "committed",
    "pinned": False,
    "stale_copies": [],
}


class PoolView(Protocol):
    """The part of the pool that is shown."""

    def status(self) -> dict[str, Any]:
        """Return the pool's part of the status."""
        ...

    def locate(self, key: bytes) -> dict[str, Any]:
        """Return where the file at *key* is, and why."""
        ...

    def clean(
        self,
        *,
        disk: str | None,
        keys: Sequence[bytes],
        regex: str | None,
        everything: bool,
        dry_run: bool,
    ) -> list[dict[str, Any]]:
        """Begin cleanup tasks."""
        ...

    def tasks(self, task_id: int | None) -> list[dict[str, Any]]:
        """Return the cleanup tasks, or one."""
        ...

    def fsck(self, *, repair: bool) -> dict[str, Any]:
        """Begin to compare catalog and disks."""
        ...

    def findings(self, number: int) -> dict[str, Any]:
        """Return how far a comparison is, or what it found."""
        ...


class DriverView(Protocol):
    """The part of the driver that is shown."""

    name: str
    reason: str

    @property
    def passthrough_obstacle(self) -> str | None:
        """Why reads and writes go through the daemon, None when they do not."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return what was counted of each kind of request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFacts:
    """What is true of a mount for as long as it lives."""

    mountpoint: str
    owner_uid: int
    log: str
    config: list[tuple[str, Any, str]]  # key, value, origin


class ControlService:
    """The verbs of the control socket over *pool*.

    *stop* asks the daemon to unmount and end; it returns at once. *processes* tells which processes
    the mount has.
    """

    READING_VERBS = frozenset({"status", "locate", "disks", "config", "tasks", "findings"})

    def __init__(
        self,
        pool: PoolView,
        driver: DriverView,
        facts: MountFacts,
        *,
        stop: Callable[[], None],
        processes: Callable[[], dict[str, Any]] = lambda: {"server": {"pid": os.getpid()}},
    ) -> None:
        self._pool = pool
        self._facts = facts
        self._stop = stop
        self._driver = driver
        self._processes = processes

    @property
    def owner_uid(self) -> int:
        """The user who may call the reading verbs, besides root."""
        return self._facts.owner_uid

    def status(self) -> dict[str, Any]:
        """Return the whole status, as interface ``status --json`` shows it."""
        status = dict(self._pool.status())
        obstacle = self._driver.passthrough_obstacle
        status["pool"] = {
            **status.get("pool", {}),
            "mountpoint": self._facts.mountpoint,
            "driver": self._driver.name,
            "driver_reason": self._driver.reason,
            "passthrough": obstacle is None,
            "passthrough_obstacle": obstacle or "",
            "version": __version__,
            "log": self._facts.log,
        }
        status["processes"] = self._processes()
        status["requests"] = self._driver.counters()
        return status

    def disks(self) -> list[dict[str, Any]]:
        """Return the disks of the pool, as in the status."""
        return list(self._pool.status().get("disks", []))

    def config(self) -> list[tuple[str, Any, str]]:
        """Return every key of the configuration in force, its value, and where that came from."""
        return self._facts.config

    def locate(self, keys: list[bytes]) -> list[dict[str, Any]]:
        """Return where the files at *keys* are, in the same order.

        Raises:
            KvfuseError: a key is not in the pool, or too many were asked for at once.
        """
        if len(keys) > LOCATE_KEYS_MAX:
            raise KvfuseError(
                f"{len(keys)} paths in one question; ask for at most {LOCATE_KEYS_MAX}"
            )
        return [self._locate_one(key) for key in keys]

    def clean(self, args: CleanArgs) -> list[dict[str, Any]]:
        """Begin to remove files; return the tasks that do.

        Raises:
            KvfuseError: no such disk or key, too many keys, or a pattern that cannot be used.
        """
        if len(args.keys) > LOCATE_KEYS_MAX:
            raise KvfuseError(f"{len(args.keys)} keys at once; name at most {LOCATE_KEYS_MAX}")
        return self._pool.clean(
            disk=args.disk,
            keys=args.keys,
            regex=args.regex,
            everything=args.everything,
            dry_run=args.dry_run,
        )

    def tasks(self, task_id: int | None) -> list[dict[str, Any]]:
        """Return the cleanup tasks that are remembered, or one."""
        return self._pool.tasks(task_id)

    def fsck(self, *, repair: bool) -> dict[str, Any]:
        """Begin to compare catalog and disks, or join who does; return how far that is.

        Raises:
            BusyError: another kind of comparison runs, or disks are still being read.
        """
        return self._pool.fsck(repair=repair)

    def findings(self, number: int) -> dict[str, Any]:
        """Return how far a comparison is, and what it found when it is over.

        Raises:
            KvfuseError: it is not remembered.
        """
        return self._pool.findings(number)

    def stop(self) -> dict[str, Any]:
        """Ask the daemon to unmount and end."""
        self._stop()
        return {"pid": os.getpid()}

    def _locate_one(self, key: bytes) -> dict[str, Any]:
        path = os.path.join(self._facts.mountpoint.encode(), key)
        shown = path.decode(errors="backslashreplace")
        try:
            found = self._pool.locate(key)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
                raise KvfuseError(f"{shown}: no such file in the pool") from exc
            raise KvfuseError(f"{shown}: {exc.strerror}") from exc
        return {**_ON_NO_DISK, **found, "path": shown}
