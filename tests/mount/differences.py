"""The wanted differences between a kvfuse mount and a native directory: the only list of them.

``docs/semantics.md`` shows the same patterns with the same reasons; a test holds both together.
A difference that is no longer there fails the suite, as does one that is not in this list.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

ALL = ("pyfuse3", "direct", "direct-nopass")


@dataclass(frozen=True, slots=True)
class Difference:
    """Steps whose id matches *pattern* differ on *setups*, for *reason*."""

    pattern: str
    reason: str
    setups: tuple[str, ...] = ALL

    def covers(self, step_id: str, setup: str) -> bool:
        """Whether the step may and must differ on *setup*."""
        return setup in self.setups and fnmatchcase(step_id, self.pattern)


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "directories.link_count_of_directories",
        "st_nlink of a directory is 1: counting its subdirectories would cost a walk",
    ),
)


def reason_for(step_id: str, setup: str) -> str | None:
    """Return why *step_id* differs on *setup*, or None when it must not."""
    for difference in DIFFERENCES:
        if difference.covers(step_id, setup):
            return difference.reason
    return None
