"""link(2), unlink(2), symlink(2) and readlink(2)."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    attempt,
    changed_times,
    link_following,
    read_file,
    register,
    same_inode,
    step,
    write_file,
)


def _link(follow: bool, old: str, new: str) -> list[object]:
    KINDS[old]("old")
    KINDS[new]("new")
    link = link_following if follow else partial(os.link, follow_symlinks=False)
    return [attempt(link, "old", "new"), sorted(os.listdir("."))]


def _unlink(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [
        attempt(os.unlink, "name/"),
        attempt(os.unlink, "name/child"),
        attempt(os.unlink, "name"),
        sorted(os.listdir(".")),
    ]


def _symlink(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [attempt(os.symlink, "target", "name"), attempt(os.symlink, "target", "name/child")]


def _readlink(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [attempt(os.readlink, "name"), attempt(os.readlink, "name/child")]


for _kind in KINDS:
    register(f"linking.unlink_of_{_kind}", partial(_unlink, _kind))
    register(f"linking.symlink_at_{_kind}", partial(_symlink, _kind))
    register(f"linking.readlink_of_{_kind}", partial(_readlink, _kind))
    register(f"linking.link_of_{_kind}", partial(_link, False, _kind, "nothing"))
    register(f"linking.link_following_{_kind}", partial(_link, True, _kind, "nothing"))
    register(f"linking.link_of_file_over_{_kind}", partial(_link, False, "file", _kind))
    register(f"linking.link_of_directory_over_{_kind}", partial(_link, False, "directory", _kind))


@step
def two_links_are_one_inode() -> list[object]:
    write_file("a", b"shared")
    os.link("a", "b")
    os.chmod("b", 0o600)
    fd = os.open("b", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b" data")
    os.close(fd)
    return [same_inode("a", "b"), os.stat("a").st_nlink, read_file("a").decode(),
            os.stat("a").st_mode]  # fmt: skip


@step
def links_in_other_directories() -> list[object]:
    os.makedirs("x/y")
    os.mkdir("z")
    write_file("x/y/a", b"1")
    os.link("x/y/a", "z/b")
    os.link("z/b", "c")
    os.unlink("x/y/a")
    return [same_inode("z/b", "c"), os.stat("c").st_nlink, read_file("z/b").decode()]


@step
def the_first_name_goes_and_the_second_stays() -> list[object]:
    write_file("a", b"stays")
    os.link("a", "b")
    os.unlink("a")
    os.rename("b", "c")
    os.link("c", "a")
    return [os.stat("a").st_nlink, read_file("a").decode(), attempt(os.stat, "b")]


@step
def many_links() -> list[int]:
    write_file("a")
    for number in range(100):
        os.link("a", f"l{number}")
    counts = [os.stat("a").st_nlink]
    for number in range(100):
        os.unlink(f"l{number}")
    return [*counts, os.stat("a").st_nlink]


@step
def link_moves_ctime_and_the_parents_times() -> list[object]:
    write_file("a")
    os.mkdir("d")
    return [
        changed_times("a", lambda: os.link("a", "d/b")),
        changed_times("d", lambda: os.link("a", "d/c")),
    ]


@step
def unlink_moves_ctime_and_the_parents_times() -> list[object]:
    os.mkdir("d")
    write_file("d/a")
    os.link("d/a", "b")
    os.link("b", "d/c")
    return [
        changed_times("b", lambda: os.unlink("d/a")),
        changed_times("d", lambda: os.unlink("d/c")),
    ]


@step
def a_failed_link_leaves_times() -> list[object]:
    write_file("a")
    write_file("b")
    return [
        changed_times("a", lambda: attempt(os.link, "a", "b")),
        changed_times(".", lambda: attempt(os.link, "a", "b")),
    ]


@step
def link_to_a_link() -> list[object]:
    write_file("t")
    os.symlink("t", "s")
    os.link("s", "h", follow_symlinks=False)
    return [os.readlink("h"), os.lstat("s").st_nlink, same_inode("s", "h")]


@step
def link_of_an_unlinked_open_file() -> object:
    write_file("a")
    fd = os.open("a", os.O_RDONLY)
    os.unlink("a")
    found = attempt(link_following, f"/proc/self/fd/{fd}", "b")
    os.close(fd)
    return [found, os.listdir(".")]


@step
def link_from_an_open_file() -> object:
    write_file("a", b"x")
    fd = os.open("a", os.O_RDONLY)
    found = attempt(link_following, f"/proc/self/fd/{fd}", "b")
    os.close(fd)
    return [found, sorted(os.listdir("."))]


@step
def link_through_wrong_parents() -> list[object]:
    write_file("f")
    write_file("g")
    cases = (("f", "no/x"), ("no/x", "y"), ("f", "g/x"), ("g/x", "y"), ("", "y"), ("f", ""))
    return [attempt(os.link, old, new) for old, new in cases]


@step
def link_with_trailing_slashes() -> list[object]:
    write_file("f")
    os.mkdir("d")
    return [attempt(os.link, old, new) for old, new in (("f/", "x"), ("f", "x/"), ("f", "d/"))]


@step
def unlink_of_dot_and_dotdot() -> list[object]:
    os.mkdir("d")
    return [attempt(os.unlink, name) for name in (".", "..", "d/.", "d/..", "")]


@step
def unlink_twice() -> list[object]:
    write_file("f")
    return [attempt(os.unlink, "f"), attempt(os.unlink, "f")]


@step
def unlink_then_create_gives_a_fresh_file() -> list[object]:
    write_file("f", b"old")
    os.chmod("f", 0o600)
    os.setxattr("f", "user.x", b"y")
    os.unlink("f")
    write_file("f", b"")
    return [os.stat("f").st_size, os.stat("f").st_mode, os.listxattr("f")]


@step
def symlink_targets_are_kept_byte_by_byte() -> list[object]:
    targets = (b"a", b"/", b"..", b"./x//y/", b"\xff\xfe", b"x" * 255, b"y/" * 500, b"with space")
    for number, target in enumerate(targets):
        os.symlink(target, b"l%d" % number)
    return [os.readlink(b"l%d" % number) == target for number, target in enumerate(targets)]


@step
def symlink_size_is_the_length_of_its_target() -> list[int]:
    for length in (1, 59, 60, 61, 255, 1000, 4000):
        os.symlink("x" * length, f"l{length}")
    return [os.lstat(f"l{length}").st_size for length in (1, 59, 60, 61, 255, 1000, 4000)]


@step
def symlink_target_limits() -> list[object]:
    return [attempt(os.symlink, "x" * length, f"l{length}") for length in (0, 4095, 4096, 5000)]


@step
def symlink_mode_is_0777() -> int:
    os.umask(0o077)
    os.symlink("t", "l")
    return os.lstat("l").st_mode


@step
def symlink_with_trailing_slash() -> list[object]:
    os.mkdir("d")
    return [attempt(os.symlink, "t", "x/"), attempt(os.symlink, "t", "d/")]


@step
def symlink_moves_the_parents_times() -> list[str]:
    os.mkdir("d")
    return changed_times("d", lambda: os.symlink("t", "d/l"))


@step
def a_symlink_of_a_symlink_leads_on() -> str:
    write_file("t", b"end")
    os.mkdir("d")
    os.symlink("../t", "d/one")
    os.symlink("d/one", "two")
    os.symlink("d", "dir")
    return (read_file("two") + read_file("dir/one")).decode()


@step
def replacing_a_symlink_by_rename() -> list[object]:
    write_file("t", b"target")
    os.symlink("t", "l")
    write_file("n", b"new")
    os.rename("n", "l")
    return [os.path.islink("l"), read_file("t").decode(), read_file("l").decode()]
