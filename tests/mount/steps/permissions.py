"""Permissions as another user: classes of mode bits, directories, sticky bits, groups."""

import os
from functools import partial

from tests.mount.steps.registry import (
    OTHER_GID,
    OTHER_UID,
    RENAME_EXCHANGE,
    THIRD_GID,
    THIRD_UID,
    as_user,
    attempt_open,
    mode_of,
    read_file,
    register,
    renameat2,
    step,
    utimensat,
    write_file,
)
from tests.mount.steps.registry import UTIME_NOW as NOW

_CLASSES = {
    "owner": (OTHER_UID, THIRD_GID),
    "group": (THIRD_UID, OTHER_GID),
    "other": (THIRD_UID, THIRD_GID),
}


def _file_access(owner: tuple[int, int], mode: int) -> list[object]:
    write_file("f")
    os.chown("f", *owner)
    os.chmod("f", mode)

    def tries() -> list[object]:
        flags = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC)
        found: list[object] = [attempt_open("f", flag) for flag in flags]
        return found + [os.access("f", right) for right in (os.R_OK, os.W_OK, os.X_OK)]

    return [as_user(tries)]


def _directory_access(owner: tuple[int, int], mode: int) -> list[object]:
    os.mkdir("d")
    write_file("d/f")
    os.mkdir("d/e")
    os.chown("d", *owner)
    os.chmod("d", mode)

    actions = {
        "list": lambda: len(os.listdir("d")),
        "stat": lambda: os.stat("d/f").st_size,
        "chdir": lambda: os.chdir("d"),
        "read": lambda: len(read_file("d/f")),
        "create": lambda: write_file("d/new"),
        "mkdir": lambda: os.mkdir("d/newdir"),
        "symlink": lambda: os.symlink("t", "d/newlink"),
        "rename": lambda: os.rename("d/f", "d/g"),
        "rmdir": lambda: os.rmdir("d/e"),
        "unlink": lambda: os.unlink("d/g"),
        "missing": lambda: os.stat("d/missing"),
    }
    return [[name, as_user(action)] for name, action in actions.items()]


for _class, _owner in _CLASSES.items():
    for _bits in range(8):
        for _shift in (6, 3, 0) if _bits else (0,):
            _mode = _bits << _shift
            register(
                f"permissions.file_{_mode:03o}_for_{_class}", partial(_file_access, _owner, _mode)
            )
        _mode = {"owner": _bits << 6, "group": _bits << 3, "other": _bits}[_class]
        register(
            f"permissions.directory_{_mode:03o}_for_{_class}",
            partial(_directory_access, _owner, _mode),
        )


def _sticky(directory_owner: int, file_owner: int) -> list[object]:
    os.umask(0)
    os.mkdir("d")
    os.chmod("d", 0o1777)
    os.chown("d", directory_owner, 0)
    for name in ("unlinked", "renamed", "replaced", "exchanged"):
        write_file(f"d/{name}", mode=0o666)
        os.chown(f"d/{name}", file_owner, 0)
    os.mkdir("d/removed")
    os.chown("d/removed", file_owner, 0)

    def replace() -> None:
        write_file("d/mine")
        os.rename("d/mine", "d/replaced")

    def exchange() -> None:
        write_file("d/own")
        renameat2("d/own", "d/exchanged", RENAME_EXCHANGE)

    return [
        as_user(lambda: os.unlink("d/unlinked")),
        as_user(lambda: os.rename("d/renamed", "d/elsewhere")),
        as_user(replace),
        as_user(exchange),
        as_user(lambda: os.rmdir("d/removed")),
    ]


for _d, _f in ((0, 0), (OTHER_UID, 0), (0, OTHER_UID), (THIRD_UID, THIRD_UID)):
    register(f"permissions.sticky_directory_of_{_d}_file_of_{_f}", partial(_sticky, _d, _f))


@step
def files_belong_to_their_maker() -> list[object]:
    os.umask(0)
    os.mkdir("d", 0o777)

    def make() -> None:
        os.umask(0o027)
        write_file("d/f", mode=0o666)
        os.mkdir("d/e")
        os.symlink("t", "d/l")

    found = as_user(make, groups=(THIRD_GID,))
    return [found, *(mode_of(f"d/{name}") for name in "fel")]


@step
def supplementary_groups_count() -> list[object]:
    write_file("f", mode=0o640)
    os.chown("f", 0, THIRD_GID)
    os.mkdir("d", 0o770)
    os.chmod("d", 0o770)
    os.chown("d", 0, THIRD_GID)
    return [
        as_user(lambda: len(read_file("f"))),
        as_user(lambda: len(read_file("f")), groups=(THIRD_GID,)),
        as_user(lambda: write_file("d/f")),
        as_user(lambda: write_file("d/f"), groups=(1, THIRD_GID)),
    ]


@step
def an_unsearchable_parent_hides_everything_below() -> list[object]:
    os.makedirs("d/e")
    write_file("d/e/f", mode=0o666)
    os.chmod("d", 0o600)
    return [
        as_user(lambda: os.stat("d/e/f")),
        as_user(lambda: os.stat("d/nothing")),
        as_user(lambda: write_file("d/e/f")),
        as_user(lambda: os.rename("d/e/f", "f")),
    ]


@step
def utime_to_now_needs_write_and_to_a_value_needs_ownership() -> list[object]:
    os.umask(0)
    write_file("writable", mode=0o666)
    write_file("readable", mode=0o644)
    write_file("own", mode=0o000)
    os.chown("own", OTHER_UID, OTHER_GID)
    found = []
    for name in ("writable", "readable", "own"):
        found.append(as_user(lambda name=name: utimensat(name, (0, NOW), (0, NOW))))
        found.append(as_user(lambda name=name: utimensat(name, (5, 0), (5, 0))))
        found.append(as_user(lambda name=name: utimensat(name, (0, NOW), (5, 0))))
    return list(found)


@step
def truncate_needs_write_permission() -> list[object]:
    write_file("f", mode=0o644)
    write_file("g", mode=0o666)
    os.chmod("g", 0o666)
    return [as_user(lambda: os.truncate("f", 0)), as_user(lambda: os.truncate("g", 1))]


@step
def an_open_descriptor_outlives_its_permission() -> list[object]:
    write_file("f", mode=0o666)
    os.chmod("f", 0o666)

    def work() -> list[object]:
        fd = os.open("f", os.O_RDWR)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        return [os.write(fd, b"late"), os.pread(fd, 4, 0).decode()]

    ready = os.pipe()
    go = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(ready[0], 1)
        os.chmod("f", 0o000)
        os.write(go[1], b"x")
        os._exit(0)
    found = as_user(work)
    os.waitpid(pid, 0)
    for fd in (*ready, *go):
        os.close(fd)
    return [found, mode_of("f")]


@step
def xattrs_follow_the_mode() -> list[object]:
    write_file("f", mode=0o644)
    os.setxattr("f", "user.x", b"1")
    write_file("g", mode=0o600)
    return [
        as_user(lambda: os.getxattr("f", "user.x").decode()),
        as_user(lambda: os.setxattr("f", "user.x", b"2")),
        as_user(lambda: os.removexattr("f", "user.x")),
        as_user(lambda: os.listxattr("f")),
        as_user(lambda: os.getxattr("g", "user.x")),
        as_user(lambda: os.listxattr("g")),
    ]


@step
def linking_somebody_elses_file() -> list[object]:
    os.umask(0)
    os.mkdir("d", 0o777)
    write_file("d/readable", mode=0o644)
    write_file("d/writable", mode=0o666)
    return [
        as_user(lambda: os.link("d/readable", "d/a")),
        as_user(lambda: os.link("d/writable", "d/b")),
    ]


@step
def execution_needs_the_bit() -> list[object]:
    import shutil

    shutil.copy("/bin/true", "program")
    found = []
    for mode in (0o644, 0o755, 0o711):
        os.chmod("program", mode)
        found.append(as_user(lambda: os.access("program", os.X_OK)))
        found.append(as_user(lambda: os.spawnv(os.P_WAIT, "program", ["program"])))
    return list(found)
