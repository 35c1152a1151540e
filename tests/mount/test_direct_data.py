"""Bytes on the mount of the direct driver, whoever moves them: the kernel, or the server."""

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.drivers.direct import abi
from kvfuse.drivers.direct.session import can_run
from tests.connectors import replacing
from tests.directmount import DirectMount, opened, settled

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(can_run() is not None, reason=str(can_run())),
]

PAGE = 4096
MIB = 1 << 20
NO_PASSTHROUGH = ~abi.PASSTHROUGH & (1 << 64) - 1

# How data gets to the disk, by the options of the mount.
MODES = {
    "passthrough": {},
    "writers-mediated": {"minor_max": 40},  # Linux 6.9 to 6.11
    "mediated": {"passthrough": False},
    "old-kernel": {"mask_flags": NO_PASSTHROUGH, "minor_max": 38},
}


@pytest.fixture(params=MODES)
def any_mode(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DirectMount]:
    with DirectMount(tmp_path, **MODES[request.param]) as mounted:
        yield mounted


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[DirectMount]:
    with DirectMount(tmp_path) as mounted:
        yield mounted


def aligned(size_bytes: int) -> mmap.mmap:
    """Return a buffer that O_DIRECT takes."""
    return mmap.mmap(-1, size_bytes)


def test_no_data_reaches_the_server_while_the_kernel_passes_it_through(mounted: DirectMount):
    """Buffered, O_DIRECT, mapped, vectored, sent: neither READ nor WRITE arrives."""
    path = mounted.path / "data"
    block = os.urandom(MIB)

    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, block)
        os.pwritev(fd, [block, block], MIB)
        assert os.fstat(fd).st_size == 3 * MIB
        with mmap.mmap(fd, 3 * MIB) as shared:
            shared[:4] = b"mmap"
            shared.flush()
        assert os.pread(fd, 4, 0) == b"mmap"
        assert os.sendfile(os.open(os.devnull, os.O_WRONLY), fd, 0, MIB) == MIB
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd, aligned(PAGE) as page:
        page[:] = b"d" * PAGE
        assert os.pwrite(fd, page, PAGE) == PAGE
        assert os.preadv(fd, [page], 0) == PAGE
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"end")
    with (
        opened(path, os.O_RDONLY) as fd,
        mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as private,
    ):
        assert private[-3:] == b"end"

    counts = mounted.counts()
    assert counts.keys().isdisjoint({"read", "write"}), counts


def test_bytes_and_size_are_right_in_every_mode(any_mode: DirectMount):
    """What one handle writes another reads at once, to the last byte, and stat knows the size."""
    path = any_mode.path / "data"
    blob = os.urandom(3 * MIB + 17)

    with opened(path, os.O_RDWR | os.O_CREAT) as writer, opened(path, os.O_RDONLY) as reader:
        assert os.write(writer, blob) == len(blob)
        assert os.fstat(reader).st_size == len(blob)
        assert os.pread(reader, 4 * MIB, 0) == blob
        assert os.pwrite(writer, b"xyz", 10) == 3
        assert os.pread(reader, 5, 9) == blob[9:10] + b"xyz" + blob[13:14]
        assert os.pread(reader, 10, len(blob) - 4) == blob[-4:]
        os.ftruncate(writer, 100)
        assert os.stat(path).st_size == 100
        assert os.pread(reader, 1000, 0) == os.pread(writer, 1000, 0)

    stored = next(disk / "data" for disk in any_mode.disks if (disk / "data").exists())
    assert stored.read_bytes() == path.read_bytes()


def test_mappings_share_bytes_with_the_file_in_every_mode(any_mode: DirectMount):
    """MAP_SHARED reaches the disk, also through a mapping that outlives its descriptor."""
    path = any_mode.path / "data"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 2 * PAGE)
        shared = mmap.mmap(fd, 2 * PAGE)
    with shared:
        shared[PAGE : PAGE + 4] = b"late"
        shared.flush()

    with opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 4, PAGE) == b"late"
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[PAGE : PAGE + 4] = b"mine"
        assert os.pread(fd, 4, PAGE) == b"late"


def test_sparse_and_preallocated_files_work_in_every_mode(any_mode: DirectMount):
    """fallocate, SEEK_DATA, SEEK_HOLE and copy_file_range do what the disk does."""
    path = any_mode.path / "data"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, MIB)
        assert os.fstat(fd).st_size == MIB
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"data", 8 * MIB)
        assert os.lseek(fd, 0, os.SEEK_DATA) == 8 * MIB
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
        assert os.lseek(fd, 0, os.SEEK_END) == 8 * MIB + 4
        with opened(any_mode.path / "copy", os.O_RDWR | os.O_CREAT) as copy:
            assert os.copy_file_range(fd, copy, 4, 8 * MIB, 0) == 4
            assert os.pread(copy, 10, 0) == b"data"


def test_every_handle_of_a_file_has_one_backing_id_that_goes_with_the_last(mounted: DirectMount):
    """Opens come and go in any order; the id stays until nobody needs it, and no longer."""
    path = mounted.path / "data"
    path.write_bytes(b"data")

    first = os.open(path, os.O_RDONLY)
    second = os.open(path, os.O_RDWR)
    ids = mounted.ask("ids")["backing"]
    os.close(first)
    third = os.open(path, os.O_RDONLY)
    os.close(second)
    same = mounted.ask("ids")["backing"]
    assert os.pread(third, 4, 0) == b"data"
    os.close(third)
    settled(mounted)

    assert ids == same
    assert len(ids) == 1


def test_a_file_no_longer_named_stays_a_file_while_it_is_open(any_mode: DirectMount):
    """Unlinked or replaced, a handle reads, writes, syncs, truncates and stats as before."""
    path = any_mode.path / "data"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"before")
        os.unlink(path)
        assert not os.path.exists(path)
        path.write_bytes(b"another")
        os.pwrite(fd, b"after!", 6)
        os.fsync(fd)
        assert os.fstat(fd).st_size == 12
        assert os.pread(fd, 100, 0) == b"beforeafter!"
        os.ftruncate(fd, 3)
        assert os.pread(fd, 100, 0) == b"bef"
        with opened(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY) as again:
            assert os.pread(again, 100, 0) == b"bef"

    assert path.read_bytes() == b"another"
    assert os.listdir(any_mode.path) == ["data"]
    settled(any_mode)


def test_parallel_readers_and_writers_see_whole_blocks(any_mode: DirectMount):
    """Eight threads over one file, each in its own place, whoever moves the bytes."""
    path = any_mode.path / "data"
    path.write_bytes(bytes(8 * MIB))
    failures: list[str] = []

    def work(number: int) -> None:
        with opened(path, os.O_RDWR) as fd:
            for turn in range(4):
                block = bytes([number * 8 + turn]) * MIB
                os.pwrite(fd, block, number * MIB)
                if os.pread(fd, MIB, number * MIB) != block:
                    failures.append(f"{number}, {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    settled(any_mode)


def test_a_name_that_is_replaced_again_and_again_can_always_be_opened(any_mode: DirectMount):
    """A reader that meets several renames in one open gets one of the files, whole."""
    path = any_mode.path / "key.data"
    replacing.write(str(path), 1)

    engines = [
        subprocess.Popen(
            [sys.executable, replacing.__file__, verb, path, "100"], stderr=subprocess.PIPE
        )
        for verb in ("write", "read") * 4
    ]
    errors = [engine.communicate()[1].decode() for engine in engines]

    assert not any(errors), max(errors)
    for _ in range(1000):
        if any_mode.ask("handles") == 0:
            break
        threading.Event().wait(0.01)
    assert any_mode.ask("handles") == 0
