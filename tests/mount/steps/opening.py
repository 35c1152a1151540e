"""open(2) and creat(2): every combination of flags with every kind of name."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    attempt,
    attempt_open,
    changed_times,
    link_following,
    mode_of,
    read_file,
    register,
    same_inode,
    step,
    write_file,
)

FLAGS = {
    "rdonly": os.O_RDONLY,
    "wronly": os.O_WRONLY,
    "rdwr": os.O_RDWR,
    "creat": os.O_WRONLY | os.O_CREAT,
    "creat_rdonly": os.O_RDONLY | os.O_CREAT,
    "creat_excl": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "creat_excl_trunc": os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_TRUNC,
    "creat_trunc": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "trunc": os.O_WRONLY | os.O_TRUNC,
    "trunc_rdwr": os.O_RDWR | os.O_TRUNC,
    "append": os.O_WRONLY | os.O_APPEND,
    "nofollow": os.O_RDONLY | os.O_NOFOLLOW,
    "creat_nofollow": os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW,
    "directory": os.O_RDONLY | os.O_DIRECTORY,
    "directory_nofollow": os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW,
    "directory_wronly": os.O_WRONLY | os.O_DIRECTORY,
    "creat_directory": os.O_RDONLY | os.O_CREAT | os.O_DIRECTORY,
    "path": os.O_PATH,
    "path_nofollow": os.O_PATH | os.O_NOFOLLOW,
    "noatime": os.O_RDONLY | os.O_NOATIME,
    "sync": os.O_WRONLY | os.O_CREAT | os.O_SYNC,
    "dsync": os.O_WRONLY | os.O_CREAT | os.O_DSYNC,
    "nonblock": os.O_RDONLY | os.O_NONBLOCK,
    "cloexec": os.O_RDONLY | os.O_CLOEXEC,
}


def _open(flags: int, kind: str) -> str:
    KINDS[kind]("name")
    return attempt_open("name", flags)


def _open_below(kind: str) -> list[str]:
    KINDS[kind]("name")
    return [
        attempt_open("name/child", os.O_RDONLY),
        attempt_open("name/child", os.O_WRONLY | os.O_CREAT),
        attempt_open("name/", os.O_RDONLY),
        attempt_open("name/", os.O_WRONLY | os.O_CREAT),
        attempt_open("name/.", os.O_RDONLY),
        attempt_open("name/..", os.O_RDONLY),
    ]


for _kind in KINDS:
    for _label, _flags in FLAGS.items():
        register(f"opening.{_label}_of_{_kind}", partial(_open, _flags, _kind))
    register(f"opening.below_{_kind}", partial(_open_below, _kind))


def _creation_mode(mode: int, umask: int) -> list[str]:
    os.umask(umask)
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, mode))
    os.mkdir("directory", mode)
    return [mode_of("file"), mode_of("directory")]


for _mode in (0o000, 0o400, 0o600, 0o644, 0o666, 0o755, 0o777, 0o1777):
    for _umask in (0o000, 0o022, 0o027, 0o077, 0o777):
        register(
            f"opening.mode_{_mode:04o}_umask_{_umask:03o}", partial(_creation_mode, _mode, _umask)
        )


@step
def setid_bits_at_creation() -> list[str]:
    os.umask(0)
    os.close(os.open("suid", os.O_WRONLY | os.O_CREAT, 0o4755))
    os.close(os.open("sgid", os.O_WRONLY | os.O_CREAT, 0o2755))
    return [mode_of("suid"), mode_of("sgid")]


@step
def a_mode_without_write_permission_still_lets_its_creator_write() -> object:
    fd = os.open("file", os.O_RDWR | os.O_CREAT, 0o000)
    os.write(fd, b"data")
    found = os.pread(fd, 10, 0)
    os.close(fd)
    return found.decode()


@step
def creat_of_existing_keeps_mode_and_owner() -> str:
    write_file("file", mode=0o640)
    os.chown("file", 5, 6)
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o777))
    return mode_of("file")


@step
def excl_is_exact_for_a_second_opener() -> list[str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return [attempt_open("f", flags), attempt_open("f", flags), attempt_open("f", flags)]


@step
def excl_works_again_after_unlink() -> list[object]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    found: list[object] = [attempt_open("f", flags)]
    os.unlink("f")
    return [*found, attempt_open("f", flags)]


@step
def trunc_keeps_the_inode() -> bool:
    write_file("f", b"long content")
    os.link("f", "other")
    write_file("f", b"short")
    return same_inode("f", "other") and read_file("other") == b"short"


@step
def trunc_moves_mtime_and_ctime() -> list[str]:
    write_file("f")
    return changed_times("f", lambda: attempt_open("f", os.O_WRONLY | os.O_TRUNC))


@step
def trunc_of_an_empty_file_moves_times() -> list[str]:
    write_file("f", b"")
    return changed_times("f", lambda: attempt_open("f", os.O_WRONLY | os.O_TRUNC))


@step
def creat_moves_the_parents_times() -> list[str]:
    os.mkdir("d")
    return changed_times("d", lambda: write_file("d/f"))


@step
def opening_existing_with_creat_leaves_the_parents_times() -> list[str]:
    os.mkdir("d")
    write_file("d/f")
    return changed_times("d", lambda: attempt_open("d/f", os.O_WRONLY | os.O_CREAT))


@step
def a_failed_creat_leaves_the_parents_times() -> list[str]:
    os.mkdir("d")
    write_file("d/f")
    return changed_times("d", lambda: attempt_open("d/f", os.O_WRONLY | os.O_CREAT | os.O_EXCL))


@step
def reading_a_write_only_descriptor() -> object:
    write_file("f")
    fd = os.open("f", os.O_WRONLY)
    found = attempt(os.read, fd, 1)
    os.close(fd)
    return found


@step
def writing_a_read_only_descriptor() -> object:
    write_file("f")
    fd = os.open("f", os.O_RDONLY)
    found = attempt(os.write, fd, b"x")
    os.close(fd)
    return found


@step
def append_writes_at_the_end_whatever_the_position() -> str:
    write_file("f", b"0123456789")
    fd = os.open("f", os.O_RDWR | os.O_APPEND)
    os.lseek(fd, 2, os.SEEK_SET)
    os.write(fd, b"abc")
    os.write(fd, b"def")
    os.close(fd)
    return read_file("f").decode()


@step
def two_appenders_never_overwrite_each_other() -> str:
    first = os.open("f", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    second = os.open("f", os.O_WRONLY | os.O_APPEND)
    for number in range(10):
        os.write(first, b"a%d" % number)
        os.write(second, b"b%d" % number)
    os.close(first)
    os.close(second)
    return read_file("f").decode()


@step
def creat_in_a_removed_directory() -> str:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    os.rmdir("d")
    try:
        return str(attempt(os.open, "f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    finally:
        os.close(fd)


@step
def tmpfile_is_nameless_until_linked() -> object:
    fd = attempt(os.open, ".", os.O_RDWR | os.O_TMPFILE, 0o644)
    if isinstance(fd, str):
        return fd
    os.write(fd, b"data")
    before = os.listdir(".")
    link_following(f"/proc/self/fd/{fd}", "named")
    os.close(fd)
    return [before, read_file("named").decode()]


@step
def creat_through_a_dangling_link_makes_the_target() -> list[object]:
    os.symlink("target", "link")
    found = attempt_open("link", os.O_WRONLY | os.O_CREAT)
    return [found, sorted(os.listdir("."))]


@step
def open_through_forty_links_and_more() -> list[str]:
    write_file("l0")
    for number in range(45):
        os.symlink(f"l{number}", f"l{number + 1}")
    return [attempt_open(f"l{number}", os.O_RDONLY) for number in (1, 10, 39, 40, 41, 45)]


@step
def open_of_an_empty_path() -> str:
    return attempt_open("", os.O_RDONLY)


@step
def opening_a_running_program_for_writing() -> list[object]:
    import shutil
    import subprocess

    shutil.copy("/bin/sleep", "program")
    os.chmod("program", 0o755)
    child = subprocess.Popen(["./program", "30"])
    try:
        found = [attempt_open("program", os.O_WRONLY)]
        os.unlink("program")
    finally:
        child.kill()
        child.wait()
    return list(found)
