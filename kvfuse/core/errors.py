"""Errors that an operator sees: one clear line each, with the exit code of the command line.

The verbs of the pool do not use these: they raise ``OSError`` carrying the errno the client gets.
"""

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_MOUNTED = 3
EXIT_DISK_REFUSED = 4
EXIT_BUSY = 5
EXIT_KERNEL = 6


class KvfuseError(Exception):
    """A failure that is reported in one line: what is wrong, where, and what to do."""

    exit_code = EXIT_FAILED

    @property
    def lines(self) -> tuple[str, ...]:
        """What is reported, a line for each thing that is wrong."""
        return (str(self),)


class ConfigError(KvfuseError):
    """A configuration value or an argument that cannot be used."""

    exit_code = EXIT_USAGE


class ConfigMistakesError(ConfigError):
    """All that is wrong in a configuration, a line for each mistake."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self._mistakes = tuple(mistakes)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each mistake."""
        return self._mistakes


class NotMountedError(KvfuseError):
    """No kvfuse answers at the mountpoint."""

    exit_code = EXIT_NOT_MOUNTED


class DiskRefusedError(KvfuseError):
    """A disk that must not be used as it is; nothing was written to it."""

    exit_code = EXIT_DISK_REFUSED


class BusyError(KvfuseError):
    """Something is in use: a disk by another daemon, a mountpoint by a process."""

    exit_code = EXIT_BUSY


class KernelError(KvfuseError):
    """The kernel, a device or a privilege that kvfuse needs is missing."""

    exit_code = EXIT_KERNEL


class CatalogDamagedError(KvfuseError):
    """The catalog cannot be read; it has to be rebuilt from the disks."""
