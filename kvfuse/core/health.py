"""What state a disk is in, and what each event makes of it. Pure.

``Health`` is a value; each of its verbs returns the next one. ``TRANSITIONS`` says what an event
does to the *mode*; an errno becomes an event by ``fault_of``. The *state* operators see follows
from mode and facts, so that no two of them can contradict each other. Load is not failure: only
errors and requests that outlived their deadline count.
"""

import errno
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

ERRORS_TO_FAIL = 3
ERRORS_WINDOW_S = 60.0


class DiskState(StrEnum):
    """What operators see."""

    REGISTERING = "REGISTERING"  # being identified and scanned
    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"  # in use, but it failed lately or takes no writes
    DRAINING = "DRAINING"  # its files are served and leave; takes no new ones
    DISABLED = "DISABLED"  # its files are served; takes no new ones
    FAILED = "FAILED"  # not touched: its files are misses
    FULL = "FULL"  # in use, but without room


class RuntimeState(StrEnum):
    """Whether a disk takes new files, and if not, why."""

    ENABLED = "ENABLED"
    DISABLED_BY_CONFIG = "DISABLED_BY_CONFIG"
    DISABLED_BY_FAILURE = "DISABLED_BY_FAILURE"
    DISABLED_BY_CAPACITY = "DISABLED_BY_CAPACITY"


class Mode(Enum):
    """What is done with a disk: decided by operators and by failures."""

    REGISTERING = auto()
    IN_USE = auto()
    DRAINING = auto()
    DISABLED = auto()
    FAILED = auto()


class Writes(Enum):
    """Whether a disk may be changed."""

    ALLOWED = auto()
    FORBIDDEN = auto()  # by the configuration
    REFUSED = auto()  # by the disk, which became read-only


class Event(Enum):
    """What changes the mode of a disk."""

    REGISTERED = auto()  # identified and scanned
    BROKEN = auto()  # too many I/O errors, or the device is gone
    STUCK = auto()  # a request outlived its deadline
    UNSTUCK = auto()  # every stuck call has returned
    ENABLE = auto()  # from here: an operator
    DISABLE = auto()
    DRAIN = auto()
    FAIL = auto()
    READMIT = auto()


class Fault(Enum):
    """What an errno of a syscall on a disk says of the disk."""

    IO = auto()
    GONE = auto()
    CAPACITY = auto()
    READ_ONLY = auto()


_FAULTS = {
    errno.EIO: Fault.IO,
    errno.ENODEV: Fault.GONE,
    errno.ENXIO: Fault.GONE,
    errno.ESTALE: Fault.GONE,
    errno.ETIMEDOUT: Fault.GONE,
    errno.ENOTCONN: Fault.GONE,
    errno.ENOSPC: Fault.CAPACITY,
    errno.EDQUOT: Fault.CAPACITY,
    errno.EROFS: Fault.READ_ONLY,
}

_SERVING = (Mode.IN_USE, Mode.DRAINING, Mode.DISABLED)

# A pair that is not here changes nothing. A failed disk comes back through REGISTERING only, that
# is, after a scan: what a stuck call did late is never believed.
TRANSITIONS: dict[tuple[Mode, Event], Mode] = {
    (Mode.REGISTERING, Event.REGISTERED): Mode.IN_USE,  # or what an operator wanted before
    (Mode.FAILED, Event.UNSTUCK): Mode.REGISTERING,  # unless broken as well
    (Mode.FAILED, Event.READMIT): Mode.REGISTERING,  # unless a call is still at work on it
    **{(mode, Event.ENABLE): Mode.IN_USE for mode in _SERVING},
    **{(mode, Event.DISABLE): Mode.DISABLED for mode in _SERVING},
    **{(mode, Event.DRAIN): Mode.DRAINING for mode in _SERVING},
    **{
        (mode, event): Mode.FAILED
        for mode in Mode
        for event in (Event.BROKEN, Event.STUCK, Event.FAIL)
    },
}


def fault_of(code: int) -> Fault | None:
    """Return what errno *code* says of the disk; None when it says nothing (ENOENT, EINVAL, …)."""
    return _FAULTS.get(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of one disk. *reason* is one line, empty when nothing is wrong.

    *since_s* is when the state last changed, on the clock of *now_s*, which every verb takes.
    *errors* counts all errors ever; *recent_errors_s* holds those that still make it DEGRADED.
    *wanted* is the mode an operator gave it while it served. *is_stuck*: a request that outlived
    its deadline has not returned; *is_broken*: failed for another reason than that.
    """

    mode: Mode
    since_s: float
    reason: str = ""
    errors: int = 0
    recent_errors_s: tuple[float, ...] = ()
    writes: Writes = Writes.ALLOWED
    is_full: bool = False
    wanted: Mode = Mode.IN_USE
    is_stuck: bool = False
    is_broken: bool = False

    @classmethod
    def registering(cls, *, now_s: float, read_only: bool = False) -> "Health":
        """Return the health of a disk that is to be scanned; *read_only* by configuration."""
        writes = Writes.FORBIDDEN if read_only else Writes.ALLOWED
        return cls(mode=Mode.REGISTERING, since_s=now_s, writes=writes)

    @classmethod
    def healthy(cls, *, now_s: float, read_only: bool = False) -> "Health":
        """Return the health of a disk in use; *read_only* by configuration."""
        return cls.registering(now_s=now_s, read_only=read_only).registered(now_s=now_s)

    @classmethod
    def failed(cls, reason: str, *, now_s: float) -> "Health":
        """Return the health of a disk that is missing or dead."""
        return cls(mode=Mode.FAILED, since_s=now_s, reason=reason, is_broken=True)

    @property
    def state(self) -> DiskState:
        """The state operators see."""
        if self.mode is not Mode.IN_USE:
            return DiskState[self.mode.name]
        if self.recent_errors_s or self.writes is Writes.REFUSED:
            return DiskState.DEGRADED
        return DiskState.FULL if self.is_full else DiskState.HEALTHY

    @property
    def runtime(self) -> RuntimeState:
        """Whether it takes new files, and if not, why."""
        if self.mode is Mode.FAILED or self.writes is Writes.REFUSED:
            return RuntimeState.DISABLED_BY_FAILURE
        if self.mode in (Mode.DRAINING, Mode.DISABLED) or self.writes is Writes.FORBIDDEN:
            return RuntimeState.DISABLED_BY_CONFIG
        return RuntimeState.DISABLED_BY_CAPACITY if self.is_full else RuntimeState.ENABLED

    @property
    def readable(self) -> bool:
        """Whether its files are served; else they are misses."""
        return self.mode in _SERVING

    @property
    def writable(self) -> bool:
        """Whether the files it has may be changed and removed."""
        return self.readable and self.writes is Writes.ALLOWED

    @property
    def schedulable(self) -> bool:
        """Whether new files may go to it."""
        return self.takes_files and not self.is_full

    @property
    def takes_files(self) -> bool:
        """Whether new files may go to it as soon as there is room."""
        return self.mode is Mode.IN_USE and self.writable

    def on_error(self, code: int, *, now_s: float, what: str = "I/O") -> "Health":
        """Return the health after errno *code* came from a syscall; *what* was being done.

        An errno that says nothing of the disk (ENOENT, EINVAL, …) changes nothing.
        """
        name = f"{errno.errorcode.get(code, str(code))} on {what}"
        match fault_of(code):
            case None:
                return self
            case Fault.IO:
                return self._after_io_error(name, now_s)
            case Fault.GONE:
                return replace(self, errors=self.errors + 1)._broken(Event.BROKEN, name, now_s)
            case Fault.CAPACITY:
                return self.on_full(now_s=now_s, reason=name)
            case Fault.READ_ONLY:
                return self.on_read_only(now_s=now_s, reason=name)

    def on_success(self, *, now_s: float) -> "Health":
        """Return the health after something worked: errors older than the window are forgiven."""
        if not self.recent_errors_s:
            return self
        return _since(self, replace(self, recent_errors_s=self._recent(now_s)), now_s)

    def on_timeout(self, *, now_s: float, what: str = "a request") -> "Health":
        """Return the health after *what* outlived its deadline: fenced."""
        mode = self._mode_after(Event.STUCK)
        reason = self.reason if self.is_broken else f"fenced: {what} did not return in time"
        return _since(self, replace(self, mode=mode, is_stuck=True, reason=reason), now_s)

    def on_unstuck(self, *, now_s: float) -> "Health":
        """Return the health after every stuck call has returned: to be scanned."""
        if not self.is_stuck:
            return self
        free = replace(self, is_stuck=False)
        if self.is_broken:
            return free
        return _since(self, replace(free, mode=self._mode_after(Event.UNSTUCK), reason=""), now_s)

    def on_full(self, *, now_s: float, reason: str = "no room") -> "Health":
        """Return the health of a disk that is out of room."""
        is_reason = self.state is DiskState.HEALTHY
        after = replace(self, is_full=True, reason=reason if is_reason else self.reason)
        return _since(self, after, now_s)

    def on_room(self, *, now_s: float) -> "Health":
        """Return the health of a disk that has room."""
        return _since(self, replace(self, is_full=False), now_s)

    def on_read_only(self, *, now_s: float, reason: str = "read-only") -> "Health":
        """Return the health of a disk that takes no writes any more; what it has is served."""
        if self.writes is not Writes.ALLOWED:
            return self
        after = replace(self, writes=Writes.REFUSED, errors=self.errors + 1)
        if self.mode is Mode.IN_USE:
            after = replace(after, reason=reason)
        return _since(self, after, now_s)

    def registered(self, *, now_s: float) -> "Health":
        """Return the health after identification and scan."""
        if self._mode_after(Event.REGISTERED) is self.mode:
            return self
        return _since(self, replace(self, mode=self.wanted), now_s)

    def enable(self, *, now_s: float) -> "Health":
        """Return the health after an operator's *enable*; only of a disk that serves."""
        return self._told(Event.ENABLE, "", now_s)

    def disable(self, *, now_s: float, reason: str = "disabled by the operator") -> "Health":
        """Return the health after an operator's *disable*; only of a disk that serves."""
        return self._told(Event.DISABLE, reason, now_s)

    def drain(self, *, now_s: float, reason: str = "drained by the operator") -> "Health":
        """Return the health after an operator's *drain*; only of a disk that serves."""
        return self._told(Event.DRAIN, reason, now_s)

    def fail(self, *, now_s: float, reason: str = "failed by the operator") -> "Health":
        """Return the health after an operator's *fail*."""
        return replace(self, is_broken=False)._broken(Event.FAIL, reason, now_s)

    def readmit(self, *, now_s: float) -> "Health":
        """Return the health after an operator's *readmit*: to be scanned, its past forgiven.

        Nothing changes while a stuck call is still at work on the disk.
        """
        mode = self._mode_after(Event.READMIT)
        if self.is_stuck or mode is self.mode:
            return self
        fresh = Health.registering(now_s=now_s, read_only=self.writes is Writes.FORBIDDEN)
        return replace(fresh, errors=self.errors)

    def _mode_after(self, event: Event) -> Mode:
        return TRANSITIONS.get((self.mode, event), self.mode)

    def _after_io_error(self, name: str, now_s: float) -> "Health":
        recent = (*self._recent(now_s), now_s)[-ERRORS_TO_FAIL:]
        counted = replace(self, errors=self.errors + 1, recent_errors_s=recent)
        if len(recent) >= ERRORS_TO_FAIL:
            reason = f"{len(recent)} errors within {ERRORS_WINDOW_S:g} s, last {name}"
            return _since(self, counted._broken(Event.BROKEN, reason, now_s), now_s)
        if self.mode is Mode.IN_USE:
            counted = replace(counted, reason=name)
        return _since(self, counted, now_s)

    def _recent(self, now_s: float) -> tuple[float, ...]:
        return tuple(at_s for at_s in self.recent_errors_s if now_s - at_s < ERRORS_WINDOW_S)

    def _broken(self, event: Event, reason: str, now_s: float) -> "Health":
        if self.is_broken:  # the first reason tells most
            return self
        mode = self._mode_after(event)
        return _since(self, replace(self, mode=mode, is_broken=True, reason=reason), now_s)

    def _told(self, event: Event, reason: str, now_s: float) -> "Health":
        mode = self._mode_after(event)
        if mode is self.mode:
            return self
        return _since(self, replace(self, mode=mode, wanted=mode, reason=reason), now_s)


def _since(before: Health, after: Health, now_s: float) -> Health:
    """Return *after*, with the time of its state, and without a reason that no longer holds."""
    if after.state is before.state:
        return after
    reason = "" if after.reason == before.reason else after.reason
    match after.state:
        case DiskState.HEALTHY:
            reason = ""
        case DiskState.FULL:
            reason = reason or "no room"
        case DiskState.DEGRADED:
            reason = reason or ("read-only" if after.writes is Writes.REFUSED else "I/O errors")
        case _:
            reason = after.reason
    return replace(after, since_s=now_s, reason=reason)
