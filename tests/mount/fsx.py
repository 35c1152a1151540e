"""One file under random reads, writes, truncations, mappings and renames, against bytes in memory.

Every operation and its operands come from one seed. On a difference the last operations are told.
"""

import contextlib
import mmap
import os
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tests.mount.steps.registry import fallocate

SIZE_MAX = 256 * 1024
LENGTH_MAX = 64 * 1024
HANDLES = 3
TOLD = 25
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16


@dataclass(frozen=True, slots=True)
class Features:
    """Which operations the place offers."""

    fallocate: bool = True


class Fsx:
    """A file *path* and what it must hold. ``run`` does *count* operations."""

    def __init__(self, directory: Path, seed: int, features: Features) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._features = features
        self._path = directory / "file"
        self._names = 0
        self._data = bytearray()
        self._done: deque[str] = deque(maxlen=TOLD)
        self._handles: list[int] = []
        self._operations = [
            (self._write, 20), (self._append, 6), (self._read, 20), (self._truncate, 8),
            (self._mapped_read, 8), (self._mapped_write, 6), (self._copy_within, 4),
            (self._copy_whole, 1), (self._rename, 4), (self._replace, 2), (self._reopen, 5),
            (self._sync, 2), (self._check, 4),
        ]  # fmt: skip
        if features.fallocate:
            self._operations += [(self._punch, 4), (self._zero, 3), (self._extend, 3)]

    def run(self, count: int) -> None:
        """Do *count* random operations; AssertionError tells the first difference."""
        choices, weights = zip(*self._operations, strict=True)
        self._handles = [self._open(os.O_CREAT) for _ in range(HANDLES)]
        try:
            for _ in range(count):
                (operation,) = self._random.choices(choices, weights)
                operation()
            self._check()
        except (AssertionError, OSError) as exc:
            told = "\n".join(self._done)
            raise AssertionError(f"{exc!r} after:\n{told}") from exc
        finally:
            for fd in self._handles:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _open(self, flags: int = 0) -> int:
        return os.open(self._path, os.O_RDWR | flags, 0o644)

    def _handle(self) -> int:
        return self._random.choice(self._handles)

    def _note(self, text: str) -> None:
        self._done.append(text)

    def _range(self) -> tuple[int, int]:
        """Return an offset and a length within the largest size, often at page borders."""
        offset = self._random.randrange(SIZE_MAX)
        if self._random.random() < 0.4:
            offset -= offset % 4096
        length = self._random.randrange(1, LENGTH_MAX)
        if self._random.random() < 0.3:
            length = max(4096, length - length % 4096)
        return offset, min(length, SIZE_MAX - offset)

    def _bytes(self, length: int) -> bytes:
        return self._random.randbytes(min(length, 64)) * (length // 64 + 1)

    def _store(self, offset: int, data: bytes) -> None:
        if len(self._data) < offset:
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset : offset + len(data)] = data

    def _write(self) -> None:
        offset, length = self._range()
        data = self._bytes(length)[:length]
        self._note(f"write {offset} +{length}")
        assert os.pwrite(self._handle(), data, offset) == length
        self._store(offset, data)

    def _append(self) -> None:
        length = self._random.randrange(1, 5000)
        if len(self._data) + length > SIZE_MAX:
            return
        data = self._bytes(length)[:length]
        self._note(f"append +{length}")
        fd = self._open(os.O_APPEND)
        assert os.write(fd, data) == length
        os.close(fd)
        self._data += data

    def _read(self) -> None:
        offset, length = self._range()
        self._note(f"read {offset} +{length}")
        self._same(os.pread(self._handle(), length, offset), offset, length)

    def _same(self, found: bytes, offset: int, length: int) -> None:
        wanted = bytes(self._data[offset : offset + length])
        assert len(found) == len(wanted), f"read {len(found)} bytes, wanted {len(wanted)}"
        if found != wanted:
            at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise AssertionError(f"byte {offset + at} is {found[at]}, wanted {wanted[at]}")

    def _truncate(self) -> None:
        size = self._random.choice((0, self._random.randrange(SIZE_MAX)))
        size = size if self._random.random() < 0.3 else self._random.randrange(SIZE_MAX)
        self._note(f"truncate {size}")
        if self._random.random() < 0.5:
            os.ftruncate(self._handle(), size)
        else:
            os.truncate(self._path, size)
        del self._data[size:]
        self._data.extend(bytes(size - len(self._data)))

    def _mapped_read(self) -> None:
        if not self._data:
            return
        self._note("mapped read")
        flags = self._random.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE))
        memory = mmap.mmap(self._handle(), len(self._data), flags=flags, prot=mmap.PROT_READ)
        self._same(memory[:], 0, len(self._data))
        memory.close()

    def _mapped_write(self) -> None:
        if not self._data:
            return
        offset = self._random.randrange(len(self._data))
        length = min(self._random.randrange(1, LENGTH_MAX), len(self._data) - offset)
        data = self._bytes(length)[:length]
        self._note(f"mapped write {offset} +{length}")
        memory = mmap.mmap(self._handle(), len(self._data))
        memory[offset : offset + length] = data
        if self._random.random() < 0.5:
            memory.flush()
        memory.close()
        self._store(offset, data)

    def _copy_within(self) -> None:
        source, length = self._range()
        target = self._random.randrange(SIZE_MAX)
        length = min(length, len(self._data) - source, SIZE_MAX - target)
        if length <= 0 or abs(source - target) < length:
            return
        self._note(f"copy {source} to {target} +{length}")
        fd, done = self._handle(), 0
        data = bytes(self._data[source : source + length])
        while done < length:
            count = os.copy_file_range(fd, fd, length - done, source + done, target + done)
            assert count > 0, "copy_file_range stopped early"
            done += count
        self._store(target, data)

    def _copy_whole(self) -> None:
        self._note("copy to another file")
        copy = self._directory / "copy"
        fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        done = 0
        while done < len(self._data):
            count = os.copy_file_range(self._handle(), fd, len(self._data), done, done)
            assert count > 0, "copy_file_range stopped early"
            done += count
        self._same(os.pread(fd, SIZE_MAX + 1, 0), 0, SIZE_MAX)
        os.close(fd)
        os.unlink(copy)

    def _rename(self) -> None:
        self._names += 1
        suffix = self._random.choice(("", "_123.tmp", ".tmp", ".data"))
        target = self._directory / f"file{self._names}{suffix}"
        self._note(f"rename to {target.name}")
        os.rename(self._path, target)
        self._path = target

    def _replace(self) -> None:
        """Put a new file of the same content in place; old handles lead to the old one."""
        self._note("replace")
        temp = self._directory / "replacement.tmp"
        temp.write_bytes(self._data)
        os.rename(temp, self._path)
        for index, fd in enumerate(self._handles):
            self._same(os.pread(fd, SIZE_MAX + 1, 0), 0, SIZE_MAX)
            os.close(fd)
            self._handles[index] = self._open()

    def _reopen(self) -> None:
        self._note("reopen")
        index = self._random.randrange(HANDLES)
        os.close(self._handles[index])
        self._handles[index] = self._open()

    def _sync(self) -> None:
        self._note("fsync")
        os.fsync(self._handle())

    def _check(self) -> None:
        self._note("check all")
        size = len(self._data)
        assert os.stat(self._path).st_size == size, f"stat says {os.stat(self._path).st_size}"
        assert os.fstat(self._handle()).st_size == size
        self._same(self._path.read_bytes(), 0, SIZE_MAX)

    def _punch(self) -> None:
        offset, length = self._range()
        self._note(f"punch {offset} +{length}")
        fallocate(self._handle(), PUNCH_HOLE | KEEP_SIZE, offset, length)
        end = min(offset + length, len(self._data))
        if offset < end:
            self._data[offset:end] = bytes(end - offset)

    def _zero(self) -> None:
        offset, length = self._range()
        self._note(f"zero {offset} +{length}")
        fallocate(self._handle(), ZERO_RANGE, offset, length)
        self._store(offset, bytes(length))

    def _extend(self) -> None:
        offset, length = self._range()
        self._note(f"allocate {offset} +{length}")
        fallocate(self._handle(), 0, offset, length)
        if offset + length > len(self._data):
            self._data.extend(bytes(offset + length - len(self._data)))
