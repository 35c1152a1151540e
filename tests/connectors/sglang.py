"""SGLang's HiCacheFile and HiCacheNixl, and NIXL's POSIX plugin with libaio."""

import ctypes
import errno
import mmap
import os
import struct
import uuid
from pathlib import Path

from tests.connectors.place import (
    Place,
    aligned,
    key_hex,
    payload,
    read_at_once,
    refused,
    sequence,
)
from tests.mount.steps.registry import tick

# x86-64 numbers; libaio is not in the C library
IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = 206, 207, 208, 209
CMD_PREAD, CMD_PWRITE = 0, 1


def page_path(root: Path, number: int) -> Path:
    """Return the flat name of a page."""
    return root / f"{key_hex(number)}_meta-llama-Llama-3.1-8B-Instruct_0_1.bin"


def set_page(path: Path, data: bytes, temp: Path | None = None) -> bool:
    """Store a page: a temp that says nothing of it, and a dup'ed descriptor closed twice."""
    if os.path.exists(path):
        return False
    temp = temp or path.with_name(f".{uuid.uuid4().hex}.tmp")
    with open(temp, "wb") as stream:
        twin = os.dup(stream.fileno())
        assert os.write(twin, data) == len(data)
        os.close(twin)
    os.replace(temp, path)
    return True


def get_page(path: Path, length: int) -> bytes | None:
    """Load a page; None is a miss, anything but ENOENT is an exception."""
    memory = bytearray(length)
    try:
        with open(path, "rb", buffering=0) as stream:
            assert os.fstat(stream.fileno()).st_size == length
            assert stream.readinto(memory) == length
    except FileNotFoundError:
        return None
    return bytes(memory)


@sequence
def pages_are_set_found_and_got(place: Place) -> None:
    for number in range(6):
        assert set_page(page_path(place.root, number), payload(300_000, number))
        assert not set_page(page_path(place.root, number), b"")
    for number in range(6):
        assert os.path.isfile(page_path(place.root, number))
        assert get_page(page_path(place.root, number), 300_000) == payload(300_000, number)
    assert get_page(page_path(place.root, 99), 1) is None
    assert not [name for name in os.listdir(place.root) if name.endswith(".tmp")]


@sequence
def older_temp_forms(place: Place) -> None:
    for number in range(4):
        path = page_path(place.root, number)
        temp = Path(f"{path}.tmp.{os.getpid()}.{number}.{uuid.uuid4()}")
        assert set_page(path, payload(5000, number), temp)
        other = page_path(place.root, 100 + number)
        assert set_page(other, payload(5000, number), Path(f"{other}.{uuid.uuid4().hex}.tmp"))
        assert get_page(other, 5000) == get_page(path, 5000)


@sequence
def its_own_lru_goes_by_mtime(place: Place) -> None:
    for number in range(6):
        set_page(page_path(place.root, number), payload(1000, number))
        tick()

    def by_age() -> list[str]:
        names = os.listdir(place.root)
        return sorted(names, key=lambda name: os.stat(place.root / name).st_mtime_ns)

    order = by_age()
    assert order == [page_path(place.root, number).name for number in range(6)]
    get_page(page_path(place.root, 0), 1000)
    assert by_age() == order
    for name in order[:3]:
        os.unlink(place.root / name)
    for name in order[:3]:
        with refused(errno.ENOENT):
            os.unlink(place.root / name)


@sequence
def clear_unlinks_every_file(place: Place) -> None:
    for number in range(50):
        set_page(page_path(place.root, number), payload(100, number))
    for name in os.listdir(place.root):
        path = place.root / name
        if path.is_file():
            os.unlink(path)
    assert os.listdir(place.root) == []


@sequence
def space_moves_with_writes_and_deletes(place: Place) -> None:
    def free_bytes() -> int:
        os.sync()
        space = os.statvfs(place.root)
        assert space.f_bavail <= space.f_blocks
        return space.f_bfree * space.f_frsize

    before = free_bytes()
    set_page(page_path(place.root, 1), payload(20 << 20))
    during = free_bytes()
    os.unlink(page_path(place.root, 1))
    after = free_bytes()
    assert before - during >= 19 << 20
    assert after - during >= 19 << 20


@sequence
def nixl_files_are_written_in_place(place: Place) -> None:
    for number in range(16):
        os.makedirs(place.root / f"{number:02x}", exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    for number in range(16):
        path = place.root / f"{number:02x}" / f"{key_hex(number)}_model_0_1_k"
        fd = os.open(path, flags, 0o644)
        data = payload(65_536, number)
        assert os.pwritev(fd, [aligned(data)], 0) == len(data)
        os.close(fd)
        assert os.stat(path).st_size == 65_536
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        assert read_at_once(fd, 65_536) == data
        os.close(fd)


@sequence
def nixl_writes_and_reads_by_libaio(place: Place) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    context = ctypes.c_ulong(0)
    assert libc.syscall(IO_SETUP, 32, ctypes.byref(context)) == 0, os.strerror(ctypes.get_errno())
    fd = os.open(place.root / "object", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        length = 1 << 20
        source = [aligned(payload(length, slot)) for slot in range(4)]
        _submit(libc, context, fd, source, CMD_PWRITE)
        sink = [aligned(bytes(length)) for _ in range(4)]
        _submit(libc, context, fd, sink, CMD_PREAD)
        assert [memory[:] for memory in sink] == [payload(length, slot) for slot in range(4)]
    finally:
        os.close(fd)
        libc.syscall(IO_DESTROY, context)


def _submit(
    libc: ctypes.CDLL, context: ctypes.c_ulong, fd: int, buffers: list[mmap.mmap], command: int
) -> None:
    """Submit one block for each of *buffers* and wait for all; each must be done whole."""
    blocks, pins = [], []
    for slot, memory in enumerate(buffers):
        pins.append(ctypes.c_char.from_buffer(memory))
        raw = struct.pack(
            "<QIiHhIQQqQIi", slot, 0, 0, command, 0, fd, ctypes.addressof(pins[-1]),
            len(memory), slot * len(memory), 0, 0, 0,
        )  # fmt: skip
        blocks.append(ctypes.create_string_buffer(raw, 64))
    pointers = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(block) for block in blocks))
    done = 0
    while done < len(blocks):
        rest = ctypes.byref(pointers, done * ctypes.sizeof(ctypes.c_void_p))
        taken = libc.syscall(IO_SUBMIT, context, len(blocks) - done, rest)
        assert taken > 0, errno.errorcode[ctypes.get_errno()]
        done += taken
    events = ctypes.create_string_buffer(32 * done)
    assert libc.syscall(IO_GETEVENTS, context, done, done, events, None) == done
    for slot in range(done):
        result = struct.unpack_from("<QQqq", events, slot * 32)[2]
        assert result == len(buffers[0]), f"aio result {result}"
    pins.clear()
