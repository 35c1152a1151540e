"""Mooncake's file backends, and Dynamo's preallocated scratch file."""

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from tests.connectors.place import Place, aligned, payload, preallocate, refused, sequence
from tests.mount.steps.registry import fallocate

SPACE_BYTES = 8 << 20
STATX_BTIME = 0x800


def _write_pair(root: Path, bucket: str, parts: list[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    for suffix, buffers in ((".bucket", parts), (".meta", [b"protobuf" * 128])):
        fd = os.open(root / f"{bucket}{suffix}", flags, 0o644)
        assert os.pwritev(fd, buffers, 0) == sum(len(part) for part in buffers)
        os.close(fd)


@sequence
def buckets_are_written_whole_and_read_in_parts(place: Place) -> None:
    assert os.access(place.root, os.W_OK)
    space = os.statvfs(place.root)
    assert space.f_bavail * space.f_frsize >= SPACE_BYTES
    parts = [payload(400_000, number) for number in range(20)]
    _write_pair(place.root, "1724300000001", parts)

    fd = os.open(place.root / "1724300000001.bucket", os.O_RDONLY | os.O_CLOEXEC)
    for number in (19, 0, 7):
        memory = bytearray(400_000)
        assert os.preadv(fd, [memory], number * 400_000) == 400_000
        assert bytes(memory) == parts[number]
    os.close(fd)


@sequence
def a_restart_drops_halves_of_pairs(place: Place) -> None:
    for number in range(3):
        _write_pair(place.root, f"{number:013d}", [payload(1000, number)])
    os.unlink(place.root / f"{1:013d}.meta")
    os.unlink(place.root / f"{2:013d}.bucket")

    names = {entry.name for entry in os.scandir(place.root) if entry.is_file()}
    for name in sorted(names):
        stem, suffix = os.path.splitext(name)
        other = stem + {".bucket": ".meta", ".meta": ".bucket"}[suffix]
        if other not in names:
            os.unlink(place.root / name)
    assert sorted(os.listdir(place.root)) == [f"{0:013d}.bucket", f"{0:013d}.meta"]


@sequence
def occupied_blocks_add_up(place: Place) -> None:
    for number in range(4):
        _write_pair(place.root, f"{number:013d}", [payload(100_000, number)])
    os.sync()
    total = 0
    for entry in os.scandir(place.root):
        status = os.stat(entry.path)
        total += status.st_blocks * 512
        assert status.st_blocks * 512 >= status.st_size
    assert 4 * 101_024 <= total <= 4 * (102_400 + 8192 + 4096)


@sequence
def a_bucket_deleted_while_it_is_read(place: Place) -> None:
    _write_pair(place.root, "1", [payload(1_000_000)])
    fd = os.open(place.root / "1.bucket", os.O_RDONLY)
    os.unlink(place.root / "1.meta")
    os.unlink(place.root / "1.bucket")
    memory = bytearray(1_000_000)
    assert os.preadv(fd, [memory], 0) == 1_000_000
    assert bytes(memory) == payload(1_000_000)
    os.close(fd)


@sequence
def one_file_a_key(place: Place) -> None:
    for number in range(6):
        folder = place.root / "file_per_key_dir" / "abcdef"[number] / "p"
        os.makedirs(folder, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(folder / f"tenant_key_{number}", flags, 0o644)
        assert os.write(fd, payload(70_000, number)) == 70_000
        os.close(fd)
    found = []
    for folder_text, _, files in os.walk(place.root):
        for name in files:
            path = Path(folder_text, name)
            found.append((_birth_time_ns(path), path.name))
            assert path.read_bytes() == payload(70_000, int(name[-1]))
    in_order = [name for _, name in sorted(found)]
    assert in_order == [f"tenant_key_{number}" for number in range(6)]


def _birth_time_ns(path: Path) -> int:
    """Return the birth time by statx(2), 0 when the filesystem has none."""
    buffer = (ctypes.c_char * 256)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.statx(-100, os.fsencode(path), 0, STATX_BTIME, buffer) == 0
    raw = bytes(buffer)
    if not int.from_bytes(raw[0:4], "little") & STATX_BTIME:
        return 0
    return int.from_bytes(raw[80:88], "little") * 10**9 + int.from_bytes(raw[88:92], "little")


@sequence
def the_offset_allocator_preallocates_or_truncates(place: Place) -> None:
    fd = os.open(place.root / "kv_cache.data", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    if not preallocate(place, fd, 32 << 20):
        os.ftruncate(fd, 32 << 20)
    assert os.fstat(fd).st_size == 32 << 20
    for slot in (31, 0, 17):
        assert os.pwritev(fd, [payload(1 << 20, slot)], slot << 20) == 1 << 20
    for slot in (0, 17, 31):
        memory = bytearray(1 << 20)
        assert os.preadv(fd, [memory], slot << 20) == 1 << 20
        assert bytes(memory) == payload(1 << 20, slot)
    meta = place.root / "kv_cache.meta.tmp"
    meta.write_bytes(b"meta")
    meta_fd = os.open(meta, os.O_RDONLY)
    os.fsync(meta_fd)
    os.close(meta_fd)
    os.rename(meta, place.root / "kv_cache.meta")
    folder = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)
    os.fdatasync(fd)
    os.close(fd)


@sequence
def preallocating_more_than_a_disk_is_enospc(place: Place) -> None:
    space = os.statvfs(place.root)
    length = space.f_blocks * space.f_frsize * 2
    fd = os.open(place.root / "kv_cache.data", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    with refused(errno.ENOSPC if place.capabilities.fallocate else errno.EOPNOTSUPP):
        fallocate(fd, 0, 0, length)
    if place.capabilities.beyond_disk:
        os.ftruncate(fd, length)
    else:
        with refused(errno.ENOSPC):
            os.ftruncate(fd, length)
    os.close(fd)
    os.unlink(place.root / "kv_cache.data")


@sequence
def dynamo_scratch_is_unlinked_while_open(place: Place) -> None:
    fd, name = tempfile.mkstemp(prefix="dynamo-kvbm-disk-cache-", dir=place.root)
    os.close(fd)
    fd = os.open(name, os.O_RDWR | os.O_DIRECT)
    if not preallocate(place, fd, 4 << 20):
        for slot in range(4):
            os.pwritev(fd, [aligned(bytes(1 << 20))], slot << 20)
    os.unlink(name)
    assert os.listdir(place.root) == []
    data = payload(1 << 20)
    assert os.pwritev(fd, [aligned(data)], 2 << 20) == 1 << 20
    memory = aligned(bytes(1 << 20))
    assert os.preadv(fd, [memory], 2 << 20) == 1 << 20
    assert memory[:] == data
    assert os.fstat(fd).st_size == 4 << 20
    os.fsync(fd)
    os.close(fd)
