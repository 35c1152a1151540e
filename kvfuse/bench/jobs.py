"""What is measured: a job is one thing clients do, with how many of them do it at once."""

import re
from dataclasses import dataclass
from enum import StrEnum

from kvfuse.core.errors import ConfigError

MIB = 1 << 20
SMALL_BYTES = 4096  # of a file in the jobs about names


class Kind(StrEnum):
    """What clients do in a job."""

    PUT = "put"  # create under a temporary name, write 4 KiB, close, rename
    GET = "get"  # open, read, close, of files opened before
    HIT_FIRST = "access hit first"  # access(2) of a file the kernel has no name of
    MISS_FIRST = "access miss first"  # access(2) of a name never asked before
    HIT_AGAIN = "access hit again"
    MISS_AGAIN = "access miss again"
    UNLINK = "unlink"
    READDIR = "readdir"  # list a directory with the type of each entry
    READ = "read"  # open, read all, close
    WRITE = "write"  # open with O_CREAT and O_TRUNC, write all, close

    @property
    def is_data(self) -> bool:
        """Whether bytes count, not operations."""
        return self in (Kind.READ, Kind.WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One line of the table. *clients* are processes, in READ and WRITE threads of one process."""

    kind: Kind
    clients: int
    size_bytes: int = SMALL_BYTES
    direct: bool = False  # O_DIRECT
    cold: bool = False  # nothing in the page cache at the beginning

    @property
    def name(self) -> str:
        """What the job is called in tables and in JSON."""
        if not self.kind.is_data:
            return f"{self.kind} x{self.clients}"
        how = "O_DIRECT" if self.direct else "cold" if self.cold else "warm"
        if self.kind is Kind.WRITE and not self.direct:
            how = "buffered"
        return f"{self.kind} {self.size_bytes // MIB} MiB x{self.clients} {how}"

    @property
    def unit(self) -> str:
        """What its rate is in."""
        return "B/s" if self.kind.is_data else "1/s"

    @property
    def forgets_names(self) -> bool:
        """Whether the kernel must not know names when it begins."""
        return self.kind is Kind.HIT_FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When the clients of a job stop: at the first of these that they meet."""

    seconds: float = 0.3
    operations: int = 24_000  # on new names, of all clients together
    bytes: int = 512 * MIB  # of all threads together


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement. *data_ns* is the time inside read and write calls, of all threads."""

    operations: int
    bytes: int
    begin_ns: int
    end_ns: int
    data_ns: int = 0

    def rate(self, job: Job) -> float:
        """Return operations, or bytes, in a second."""
        amount = self.bytes if job.kind.is_data else self.operations
        return amount * 1e9 / max(1, self.end_ns - self.begin_ns)

    def data_rate(self, job: Job) -> float | None:
        """Return the bytes in a second while a read or write call ran, None if there was none."""
        if not self.data_ns:
            return None
        return self.bytes * 1e9 * job.clients / self.data_ns


def together(samples: list[Sample]) -> Sample:
    """Return what clients did that ran at the same time."""
    return Sample(
        operations=sum(sample.operations for sample in samples),
        bytes=sum(sample.bytes for sample in samples),
        begin_ns=min(sample.begin_ns for sample in samples),
        end_ns=max(sample.end_ns for sample in samples),
        data_ns=sum(sample.data_ns for sample in samples),
    )


_NAME_KINDS = [kind for kind in Kind if not kind.is_data]
_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_THREADS = (1, 4, 16, 64)


def name_jobs() -> list[Job]:
    """Return the jobs about names and small files, at one and eight clients."""
    return [Job(kind=kind, clients=clients) for kind in _NAME_KINDS for clients in (1, 8)]


def data_jobs(
    sizes: tuple[int, ...] = _SIZES, threads: tuple[int, ...] = _THREADS, *, cold: bool = True
) -> list[Job]:
    """Return the jobs about whole files."""
    variants = [
        (Kind.READ, False, False),
        (Kind.READ, True, False),
        (Kind.WRITE, False, False),
        (Kind.WRITE, True, False),
    ]
    if cold:
        variants.insert(1, (Kind.READ, False, True))
    return [
        Job(kind=kind, clients=count, size_bytes=size, direct=direct, cold=is_cold)
        for kind, direct, is_cold in variants
        for size in sizes
        for count in threads
    ]


def quick_jobs() -> list[Job]:
    """Return the jobs that show the most in a minute or two."""
    return name_jobs() + data_jobs((4 * MIB, 64 * MIB), (4,), cold=False)


def all_jobs() -> list[Job]:
    """Return every job."""
    return name_jobs() + data_jobs()


def chosen(jobs: list[Job], only: str | None) -> list[Job]:
    """Return the *jobs* whose name the regular expression *only* matches somewhere.

    Raises:
        ConfigError: it is none, or matches no job.
    """
    if only is None:
        return jobs
    try:
        pattern = re.compile(only)
    except re.error as exc:
        raise ConfigError(f"--only {only}: not a regular expression: {exc}") from exc
    found = [job for job in jobs if pattern.search(job.name)]
    if not found:
        raise ConfigError(f"--only {only}: matches no job; one is called '{jobs[0].name}'")
    return found
