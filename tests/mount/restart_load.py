"""A client that uses a directory of a mount in every way, and knows what must come of each call.

``python restart_load.py DIRECTORY SEED``: works until a line comes on stdin, then checks all files
and prints a JSON object: *steps* done, *failures* (each call that did not answer as it had to) and
*longest_s*, the longest step. The model is in the memory of this process: the directory is its own.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import select
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

NAMES = [f"block-{number}.bin" for number in range(24)]
SIZES = (0, 1, 4096, 70_000, 300_000)
SYMLINKS_MAX = 5
NOREPLACE, EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def rename_by(source: Path, target: Path, flags: int) -> None:
    """Rename as renameat2(2) does with *flags*."""
    at = -100  # AT_FDCWD
    if _libc.renameat2(at, os.fsencode(source), at, os.fsencode(target), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


class File:
    """A file, which several names may show."""

    def __init__(self, content: bytes) -> None:
        self.content = content


class Client:
    """One client and what it knows of its directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.files: dict[str, File] = {}
        self.directories: set[str] = set()
        self.symlinks: dict[str, str] = {}
        self.serial = 0
        self.failures: list[str] = []
        self.steps = 0
        self.longest_s = 0.0
        directory.mkdir()
        self._open_long_lived()

    def _open_long_lived(self) -> None:
        path = self.directory / "long-lived"
        path.write_bytes(b"long " * 1000)
        self.reader = os.open(path, os.O_RDONLY)
        self.map = mmap.mmap(self.reader, 0, access=mmap.ACCESS_READ)
        self.writer = os.open(self.directory / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.written = b""
        orphan = self.directory / "orphan"
        orphan.write_bytes(b"orphan")
        self.orphan = os.open(orphan, os.O_RDWR)
        orphan.unlink()
        self.orphaned = b"orphan"
        self.space = os.open(self.directory / "space", os.O_RDWR | os.O_CREAT)

    def run(self) -> None:
        """Do steps until somebody writes to stdin."""
        steps: list[Callable[[], None]] = [
            self.put, self.put, self.get, self.get, self.rename, self.unlink, self.link,
            self.exclusive, self.make_directory, self.remove_directory, self.list,
            self.read_map, self.use_long_lived, self.use_orphan, self.miss, self.touch,
            self.make_symlink, self.remove_symlink, self.exchange, self.rename_to_nothing,
            self.rewrite, self.label, self.reserve, self.truncate, self.copy, self.make_node,
        ]  # fmt: skip
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.step(self.random.choice(steps))
        for name in list(self.files):
            self.step(lambda name=name: self.check(name))
        self.step(self.list)
        self.step(self.use_long_lived)
        self.step(self.use_orphan)

    def step(self, step: Callable[[], None]) -> None:
        began_s = time.monotonic()
        try:
            step()
        except (OSError, AssertionError):
            self.failures.append(f"at {time.time():.3f}: {traceback.format_exc(limit=3)}")
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.steps += 1

    # -- steps

    def data(self) -> bytes:
        return self.random.randbytes(self.random.choice(SIZES))

    def put(self) -> None:
        name, data = self.random.choice(NAMES), File(self.data())
        self.serial += 1
        temporary = self.directory / f"{name}_{self.serial}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            assert os.write(fd, data.content) == len(data.content)
        finally:
            os.close(fd)
        os.rename(temporary, self.directory / name)
        self.files[name] = data

    def existing(self) -> str | None:
        return self.random.choice(sorted(self.files)) if self.files else None

    def get(self) -> None:
        if (name := self.existing()) is not None:
            self.check(name)

    def check(self, name: str) -> None:
        found, data = (self.directory / name).read_bytes(), self.files[name].content
        assert found == data, f"{name}: {len(found)} bytes, {len(data)} were put"

    def rename(self) -> None:
        if (name := self.existing()) is not None:
            target = self.random.choice(NAMES)
            os.rename(self.directory / name, self.directory / target)
            if self.files[name] is not self.files.get(target):  # else two links of one file stay
                self.files[target] = self.files.pop(name)

    def unlink(self) -> None:
        if (name := self.existing()) is not None:
            os.unlink(self.directory / name)
            del self.files[name]

    def link(self) -> None:
        free = [name for name in NAMES if name not in self.files]
        if (name := self.existing()) is not None and free:
            os.link(self.directory / name, self.directory / free[0])
            self.files[free[0]] = self.files[name]

    def exclusive(self) -> None:
        name = self.random.choice(NAMES)
        try:
            fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            assert name in self.files, f"{name}: EEXIST, and it was not there"
            return
        os.close(fd)
        assert name not in self.files, f"{name}: made with O_EXCL, and it was there"
        self.files[name] = File(b"")

    def make_directory(self) -> None:
        self.serial += 1
        name = f"dir-{self.serial}"
        os.mkdir(self.directory / name)
        self.directories.add(name)

    def remove_directory(self) -> None:
        if self.directories:
            name = self.random.choice(sorted(self.directories))
            os.rmdir(self.directory / name)
            self.directories.remove(name)

    def list(self) -> None:
        found = set(os.listdir(self.directory))
        expected = {*self.files, *self.directories, *self.symlinks, "long-lived", "log", "space"}
        assert found == expected, f"too many: {found - expected}, missing: {expected - found}"

    def read_map(self) -> None:
        name = self.existing()
        if name is None or not self.files[name].content:
            return
        with (
            (self.directory / name).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            assert view[:] == self.files[name].content, f"{name}: mapped otherwise than it was put"

    def use_long_lived(self) -> None:
        assert os.pread(self.reader, 6000, 0) == b"long " * 1000
        assert self.map[:5] == b"long "
        assert os.fstat(self.reader).st_size == 5000
        data = self.random.randbytes(100)
        assert os.write(self.writer, data) == 100
        self.written = (self.written + data)[-100_000:]
        tail = os.pread(self.writer, len(self.written), os.fstat(self.writer).st_size - 100)
        assert tail == data

    def use_orphan(self) -> None:
        assert os.pread(self.orphan, 100, 0) == self.orphaned
        found = os.fstat(self.orphan)
        assert (found.st_nlink, found.st_size) == (0, len(self.orphaned)), found
        self.orphaned = self.random.randbytes(20)
        assert os.pwrite(self.orphan, self.orphaned, 0) == 20
        os.fsync(self.orphan)

    def miss(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.stat(self.directory / f"missing-{self.random.randrange(1000)}")
            raise AssertionError("a name that was never made is there")

    def touch(self) -> None:
        if (name := self.existing()) is not None:
            os.utime(self.directory / name)
            size = os.stat(self.directory / name).st_size
            assert size == len(self.files[name].content), f"{name}: {size} bytes"

    def make_symlink(self) -> None:
        if len(self.symlinks) < SYMLINKS_MAX:
            self.serial += 1
            name, target = f"symlink-{self.serial}", f"to/{self.serial}"
            os.symlink(target, self.directory / name)
            self.symlinks[name] = target

    def remove_symlink(self) -> None:
        if self.symlinks:
            name = self.random.choice(sorted(self.symlinks))
            assert os.readlink(self.directory / name) == self.symlinks[name]
            os.unlink(self.directory / name)
            del self.symlinks[name]

    def exchange(self) -> None:
        if len(self.files) < 2:
            return
        one, two = self.random.sample(sorted(self.files), 2)
        rename_by(self.directory / one, self.directory / two, EXCHANGE)
        self.files[one], self.files[two] = self.files[two], self.files[one]

    def free(self) -> str | None:
        return next((name for name in NAMES if name not in self.files), None)

    def rename_to_nothing(self) -> None:
        name, target = self.existing(), self.free()
        if name is not None and target is not None:
            rename_by(self.directory / name, self.directory / target, NOREPLACE)
            self.files[target] = self.files.pop(name)

    def rewrite(self) -> None:
        if (name := self.existing()) is not None:
            self.files[name].content = self.data()
            (self.directory / name).write_bytes(self.files[name].content)

    def label(self) -> None:
        if (name := self.existing()) is None:
            return
        path, value = self.directory / name, self.random.randbytes(20)
        os.setxattr(path, "user.label", value, os.XATTR_CREATE)
        assert os.getxattr(path, "user.label") == value
        os.removexattr(path, "user.label")

    def reserve(self) -> None:
        size_bytes = self.random.choice((1, 4096, 100_000))
        os.posix_fallocate(self.space, 0, size_bytes)
        assert os.fstat(self.space).st_size == size_bytes
        os.ftruncate(self.space, 0)
        assert os.fstat(self.space).st_size == 0

    def truncate(self) -> None:
        if (name := self.existing()) is not None:
            file = self.files[name]
            size_bytes = self.random.randrange(len(file.content) + 1)
            os.truncate(self.directory / name, size_bytes)
            file.content = file.content[:size_bytes]

    def copy(self) -> None:
        source, target = self.existing(), self.free()
        if source is None or target is None:
            return
        with (
            (self.directory / source).open("rb") as old,
            (self.directory / target).open("xb") as new,
        ):
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 20):
                pass
        self.files[target] = File(self.files[source].content)

    def make_node(self) -> None:
        if (name := self.free()) is not None:
            os.mknod(self.directory / name)
            self.files[name] = File(b"")


def main(directory: Path, seed: int) -> None:
    client = Client(directory, seed)
    print("begun", flush=True)  # noqa: T201
    client.run()
    for fd in (client.reader, client.writer, client.orphan, client.space):
        os.close(fd)
    print(  # noqa: T201
        json.dumps({
            "steps": client.steps, "failures": client.failures, "longest_s": client.longest_s,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
