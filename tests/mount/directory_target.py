"""A directory of any mounted file system, as the machine of ``tests.model`` drives it."""

import errno
import os
import stat
from pathlib import Path as FilePath

from tests.model import NOWHERE, Path, fail
from tests.mount.steps.registry import renameat2


class DirectoryTarget:
    """The verbs as system calls on paths below *root*."""

    def __init__(self, root: FilePath) -> None:
        self._root = root
        self._handles: list[int] = []

    def _at(self, path: Path) -> str:
        return str(self._root.joinpath(*path))

    def create(self, path: Path, *, exclusive: bool) -> None:
        flags = os.O_EXCL if exclusive else os.O_TRUNC | os.O_NOFOLLOW
        os.close(os.open(self._at(path), os.O_WRONLY | os.O_CREAT | flags, 0o644))

    def write(self, path: Path, offset: int, data: bytes) -> None:
        fd = os.open(self._at(path), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def truncate(self, path: Path, size: int) -> None:
        fd = os.open(self._at(path), os.O_RDWR | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def read(self, path: Path) -> bytes:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise fail(errno.EISDIR)
            return os.pread(fd, 1 << 20, 0)
        finally:
            os.close(fd)

    def mkdir(self, path: Path) -> None:
        os.mkdir(self._at(path))

    def rmdir(self, path: Path) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: Path) -> None:
        os.unlink(self._at(path))

    def rename(self, old: Path, new: Path, flags: int) -> None:
        renameat2(self._at(old), self._at(new), flags)

    def link(self, old: Path, new: Path) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def symlink(self, path: Path) -> None:
        os.symlink(NOWHERE, self._at(path))

    def chmod(self, path: Path, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        os.setxattr(self._at(path), name, value)

    def xattrs(self, path: Path) -> dict[str, bytes]:
        names = [n for n in os.listxattr(self._at(path)) if n.startswith("user.")]
        return {name: os.getxattr(self._at(path), name) for name in names}

    def listing(self, path: Path) -> list[str]:
        return os.listdir(self._at(path))

    def stat(self, path: Path) -> tuple[int, int, int]:
        status = os.lstat(self._at(path))
        return status.st_mode, status.st_nlink, status.st_size

    def open(self, path: Path) -> int:
        fd = os.open(self._at(path), os.O_RDWR)
        self._handles.append(fd)
        return fd

    def pwrite(self, handle: int, offset: int, data: bytes) -> None:
        assert os.pwrite(handle, data, offset) == len(data)

    def pread(self, handle: int) -> bytes:
        return os.pread(handle, 1 << 20, 0)

    def handle_stat(self, handle: int) -> tuple[int, int]:
        status = os.fstat(handle)
        return status.st_nlink, status.st_size

    def close(self, handle: int) -> None:
        self._handles.remove(handle)
        os.close(handle)

    def close_all(self) -> None:
        for handle in self._handles:
            os.close(handle)
