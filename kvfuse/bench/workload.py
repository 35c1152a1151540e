"""What one client does in a job: raw system calls on paths, as connectors make them.

Names and buffers are made before the clock starts; what a job leaves is removed after it stopped.
"""

import itertools
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from kvfuse.bench.jobs import MIB, SMALL_BYTES, Bounds, Job, Kind, Sample, together

BUCKETS = 16  # directories the small files are spread over
STANDING_FILES = 4000  # that are asked for in the jobs about hits
LISTED_FILES = 1000
FILES_BYTES_MAX = 256 * MIB  # of all files of a job about whole files
_AGAIN_NAMES = 500
_UNLINKED_FILES = 1200
_CALL_BYTES_MAX = 8 * MIB
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_TRUNCATED = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_now_ns = time.perf_counter_ns


class Client(ABC):
    """One client of a job below *base*: ``prepare``, ``run`` (timed), ``clean``."""

    def __init__(self, base: Path, job: Job, number: int, bounds: Bounds) -> None:
        self.base = base
        self.job = job
        self.number = number
        self.bounds = bounds

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Make what the timed part needs."""

    @abstractmethod
    def run(self) -> Sample:
        """Do the job until the first bound is met."""

    def clean(self) -> None:  # noqa: B027 - most leave nothing
        """Remove what the timed part made."""

    def name(self, stem: str, count: int) -> str:
        """Return the path of the file *count* of this client."""
        return f"{self.base}/{count % BUCKETS:02x}/{stem}-{self.number}-{count:08x}.bin"

    @property
    def share(self) -> int:
        """How many operations on new names this client does at most."""
        return max(1, self.bounds.operations // self.job.clients)

    def _repeat(self, operation: Callable[[str], object], paths: Iterable[str]) -> Sample:
        """Do *operation* for the paths, once each, until a bound is met."""
        done = 0
        begin_ns = _now_ns()
        deadline_ns = begin_ns + int(self.bounds.seconds * 1e9)
        for path in paths:
            operation(path)
            done += 1
            if _now_ns() >= deadline_ns:
                break
        end_ns = _now_ns()
        return Sample(operations=done, bytes=0, begin_ns=begin_ns, end_ns=end_ns)


class _Put(Client):
    def prepare(self) -> None:
        tag = f"{os.getpid():x}{_now_ns():x}"
        self._finals = [self.name(tag, count) for count in range(self.share)]
        self._made = 0

    def run(self) -> Sample:
        sample = self._repeat(put, self._finals)
        self._made = sample.operations
        return sample

    def clean(self) -> None:
        for path in self._finals[: self._made]:
            os.unlink(path)


class _Get(Client):
    def prepare(self) -> None:
        count = STANDING_FILES // self.job.clients
        paths = [standing(self.base, i) for i in range(self.number, STANDING_FILES, 8)][:count]
        for path in paths:
            get(path)
        self._paths = itertools.cycle(paths)

    def run(self) -> Sample:
        return self._repeat(get, self._paths)


class _Hit(Client):
    def prepare(self) -> None:
        mine = range(self.number, STANDING_FILES, self.job.clients)
        paths = [standing(self.base, i) for i in mine]
        self._paths: Iterable[str] = paths
        if self.job.kind is Kind.HIT_AGAIN:
            self._paths = _asked(paths[:_AGAIN_NAMES])

    def run(self) -> Sample:
        return self._repeat(_present, self._paths)


class _Miss(Client):
    def prepare(self) -> None:
        tag = f"m{os.getpid():x}{_now_ns():x}"
        if self.job.kind is Kind.MISS_FIRST:
            self._paths: Iterable[str] = [self.name(tag, count) for count in range(self.share)]
        else:
            self._paths = _asked([self.name(tag, count) for count in range(_AGAIN_NAMES)])

    def run(self) -> Sample:
        return self._repeat(_absent, self._paths)


class _Unlink(Client):
    def prepare(self) -> None:
        tag = f"u{os.getpid():x}{_now_ns():x}"
        count = min(_UNLINKED_FILES // self.job.clients, self.share)
        self._paths = [self.name(tag, number) for number in range(count)]
        for path in self._paths:
            put(path)
        self._done = 0

    def run(self) -> Sample:
        sample = self._repeat(os.unlink, self._paths)
        self._done = sample.operations
        return sample

    def clean(self) -> None:
        for path in self._paths[self._done :]:
            os.unlink(path)


class _Readdir(Client):
    def run(self) -> Sample:
        directory = f"{self.base}/listed"
        self._repeat(_list, [directory])
        sample = self._repeat(_list, itertools.repeat(directory))
        return Sample(
            operations=sample.operations * LISTED_FILES,
            bytes=0,
            begin_ns=sample.begin_ns,
            end_ns=sample.end_ns,
        )


class _Whole(Client):
    """Reads or writes whole files by threads; each takes the files in turn from its own start."""

    def prepare(self) -> None:
        job = self.job
        self._flags = os.O_RDONLY if job.kind is Kind.READ else _TRUNCATED
        if job.direct:
            self._flags |= os.O_DIRECT
        self._files = whole_files(self.base, job)
        length = min(_CALL_BYTES_MAX, job.size_bytes)
        self._buffers = [mmap.mmap(-1, length) for _ in range(job.clients)]
        for buffer in self._buffers:
            buffer[:] = b"\x5a" * length  # no page fault is measured
        if job.kind is Kind.READ and not job.cold and not job.direct:
            for index in range(len(self._files)):
                self._one(index, self._buffers[0])

    def run(self) -> Sample:
        count = self.job.clients
        samples: list[Sample] = []
        errors: list[BaseException] = []
        barrier = threading.Barrier(count)

        def work(number: int) -> None:
            try:
                barrier.wait()
                samples.append(self._loop(number))
            except BaseException as exc:  # noqa: BLE001 - reported by the thread that waits
                errors.append(exc)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return together(samples)

    def _loop(self, number: int) -> Sample:
        job, bounds = self.job, self.bounds
        files = len(self._files)
        share = max(1, bounds.bytes // (job.size_bytes * job.clients))
        if job.cold:  # a second round would be warm
            share = max(1, files // job.clients)
        done = data_ns = 0
        begin_ns = _now_ns()
        deadline_ns = begin_ns + int(bounds.seconds * 1e9)
        for turn in range(share):
            index = (number + turn * job.clients) % files
            data_ns += self._one(index, self._buffers[number])
            done += 1
            if _now_ns() >= deadline_ns:
                break
        end_ns = _now_ns()
        return Sample(
            operations=done, bytes=done * job.size_bytes,
            begin_ns=begin_ns, end_ns=end_ns, data_ns=data_ns,
        )  # fmt: skip

    def _one(self, index: int, buffer: mmap.mmap) -> int:
        """Read or write one file; return the ns inside the calls that move bytes."""
        size = self.job.size_bytes
        move: Callable[[int, list[mmap.mmap], int], int]
        move = os.preadv if self.job.kind is Kind.READ else os.pwritev
        fd = os.open(self._files[index], self._flags, 0o644)
        try:
            begin_ns = _now_ns()
            offset = 0
            while offset < size:
                moved = move(fd, [buffer], offset)
                if not moved:
                    raise OSError(0, f"{self._files[index]}: shorter than it was written")
                offset += moved
            return _now_ns() - begin_ns
        finally:
            os.close(fd)


def put(path: str) -> None:
    """Store 4 KiB at *path* as engines do."""
    temporary = f"{path}_7.tmp"
    fd = os.open(temporary, _NEW, 0o644)
    os.write(fd, _BLOCK)
    os.close(fd)
    os.rename(temporary, path)


def get(path: str) -> None:
    """Read the 4 KiB at *path*."""
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, SMALL_BYTES)
    os.close(fd)


def standing(base: Path, count: int) -> str:
    """Return the path of a small file that stays for the whole run."""
    return f"{base}/{count % BUCKETS:02x}/standing-{count:06x}.bin"


def whole_files(base: Path, job: Job) -> list[str]:
    """Return the paths of the files of a job about whole files."""
    count = max(1, min(max(4, job.clients), FILES_BYTES_MAX // job.size_bytes))
    return [f"{base}/whole/{number}.bin" for number in range(count)]


def furnish(base: Path, kinds: Set[Kind]) -> None:
    """Make the directories below *base*, and the small files that jobs of these *kinds* share."""
    for bucket in range(BUCKETS):
        os.makedirs(f"{base}/{bucket:02x}")
    os.mkdir(f"{base}/whole")
    os.mkdir(f"{base}/listed")
    if kinds & {Kind.GET, Kind.HIT_FIRST, Kind.HIT_AGAIN}:
        for count in range(STANDING_FILES):
            put(standing(base, count))
    if Kind.READDIR in kinds:
        for count in range(LISTED_FILES):
            put(f"{base}/listed/{count:06x}.bin")


def furnish_whole(base: Path, job: Job) -> None:
    """Make the files that a READ reads; the others make their own."""
    piece = b"\x5a" * MIB
    for path in whole_files(base, job):
        with open(path, "wb", buffering=0) as file:
            for _ in range(job.size_bytes // MIB):
                file.write(piece)


def clear_whole(base: Path, job: Job) -> None:
    """Remove the files of a job about whole files."""
    for path in whole_files(base, job):
        Path(path).unlink(missing_ok=True)


_BLOCK = b"\x5a" * SMALL_BYTES

_CLIENTS: dict[Kind, type[Client]] = {
    Kind.PUT: _Put,
    Kind.GET: _Get,
    Kind.HIT_FIRST: _Hit,
    Kind.HIT_AGAIN: _Hit,
    Kind.MISS_FIRST: _Miss,
    Kind.MISS_AGAIN: _Miss,
    Kind.UNLINK: _Unlink,
    Kind.READDIR: _Readdir,
    Kind.READ: _Whole,
    Kind.WRITE: _Whole,
}


def client(base: Path, job: Job, number: int, bounds: Bounds) -> Client:
    """Return the client *number* of a job below *base*."""
    return _CLIENTS[job.kind](base, job, number, bounds)


def _present(path: str) -> None:
    if not os.access(path, os.F_OK):
        raise FileNotFoundError(2, "it must be there", path)


def _absent(path: str) -> None:
    if os.access(path, os.F_OK):
        raise FileExistsError(17, "it must not be there", path)


def _list(path: str) -> None:
    with os.scandir(path) as entries:
        found = sum(entry.is_file(follow_symlinks=False) for entry in entries)
    if found != LISTED_FILES:
        raise OSError(0, f"{path}: {found} entries instead of {LISTED_FILES}")


def _asked(paths: list[str]) -> Iterable[str]:
    """Ask for each of the paths, and return them again and again."""
    for path in paths:
        os.access(path, os.F_OK)
    return itertools.cycle(paths)
