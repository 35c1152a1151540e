"""The wish to end: said once, by a signal or a command, heard by whoever serves."""

import logging
import signal
import threading
from collections.abc import Callable, Iterable

_log = logging.getLogger("kvfuse.daemon")


class Stop:
    """A wish to end that any thread may say and any number of listeners hear, at most once each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._requested = False

    @property
    def is_requested(self) -> bool:
        """Whether the wish was said."""
        return self._requested

    def request(self) -> None:
        """Say it; saying it again changes nothing."""
        with self._lock:
            if self._requested:
                return
            self._requested = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call *listener* when the wish is said, now if it was. It is called in any thread."""
        with self._lock:
            if not self._requested:
                self._listeners.append(listener)
                return
        listener()


def stop_on_signals(stop: Stop, signals: Iterable[signal.Signals]) -> None:
    """Make *signals* say *stop*, from a thread of its own.

    Call it in the main thread before any other thread starts: the signals are blocked here and in
    all threads made later, so no driver meets them in the middle of a request.
    """
    wanted = set(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)

    def wait() -> None:
        number = signal.sigwait(wanted)
        _log.info("%s: unmounting", signal.Signals(number).name)
        stop.request()

    threading.Thread(target=wait, daemon=True, name="signals").start()
