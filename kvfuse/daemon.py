"""The daemon of one mount: builds the pool from a configuration, serves it, takes it down again.

The composition root: nothing else knows all the parts. It ends when it is told to (a signal, the
control socket) or when somebody unmounts the mountpoint; both are a clean end.
"""

import contextlib
import ctypes
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfuse import logs
from kvfuse.config import Resolved
from kvfuse.control import registry
from kvfuse.control.rpc import ControlServer
from kvfuse.control.service import ControlService, MountFacts
from kvfuse.diskset import DiskSet, DiskSpec, open_disks
from kvfuse.drivers.choice import Driver, choose_driver
from kvfuse.errors import KvfuseError
from kvfuse.notify import notify
from kvfuse.pool import Pool, open_pool
from kvfuse.progress import Event
from kvfuse.stop import Stop, stop_on_signals

_log = logging.getLogger("kvfuse.daemon")
_PR_SET_IO_FLUSHER = 57
_OOM_SCORE = "-900"


class InterruptedStartError(KvfuseError):
    """The daemon was told to end before its mount answered."""


class Daemon:
    """One run of the daemon for the configuration *resolved*.

    *report* hears warnings, progress, and that the mount answers. In the background it logs to a
    file under the state directory, in the *foreground* or below a service manager to stderr.
    """

    def __init__(
        self, resolved: Resolved, *, init: bool, report: Callable[[Event], None], foreground: bool
    ) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._init = init
        self._report = report
        self._foreground = foreground
        self._stop = Stop()
        self._log_path = ""

    def run(self) -> None:
        """Mount, serve, and return when the mount is gone and the pool is closed.

        Raises:
            KvfuseError: the pool cannot be mounted, or its driver failed.
            OSError: a system call failed that nothing can be done about.
        """
        logs.log_to_stderr()
        self._prepare_process()
        driver = choose_driver(self._config)
        with contextlib.closing(self._open_disks()) as disks:
            self._prepare_directories(disks.pool_id)
            for warning in disks.warnings:
                self._warn(warning)
            if driver.reason:
                _log.info("driver %s: %s", driver.name, driver.reason)
            self._serve(driver, disks)

    def _prepare_process(self) -> None:
        """Make this process fit to serve a file system that others wait for."""
        signals = [signal.SIGTERM, signal.SIGINT]
        if self._foreground:
            signals.append(signal.SIGHUP)
        else:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_on_signals(self._stop, signals)
        os.chdir("/")  # a working directory on a disk, or below the mountpoint, would pin it
        os.umask(0o022)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # Memory reclaim must not wait for writes that wait for this process, nor kill it first.
        ctypes.CDLL(None).prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")

    def _open_disks(self) -> DiskSet:
        pool = self._config.pool
        return open_disks(
            [DiskSpec(disk.path, disk.weight, disk.mode) for disk in pool.disks],
            mountpoint=pool.mountpoint,
            state_dir=pool.state_dir,
            run_dir=pool.run_dir,
            require_all=pool.require_all_disks,
            allow_shared_device=pool.allow_shared_device,
            init=self._init,
        )

    def _prepare_directories(self, pool_id: str) -> None:
        """Make the directories of the pool, and send the log where it belongs."""
        run_dir = Path(self._config.pool.run_dir)
        registry.require_directory(run_dir)
        registry.require_directory(run_dir / pool_id)
        registry.require_directory(registry.REGISTRY_DIR)
        if self._foreground or "JOURNAL_STREAM" in os.environ or "NOTIFY_SOCKET" in os.environ:
            return
        path = Path(self._config.pool.state_dir) / pool_id / "kvfuse.log"
        try:
            logs.log_to_file(path)
        except OSError as exc:
            fallback = run_dir / pool_id / "kvfuse.log"
            logs.log_to_file(fallback)
            self._warn(f"{path}: {exc.strerror}; logging to {fallback}")
            path = fallback
        self._log_path = str(path)

    def _serve(self, driver: Driver, disks: DiskSet) -> None:
        mountpoint = self._config.pool.mountpoint
        pool = open_pool(self._config, disks, progress=self._progress)
        clean = False
        try:
            with contextlib.ExitStack() as answering:
                socket = self._control(driver, pool, disks.pool_id)
                answering.callback(socket.close)

                def ready() -> None:
                    answering.enter_context(self._registered(disks.pool_id, socket.path))
                    _log.info(
                        "%s: mounted, pool %s, driver %s", mountpoint, disks.pool_id, driver.name
                    )
                    notify("READY=1", f"MAINPID={os.getpid()}")
                    self._report(Event("ready"))

                driver.serve(pool, ready, self._stop)
                notify("STOPPING=1")
            clean = True
        finally:
            pool.close(clean=clean)
            _log.info("%s: unmounted", mountpoint)

    def _control(self, driver: Driver, pool: Pool, pool_id: str) -> ControlServer:
        facts = MountFacts(
            mountpoint=self._config.pool.mountpoint,
            owner_uid=os.geteuid(),
            log=self._log_path,
            config=[(row.key, row.value, row.origin) for row in self._resolved.rows()],
        )
        service = ControlService(pool, driver, facts, stop=self._stop.request)
        path = Path(self._config.socket_path(pool_id))
        try:
            return ControlServer(service, path)
        except OSError as exc:
            raise KvfuseError(f"{path}: the control socket cannot be made: {exc.strerror}") from exc

    @contextlib.contextmanager
    def _registered(self, pool_id: str, socket: Path) -> Iterator[None]:
        """While the mount answers, commands find its control socket."""
        entry = registry.Registration(
            mountpoint=self._config.pool.mountpoint,
            pool_id=pool_id,
            pid=os.getpid(),
            started=registry.start_time(os.getpid()) or 0,
            socket=str(socket),
            log=self._log_path,
        )
        registry.register(entry)
        try:
            yield
        finally:
            registry.unregister(entry)

    def _progress(self, text: str) -> None:
        """Tell how far a scan is; the way out of one when the daemon is told to end."""
        if self._stop.is_requested:
            raise InterruptedStartError("stopped before the mount answered; nothing is mounted")
        notify(f"STATUS={text}", "EXTEND_TIMEOUT_USEC=60000000")
        self._report(Event("progress", text))

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        self._report(Event("warning", text))
