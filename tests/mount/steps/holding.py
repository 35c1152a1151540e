"""Open handles: unlinked files, mappings, direct I/O, locks, syncing."""

import fcntl
import mmap
import os

from tests.mount.steps.registry import attempt, changed_times, read_file, step, write_file


@step
def an_unlinked_open_file_lives_on() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"before")
    os.unlink("f")
    found: list[object] = [os.listdir("."), os.fstat(fd).st_nlink, os.fstat(fd).st_size]
    os.write(fd, b" after")
    found += [os.pread(fd, 100, 0).decode(), attempt(os.fsync, fd), attempt(os.fdatasync, fd)]
    found += [attempt(os.ftruncate, fd, 3), os.fstat(fd).st_size, os.listdir(".")]
    os.close(fd)
    return found


@step
def an_unlinked_open_file_and_a_new_one_of_its_name() -> list[object]:
    write_file("f", b"old")
    old = os.open("f", os.O_RDWR)
    os.unlink("f")
    write_file("f", b"new")
    os.pwrite(old, b"OLD", 0)
    found = [os.pread(old, 9, 0).decode(), read_file("f").decode(), os.fstat(old).st_nlink]
    os.close(old)
    return [*found, read_file("f").decode()]


@step
def two_handles_of_an_unlinked_file_share_it() -> list[object]:
    write_file("f", b"0000")
    first, second = os.open("f", os.O_RDWR), os.open("f", os.O_RDONLY)
    os.unlink("f")
    os.pwrite(first, b"11", 1)
    found = [os.pread(second, 9, 0).decode()]
    os.close(first)
    found.append(os.pread(second, 9, 0).decode())
    os.close(second)
    return list(found)


@step
def an_unlinked_file_reopened_by_its_descriptor() -> list[object]:
    write_file("f", b"data")
    fd = os.open("f", os.O_RDONLY)
    os.unlink("f")
    again = attempt(os.open, f"/proc/self/fd/{fd}", os.O_RDWR)
    if isinstance(again, str):
        return [again]
    found = [os.read(again, 9).decode()]
    os.close(again)
    os.close(fd)
    return list(found)


@step
def rmdir_of_a_directory_whose_file_is_still_open() -> list[object]:
    os.mkdir("d")
    fd = os.open("d/f", os.O_RDWR | os.O_CREAT)
    os.unlink("d/f")
    found: list[object] = [attempt(os.rmdir, "d"), os.write(fd, b"x"), os.pread(fd, 1, 0).decode()]
    os.close(fd)
    return [*found, os.listdir(".")]


@step
def a_handle_follows_its_renamed_and_replaced_file() -> list[object]:
    write_file("a", b"A")
    write_file("b", b"B")
    first, second = os.open("a", os.O_RDONLY), os.open("b", os.O_RDONLY)
    os.rename("a", "b")
    found = [os.pread(first, 1, 0).decode(), os.pread(second, 1, 0).decode()]
    os.unlink("b")
    found.append(os.pread(first, 1, 0).decode())
    os.close(first)
    os.close(second)
    return list(found)


@step
def a_duplicated_descriptor_closed_twice() -> list[object]:
    fd = os.open("t.tmp", os.O_WRONLY | os.O_CREAT)
    twin = os.dup(fd)
    os.write(fd, b"one")
    os.close(fd)
    os.write(twin, b"two")
    os.close(twin)
    os.rename("t.tmp", "t")
    return [read_file("t").decode(), attempt(os.close, twin)]


@step
def writes_are_seen_at_once_by_other_handles() -> list[object]:
    writer = os.open("f", os.O_WRONLY | os.O_CREAT)
    reader = os.open("f", os.O_RDONLY)
    found = []
    for text in (b"one", b"two", b"three"):
        os.write(writer, text)
        found.append([os.fstat(reader).st_size, os.stat("f").st_size, os.read(reader, 99).decode()])
    os.close(writer)
    os.close(reader)
    return list(found)


@step
def truncation_is_seen_at_once_by_other_handles() -> list[object]:
    write_file("f", b"0123456789" * 1000)
    reader = os.open("f", os.O_RDONLY)
    found = [len(os.pread(reader, 20_000, 0))]
    os.truncate("f", 5000)
    found += [len(os.pread(reader, 20_000, 0)), os.fstat(reader).st_size]
    write_file("f", b"short")
    found += [len(os.pread(reader, 20_000, 0)), os.fstat(reader).st_size]
    os.close(reader)
    return list(found)


@step
def a_shared_mapping_writes_the_file() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 10_000)
    memory = mmap.mmap(fd, 10_000)
    memory[5000:5005] = b"hello"
    memory.flush()
    found = [os.pread(fd, 5, 5000).decode()]
    memory.close()
    os.close(fd)
    return [*found, read_file("f")[5000:5005].decode(), os.stat("f").st_size]


@step
def a_shared_mapping_outlives_its_descriptor_and_its_name() -> list[object]:
    fd = os.open("t.tmp", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    memory = mmap.mmap(fd, 8192)
    os.close(fd)
    memory[0:5] = b"first"
    os.rename("t.tmp", "final")
    memory[4096:4102] = b"second"
    memory.flush()
    memory.close()
    data = read_file("final")
    return [data[:5].decode(), data[4096:4102].decode(), len(data)]


@step
def a_mapping_sees_what_is_written() -> list[object]:
    write_file("f", b"a" * 4096)
    fd = os.open("f", os.O_RDWR)
    memory = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    found = [memory[:3].decode()]
    os.pwrite(fd, b"XYZ", 0)
    found.append(memory[:3].decode())
    memory.close()
    os.close(fd)
    return list(found)


@step
def a_private_mapping_leaves_the_file_alone() -> list[object]:
    write_file("f", b"data" * 1024)
    fd = os.open("f", os.O_RDONLY)
    memory = mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory[0:4] = b"mine"
    found = [memory[:8].decode(), read_file("f")[:8].decode()]
    memory.close()
    os.close(fd)
    return list(found)


@step
def a_mapping_of_an_unlinked_file() -> list[object]:
    write_file("f", b"mapped" + bytes(4090))
    fd = os.open("f", os.O_RDONLY)
    memory = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    os.close(fd)
    os.unlink("f")
    found = [memory[:6].decode()]
    memory.close()
    return list(found)


@step
def mapping_modes_and_descriptors() -> list[object]:
    write_file("f", b"x" * 4096)
    reader, writer = os.open("f", os.O_RDONLY), os.open("f", os.O_WRONLY)
    found = [
        attempt(lambda f=fd, p=prot, g=flags: mmap.mmap(f, 4096, g, p).close())
        for fd in (reader, writer)
        for prot in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
    ]
    os.close(reader)
    os.close(writer)
    return list(found)


def _direct(flags: int) -> int:
    return os.open("f", flags | os.O_DIRECT, 0o644)


def _aligned(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@step
def direct_io_aligned() -> list[object]:
    fd = _direct(os.O_WRONLY | os.O_CREAT)
    data = _aligned(bytes(range(256)) * 256)
    found: list[object] = [os.writev(fd, [data])]
    os.close(fd)
    fd = _direct(os.O_RDONLY)
    memory = mmap.mmap(-1, 131_072)
    found += [os.preadv(fd, [memory], 0), memory[:65_536] == bytes(range(256)) * 256]
    found += [os.preadv(fd, [memory], 65_536)]
    os.close(fd)
    return [*found, os.stat("f").st_size]


@step
def direct_io_beside_buffered_io() -> list[object]:
    write_file("f", b"b" * 8192)
    fd = _direct(os.O_RDWR)
    os.pwritev(fd, [_aligned(b"d" * 4096)], 4096)
    found: list[object] = [read_file("f")[4090:4100].decode()]
    buffered = os.open("f", os.O_WRONLY)
    os.pwrite(buffered, b"late", 0)
    memory = mmap.mmap(-1, 4096)
    found += [os.preadv(fd, [memory], 0), memory[:6].decode()]
    os.close(buffered)
    os.close(fd)
    return found


@step
def direct_io_at_odd_offsets_and_lengths() -> list[object]:
    write_file("f", b"x" * 8192)
    fd = _direct(os.O_RDWR)
    found = [
        attempt(os.preadv, fd, [mmap.mmap(-1, 4096)], 1),
        attempt(os.pwritev, fd, [_aligned(b"y" * 100)], 0),
        attempt(os.pwritev, fd, [_aligned(b"y" * 4096)], 7),
    ]
    os.close(fd)
    return list(found)


@step
def direct_io_probe_file() -> list[object]:
    fd = os.open("probe.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    found = [os.writev(fd, [_aligned(bytes(4096))])]
    os.close(fd)
    os.unlink("probe.tmp")
    return list(found)


@step
def direct_append() -> list[object]:
    fd = os.open("f", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DIRECT, 0o644)
    found = [os.writev(fd, [_aligned(b"a" * 4096)]), os.writev(fd, [_aligned(b"b" * 4096)])]
    os.close(fd)
    return [*found, os.stat("f").st_size]


def _lock_answer(path: str, take: object) -> object:
    """Try a lock in a child process and return what it got."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        fd = os.open(path, os.O_RDWR)
        os.write(writer, str(attempt(take, fd)).encode())  # type: ignore[arg-type]
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    answer = os.read(reader, 100).decode()
    os.close(reader)
    return answer


@step
def whole_file_locks() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)

    def exclusive(child: int) -> None:
        fcntl.flock(child, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def shared(child: int) -> None:
        fcntl.flock(child, fcntl.LOCK_SH | fcntl.LOCK_NB)

    found = []
    for mine in (fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN):
        fcntl.flock(fd, mine)
        found += [_lock_answer("f", exclusive), _lock_answer("f", shared)]
    os.close(fd)
    return list(found)


@step
def ranges_locked_by_fcntl() -> list[object]:
    write_file("f", b"x" * 100)
    fd = os.open("f", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0)

    def inside(child: int) -> None:
        fcntl.lockf(child, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5)

    def outside(child: int) -> None:
        fcntl.lockf(child, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 50)

    found = [_lock_answer("f", inside), _lock_answer("f", outside)]
    fcntl.lockf(fd, fcntl.LOCK_UN, 10, 0)
    found.append(_lock_answer("f", inside))
    os.close(fd)
    return list(found)


@step
def syncing() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x")
    libc = __import__("ctypes").CDLL(None, use_errno=True)
    found = [attempt(os.fsync, fd), attempt(os.fdatasync, fd), libc.syncfs(fd)]
    found.append(libc.sync_file_range(fd, 0, 0, 7))
    os.close(fd)
    reader = os.open("f", os.O_RDONLY)
    found += [attempt(os.fsync, reader), attempt(os.posix_fadvise, reader, 0, 0, 4)]
    os.close(reader)
    return list(found)


@step
def terminal_ioctl_on_a_file() -> list[object]:
    import termios

    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    found = [os.isatty(fd)]
    try:
        termios.tcgetattr(fd)
    except termios.error as exc:
        found.append(exc.args[0])
    os.close(fd)
    return list(found)


@step
def reading_moves_no_mtime() -> list[str]:
    write_file("f")
    return [t for t in changed_times("f", lambda: read_file("f")) if t != "st_atime_ns"]


@step
def a_hundred_handles_of_one_file() -> list[object]:
    write_file("f", b"shared")
    handles = [os.open("f", os.O_RDONLY) for _ in range(100)]
    found = {os.pread(fd, 10, 0) for fd in handles}
    for fd in handles:
        os.close(fd)
    return [item.decode() for item in found]


@step
def file_handles_by_name_reopen() -> object:
    import ctypes

    write_file("f", b"by handle")
    libc = ctypes.CDLL(None, use_errno=True)
    handle = (ctypes.c_uint * 40)(128, 0)
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(-100, b"f", handle, ctypes.byref(mount_id), 0) < 0:
        return "no handles"
    here = os.open(".", os.O_RDONLY)
    fd = libc.open_by_handle_at(here, handle, os.O_RDONLY)
    os.close(here)
    if fd < 0:
        return f"handle refused: {ctypes.get_errno()}"
    found = os.read(fd, 20).decode()
    os.close(fd)
    return found
