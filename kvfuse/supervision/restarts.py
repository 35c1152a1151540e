"""How often a server died, and how long the next one waits. Pure: the time is an argument."""

KEPT_MAX = 16
FREE_SHORT_LIVES = 3
SHORT_LIFE_S = 0.5
DELAY_FIRST_S, DELAY_MAX_S = 0.1, 10.0
FAILED_RESUMES_MAX = 8
_SIGKILL = "signal 9"


class Restarts:
    """The deaths of the servers of one mount.

    A server is followed at once, however often it dies; only one that dies right after its start
    again and again is waited for, longer each time.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: list[dict[str, object]] = []
        self._short_lives = 0
        self._failed_starts = 0

    def note(self, pid: int, reason: str, *, time_s: float, age_s: float, was_ready: bool) -> None:
        """Count the death of *pid* at *time_s* (wall clock), *age_s* after its start."""
        self.count += 1
        row: dict[str, object] = {"time": round(time_s, 3), "pid": pid, "reason": reason}
        self.last = [*self.last, row][-KEPT_MAX:]
        # one that somebody kills while it starts has not failed by itself
        is_short = age_s < SHORT_LIFE_S or (not was_ready and reason != _SIGKILL)
        self._short_lives = self._short_lives + 1 if is_short else 0
        self._failed_starts = 0 if was_ready else self._failed_starts + 1

    @property
    def delay_s(self) -> float:
        """How long the next server waits, in seconds; mostly 0."""
        beyond = self._short_lives - FREE_SHORT_LIVES
        if beyond <= 0:
            return 0.0
        return float(min(DELAY_MAX_S, DELAY_FIRST_S * 2 ** min(beyond - 1, 16)))

    @property
    def is_hopeless(self) -> bool:
        """Whether so many servers in a row died before they were ready that none will resume."""
        return self._failed_starts >= FAILED_RESUMES_MAX

    def start_over(self) -> None:
        """Forget the failed starts: what comes next is a mount anew."""
        self._failed_starts = 0
