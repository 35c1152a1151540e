"""A file system in dictionaries, and a machine that holds a real one to it.

The machine is one for all targets: a directory of a mount, a native directory, or a pool without a
driver. Symbolic links of the model lead nowhere, so that no walk follows one.
"""

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.mount.steps.registry import RENAME_EXCHANGE, RENAME_NOREPLACE

Path = tuple[str, ...]
NAMES = ("a", "b", "c", "a.tmp", "c_7.tmp", "b.data", ".0123456789abcdef0123456789abcdef.tmp")
NOWHERE = "leads/nowhere"
DEPTH_MAX = 4


@dataclass(eq=False)
class File:
    """A regular file; *nlink* names show it."""

    data: bytearray = field(default_factory=bytearray)
    mode: int = 0o644
    nlink: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """A symbolic link to NOWHERE."""

    nlink: int = 0


@dataclass(eq=False)
class Directory:
    """Names and what they show."""

    children: dict[str, "Node"] = field(default_factory=dict)


Node = File | Link | Directory


def fail(code: int) -> OSError:
    """Return the error of *code*."""
    return OSError(code, os.strerror(code))


class Target(Protocol):
    """What the machine drives: verbs on paths and handles, with the errno of the kernel."""

    def create(self, path: Path, *, exclusive: bool) -> None: ...
    def write(self, path: Path, offset: int, data: bytes) -> None: ...
    def truncate(self, path: Path, size: int) -> None: ...
    def read(self, path: Path) -> bytes: ...
    def mkdir(self, path: Path) -> None: ...
    def rmdir(self, path: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path, flags: int) -> None: ...
    def link(self, old: Path, new: Path) -> None: ...
    def symlink(self, path: Path) -> None: ...
    def chmod(self, path: Path, mode: int) -> None: ...
    def setxattr(self, path: Path, name: str, value: bytes) -> None: ...
    def xattrs(self, path: Path) -> dict[str, bytes]: ...
    def listing(self, path: Path) -> list[str]: ...
    def stat(self, path: Path) -> tuple[int, int, int]:
        """Return mode, link count and size."""
        ...

    def open(self, path: Path) -> int: ...
    def pwrite(self, handle: int, offset: int, data: bytes) -> None: ...
    def pread(self, handle: int) -> bytes: ...
    def handle_stat(self, handle: int) -> tuple[int, int]:
        """Return link count and size."""
        ...

    def close(self, handle: int) -> None: ...
    def close_all(self) -> None: ...


class Model:
    """The same verbs as a target, on dictionaries."""

    def __init__(self) -> None:
        self.root = Directory()

    def get(self, path: Path) -> Node:
        """Return what *path* shows."""
        node: Node = self.root
        for name in path:
            if isinstance(node, Link):
                raise fail(errno.ENOENT)
            if isinstance(node, File):
                raise fail(errno.ENOTDIR)
            if name not in node.children:
                raise fail(errno.ENOENT)
            node = node.children[name]
        return node

    def _parent(self, path: Path) -> Directory:
        node = self.get(path[:-1])
        if isinstance(node, Link):
            raise fail(errno.ENOENT)
        if isinstance(node, File):
            raise fail(errno.ENOTDIR)
        return node

    def file(self, path: Path) -> File:
        """Return the regular file at *path*, as open(O_NOFOLLOW) for writing does."""
        node = self.get(path)
        if isinstance(node, Link):
            raise fail(errno.ELOOP)
        if isinstance(node, Directory):
            raise fail(errno.EISDIR)
        return node

    def create(self, path: Path, *, exclusive: bool) -> None:
        parent = self._parent(path)
        if path[-1] not in parent.children:
            parent.children[path[-1]] = File(nlink=1)
        elif exclusive:
            raise fail(errno.EEXIST)
        else:
            self.file(path).data.clear()

    def write(self, path: Path, offset: int, data: bytes) -> None:
        store(self.file(path), offset, data)

    def truncate(self, path: Path, size: int) -> None:
        node = self.file(path)
        del node.data[size:]
        node.data.extend(bytes(size - len(node.data)))

    def read(self, path: Path) -> bytes:
        return bytes(self.file(path).data)

    def mkdir(self, path: Path) -> None:
        self._make(path, Directory())

    def symlink(self, path: Path) -> None:
        self._make(path, Link(1))

    def _make(self, path: Path, node: Node) -> None:
        parent = self._parent(path)
        if path[-1] in parent.children:
            raise fail(errno.EEXIST)
        parent.children[path[-1]] = node

    def rmdir(self, path: Path) -> None:
        parent = self._parent(path)
        node = self.get(path)
        if not isinstance(node, Directory):
            raise fail(errno.ENOTDIR)
        if node.children:
            raise fail(errno.ENOTEMPTY)
        del parent.children[path[-1]]

    def unlink(self, path: Path) -> None:
        parent = self._parent(path)
        node = self.get(path)
        if isinstance(node, Directory):
            raise fail(errno.EISDIR)
        node.nlink -= 1
        del parent.children[path[-1]]

    def link(self, old: Path, new: Path) -> None:
        node = self.get(old)
        parent = self._parent(new)
        if new[-1] in parent.children:
            raise fail(errno.EEXIST)
        if isinstance(node, Directory):
            raise fail(errno.EPERM)
        node.nlink += 1
        parent.children[new[-1]] = node

    def rename(self, old: Path, new: Path, flags: int) -> None:
        source, target = self._parent(old), self._parent(new)
        if old[-1] not in source.children:
            raise fail(errno.ENOENT)
        moved, replaced = source.children[old[-1]], target.children.get(new[-1])
        if flags == RENAME_NOREPLACE and replaced is not None:
            raise fail(errno.EEXIST)
        if flags == RENAME_EXCHANGE and replaced is None:
            raise fail(errno.ENOENT)
        if new[: len(old)] == old and len(new) > len(old):
            raise fail(errno.EINVAL)
        if old[: len(new)] == new and len(old) > len(new):
            raise fail(errno.EINVAL if flags == RENAME_EXCHANGE else errno.ENOTEMPTY)
        if moved is replaced:
            return
        if flags == RENAME_EXCHANGE:
            assert replaced is not None
            source.children[old[-1]], target.children[new[-1]] = replaced, moved
            return
        if replaced is not None:
            self._check_replace(moved, replaced)
            if not isinstance(replaced, Directory):
                replaced.nlink -= 1
        del source.children[old[-1]]
        target.children[new[-1]] = moved

    def _check_replace(self, moved: Node, replaced: Node) -> None:
        if isinstance(moved, Directory) and not isinstance(replaced, Directory):
            raise fail(errno.ENOTDIR)
        if isinstance(replaced, Directory) and not isinstance(moved, Directory):
            raise fail(errno.EISDIR)
        if isinstance(replaced, Directory) and replaced.children:
            raise fail(errno.ENOTEMPTY)

    def chmod(self, path: Path, mode: int) -> None:
        self.file(path).mode = mode

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        self.file(path).xattrs[name] = value

    def paths(self) -> list[tuple[Path, Node]]:
        """Return all that is there, parents before children."""
        found: list[tuple[Path, Node]] = [((), self.root)]
        for path, node in found:
            if isinstance(node, Directory):
                found += [((*path, name), child) for name, child in node.children.items()]
        return found


def store(file: File, offset: int, data: bytes) -> None:
    """Put *data* at *offset*, zeros in a gap before it."""
    if data:
        file.data.extend(bytes(max(0, offset - len(file.data))))
        file.data[offset : offset + len(data)] = data


numbers = st.integers(0, 10_000)
names = st.sampled_from(NAMES)
contents = st.sampled_from((b"", b"x", b"some text", bytes(range(256)) * 20))
offsets = st.sampled_from((0, 0, 1, 100, 4096, 10_000))


class FileSystemMachine(RuleBasedStateMachine):
    """Drives a target and the model with the same calls. Subclasses give ``make_target``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.target = self.make_target()
        self.open_files: list[tuple[int, File]] = []

    def make_target(self) -> Target:
        """Return an empty file system."""
        raise NotImplementedError

    def teardown(self) -> None:
        try:
            self._compare_all()
        finally:
            self.target.close_all()

    # -- which path a number stands for

    def _any(self, number: int) -> Path:
        everything = self.model.paths()[1:]
        return everything[number % len(everything)][0] if everything else ("a",)

    def _in(self, number: int, name: str) -> Path:
        """Return a name in some directory; one time in twelve below something else."""
        everything = [p for p in self.model.paths() if len(p[0]) < DEPTH_MAX]
        if number % 12:
            everything = [p for p in everything if isinstance(p[1], Directory)]
        return (*everything[number % len(everything)][0], name)

    def _both(self, verb: str, *args: object, **kwargs: object) -> None:
        """Call *verb* on the model and on the target; both must say the same."""
        wanted = _outcome(getattr(self.model, verb), *args, **kwargs)
        found = _outcome(getattr(self.target, verb), *args, **kwargs)
        assert found == wanted, f"{verb}{args}: {found}, wanted {wanted}"

    # -- calls

    @rule(number=numbers, name=names, exclusive=st.booleans())
    def create(self, number: int, name: str, exclusive: bool) -> None:
        self._both("create", self._in(number, name), exclusive=exclusive)

    @rule(number=numbers, name=names, data=contents)
    def put(self, number: int, name: str, data: bytes) -> None:
        """Write under a temp name and rename, as connectors do."""
        final = self._in(number, name)
        temp = (*final[:-1], f"{name}_99.tmp")
        self._both("create", temp, exclusive=False)
        self._both("write", temp, 0, data)
        self._both("rename", temp, final, 0)

    @rule(number=numbers, offset=offsets, data=contents)
    def write(self, number: int, offset: int, data: bytes) -> None:
        self._both("write", self._any(number), offset, data)

    @rule(number=numbers, size=offsets)
    def truncate(self, number: int, size: int) -> None:
        self._both("truncate", self._any(number), size)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        self._both("read", self._any(number))

    @rule(number=numbers, name=names)
    def mkdir(self, number: int, name: str) -> None:
        self._both("mkdir", self._in(number, name))

    @rule(number=numbers)
    def rmdir(self, number: int) -> None:
        self._both("rmdir", self._any(number))

    @rule(number=numbers)
    def unlink(self, number: int) -> None:
        self._both("unlink", self._any(number))

    @rule(
        old=numbers, new=numbers, name=names,
        flags=st.sampled_from((0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE)), onto=st.booleans(),
    )  # fmt: skip
    def rename(self, old: int, new: int, name: str, flags: int, onto: bool) -> None:
        target = self._any(new) if onto else self._in(new, name)
        self._both("rename", self._any(old), target, flags)

    @rule(old=numbers, new=numbers, name=names)
    def link(self, old: int, new: int, name: str) -> None:
        self._both("link", self._any(old), self._in(new, name))

    @rule(number=numbers, name=names)
    def symlink(self, number: int, name: str) -> None:
        self._both("symlink", self._in(number, name))

    @rule(number=numbers, mode=st.sampled_from((0o600, 0o644, 0o755)))
    def chmod(self, number: int, mode: int) -> None:
        path = self._any(number)
        if isinstance(self._node(path), File):
            self._both("chmod", path, mode)

    @rule(number=numbers, name=st.sampled_from(("user.a", "user.b")), value=contents)
    def setxattr(self, number: int, name: str, value: bytes) -> None:
        path = self._any(number)
        if isinstance(self._node(path), File):
            self._both("setxattr", path, name, value[:100])

    @rule(number=numbers)
    def open_file(self, number: int) -> None:
        path = self._any(number)
        node = self._node(path)
        if isinstance(node, File) and len(self.open_files) < 5:
            self.open_files.append((self.target.open(path), node))

    @precondition(lambda self: self.open_files)
    @rule(number=numbers, offset=offsets, data=contents)
    def write_handle(self, number: int, offset: int, data: bytes) -> None:
        handle, node = self.open_files[number % len(self.open_files)]
        self.target.pwrite(handle, offset, data)
        store(node, offset, data)

    @precondition(lambda self: self.open_files)
    @rule(number=numbers)
    def read_handle(self, number: int) -> None:
        handle, node = self.open_files[number % len(self.open_files)]
        assert self.target.pread(handle) == bytes(node.data)
        assert self.target.handle_stat(handle) == (node.nlink, len(node.data))

    @precondition(lambda self: self.open_files)
    @rule(number=numbers)
    def close_handle(self, number: int) -> None:
        handle, _ = self.open_files.pop(number % len(self.open_files))
        self.target.close(handle)

    def _node(self, path: Path) -> Node | None:
        try:
            return self.model.get(path)
        except OSError:
            return None

    # -- comparing

    @invariant()
    def the_root_lists_the_same(self) -> None:
        assert sorted(self.target.listing(())) == sorted(self.model.root.children)

    def _compare_all(self) -> None:
        """Walk everything: names, types, modes, links, sizes, data, attributes."""
        for path, node in self.model.paths():
            mode, nlink, size = self.target.stat(path)
            if isinstance(node, Directory):
                assert stat.S_ISDIR(mode), path
                assert sorted(self.target.listing(path)) == sorted(node.children), path
            elif isinstance(node, Link):
                assert stat.S_ISLNK(mode), path
                assert (nlink, size) == (node.nlink, len(NOWHERE)), path
            else:
                assert (mode, nlink, size) == (
                    stat.S_IFREG | node.mode,
                    node.nlink,
                    len(node.data),
                ), path
                assert self.target.read(path) == bytes(node.data), path
                assert self.target.xattrs(path) == node.xattrs, path


def _outcome(function: object, *args: object, **kwargs: object) -> object:
    assert callable(function)
    try:
        return function(*args, **kwargs)
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
