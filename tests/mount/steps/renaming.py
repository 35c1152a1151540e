"""rename(2) and renameat2(2): every kind over every kind, and what must move with it."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    attempt,
    changed_times,
    read_file,
    register,
    renameat2,
    same_inode,
    step,
    write_file,
)


def _rename(flags: int, old: str, new: str) -> list[object]:
    KINDS[old]("old")
    KINDS[new]("new")
    found = attempt(renameat2, "old", "new", flags)
    return [found, sorted(os.listdir("."))]


_FLAGS = {"rename": 0, "noreplace": RENAME_NOREPLACE, "exchange": RENAME_EXCHANGE}
for _name, _flags in _FLAGS.items():
    for _old in KINDS:
        for _new in KINDS:
            register(f"renaming.{_name}_{_old}_to_{_new}", partial(_rename, _flags, _old, _new))


@step
def unknown_and_contradictory_flags() -> list[object]:
    write_file("a")
    write_file("b")
    both = RENAME_EXCHANGE | RENAME_NOREPLACE
    return [attempt(renameat2, "a", "b", flags) for flags in (both, 8, 1 << 20)]


@step
def a_name_to_itself() -> list[object]:
    write_file("a")
    os.mkdir("d")
    return [attempt(os.rename, "a", "a"), attempt(os.rename, "d", "d")]


@step
def a_name_to_itself_with_flags() -> list[object]:
    write_file("a")
    return [attempt(renameat2, "a", "a", flags) for flags in (RENAME_NOREPLACE, RENAME_EXCHANGE)]


@step
def two_hard_links_of_one_inode_stay_both() -> list[object]:
    write_file("a")
    os.link("a", "b")
    return [attempt(os.rename, "a", "b"), sorted(os.listdir("."))]


@step
def exchange_of_two_hard_links() -> list[object]:
    write_file("a")
    os.link("a", "b")
    return [attempt(renameat2, "a", "b", RENAME_EXCHANGE), sorted(os.listdir("."))]


@step
def a_directory_into_itself_and_below() -> list[object]:
    os.makedirs("a/b/c")
    return [attempt(os.rename, "a", target) for target in ("a/x", "a/b", "a/b/x", "a/b/c/x")]


@step
def a_directory_over_its_own_parent() -> list[object]:
    os.makedirs("a/b/c")
    return [attempt(os.rename, "a/b", "a"), attempt(os.rename, "a/b/c", "a")]


@step
def exchange_with_own_child_and_parent() -> list[object]:
    os.makedirs("a/b/c")
    return [
        attempt(renameat2, "a", "a/b", RENAME_EXCHANGE),
        attempt(renameat2, "a/b/c", "a", RENAME_EXCHANGE),
    ]


@step
def dot_and_dotdot() -> list[object]:
    os.makedirs("a/b")
    cases = (("a/.", "x"), ("a/..", "x"), ("a", "a/."), ("a/b", "a/.."), (".", "x"), ("..", "x"))
    return [attempt(os.rename, old, new) for old, new in cases]


@step
def trailing_slashes() -> list[object]:
    os.mkdir("d")
    write_file("f")
    cases = (("f/", "x"), ("f", "x/"), ("d/", "x"), ("x", "d/"), ("d", "e/"), ("e/", "g/"))
    return [attempt(os.rename, old, new) for old, new in cases]


@step
def through_a_missing_or_wrong_parent() -> list[object]:
    write_file("f")
    write_file("g")
    cases = (("f", "no/x"), ("no/x", "y"), ("f", "g/x"), ("g/x", "y"), ("no", "y"), ("", "y"))
    return [attempt(os.rename, old, new) for old, new in cases]


@step
def the_renamed_file_is_the_same_inode() -> list[object]:
    write_file("a", b"payload")
    os.link("a", "witness")
    os.rename("a", "b")
    return [same_inode("b", "witness"), read_file("b").decode(), os.stat("b").st_nlink]


@step
def the_replaced_file_loses_a_link() -> int:
    write_file("a")
    write_file("b")
    os.link("b", "witness")
    os.rename("a", "b")
    return os.stat("witness").st_nlink


@step
def the_source_gets_a_new_ctime() -> list[str]:
    write_file("a")

    def there_and_back() -> None:
        os.rename("a", "b")
        os.rename("b", "a")

    return changed_times("a", there_and_back)


@step
def both_parents_get_new_times() -> list[object]:
    os.mkdir("from")
    os.mkdir("to")
    write_file("from/f")
    write_file("from/g")
    return [
        changed_times("from", lambda: os.rename("from/f", "to/f")),
        changed_times("to", lambda: os.rename("from/g", "to/g")),
    ]


@step
def a_failed_rename_changes_nothing() -> list[object]:
    os.makedirs("full/x")
    os.mkdir("d")
    return [
        changed_times("full", lambda: attempt(os.rename, "d", "full")),
        changed_times(".", lambda: attempt(os.rename, "d", "full")),
        sorted(os.listdir(".")),
    ]


@step
def while_open_for_writing() -> list[object]:
    fd = os.open("tmp", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before ")
    os.rename("tmp", "final")
    os.write(fd, b"after")
    size = os.fstat(fd).st_size
    os.close(fd)
    return [size, read_file("final").decode()]


@step
def the_replaced_file_stays_readable_by_its_holder() -> list[object]:
    write_file("f", b"old")
    fd = os.open("f", os.O_RDWR)
    write_file("n", b"new")
    os.rename("n", "f")
    os.pwrite(fd, b"OLD!", 0)
    found = [os.pread(fd, 10, 0).decode(), os.fstat(fd).st_nlink, read_file("f").decode()]
    os.close(fd)
    return list(found)


@step
def a_directory_moves_with_all_below_it() -> list[object]:
    os.makedirs("a/b/c")
    os.mkdir("z")
    write_file("a/b/c/f", b"deep")
    fd = os.open("a/b/c/f", os.O_RDWR)
    os.rename("a", "z/moved")
    os.pwrite(fd, b"DEEP", 0)
    os.close(fd)
    return [read_file("z/moved/b/c/f").decode(), attempt(os.stat, "a/b/c/f")]


@step
def the_working_directory_may_move() -> list[object]:
    os.makedirs("a/b")
    os.mkdir("z")
    os.chdir("a/b")
    os.rename("../../a", "../../z/a")
    write_file("f")
    os.chdir("../..")
    return [sorted(os.listdir(".")), sorted(os.listdir("a/b"))]


@step
def dotdot_of_a_moved_directory_is_its_new_parent() -> bool:
    os.makedirs("a/d")
    os.makedirs("b")
    os.rename("a/d", "b/d")
    return os.path.samestat(os.stat("b/d/.."), os.stat("b"))


@step
def exchange_of_two_directories_with_content() -> list[object]:
    os.makedirs("a/x")
    os.makedirs("b/y")
    renameat2("a", "b", RENAME_EXCHANGE)
    return [os.listdir("a"), os.listdir("b")]


@step
def exchange_across_directories_of_file_and_directory() -> list[object]:
    os.makedirs("a/d/x")
    os.mkdir("b")
    write_file("b/f", b"file")
    renameat2("a/d", "b/f", RENAME_EXCHANGE)
    return [read_file("a/d").decode(), os.listdir("b/f")]


@step
def a_long_chain_of_renames_keeps_the_content() -> str:
    write_file("n0", b"chain")
    for number in range(50):
        os.rename(f"n{number}", f"n{number + 1}")
    return read_file("n50").decode()


@step
def swapping_by_three_renames() -> list[str]:
    write_file("a", b"A")
    write_file("b", b"B")
    os.rename("a", "t")
    os.rename("b", "a")
    os.rename("t", "b")
    return [read_file("a").decode(), read_file("b").decode()]


@step
def attributes_move_with_the_file() -> list[object]:
    write_file("a", mode=0o640)
    os.chown("a", 3, 4)
    os.setxattr("a", "user.checksum", b"\x00\x01")
    os.utime("a", ns=(10**18, 10**18 + 7))
    os.rename("a", "b")
    status = os.stat("b")
    return [status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns,
            os.getxattr("b", "user.checksum").hex()]  # fmt: skip


@step
def a_file_to_a_name_in_its_parents_parent() -> list[object]:
    os.mkdir("tmpdir")
    write_file("tmpdir/F", b"one")
    os.rename("tmpdir/F", "F")
    write_file("tmpdir/F", b"two")
    os.rename("tmpdir/F", "F")
    return [read_file("F").decode(), os.listdir("tmpdir")]
