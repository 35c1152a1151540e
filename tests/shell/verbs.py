"""One verb each, on a small pool: what the sweeps of faults and kills run."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvfuse.pool.pool import RENAME_EXCHANGE, AttrChanges, Pool
from tests.shell.pools import (
    CALLER,
    commit,
    ids,
    mkdir,
    node_of,
    put,
    rename,
    truncate,
    unlink,
)  # fmt: skip


def name_on(pool: Pool, disk: int, stem: str, directory: str = "") -> str:
    """Return a path whose file goes to *disk*."""
    for number in range(1000):
        name = f"{stem}{number}.bin"  # with an extension, temp and final name have one owner
        path = f"{directory}/{name}" if directory else name
        if pool.disk_of_create(*ids(pool, path)) == disk:
            return path
    raise AssertionError(f"no name for disk {disk}")


@dataclass(frozen=True)
class Verb:
    """*prepare* makes what *act* needs; what one returns the other is given.

    *torn*: a death may take away what is being written. Without the catalog: *lossy*, a death may
    take away one of two files; *scattered*, a directory may be renamed on one disk and not yet on
    the other.
    """

    name: str
    prepare: Callable[[Pool], tuple[str, ...]]
    act: Callable[..., None]
    torn: bool = False
    lossy: bool = False
    scattered: bool = False


def _create(pool: Pool) -> None:
    put(pool, "dir/new", b"")


def _write(pool: Pool) -> None:
    put(pool, "dir/new", b"some data")


def _bystanders(pool: Pool) -> None:
    """Files on both disks that nothing may happen to."""
    mkdir(pool, "dir")
    mkdir(pool, "other")
    for number in (0, 1):
        commit(pool, name_on(pool, number, "by", "dir"), b"bystander")


def _prepared(*steps: Callable[[Pool], str]) -> Callable[[Pool], tuple[str, ...]]:
    def prepare(pool: Pool) -> tuple[str, ...]:
        _bystanders(pool)
        return tuple(step(pool) for step in steps)

    return prepare


def _file(disk: int, stem: str, directory: str = "dir") -> Callable[[Pool], str]:
    """A committed file on *disk*."""

    def step(pool: Pool) -> str:
        path = name_on(pool, disk, stem, directory)
        commit(pool, path, stem.encode() * 3)
        return path

    return step


def _name(disk: int, stem: str, directory: str = "dir") -> Callable[[Pool], str]:
    return lambda pool: name_on(pool, disk, stem, directory)


def _misplaced(disk: int, stem: str, directory: str = "dir") -> Callable[[Pool], str]:
    """A name whose owner is the other disk: a file renamed to it is displaced."""
    return _name(1 - disk, stem, directory)


def _full_dir(name: str) -> Callable[[Pool], str]:
    """A directory with a file on each disk, and one below with a file."""

    def step(pool: Pool) -> str:
        mkdir(pool, f"{name}/below")
        for number in (0, 1):
            commit(pool, name_on(pool, number, "in", name), b"in it")
        commit(pool, f"{name}/below/deep.bin", b"deep")
        return name

    return step


def _emptied_dir(name: str) -> Callable[[Pool], str]:
    """An empty directory that has carriers on both disks."""

    def step(pool: Pool) -> str:
        _full_dir(name)(pool)
        for path in [name_on(pool, n, "x", name) for n in (0, 1)]:
            commit(pool, path)
            unlink(pool, path)
        _empty(pool, name)
        return name

    return step


def _empty(pool: Pool, name: str) -> None:
    node = node_of(pool, name)
    for entry in pool.readdir(node.id, 0, 1000):
        child = f"{name}/{os.fsdecode(entry.name)}"
        if pool.getattr(entry.id).is_dir:
            _empty(pool, child)
            pool.rmdir(*ids(pool, child))
        else:
            unlink(pool, child)


def _link(pool: Pool, old: str, new: str) -> None:
    pool.link(node_of(pool, old).id, *ids(pool, new))


def _linked(disk: int, stem: str) -> Callable[[Pool], str]:
    def step(pool: Pool) -> str:
        path = _file(disk, stem)(pool)
        _link(pool, path, f"other/{stem}-link")
        return path

    return step


def _swap(pool: Pool, a: str, b: str) -> None:
    rename(pool, a, b, RENAME_EXCHANGE)


def _symlink(pool: Pool) -> None:
    pool.symlink(*ids(pool, "dir/sym"), b"to/where", CALLER)


def _fresh_dir(pool: Pool) -> str:
    mkdir(pool, "fresh/deep")
    return "fresh/deep/first"


def _rewrite(pool: Pool, path: str) -> None:
    fh = pool.open(node_of(pool, path).id, os.O_WRONLY)
    try:
        pool.write(fh, 0, b"REWRITTEN")
    finally:
        pool.release(fh)


def _rename_open(pool: Pool, old: str, new: str) -> None:
    """Rename while the writer still has it: llm-d."""
    fh = pool.open(node_of(pool, old).id, os.O_RDWR)
    try:
        rename(pool, old, new)
    finally:
        pool.release(fh)


def _chmod_dir(pool: Pool, path: str) -> None:
    pool.setattr(node_of(pool, path).id, AttrChanges(mode=0o700))


VERBS = [
    Verb("create", _prepared(), _create),
    Verb("create and write", _prepared(), _write, torn=True),
    Verb("mkdir", _prepared(), lambda p: mkdir(p, "dir/made") and None),
    Verb("first file of a directory", _prepared(_fresh_dir), lambda p, path: put(p, path, b"")),
    Verb("symlink", _prepared(), _symlink),
    Verb("link", _prepared(_file(0, "a"), _name(0, "l", "other")), _link),
    Verb("link again", _prepared(_linked(0, "a"), _name(1, "l", "other")), _link),
    Verb("rename to fresh", _prepared(_file(0, "a"), _name(0, "b")), rename),
    Verb("rename to displaced", _prepared(_file(0, "a"), _misplaced(0, "b", "other")), rename),
    Verb("rename over same disk", _prepared(_file(0, "a"), _file(0, "b")), rename),
    Verb("rename over other disk", _prepared(_file(0, "a"), _file(1, "b", "other")), rename),
    Verb("rename over linked", _prepared(_file(0, "a"), _linked(0, "b")), rename),
    Verb("rename linked over other disk", _prepared(_linked(0, "a"), _file(1, "b")), rename),
    Verb("rename open", _prepared(_file(0, "a"), _file(1, "b")), _rename_open, torn=True),
    Verb("unlink", _prepared(_file(0, "a")), unlink),
    Verb("unlink linked", _prepared(_linked(0, "a")), unlink),
    Verb("exchange on one disk", _prepared(_file(0, "a"), _file(0, "b", "other")), _swap),
    Verb("exchange on two disks", _prepared(_file(0, "a"), _file(1, "b", "other")), _swap,
         lossy=True),
    Verb("exchange linked", _prepared(_linked(0, "a"), _linked(1, "b")), _swap, lossy=True),
    Verb("exchange file and directory", _prepared(_file(0, "a"), _full_dir("other/d")), _swap,
         lossy=True),
    Verb("exchange directories", _prepared(_full_dir("dir/d"), _full_dir("other/e")), _swap,
         lossy=True),
    Verb("rename directory", _prepared(_full_dir("dir/d"), lambda _: "other/e"), rename,
         scattered=True),
    Verb("rename directory over empty",
         _prepared(_full_dir("dir/d"), _emptied_dir("other/e")), rename, scattered=True),
    Verb("rmdir", _prepared(_emptied_dir("dir/d")), lambda p, path: p.rmdir(*ids(p, path))),
    Verb("chmod directory", _prepared(_full_dir("dir/d")), _chmod_dir),
    Verb("chmod", _prepared(_file(0, "a")),
         lambda p, path: p.setattr(node_of(p, path).id, AttrChanges(mode=0o600)) and None),
    Verb("open for write", _prepared(_file(0, "a")), _rewrite, torn=True),
    Verb("truncate", _prepared(_file(0, "a")), lambda p, path: truncate(p, path, 1), torn=True),
    Verb("set xattr", _prepared(_file(0, "a")),
         lambda p, path: p.setxattr(node_of(p, path).id, b"user.crc", b"1", 0)),
]  # fmt: skip
