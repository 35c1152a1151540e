"""A pool without a driver, as the machine of ``tests.model`` drives it.

Walks and checks what the kernel walks and checks before it asks a file system.
"""

import errno
import itertools
import os
import shutil
import stat
from pathlib import Path as FilePath

from kvfuse.core.config import Config
from kvfuse.core.records import ROOT_ID, Caller, Node
from kvfuse.disks.diskset import DiskSet, DiskSpec, open_disks
from kvfuse.pool.pool import RENAME_EXCHANGE, RENAME_NOREPLACE, AttrChanges, Pool, open_pool
from tests.model import NOWHERE, Path, fail

CALLER = Caller(0, 0, 0o022, 1)
READ_MAX = 1 << 20
DISKS = 3


class PoolTarget:
    """The verbs as calls of a pool over *DISKS* directories below *base*."""

    def __init__(self, base: FilePath) -> None:
        self._base = base
        self._config = Config.model_validate(
            {
                "pool": {
                    "mountpoint": str(base / "mount"),
                    "disks": [str(base / f"disk{number}") for number in range(DISKS)],
                    "state_dir": str(base / "state"),
                    "run_dir": str(base / "run"),
                    "allow_shared_device": True,
                }
            }
        )
        for name in ("mount", "state", "run", *(f"disk{number}" for number in range(DISKS))):
            (base / name).mkdir()
        self._ids: dict[int, int] = {}
        self._disks, self._pool = self._open()

    def _open(self) -> tuple[DiskSet, Pool]:
        settings = self._config.pool
        disks = open_disks(
            [DiskSpec(disk.path, disk.weight, disk.mode) for disk in settings.disks],
            mountpoint=settings.mountpoint,
            state_dir=settings.state_dir,
            run_dir=settings.run_dir,
            allow_shared_device=True,
            init=True,
        )
        return disks, open_pool(self._config, disks)

    def reopen(self, *, forget: bool = False) -> None:
        """Take the pool down and bring it up again; with *forget* without its catalog."""
        self.close_all()
        if forget:
            shutil.rmtree(self._base / "run")
            shutil.rmtree(self._base / "state")
            (self._base / "run").mkdir()
            (self._base / "state").mkdir()
        self._disks, self._pool = self._open()

    def close_all(self) -> None:
        self._pool.close()
        self._disks.close()

    # -- walking, as the kernel does

    def _node(self, path: Path) -> Node:
        node = self._pool.getattr(ROOT_ID)
        for name in path:
            node = self._child(node, name)
        return node

    def _child(self, directory: Node, name: str) -> Node:
        found = self._pool.lookup(self._enter(directory), os.fsencode(name))
        if found is None:
            raise fail(errno.ENOENT)
        return found

    def _enter(self, node: Node) -> int:
        if node.is_symlink:  # of this model lead nowhere
            raise fail(errno.ENOENT)
        if not node.is_dir:
            raise fail(errno.ENOTDIR)
        return node.id

    def _parent(self, path: Path) -> tuple[int, bytes]:
        return self._enter(self._node(path[:-1])), os.fsencode(path[-1])

    def _file(self, path: Path) -> Node:
        node = self._node(path)
        if node.is_symlink:
            raise fail(errno.ELOOP)
        if node.is_dir:
            raise fail(errno.EISDIR)
        return node

    # -- the verbs

    def create(self, path: Path, *, exclusive: bool) -> None:
        parent, name = self._parent(path)
        found = self._pool.lookup(parent, name)
        if found is not None and not exclusive:
            fh = self._pool.open(self._file(path).id, os.O_WRONLY | os.O_TRUNC)
        else:
            flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
            _, fh = self._pool.create(parent, name, flags, stat.S_IFREG | 0o644, CALLER)
        self._close(fh)

    def _close(self, fh: int) -> None:
        self._pool.flush(fh)
        self._pool.release(fh)

    def write(self, path: Path, offset: int, data: bytes) -> None:
        fh = self._pool.open(self._file(path).id, os.O_WRONLY)
        try:
            if data:
                self._pool.write(fh, offset, data)
        finally:
            self._close(fh)

    def truncate(self, path: Path, size: int) -> None:
        changed = self._pool.setattr(self._file(path).id, AttrChanges(size=size))
        assert changed.size == size

    def read(self, path: Path) -> bytes:
        fh = self._pool.open(self._file(path).id, os.O_RDONLY)
        try:
            return self._pool.read(fh, 0, READ_MAX)
        finally:
            self._pool.release(fh)

    def mkdir(self, path: Path) -> None:
        self._pool.mkdir(*self._parent(path), stat.S_IFDIR | 0o755, CALLER)

    def rmdir(self, path: Path) -> None:
        self._pool.rmdir(*self._parent(path))

    def unlink(self, path: Path) -> None:
        self._pool.unlink(*self._parent(path))

    def rename(self, old: Path, new: Path, flags: int) -> None:
        source, target = self._parent(old), self._parent(new)
        if self._pool.lookup(*source) is None:
            raise fail(errno.ENOENT)
        # What follows the kernel sees for itself; the pool is not asked.
        there = self._pool.lookup(*target) is not None
        if flags == RENAME_NOREPLACE and there:
            raise fail(errno.EEXIST)
        if flags == RENAME_EXCHANGE and not there:
            raise fail(errno.ENOENT)
        if source == target:
            return
        if new[: len(old)] == old:
            raise fail(errno.EINVAL)
        if old[: len(new)] == new:
            raise fail(errno.EINVAL if flags == RENAME_EXCHANGE else errno.ENOTEMPTY)
        self._pool.rename(*source, *target, flags)

    def link(self, old: Path, new: Path) -> None:
        node, (parent, name) = self._node(old), self._parent(new)
        if self._pool.lookup(parent, name) is not None:
            raise fail(errno.EEXIST)
        self._pool.link(node.id, parent, name)

    def symlink(self, path: Path) -> None:
        self._pool.symlink(*self._parent(path), NOWHERE.encode(), CALLER)

    def chmod(self, path: Path, mode: int) -> None:
        assert self._pool.setattr(self._node(path).id, AttrChanges(mode=mode)).mode & 0o7777 == mode

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        self._pool.setxattr(self._node(path).id, name.encode(), value, 0)

    def xattrs(self, path: Path) -> dict[str, bytes]:
        node = self._node(path)
        names = self._pool.listxattr(node.id)
        return {name.decode(): self._pool.getxattr(node.id, name) for name in names}

    def listing(self, path: Path) -> list[str]:
        node = self._node(path)
        names: list[str] = []
        cookie = 0
        for limit in itertools.cycle((1, 2, 100)):
            entries = self._pool.readdir(node.id, cookie, limit)
            if not entries:
                return names
            cookie = entries[-1].cookie
            names += [os.fsdecode(entry.name) for entry in entries]
        raise AssertionError

    def stat(self, path: Path) -> tuple[int, int, int]:
        node = self._node(path)
        again = self._pool.getattr(node.id)
        assert (again.id, again.mode, again.size) == (node.id, node.mode, node.size)
        if node.is_symlink:
            assert self._pool.readlink(node.id) == NOWHERE.encode()
        return node.mode, node.nlink, node.size

    def open(self, path: Path) -> int:
        node = self._node(path)
        handle = self._pool.open(node.id, os.O_RDWR)
        self._ids[handle] = node.id
        return handle

    def pwrite(self, handle: int, offset: int, data: bytes) -> None:
        if data:
            assert self._pool.write(handle, offset, data) == len(data)

    def pread(self, handle: int) -> bytes:
        return self._pool.read(handle, 0, READ_MAX)

    def handle_stat(self, handle: int) -> tuple[int, int]:
        node = self._pool.getattr(self._ids[handle], handle)
        return node.nlink, node.size

    def close(self, handle: int) -> None:
        del self._ids[handle]
        self._close(handle)
