"""mkdir(2), rmdir(2), reading directories."""

import os
import shutil
import threading
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    attempt,
    changed_times,
    register,
    same_inode,
    step,
    write_file,
)


def _mkdir(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [
        attempt(os.mkdir, "name/child"),
        attempt(os.mkdir, "name"),
        attempt(os.mkdir, "name/"),
        attempt(os.mkdir, "name/."),
    ]


def _rmdir(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [
        attempt(os.rmdir, "name/child"),
        attempt(os.rmdir, "name/."),
        attempt(os.rmdir, "name/.."),
        attempt(os.rmdir, "name"),
        sorted(os.listdir(".")),
    ]


def _rmdir_slash(kind: str) -> list[object]:
    KINDS[kind]("name")
    return [attempt(os.rmdir, "name/"), sorted(os.listdir("."))]


def _list(kind: str) -> object:
    KINDS[kind]("name")
    found = attempt(os.listdir, "name")
    return sorted(found) if isinstance(found, list) else found


def _chdir(kind: str) -> object:
    KINDS[kind]("name")
    return attempt(os.chdir, "name")


for _kind in KINDS:
    register(f"directories.mkdir_at_{_kind}", partial(_mkdir, _kind))
    register(f"directories.rmdir_of_{_kind}", partial(_rmdir, _kind))
    register(f"directories.rmdir_with_slash_of_{_kind}", partial(_rmdir_slash, _kind))
    register(f"directories.listing_of_{_kind}", partial(_list, _kind))
    register(f"directories.chdir_to_{_kind}", partial(_chdir, _kind))


@step
def mkdir_with_trailing_slash() -> list[object]:
    return [attempt(os.mkdir, "d/"), attempt(os.mkdir, "no/d/"), attempt(os.mkdir, "")]


@step
def mkdir_moves_the_parents_times() -> list[str]:
    os.mkdir("d")
    return changed_times("d", lambda: os.mkdir("d/x"))


@step
def rmdir_moves_the_parents_times() -> list[str]:
    os.makedirs("d/x")
    return changed_times("d", lambda: os.rmdir("d/x"))


@step
def a_failed_mkdir_leaves_the_parents_times() -> list[str]:
    os.makedirs("d/x")
    return changed_times("d", lambda: attempt(os.mkdir, "d/x"))


@step
def a_failed_rmdir_leaves_all_times() -> list[object]:
    os.makedirs("d/x/y")
    return [
        changed_times("d", lambda: attempt(os.rmdir, "d/x")),
        changed_times("d/x", lambda: attempt(os.rmdir, "d/x")),
    ]


@step
def writing_into_a_file_leaves_the_parents_times() -> list[str]:
    os.mkdir("d")
    write_file("d/f")
    return changed_times("d", lambda: write_file("d/f", b"more"))


@step
def link_count_of_directories() -> list[int]:
    os.mkdir("d")
    counts = [os.stat("d").st_nlink]
    os.mkdir("d/a")
    os.mkdir("d/b")
    return [*counts, os.stat("d").st_nlink]


@step
def size_of_directories() -> int:
    os.mkdir("d")
    return os.stat("d").st_size


@step
def rmdir_of_a_nonempty_directory_by_link_or_directory() -> list[object]:
    os.makedirs("a/d")
    os.mkdir("b")
    os.symlink("t", "b/l")
    return [attempt(os.rmdir, "a"), attempt(os.rmdir, "b")]


@step
def rmdir_of_the_working_directory() -> list[object]:
    os.mkdir("d")
    os.chdir("d")
    found: list[object] = [attempt(os.rmdir, "../d")]
    found += [attempt(os.mkdir, "x"), attempt(os.listdir, "."), attempt(os.getcwd)]
    found += [attempt(write_file, "y")]
    return found


@step
def reading_a_removed_directory() -> list[object]:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    os.rmdir("d")
    found = [attempt(os.listdir, fd), attempt(lambda: os.fstat(fd).st_nlink in (0, 1))]
    os.close(fd)
    return list(found)


@step
def a_removed_directory_made_again_is_empty() -> list[object]:
    os.mkdir("d")
    write_file("d/f")
    os.unlink("d/f")
    os.rmdir("d")
    os.mkdir("d", 0o700)
    return [os.listdir("d"), os.stat("d").st_mode]


@step
def dot_and_dotdot_are_there() -> list[object]:
    os.makedirs("a/b")
    return [
        same_inode("a/b/.", "a/b"),
        same_inode("a/b/..", "a"),
        same_inode("a/..", "."),
        attempt(os.stat, "a/b/nothing/.."),
    ]


@step
def types_in_listings() -> list[object]:
    for kind, make in KINDS.items():
        make(kind)
    with os.scandir(".") as entries:
        found = [
            [e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False),
             e.is_symlink(), e.inode() == os.lstat(e.name).st_ino]
            for e in entries
        ]  # fmt: skip
    return sorted(found)


@step
def a_thousand_names_are_each_listed_once() -> list[object]:
    for number in range(1000):
        write_file(f"file-with-a-rather-long-name-{number:05d}", b"")
    names = os.listdir(".")
    return [len(names), len(set(names)), sorted(names)[0], sorted(names)[-1]]


@step
def deleting_while_reading_loses_and_repeats_nothing() -> list[object]:
    for number in range(600):
        write_file(f"f{number:04d}", b"")
    seen = []
    with os.scandir(".") as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.name)
    return [len(seen), len(set(seen)), os.listdir(".")]


@step
def creating_while_reading_shows_the_old_names_once() -> list[object]:
    for number in range(300):
        write_file(f"old{number:04d}", b"")
    seen = []
    with os.scandir(".") as entries:
        for index, entry in enumerate(entries):
            if entry.name.startswith("old"):
                seen.append(entry.name)
            if index < 300:
                write_file(f"new{index:04d}", b"")
    return [len(seen), len(set(seen))]


@step
def renaming_while_reading_shows_other_names_once() -> list[object]:
    for number in range(300):
        write_file(f"f{number:04d}", b"")
    os.mkdir("away")
    seen = []
    with os.scandir(".") as entries:
        for index, entry in enumerate(entries):
            if entry.is_file():
                seen.append(entry.name)
                if index % 3 == 0:
                    os.rename(entry.name, f"away/{entry.name}")
    moved = len(os.listdir("away"))
    shutil.rmtree("away")  # which ones went there depends on the order of the listing
    for name in os.listdir("."):
        os.unlink(name)
    return [len(seen), len(set(seen)), moved >= 99]


@step
def seeking_back_in_a_directory_gives_the_same_names() -> list[object]:
    import ctypes

    for number in range(200):
        write_file(f"f{number:03d}", b"")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    libc.telldir.argtypes = libc.readdir.argtypes = libc.closedir.argtypes = (ctypes.c_void_p,)
    libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
    libc.rewinddir.argtypes = (ctypes.c_void_p,)
    stream = libc.opendir(b".")

    def rest() -> list[str]:
        names = []
        while entry := libc.readdir(stream):
            names.append(ctypes.string_at(entry + 19).decode())  # d_name of struct dirent
        return names

    for _ in range(50):
        libc.readdir(stream)
    place = libc.telldir(stream)
    first = rest()
    libc.seekdir(stream, place)
    second = rest()
    for name in first[::2]:
        if name not in (".", ".."):
            os.unlink(name)
    libc.seekdir(stream, place)
    third = rest()
    libc.rewinddir(stream)
    everything = rest()
    libc.closedir(stream)
    for name in os.listdir("."):
        os.unlink(name)
    dots = {".", ".."}
    kept = [name for name in first[1::2] if name not in dots]
    return [
        first == second,
        len(set(first)) == len(first),
        [name for name in third if name not in dots and name in first] == kept,
        dots <= set(everything),
    ]


@step
def racing_mkdir_gives_each_its_directory() -> list[object]:
    failures: list[BaseException] = []

    def make(number: int) -> None:
        try:
            os.makedirs(f"a/b/c/{number % 4}", exist_ok=True)
            write_file(f"a/b/c/{number % 4}/{number}")
        except OSError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=make, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(failures), sum(len(files) for _, _, files in os.walk("."))]


@step
def racing_exclusive_creates_have_one_winner() -> int:
    wins = []

    def create() -> None:
        try:
            os.close(os.open("one", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            wins.append(1)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wins)


@step
def deep_trees() -> list[object]:
    path = "/".join(f"d{number:03d}" for number in range(100))
    os.makedirs(path)
    write_file(f"{path}/leaf", b"deep")
    return [os.stat(f"{path}/leaf").st_size, attempt(os.removedirs, path)]


@step
def a_tree_is_removed_whole() -> list[object]:

    for first in range(5):
        for second in range(5):
            os.makedirs(f"t/{first}/{second}")
            write_file(f"t/{first}/{second}/file")
            os.symlink("file", f"t/{first}/{second}/link")
    shutil.rmtree("t")
    return os.listdir(".")


@step
def fsync_of_a_directory() -> list[object]:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    found = [attempt(os.fsync, fd), attempt(os.fdatasync, fd)]
    os.close(fd)
    return list(found)


@step
def reading_and_writing_a_directory_as_a_file() -> list[object]:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    found = [attempt(os.read, fd, 10), attempt(os.write, fd, b"x"), attempt(os.ftruncate, fd, 0)]
    os.close(fd)
    return [*found, attempt(os.truncate, "d", 0)]
