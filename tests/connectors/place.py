"""Where a connector's sequence runs, and what it may expect there."""

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.mount.steps.registry import fallocate


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a place can do beyond plain reads and writes. ``docs/semantics.md`` has the table."""

    fallocate: bool = True  # fallocate(2) itself; else EOPNOTSUPP
    beyond_disk: bool = True  # a sparse file may be larger than its disk; else ENOSPC
    seek_data: bool = True  # lseek(SEEK_DATA) knows holes; else a file is all data


@dataclass(frozen=True, slots=True)
class Place:
    """An empty directory to run a sequence in."""

    root: Path
    capabilities: Capabilities = field(default_factory=Capabilities)


Sequence = Callable[[Place], None]
SEQUENCES: dict[str, Sequence] = {}


def sequence(function: Sequence) -> Sequence:
    """Register *function* as ``<module>.<its name>``."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    assert name not in SEQUENCES, f"two sequences are called {name}"
    SEQUENCES[name] = function
    return function


def payload(length: int, seed: int = 0) -> bytes:
    """Return *length* bytes that differ from place to place and from seed to seed."""
    pattern = b"".join(b"%08x" % (seed * 1_000_003 + i * 7919) for i in range(512))
    return (pattern * (length // len(pattern) + 1))[:length]


def aligned(data: bytes) -> mmap.mmap:
    """Return *data* in memory that O_DIRECT takes."""
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memory


def write_at_once(fd: int, data: bytes | mmap.mmap) -> None:
    """Write all of *data* with one write(2); a short write is an error to these clients."""
    written = os.write(fd, data)
    assert written == len(data), f"short write: {written} of {len(data)} bytes"


def read_at_once(fd: int, length: int) -> bytes:
    """Read *length* bytes with one read(2); a short read is an error to these clients."""
    memory = mmap.mmap(-1, length)
    done = os.readv(fd, [memory])
    assert done == length, f"short read: {done} of {length} bytes"
    return memory[:]


def key_hex(number: int) -> str:
    """Return a block hash as vLLM prints them: 64 hex digits."""
    return hashlib.sha256(b"%d" % number).hexdigest()


def absent(path: Path) -> bool:
    """Whether access(2) says ENOENT."""
    return not os.access(path, os.F_OK)


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    """Demand that the block ends with an OSError of this errno."""
    try:
        yield
    except OSError as exc:
        if exc.errno != code:
            raise
    else:
        raise AssertionError(f"went through, must be {errno.errorcode[code]}")


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at once; raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def preallocate(place: Place, fd: int, length: int) -> bool:
    """Preallocate as the place can; returns whether fallocate(2) did it."""
    if place.capabilities.fallocate:
        fallocate(fd, 0, 0, length)
        return True
    with refused(errno.EOPNOTSUPP):
        fallocate(fd, 0, 0, length)
    return False
