"""The daemon of one mount: builds the pool from a configuration, serves it, takes it down again.

The composition root: nothing else knows all the parts. It ends when it is told to (a signal, the
control socket) or when somebody unmounts the mountpoint; both are a clean end. After any other end
its supervisor starts the next one, which goes on with the same connection and the same disks.
"""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfuse import __version__
from kvfuse.control import registry
from kvfuse.control.rpc import ControlServer
from kvfuse.control.service import ControlService, MountFacts
from kvfuse.core.config import Resolved
from kvfuse.core.errors import EXIT_DONE, EXIT_FAILED, KvfuseError
from kvfuse.disks.diskset import DiskSet, DiskSpec, open_disks
from kvfuse.drivers.choice import Driver, choose_driver
from kvfuse.drivers.direct.connection import Connection
from kvfuse.pool.pool import Pool, open_pool
from kvfuse.pool.resume import kept_fds, resume_disks
from kvfuse.supervision import ledger
from kvfuse.supervision.supervised import Keeper, Supervised
from kvfuse.supervision.takeover import formats
from kvfuse.system import logs
from kvfuse.system.fdstore import FUSE
from kvfuse.system.mounts import cover, uncover
from kvfuse.system.progress import Event
from kvfuse.system.stop import Stop, stop_on_signals

_log = logging.getLogger("kvfuse.daemon")
_PR_SET_IO_FLUSHER = 57
SWITCH_INTERVAL_S = 0.0002
RECOVERY_TOLD_S = 0.2  # how often it is told how far the disks were read
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_NO_RESEND = "this kernel does not send requests again (Linux 6.9)"


class InterruptedStartError(KvfuseError):
    """The daemon was told to end before its mount answered."""


class Daemon:
    """One run of the daemon for the configuration *resolved*, under a supervisor.

    *report* hears warnings, progress, and that the mount answers. In the background it logs to a
    file under the state directory, in the *foreground* or below a service manager to stderr.
    """

    def __init__(
        self,
        resolved: Resolved,
        supervised: Supervised,
        *,
        init: bool,
        report: Callable[[Event], None],
        foreground: bool,
    ) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._supervised = supervised
        self._init = init and supervised.start.attempt == 1
        self._report = report
        self._foreground = foreground
        self._is_ready = False
        self._stop = Stop()
        self._log_path = ""

    def run(self) -> None:
        """Mount or go on with a mount, serve, and return when it is gone and the pool is closed.

        Raises:
            KvfuseError: the pool cannot be mounted, or its driver failed.
            OSError: a system call failed that nothing can be done about.
        """
        logs.log_to_stderr()
        log = self._supervised.start.facts.get("log")
        if isinstance(log, str) and log:
            logs.log_to_file(Path(log))
        self._prepare_process()
        try:
            driver = choose_driver(self._config)
            with contextlib.closing(self._open_disks()) as disks:
                self._prepare_directories(disks.pool_id)
                for warning in disks.warnings:
                    self._warn(warning)
                if driver.reason:
                    _log.info("driver %s: %s", driver.name, driver.reason)
                self._serve(driver, disks)
        except KvfuseError as exc:
            if self._supervised.start.resume and not self._is_ready:
                _log.error("%s", exc)
                self._supervised.cold(str(exc))
            raise
        finally:
            if self._stop.is_requested:  # also when it failed: nobody wants another server
                self._supervised.ended(EXIT_FAILED)

    def _prepare_process(self) -> None:
        """Make this process fit to serve a file system that others wait for."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the supervisor
        stop_on_signals(self._stop, [signal.SIGTERM, signal.SIGINT])
        os.chdir("/")  # a working directory on a disk, or below the mountpoint, would pin it
        os.umask(0o022)
        # A request must not wait 5 ms, at each of its system calls, for a thread that computes.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # Memory reclaim must not wait for writes that wait for this process, nor kill it first.
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)
        # What was needed once stays in memory: a page of this program that has to be read from a
        # disk again, when memory is short, holds up everybody who uses the mount.
        libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)

    def _open_disks(self) -> DiskSet:
        pool = self._config.pool
        start = self._supervised.start
        if start.resume:
            run_dir = Path(pool.run_dir) / str(start.facts.get("pool_id"))
            return resume_disks(run_dir, dict(start.fds), sorted(start.stuck))
        disks = open_disks(
            [DiskSpec(disk.path, disk.weight, disk.mode) for disk in pool.disks],
            mountpoint=pool.mountpoint,
            state_dir=pool.state_dir,
            run_dir=pool.run_dir,
            require_all=pool.require_all_disks,
            allow_shared_device=pool.allow_shared_device,
            init=self._init,
        )
        self._supervised.store(kept_fds(disks))
        return disks

    def _prepare_directories(self, pool_id: str) -> None:
        """Make the directories of the pool, and send the log where it belongs."""
        run_dir = Path(self._config.pool.run_dir)
        registry.require_directory(run_dir)
        registry.require_directory(run_dir / pool_id)
        registry.require_directory(registry.REGISTRY_DIR)
        self._supervised.facts(
            pool_id=pool_id,
            mountpoint=self._config.pool.mountpoint,
            status_file=self._ledger_path(pool_id),
            version=__version__,
            formats=formats(),
        )
        if self._foreground:
            return
        self._supervised.shows_notes = True  # the supervisor's own stderr leads nowhere
        path = Path(self._config.pool.state_dir) / pool_id / "kvfuse.log"
        try:
            logs.log_to_file(path)
        except OSError as exc:
            fallback = run_dir / pool_id / "kvfuse.log"
            logs.log_to_file(fallback)
            self._warn(f"{path}: {exc.strerror}; logging to {fallback}")
            path = fallback
        self._log_path = str(path)
        self._supervised.facts(log=self._log_path)

    def _serve(self, driver: Driver, disks: DiskSet) -> None:
        mountpoint = self._config.pool.mountpoint
        start = self._supervised.start
        pool = open_pool(
            self._config, disks, progress=self._progress, outlives=driver.can_resume,
            resume=start.resume, stuck_pids=sorted(start.stuck), keeper=Keeper(self._supervised),
        )  # fmt: skip
        clean = False
        try:
            with contextlib.ExitStack() as answering:
                socket = self._control(driver, pool, disks.pool_id)
                answering.callback(socket.close)

                def ready() -> None:
                    answering.enter_context(self._registered(disks.pool_id, socket.path))
                    _log.info(
                        "%s: %s, pool %s, driver %s", mountpoint,
                        "taken over" if start.resume else "mounted", disks.pool_id, driver.name,
                    )  # fmt: skip
                    self._is_ready = True
                    self._supervised.judge_by(driver.is_alive)
                    self._supervised.facts(mounted=True)
                    self._supervised.ready()
                    if start.attempt == 1 and not start.resume:
                        self._report(Event("ready"))
                    if self._foreground:
                        teller = threading.Thread(
                            target=self._tell_recovery, args=(pool,), daemon=True, name="teller"
                        )
                        teller.start()

                if not driver.can_resume:
                    cover(mountpoint)
                driver.serve(pool, ready, self._stop, self._connection(driver, disks.pool_id))
            clean = True
            uncover(mountpoint)
        finally:
            pool.close(clean=clean)
            _log.info("%s: unmounted", mountpoint)
        self._supervised.ended(EXIT_DONE)

    def _tell_recovery(self, pool: Pool) -> None:
        """Tell how far the disks were read, until they are."""
        while not pool.wait_complete(RECOVERY_TOLD_S) and not self._stop.is_requested:
            recovery = pool.recovery()
            share = -1.0 if recovery["share"] is None else recovery["share"]
            self._report(Event("recovery", f"{recovery['files']:,} files found", share=share))
        if pool.is_complete:
            files = pool.recovery()["files"]
            if files:
                self._report(Event("recovery", f"{files:,} files found", share=1.0))

    def _connection(self, driver: Driver, pool_id: str) -> Connection | None:
        """Return the connection to go on with, or where one is kept that can be gone on with."""
        if not driver.can_resume:
            self._supervised.facts(hot=False, obstacle=f"driver {driver.name} cannot be resumed")
            return None
        self._supervised.facts(hot=self._supervised.start.resume, obstacle=_NO_RESEND)

        def keep(fd: int) -> None:
            self._supervised.store({FUSE: fd})
            self._supervised.facts(hot=True, mounted=True)

        path = Path(self._config.pool.run_dir) / pool_id / "connection.json"
        return Connection(path, self._supervised.start.fds.get(FUSE), keep)

    def _control(self, driver: Driver, pool: Pool, pool_id: str) -> ControlServer:
        facts = MountFacts(
            mountpoint=self._config.pool.mountpoint,
            owner_uid=os.geteuid(),
            log=self._log_path,
            config=[(row.key, row.value, row.origin) for row in self._resolved.rows()],
        )
        service = ControlService(
            pool,
            driver,
            facts,
            stop=self._stop.request,
            processes=lambda: self._supervised.processes(self._ledger_path(pool_id)),
        )
        path = Path(self._config.socket_path(pool_id))
        try:
            return ControlServer(service, path)
        except OSError as exc:
            raise KvfuseError(f"{path}: the control socket cannot be made: {exc.strerror}") from exc

    @contextlib.contextmanager
    def _registered(self, pool_id: str, socket: Path) -> Iterator[None]:
        """While the mount answers, commands find its control socket.

        Under the pid of the supervisor, which is there as long as the mount, whatever happens.
        """

        def register(pid: int) -> registry.Registration:
            entry = registry.Registration(
                mountpoint=self._config.pool.mountpoint,
                pool_id=pool_id,
                pid=pid,
                started=registry.start_time(pid) or 0,
                socket=str(socket),
                log=self._log_path,
            )
            registry.register(entry)
            return entry

        entries = [register(os.getppid())]
        self._supervised.when_lost(lambda: entries.append(register(os.getpid())))
        try:
            yield
        finally:
            registry.unregister(entries[-1])

    def _ledger_path(self, pool_id: str) -> str:
        return str(Path(self._config.pool.run_dir) / pool_id / ledger.FILE)

    def _progress(self, text: str) -> None:
        """Tell how far a scan is; the way out of one when the daemon is told to end."""
        if self._stop.is_requested:
            raise InterruptedStartError("stopped before the mount answered; nothing is mounted")
        self._supervised.starting(text)
        self._report(Event("progress", text))

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        self._report(Event("warning", text))
