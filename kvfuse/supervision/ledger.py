"""What a supervisor writes down: a file for ``status``, and a memory for a supervisor after it.

Standard library only, and little of it: the supervisor imports this.
"""

import contextlib
import json
import os

FILE = "supervisor.json"
_BYTES_MAX = 64 * 1024


def write(path: str, facts: dict[str, object]) -> None:
    """Replace the file at *path*; without room for it the old one stays."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o644)
        try:
            os.write(fd, json.dumps(facts).encode())
        finally:
            os.close(fd)
        os.rename(temporary, path)


def remove(path: str) -> None:
    """Remove the file at *path*, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def read(path: str) -> dict[str, object] | None:
    """Return what the supervisor wrote to *path*; None when it wrote nothing that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _decode(os.read(fd, _BYTES_MAX))
    except OSError:
        return None
    finally:
        os.close(fd)


class Memory:
    """A few facts in a descriptor, which the service manager keeps when the supervisor dies."""

    NAME = "supervisor"

    def __init__(self, fd: int | None = None) -> None:
        """Take *fd* over, a memory of a former supervisor; else make one."""
        self.fd = os.memfd_create("kvfuse-supervisor") if fd is None else fd

    def read(self) -> dict[str, object]:
        """Return what was written last; nothing when that cannot be read."""
        with contextlib.suppress(OSError):
            return _decode(os.pread(self.fd, _BYTES_MAX, 0)) or {}
        return {}

    def write(self, facts: dict[str, object]) -> None:
        """Replace what was written."""
        data = json.dumps(facts).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self.fd, data.ljust(os.fstat(self.fd).st_size), 0)


def _decode(data: bytes) -> dict[str, object] | None:
    with contextlib.suppress(ValueError):
        facts = json.loads(data)
        if isinstance(facts, dict):
            return facts
    return None
