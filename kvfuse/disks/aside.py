"""What is kept in ``.kvfuse/aside`` of a disk: foreign things that stood in the way of a file.

Nobody but the operator looks at them again, or removes them.
"""

import os
import stat
from typing import NamedTuple

from kvfuse.core.records import BLOCK_BYTES
from kvfuse.disks.disk import Disk

_PATH = b".kvfuse/aside"
_LOOKED_AT_MAX = 10_000
_DEPTH_MAX = 64


class Aside(NamedTuple):
    """How much there is; *is_all* False: at least."""

    files: int
    bytes: int
    is_all: bool


def aside(disk: Disk) -> Aside:
    """Count what was moved out of the way, up to 10 000 names.

    Raises:
        OSError: the disk failed.
    """
    files = blocks = looked_at = 0
    todo = [(_PATH, 0)]
    while todo:
        path, depth = todo.pop()
        try:
            dir_fd = disk.open_dir(path, readable=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            for item in disk.list_fd(dir_fd):
                looked_at += 1
                if looked_at > _LOOKED_AT_MAX:
                    return Aside(files, blocks * BLOCK_BYTES, is_all=False)
                if item.type_bits == stat.S_IFDIR and depth < _DEPTH_MAX:
                    todo.append((path + b"/" + item.name, depth + 1))
                    continue
                files += 1
                try:
                    blocks += disk.stat(dir_fd, item.name).st_blocks
                except FileNotFoundError:
                    continue
        finally:
            os.close(dir_fd)
    return Aside(files, blocks * BLOCK_BYTES, is_all=True)
