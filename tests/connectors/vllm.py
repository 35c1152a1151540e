"""vLLM: the fs tier, the safetensors connector, the scratch file of SimpleCPUOffload."""

import errno
import json
import mmap
import os
from pathlib import Path

from tests.connectors.llmd import block_path, make_parents
from tests.connectors.place import (
    Place,
    absent,
    aligned,
    in_threads,
    payload,
    refused,
    sequence,
    write_at_once,
)

BLOCK_BYTES = 2 << 20
U63 = 9_223_372_036_854_775_807


def probe_o_direct(base: Path) -> bool:
    """Find out, as the tier does at start, whether O_DIRECT works below *base*."""
    probe = base / f".o_direct_probe_{U63}.tmp"
    try:
        fd = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
        try:
            write_at_once(fd, aligned(bytes(4096)))
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # anything else is no answer to the question
            raise
        return False
    finally:
        os.unlink(probe)
    return True


def store_block(path: Path, data: bytes, thread: int, flags: int = 0) -> bool:
    """Store one block; returns whether it was written rather than found."""
    if os.access(path, os.F_OK):
        return False
    make_parents(path)
    temp = path.with_name(f"{path.name}_{thread}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_TRUNC | flags, 0o644)
    try:
        write_at_once(fd, aligned(data))
    except BaseException:
        os.unlink(temp)
        raise
    finally:
        os.close(fd)
    os.rename(temp, path)
    return True


def load_block(path: Path, length: int, flags: int = 0) -> bytes:
    """Load one block; a short file is unlinked and an error."""
    memory = mmap.mmap(-1, length)
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        done = os.readv(fd, [memory])
    finally:
        os.close(fd)
    if done != length:
        os.unlink(path)
        raise OSError(errno.EIO, "short read")
    return memory[:]


def _init(root: Path) -> Path:
    base = root / "meta-llama_Llama-3.1-8B-Instruct_0123456789ab"
    os.makedirs(base, exist_ok=True)
    config = base / "config.json"
    if not config.exists():
        with open(config, "w") as stream:
            json.dump({"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16"}, stream)
    return base


@sequence
def starts_stores_finds_and_loads(place: Place) -> None:
    base = _init(place.root)
    assert _init(place.root) == base
    assert probe_o_direct(base)
    ranks = base.with_name(base.name + "_r0")
    for number in range(3):
        data = payload(BLOCK_BYTES, number)
        assert store_block(block_path(ranks, number), data, U63, os.O_DIRECT)
    for number in range(3):
        path = block_path(ranks, number)
        assert not store_block(path, b"", U63)
        assert load_block(path, BLOCK_BYTES, os.O_DIRECT) == payload(BLOCK_BYTES, number)
        assert load_block(path, BLOCK_BYTES) == payload(BLOCK_BYTES, number)


@sequence
def a_leftover_temp_of_the_same_thread_is_refused(place: Place) -> None:
    path = block_path(place.root / "m_r0", 1)
    make_parents(path)
    temp = path.with_name(f"{path.name}_99.tmp")
    temp.write_bytes(b"left by a crash")
    with refused(errno.EEXIST):
        store_block(path, payload(4096), 99)
    assert store_block(path, payload(4096), 100)
    assert temp.read_bytes() == b"left by a crash"


@sequence
def lookups_come_in_thousands_and_mostly_miss(place: Place) -> None:
    base = place.root / "m_r0"
    stored = set(range(0, 200, 4))
    for number in stored:
        store_block(block_path(base, number), payload(512, number), 1)
    for _ in range(2):
        verdicts = [os.access(block_path(base, number), os.F_OK) for number in range(4096)]
        assert {number for number, there in enumerate(verdicts) if there} == stored


@sequence
def a_miss_turns_into_a_hit_at_once(place: Place) -> None:
    base = place.root / "m_r0"
    for number in range(50):
        path = block_path(base, number)
        assert absent(path)
        assert absent(path)
        store_block(path, payload(100, number), 5)
        assert os.access(path, os.F_OK)
        os.unlink(path)
        assert absent(path)
        store_block(path, payload(100, number), 5)
        assert os.path.exists(path)


@sequence
def a_short_file_is_unlinked_by_its_reader(place: Place) -> None:
    path = block_path(place.root / "m_r0", 1)
    store_block(path, payload(1000), 1)
    with refused(errno.EIO):
        load_block(path, 2000)
    assert absent(path)
    assert store_block(path, payload(2000), 1)
    assert load_block(path, 2000) == payload(2000)


@sequence
def a_missing_block_is_enoent(place: Place) -> None:
    for path in (block_path(place.root / "m_r0", 1), place.root / "flat.bin"):
        with refused(errno.ENOENT):
            load_block(path, 100)


@sequence
def writers_and_readers_share_the_mount(place: Place) -> None:
    base = place.root / "m_r0"
    size = 128 * 1024

    def write(thread: int) -> None:
        for number in range(8):
            block = number % 4 * 100 + thread % 8
            store_block(block_path(base, block), payload(size, block), 10**15 + thread)

    def read(thread: int) -> None:
        for number in range(12):
            block = number % 4 * 100 + thread % 8
            path = block_path(base, block)
            if os.access(path, os.F_OK):
                assert load_block(path, size) == payload(size, block)

    in_threads(lambda n: (write if n % 2 else read)(n // 2), 32)


@sequence
def a_checksum_in_an_attribute_survives_the_rename(place: Place) -> None:
    path = block_path(place.root / "m_r0", 1)
    make_parents(path)
    temp = path.with_name(f"{path.name}_1.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_TRUNC, 0o644)
    write_at_once(fd, payload(10_000))
    os.setxattr(fd, "user.vllm.kv_crc32c", b"\x12\x34\x56\x78")
    os.close(fd)
    os.rename(temp, path)

    assert os.getxattr(path, "user.vllm.kv_crc32c") == b"\x12\x34\x56\x78"
    fd = os.open(path, os.O_RDONLY)
    assert os.getxattr(fd, "user.vllm.kv_crc32c") == b"\x12\x34\x56\x78"
    os.close(fd)
    assert [n for n in os.listxattr(path) if n.startswith("user.")] == ["user.vllm.kv_crc32c"]


@sequence
def safetensors_of_the_example_connector(place: Place) -> None:
    folder = place.root / "0f1e2d3c"
    for layer in range(3):
        os.makedirs(folder, exist_ok=True)
        assert os.path.exists(folder)
        temp = folder / f".tmpaB3xY{layer}"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        data = payload(300_000, layer)
        os.ftruncate(fd, 80 + len(data))
        write_at_once(fd, b"h" * 80)
        write_at_once(fd, data)
        os.rename(temp, folder / f"model.layers.{layer}.safetensors")
        os.close(fd)
    for layer in range(3):
        _load_safetensors(folder / f"model.layers.{layer}.safetensors", payload(300_000, layer))


def _load_safetensors(path: Path, wanted: bytes) -> None:
    assert os.stat(path).st_mode & 0o777 == 0o600
    first = os.open(path, os.O_RDONLY)
    size = os.fstat(first).st_size
    header = mmap.mmap(first, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    second = os.open(path, os.O_RDONLY)
    os.posix_fadvise(second, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    data = mmap.mmap(second, size, flags=mmap.MAP_PRIVATE, prot=both)
    os.close(first)
    os.close(second)
    assert header[:80] == b"h" * 80
    assert data[80:] == wanted
    data[80:84] = b"mine"
    assert header[80:84] == wanted[:4]
    header.close()
    data.close()


@sequence
def scratch_of_simple_cpu_offload(place: Place) -> None:
    path = place.root / "scratch.rank_0"
    for _ in range(2):
        if path.exists():
            os.unlink(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
        fd = os.open(path, flags, 0o600)
        os.ftruncate(fd, 16 << 20)
        for slot in (3, 0, 7):
            data = payload(1 << 20, slot)
            assert os.pwritev(fd, [aligned(data)], slot << 20) == len(data)
        for slot in (0, 3, 7):
            memory = mmap.mmap(-1, 1 << 20)
            assert os.preadv(fd, [memory], slot << 20) == 1 << 20
            assert memory[:] == payload(1 << 20, slot)
        os.close(fd)
