"""Special nodes, filesystem statistics, and other things about the whole mount."""

import os
import socket
import stat

from tests.mount.steps.registry import as_user, attempt, mode_of, step, write_file


@step
def mknod_of_regular_files() -> list[object]:
    os.umask(0o022)
    return [attempt(os.mknod, "f", stat.S_IFREG | 0o666), mode_of("f"), attempt(os.mknod, "f")]


@step
def mknod_of_a_pipe() -> object:
    return attempt(os.mkfifo, "p")


@step
def mknod_of_a_character_device() -> object:
    return attempt(os.mknod, "c", stat.S_IFCHR | 0o600, os.makedev(1, 3))


@step
def mknod_of_a_block_device() -> object:
    return attempt(os.mknod, "b", stat.S_IFBLK | 0o600, os.makedev(7, 200))


@step
def mknod_of_devices_as_a_user() -> list[object]:
    os.chmod(".", 0o777)
    return [
        as_user(lambda: os.mknod("c", stat.S_IFCHR | 0o600, os.makedev(1, 3))),
        as_user(lambda: os.mknod("b", stat.S_IFBLK | 0o600, os.makedev(7, 200))),
    ]


@step
def binding_a_socket() -> object:
    with socket.socket(socket.AF_UNIX) as server:
        return attempt(server.bind, "s")


@step
def mknod_over_something() -> list[object]:
    write_file("f")
    os.mkdir("d")
    return [attempt(os.mknod, name) for name in ("f", "d", "f/x", "no/x")]


@step
def statistics_have_the_units_clients_rely_on() -> list[object]:
    found = os.statvfs(".")
    return [found.f_bsize, found.f_frsize, found.f_namemax]


@step
def statistics_are_consistent() -> list[bool]:
    found = os.statvfs(".")
    return [
        found.f_blocks > 0,
        found.f_bfree <= found.f_blocks,
        found.f_bavail <= found.f_blocks,
        found.f_files > 0,
        found.f_ffree <= found.f_files,
    ]


@step
def path_limits_by_pathconf() -> list[int]:
    return [os.pathconf(".", name) for name in ("PC_NAME_MAX", "PC_PATH_MAX")]


@step
def inode_numbers_are_stable_and_different() -> list[bool]:
    write_file("a")
    write_file("b")
    first = os.stat("a").st_ino
    os.rename("a", "c")
    fd = os.open("c", os.O_RDWR)
    found = [os.stat("c").st_ino == first, os.fstat(fd).st_ino == first]
    os.close(fd)
    return [*found, os.stat("b").st_ino != first]


@step
def one_device_everywhere() -> bool:
    os.makedirs("a/b")
    for number in range(20):
        write_file(f"a/b/{number}")
    return (
        len({os.stat(f"a/b/{number}").st_dev for number in range(20)} | {os.stat("a").st_dev}) == 1
    )
