"""llm-d's fs backend: temp in the same directory, renamed while the descriptor is open."""

import contextlib
import errno
import os
from pathlib import Path

from tests.connectors.place import (
    Place,
    aligned,
    in_threads,
    key_hex,
    payload,
    read_at_once,
    refused,
    sequence,
)
from tests.mount.steps.registry import UTIME_NOW, UTIME_OMIT, tick, utimensat

BLOCK_BYTES = 3 << 20


def block_path(base: Path, number: int) -> Path:
    """Return where the backend puts block *number*: two directories of fan-out."""
    digits = key_hex(number)
    return base / digits[:3] / f"{digits[3:5]}_g0" / f"{digits}.bin"


def make_parents(path: Path) -> None:
    """Stat each parent and make each missing one, as std::filesystem does."""
    missing = []
    parent = path.parent
    while not os.path.exists(parent):
        missing.append(parent)
        parent = parent.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o777)


def store(path: Path, data: bytes, suffix: int) -> bool:
    """Store *data*; returns whether it was written rather than touched."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        pass
    else:
        utimensat(str(path), (0, UTIME_NOW), (0, UTIME_OMIT))
        return False
    make_parents(path)
    temp = path.with_name(f"{path.name}_{suffix}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    assert os.writev(fd, [data]) == len(data)
    os.rename(temp, path)
    os.close(fd)
    return True


def load(path: Path, length: int) -> bytes:
    """Load the last *length* bytes of a file, refusing a shorter one."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        assert size >= length, f"{path.name}: {size} bytes, wanted {length}"
        os.lseek(fd, size - length, os.SEEK_SET)
        return read_at_once(fd, length)
    finally:
        os.close(fd)


@sequence
def stores_and_loads(place: Place) -> None:
    base = place.root / "meta-llama_Llama-3.1-8B-Instruct_c69f221eda93_r0"
    for number in range(4):
        assert store(block_path(base, number), payload(BLOCK_BYTES, number), 4294967295 - number)
    for number in range(4):
        path = block_path(base, number)
        assert os.path.exists(path)
        assert os.stat(path).st_size == BLOCK_BYTES
        assert load(path, BLOCK_BYTES) == payload(BLOCK_BYTES, number)
        assert os.listdir(path.parent) == [path.name]


@sequence
def size_is_exact_at_open_because_the_tail_is_read(place: Place) -> None:
    path = block_path(place.root / "m_r0", 1)
    for length in (1, 4095, 4097, 100_001, 1_048_577):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        store(path, payload(length), 7)
        assert load(path, min(length, 1000)) == payload(length)[-1000:]


@sequence
def storing_again_touches(place: Place) -> None:
    path = block_path(place.root / "m_r0", 2)
    store(path, payload(BLOCK_BYTES), 1)
    os.utime(path, ns=(10**18, 10**18))
    tick()

    assert not store(path, payload(BLOCK_BYTES), 1)

    status = os.stat(path)
    assert status.st_atime_ns > 10**18
    assert status.st_mtime_ns == 10**18


@sequence
def a_leftover_temp_of_the_same_thread_is_overwritten(place: Place) -> None:
    path = block_path(place.root / "m_r0", 3)
    make_parents(path)
    temp = path.with_name(f"{path.name}_42.tmp")
    temp.write_bytes(payload(BLOCK_BYTES * 2, 9))

    store(path, payload(1000), 42)

    assert path.read_bytes() == payload(1000)
    assert not temp.exists()


@sequence
def a_failed_write_removes_its_temp(place: Place) -> None:
    path = block_path(place.root / "m_r0", 4)
    make_parents(path)
    temp = path.with_name(f"{path.name}_5.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(fd, b"half")
    os.close(fd)
    os.unlink(temp)

    assert not os.path.exists(path)
    assert os.listdir(path.parent) == []
    with refused(errno.ENOENT):
        os.rename(temp, path)


@sequence
def many_threads_store_and_load_at_once(place: Place) -> None:
    base = place.root / "m_r0"

    def work(thread: int) -> None:
        for number in range(6):
            block = number * 100 + thread
            data = payload(100_000, block)
            store(block_path(base, block), data, thread)
            assert load(block_path(base, block), len(data)) == data

    in_threads(work, 32)
    assert sum(len(files) for _, _, files in os.walk(base)) == 192


@sequence
def many_threads_store_one_block(place: Place) -> None:
    path = block_path(place.root / "m_r0", 5)
    data = payload(200_000)
    in_threads(lambda suffix: store(path, data, suffix), 8)
    assert path.read_bytes() == data
    assert os.listdir(path.parent) == [path.name]


@sequence
def gds_path_writes_direct_and_renames_after_close(place: Place) -> None:
    path = block_path(place.root / "m_r0", 6)
    make_parents(path)
    temp = path.with_name(f"{path.name}_77.tmp")
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    data = payload(1 << 20)
    assert os.pwritev(fd, [aligned(data)], 0) == len(data)
    os.close(fd)
    os.rename(temp, path)

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert read_at_once(fd, len(data)) == data
    os.close(fd)


@sequence
def the_size_is_there_at_once_after_the_close(place: Place) -> None:
    for number in range(200):
        path = place.root / f"{number}.bin"
        path.write_bytes(b"x" * (number + 1))
        assert path.stat().st_size == number + 1
        assert len(path.read_bytes()) == number + 1
