"""LMCache: FSConnector, the fs and fs_native tiers, LocalDisk, GDS, nixl."""

import contextlib
import errno
import glob
import mmap
import os
import subprocess
import sys
import termios
from pathlib import Path

from tests.connectors import replacing
from tests.connectors.place import (
    Place,
    aligned,
    in_threads,
    key_hex,
    payload,
    read_at_once,
    refused,
    sequence,
    write_at_once,
)

HEADER_BYTES = 28
GDS_NAME = "meta-llama%2FLlama-3.1-8B-Instruct%401%400%40da3f%40bfloat16.kvcache.safetensors"


def data_path(base: Path, number: int, salt: str = "") -> Path:
    """Return the flat name of a chunk, ``.data`` at its end."""
    name = f"meta-llama-SEP-Llama-3.1-8B-Instruct@0x01000100@0@{key_hex(number)}{salt}.data"
    return base / name


def put(path: Path, data: bytes, temp: Path | None = None) -> None:
    """Store as FSConnector does: header and data in two writes, no existence check."""
    temp = temp or path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(temp, flags, 0o666)
    os.fstat(fd)
    with contextlib.suppress(termios.error):
        termios.tcgetattr(fd)
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    write_at_once(fd, b"H" * HEADER_BYTES)
    write_at_once(fd, data)
    os.close(fd)
    os.replace(temp, path)


def get(path: Path, length: int) -> bytes | None:
    """Load as FSConnector does: the header through a small buffer, then one big read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb", buffering=os.stat(path).st_blksize) as stream:
        assert stream.read(HEADER_BYTES) == b"H" * HEADER_BYTES
        memory = bytearray(length)
        assert stream.readinto(memory) == length
        return bytes(memory)


@sequence
def fs_connector_puts_gets_and_puts_again(place: Place) -> None:
    for round_ in range(3):
        for number in range(4):
            put(data_path(place.root, number), payload(1_000_001 + round_, number + round_))
        for number in range(4):
            wanted = payload(1_000_001 + round_, number + round_)
            assert get(data_path(place.root, number), len(wanted)) == wanted
    assert get(data_path(place.root, 99), 10) is None
    assert len(glob.glob(str(place.root / "*.data"))) == 4
    os.remove(data_path(place.root, 0))
    with refused(errno.ENOENT):
        os.remove(data_path(place.root, 0))


@sequence
def fs_connector_with_a_relative_temp_directory(place: Place) -> None:
    temp_dir = place.root / "reltmp"
    os.makedirs(temp_dir, exist_ok=True)
    for number in range(6):
        path = data_path(place.root, number)
        put(path, payload(50_000, number), temp=temp_dir / path.name)
        put(path, payload(60_000, number), temp=temp_dir / path.name)
        assert get(path, 60_000) == payload(60_000, number)
    assert os.listdir(temp_dir) == []


@sequence
def direct_puts_do_not_truncate(place: Place) -> None:
    assert os.statvfs(place.root).f_bsize == 4096
    path = data_path(place.root, 1)
    length = 64 * 1024
    for round_ in range(2):
        temp = path.with_suffix(".tmp")
        fd = os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o666)
        write_at_once(fd, aligned(payload(length, round_)))
        os.close(fd)
        os.replace(temp, path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert read_at_once(fd, length) == payload(length, 1)
    os.close(fd)


@sequence
def two_engines_share_one_temp(place: Place) -> None:
    path = data_path(place.root, 7)
    temp = path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    first = os.open(temp, flags, 0o644)
    write_at_once(first, payload(1000, 1))
    second = os.open(temp, flags, 0o644)
    assert os.fstat(first).st_ino == os.fstat(second).st_ino
    assert os.fstat(first).st_size == 0
    write_at_once(second, payload(1000, 2))
    os.close(first)
    os.rename(temp, path)
    write_at_once(second, b"tail")
    os.close(second)
    with refused(errno.ENOENT):
        os.rename(temp, path)
    assert path.read_bytes() == payload(1000, 2) + b"tail"


@sequence
def fs_native_batches(place: Place) -> None:
    size = 1 << 20

    def work(thread: int) -> None:
        batch = [(n, data_path(place.root, n)) for n in range(thread * 6, thread * 6 + 6)]
        for number, path in batch:
            assert not os.path.exists(path)
            temp = path.with_suffix(".tmp")
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
            write_at_once(fd, aligned(payload(size, number)))
            os.close(fd)
            os.rename(temp, path)
        for number, path in batch:
            os.stat(path)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            assert read_at_once(fd, size) == payload(size, number)
            os.close(fd)

    in_threads(work, 4)
    for number in range(24):
        os.unlink(data_path(place.root, number))
    assert os.listdir(place.root) == []


@sequence
def names_near_the_limit(place: Place) -> None:
    base_length = len(data_path(place.root, 1).name)
    path = data_path(place.root, 1, salt="@" + "s" * (255 - base_length - 1))
    assert len(path.name) == 255
    put(path, payload(1000))
    assert get(path, 1000) == payload(1000)
    assert os.listdir(place.root) == [path.name]


@sequence
def local_disk_writes_in_place(place: Place) -> None:
    path = place.root / "meta-llama-Llama@1@0@b18efa847f7a3fa4@bfloat16.pt"
    for length in (500_000, 400_000, 600_000):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        assert os.path.exists(path)
        write_at_once(fd, payload(length, length))
        assert os.stat(path).st_size == length
        os.close(fd)
        memory = bytearray(length)
        with open(path, "rb", buffering=0) as stream:
            assert stream.readinto(memory) == length
        assert bytes(memory) == payload(length, length)
    os.remove(path)


@sequence
def gds_pairs_through_shared_mappings(place: Place) -> None:
    folder = place.root / "15" / "72"
    for number in range(3):
        os.makedirs(folder, exist_ok=True)
        _store_pair(folder / f"{number}{GDS_NAME}", payload(200_000, number))
    seen = _scan_metadata(place.root)
    assert len(seen) == 3
    for metadata in seen:
        fd = os.open(metadata, os.O_RDONLY | os.O_NOATIME)
        assert os.read(fd, 4096) == b"m" * 4096
        os.close(fd)
        data = metadata.removesuffix(".metadata")
        fd = os.open(data, os.O_RDONLY)
        memory = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        assert memory[4096:] == payload(200_000, int(os.path.basename(data)[0]))
        memory.close()
        os.close(fd)


def _store_pair(path: Path, content: bytes) -> None:
    """Write data through a shared mapping and its metadata beside it, each by a temp."""
    temp = Path(f"{path}.tmp0a1b2c3d")
    temp.write_bytes(b"h" * 4096)
    fd = os.open(temp, os.O_RDWR)
    os.ftruncate(fd, 4096 + len(content))
    memory = mmap.mmap(fd, 4096 + len(content))
    memory[4096:] = content
    memory.close()
    os.close(fd)
    os.rename(temp, path)
    temp = Path(f"{path}.metadata.tmp0a1b2c3d")
    temp.write_bytes(b"m" * 4096)
    os.rename(temp, f"{path}.metadata")


def _scan_metadata(root: Path) -> list[str]:
    """Find all metadata files by the types in the listings, as the backend does at start."""
    seen = []
    with os.scandir(root) as tops:
        for top in tops:
            assert top.is_dir(follow_symlinks=False)
            with os.scandir(top.path) as seconds:
                for second in seconds:
                    with os.scandir(second.path) as files:
                        seen += [f.path for f in files if f.is_file() and "metadata" in f.name]
    return seen


@sequence
def directories_a_client_remembers_stay(place: Place) -> None:
    folder = place.root / "15" / "72"
    os.makedirs(folder)
    for number in range(5):
        path = folder / f"{number}.kvcache.safetensors"
        path.write_bytes(b"x" * 5000)
        os.unlink(path)
    assert folder.is_dir()
    (folder / "again").write_bytes(b"x")


@sequence
def nixl_dynamic_temps(place: Place) -> None:
    for number in range(4):
        path = data_path(place.root, number)
        temp = Path(f"{path}.tmp.{key_hex(number)[:32]}")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        write_at_once(fd, aligned(payload(8192, number)))
        os.close(fd)
        os.rename(temp, path)
        assert os.stat(path).st_size == 8192
        assert path.read_bytes() == payload(8192, number)


@sequence
def nixl_pool_of_descriptors_open_for_life(place: Place) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    pool = [os.open(place.root / f"obj_{i}_{i:04x}.bin", flags, 0o644) for i in range(32)]
    for round_ in range(3):
        for index, fd in enumerate(pool):
            data = payload(16_384, index + round_)
            assert os.pwritev(fd, [aligned(data)], 0) == len(data)
        for index, fd in enumerate(pool):
            memory = mmap.mmap(-1, 16_384)
            assert os.preadv(fd, [memory], 0) == 16_384
            assert memory[:] == payload(16_384, index + round_)
    for fd in pool:
        os.close(fd)
    assert len(os.listdir(place.root)) == 32


@sequence
def gets_go_on_while_the_key_is_put_again(place: Place) -> None:
    path = data_path(place.root, 1)
    replacing.write(str(path), 1)
    engines = [
        subprocess.Popen(
            [sys.executable, replacing.__file__, verb, path, "250"], stderr=subprocess.PIPE
        )
        for verb in ("write", "read") * 4
    ]
    errors = [engine.communicate()[1].decode() for engine in engines]
    assert not any(errors), max(errors)
    assert os.listdir(place.root) == [path.name]
