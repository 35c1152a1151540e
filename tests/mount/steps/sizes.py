"""truncate(2), ftruncate(2), sparse files, fallocate(2), lseek(2), copy_file_range(2)."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    attempt,
    changed_times,
    fallocate,
    read_file,
    register,
    step,
    write_file,
)

KEEP_SIZE = 1
PUNCH_HOLE = 2
ZERO_RANGE = 16
COLLAPSE_RANGE = 8


def _truncate(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [
        attempt(os.truncate, "name", 3),
        attempt(os.truncate, "name/", 3),
        attempt(os.truncate, "name/child", 3),
    ]


for _kind in KINDS:
    register(f"sizes.truncate_of_{_kind}", partial(_truncate, _kind))


def _resize(start: int, end: int, by_descriptor: bool) -> list[object]:
    write_file("f", bytes(range(256)) * (start // 256) + b"x" * (start % 256))
    if by_descriptor:
        fd = os.open("f", os.O_WRONLY)
        os.ftruncate(fd, end)
        os.close(fd)
    else:
        os.truncate("f", end)
    tail = read_file("f")[min(start, end) :]
    return [os.stat("f").st_size, tail.count(0) == len(tail)]


for _start, _end in ((0, 0), (0, 1), (1, 0), (100, 99), (4096, 4095), (4095, 4097), (9000, 100),
                     (100, 9000), (131072, 65537), (65537, 1 << 20)):  # fmt: skip
    register(f"sizes.truncate_{_start}_to_{_end}", partial(_resize, _start, _end, False))
    register(f"sizes.ftruncate_{_start}_to_{_end}", partial(_resize, _start, _end, True))


@step
def truncate_to_impossible_sizes() -> list[object]:
    write_file("f")
    return [attempt(os.truncate, "f", size) for size in (-1, 2**63 - 1)]


@step
def ftruncate_of_wrong_descriptors() -> list[object]:
    write_file("f")
    fd = os.open("f", os.O_RDONLY)
    found = [attempt(os.ftruncate, fd, 0), attempt(os.ftruncate, fd, -1)]
    os.close(fd)
    return [*found, attempt(os.ftruncate, fd, 0)]


@step
def truncate_moves_mtime_and_ctime() -> list[object]:
    write_file("f", b"1234567890")
    return [changed_times("f", lambda size=size: os.truncate("f", size)) for size in (5, 5, 20)]


@step
def ftruncate_moves_mtime_and_ctime() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"1234567890")
    found = [changed_times("f", lambda size=size: os.ftruncate(fd, size)) for size in (5, 5, 20)]
    os.close(fd)
    return list(found)


@step
def shrinking_and_growing_shows_zeros() -> bool:
    write_file("f", b"\xff" * 10000)
    os.truncate("f", 10)
    os.truncate("f", 10000)
    return read_file("f") == b"\xff" * 10 + bytes(9990)


@step
def writing_beyond_the_end_leaves_a_hole_of_zeros() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"start", 0)
    os.pwrite(fd, b"end", 100_000)
    os.close(fd)
    data = read_file("f")
    return [len(data), data[:5].decode(), data[5:100_000].count(0), data[-3:].decode()]


@step
def sparse_files_take_no_room() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 28)
    os.pwrite(fd, b"x" * 4096, 1 << 27)
    os.fsync(fd)
    os.close(fd)
    status = os.stat("f")
    return [status.st_size, status.st_blocks < 1000]


@step
def sparse_files_beyond_the_disk() -> list[object]:
    write_file("f")
    return [attempt(os.truncate, "f", 1 << 43), os.stat("f").st_size]


@step
def files_beyond_four_gigabytes() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    offset = (1 << 32) + 12345
    os.pwrite(fd, b"far", offset)
    found = [os.fstat(fd).st_size, os.pread(fd, 3, offset).decode(), os.pread(fd, 9, offset + 3)]
    os.ftruncate(fd, (1 << 32) + 1)
    found.append(os.fstat(fd).st_size)
    os.close(fd)
    return [repr(item) for item in found]


@step
def blocks_of_a_written_file() -> list[object]:
    write_file("f", b"x" * 100_000)
    fd = os.open("f", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return [os.stat("f").st_blocks, os.stat("f").st_blksize]


@step
def seeking_data_and_holes() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    os.pwrite(fd, b"x" * 4096, 1 << 19)
    os.fsync(fd)
    found = [
        attempt(os.lseek, fd, 0, os.SEEK_DATA),
        attempt(os.lseek, fd, 0, os.SEEK_HOLE),
        attempt(os.lseek, fd, 1 << 19, os.SEEK_HOLE),
        attempt(os.lseek, fd, (1 << 19) + 8192, os.SEEK_DATA),
        attempt(os.lseek, fd, 1 << 20, os.SEEK_DATA),
    ]
    os.close(fd)
    return list(found)


@step
def seeking_in_a_plain_file() -> list[object]:
    write_file("f", b"0123456789")
    fd = os.open("f", os.O_RDONLY)
    found = [
        attempt(os.lseek, fd, 3, os.SEEK_SET),
        attempt(os.lseek, fd, 3, os.SEEK_CUR),
        attempt(os.lseek, fd, -2, os.SEEK_END),
        attempt(os.lseek, fd, 100, os.SEEK_SET),
        len(os.read(fd, 10)),
        attempt(os.lseek, fd, -1, os.SEEK_SET),
        attempt(os.lseek, fd, 0, os.SEEK_DATA),
        attempt(os.lseek, fd, 0, os.SEEK_HOLE),
        attempt(os.lseek, fd, 10, os.SEEK_HOLE),
        attempt(os.lseek, fd, 0, 99),
    ]
    os.close(fd)
    return list(found)


def _fallocate(mode: int, offset: int, length: int) -> list[object]:
    write_file("f", b"x" * 20_000)
    fd = os.open("f", os.O_RDWR)
    found = [attempt(fallocate, fd, mode, offset, length), os.fstat(fd).st_size]
    os.close(fd)
    return list(found)


_MODES = {
    "plain": 0,
    "keep_size": KEEP_SIZE,
    "punch": PUNCH_HOLE | KEEP_SIZE,
    "zero": ZERO_RANGE,
    "zero_keep": ZERO_RANGE | KEEP_SIZE,
    "collapse": COLLAPSE_RANGE,
    "without_keep_punch": PUNCH_HOLE,
    "unknown": 1 << 12,
}
for _name, _mode in _MODES.items():
    for _offset, _length in ((0, 4096), (4096, 8192), (10_000, 20_000), (50_000, 1)):
        register(
            f"sizes.fallocate_{_name}_{_offset}_{_length}",
            partial(_fallocate, _mode, _offset, _length),
        )
    register(f"sizes.impossible_fallocate_{_name}_empty", partial(_fallocate, _mode, 0, 0))
    register(f"sizes.impossible_fallocate_{_name}_negative", partial(_fallocate, _mode, -1, 10))


@step
def posix_fallocate_always_works() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found = [attempt(os.posix_fallocate, fd, 0, 50_000), os.fstat(fd).st_size]
    os.close(fd)
    return list(found)


@step
def fallocate_needs_a_writable_descriptor() -> object:
    write_file("f")
    fd = os.open("f", os.O_RDONLY)
    found = attempt(fallocate, fd, 0, 0, 10)
    os.close(fd)
    return found


def _copy(source_bytes: int, offset_in: int, offset_out: int, count: int) -> list[object]:
    write_file("source", bytes(range(256)) * (source_bytes // 256))
    write_file("sink", b"s" * 1000)
    source = os.open("source", os.O_RDONLY)
    sink = os.open("sink", os.O_RDWR)
    done = 0
    while done < count:
        found = attempt(
            os.copy_file_range, source, sink, count - done, offset_in + done, offset_out + done
        )
        if not isinstance(found, int) or found == 0:
            break
        done += found
    os.close(source)
    os.close(sink)
    return [done, os.stat("sink").st_size]


for _args in ((4096, 0, 0, 4096), (4096, 100, 50, 1000), (65536, 0, 1000, 65536),
              (4096, 4096, 0, 10), (4096, 4000, 0, 1000), (1 << 20, 0, 5000, 1 << 20)):  # fmt: skip
    register("sizes.copy_file_range_{}_{}_{}_{}".format(*_args), partial(_copy, *_args))


@step
def copy_file_range_errors() -> list[object]:
    write_file("a", b"0123456789")
    write_file("b", b"")
    reader = os.open("a", os.O_RDONLY)
    appender = os.open("b", os.O_WRONLY | os.O_APPEND)
    folder = os.open(".", os.O_RDONLY)
    both = os.open("a", os.O_RDWR)
    found = [
        attempt(os.copy_file_range, reader, reader, 5, 0, 0),
        attempt(os.copy_file_range, reader, appender, 5, 0, 0),
        attempt(os.copy_file_range, folder, both, 5, 0, 0),
        attempt(os.copy_file_range, both, both, 5, 0, 2),
        attempt(os.copy_file_range, both, both, 5, 0, 5),
    ]
    for fd in (reader, appender, folder, both):
        os.close(fd)
    return list(found)


@step
def sendfile_from_and_to_the_mount() -> list[object]:
    write_file("a", b"data" * 10_000)
    source = os.open("a", os.O_RDONLY)
    sink = os.open("b", os.O_WRONLY | os.O_CREAT)
    sent = os.sendfile(sink, source, 0, 40_000)
    os.close(source)
    os.close(sink)
    return [sent, read_file("b") == read_file("a")]


@step
def one_write_of_sixteen_megabytes() -> list[object]:
    data = os.urandom(1 << 20) * 16
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found = [os.write(fd, data), os.fstat(fd).st_size, os.pread(fd, 1 << 24, 0) == data]
    os.ftruncate(fd, 0)
    os.close(fd)
    return list(found)


@step
def vectored_reads_and_writes() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found: list[object] = [os.pwritev(fd, [b"a" * 5000, b"b" * 3, b"", b"c" * 9000], 7)]
    buffers = [bytearray(6000), bytearray(8000)]
    found += [os.preadv(fd, buffers, 7), bytes(buffers[0][4998:5005]).decode()]
    os.close(fd)
    return found


@step
def reading_at_and_beyond_the_end() -> list[object]:
    write_file("f", b"0123456789")
    fd = os.open("f", os.O_RDONLY)
    found = [len(os.pread(fd, 100, offset)) for offset in (0, 5, 9, 10, 11, 1 << 40)]
    found.append(attempt(os.pread, fd, 0, 0) == b"")
    os.close(fd)
    return list(found)


@step
def writing_moves_mtime_and_ctime() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found = [
        changed_times("f", lambda: os.pwrite(fd, b"x", 0)),
        changed_times("f", lambda: os.pwrite(fd, b"", 0)),
        changed_times("f", lambda: os.pwrite(fd, b"x", 5000)),
    ]
    os.close(fd)
    return list(found)


@step
def writing_zero_bytes_beyond_the_end_changes_nothing() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found = [os.pwrite(fd, b"", 1000), os.fstat(fd).st_size]
    os.close(fd)
    return list(found)


@step
def size_limit_of_the_process() -> list[object]:
    import resource
    import signal

    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        first = attempt(os.pwrite, fd, b"x" * 8000, 0)
        second = attempt(os.pwrite, fd, b"x" * 8000, 8000)
        third = attempt(os.pwrite, fd, b"x", 10_000)
        fourth = attempt(os.ftruncate, fd, 20_000)
        with open("result", "w") as stream:
            stream.write(f"{first} {second} {third} {fourth}")
        os._exit(0)
    os.waitpid(pid, 0)
    return [read_file("result").decode(), os.stat("f").st_size]
