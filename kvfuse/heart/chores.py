"""Chores: what is decided and only has to be done on one disk. Each can be done twice.

Chores name paths: they are done in the order in which they were decided, and the disk then looks as
the catalog did at that moment. What stands at a path is told by its label, for a path may have been
used again since.
"""

import contextlib
import errno
import os
import stat

from kvfuse.core.intents import Chore, MakeDir, RemoveDir, RenameDir, SetDir, SwapPaths, Unlink
from kvfuse.disks.carrier import Carrier, Ground, Wanted

# Something else took the place of a directory: nothing is left to do there.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)


def do_chore(ground: Ground, chore: Chore) -> None:
    """Do *chore*; what is not there any more is done.

    Raises:
        OSError: the disk failed.
    """
    try:
        match chore:
            case Unlink():
                _unlink(ground, chore)
            case RemoveDir():
                _remove_dir(ground, chore)
            case MakeDir():
                _make_dir(ground, chore)
            case RenameDir():
                _rename_dir(ground, chore)
            case SwapPaths():
                _swap_paths(ground, chore)
            case SetDir():
                _set_dir(ground, chore)
    except OSError as exc:
        if exc.errno not in _NOT_THERE:
            raise


def _unlink(ground: Ground, chore: Unlink) -> None:
    parent, name = ground.parent(chore.path)
    found = ground.disk.stat(parent.fd, name)
    if found.st_ino != chore.ino:
        return
    # The inode number alone may have been reused: by a file that has no label yet, too.
    label_id = ground.label_id(parent.fd, name)
    if label_id == chore.id or (label_id is None and stat.S_ISLNK(found.st_mode)):
        ground.disk.unlink(parent.fd, name)


def _remove_dir(ground: Ground, chore: RemoveDir) -> None:
    parent, name = ground.parent(chore.path)
    if ground.label_id(parent.fd, name) not in (None, chore.id):
        return
    try:
        ground.disk.remove_dir(parent.fd, name)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        ground.set_aside(parent.fd, name)


def _make_dir(ground: Ground, chore: MakeDir) -> None:
    parent, name = ground.parent(chore.path)
    if ground.label_id(parent.fd, name) is None:
        wanted = Wanted(chore.id, chore.generation, chore.mode, chore.uid, chore.gid)
        ground.ensure(parent, name, wanted)


def _set_dir(ground: Ground, chore: SetDir) -> None:
    parent, name = ground.parent(chore.path)
    if ground.label_id(parent.fd, name) == chore.id:
        ground.disk.set_dir(parent.fd, name, mode=chore.mode, uid=chore.uid, gid=chore.gid)


def _rename_dir(ground: Ground, chore: RenameDir) -> None:
    parent, name = ground.parent(chore.path)
    if ground.label_id(parent.fd, name) not in (None, chore.id):
        return
    if stat.S_ISDIR(ground.disk.stat(parent.fd, name).st_mode):
        _move(ground, parent, name, chore.new_path)


def _move(ground: Ground, parent: Carrier, name: bytes, new_path: bytes) -> None:
    new_parent, new_name = _made_parent(ground, new_path)
    try:
        ground.disk.rename_new(parent.fd, name, new_parent.fd, new_name)
    except FileExistsError:
        ground.set_aside(new_parent.fd, new_name)
        ground.disk.rename_new(parent.fd, name, new_parent.fd, new_name)


def _swap_paths(ground: Ground, chore: SwapPaths) -> None:
    ids = (_id_at(ground, chore.path), _id_at(ground, chore.new_path))
    if ids[0] == chore.other_id or ids[1] == chore.id:
        return  # done before a crash
    if ids == (chore.id, chore.other_id):
        parent, name = ground.parent(chore.path)
        new_parent, new_name = ground.parent(chore.new_path)
        ground.disk.exchange(parent.fd, name, new_parent.fd, new_name)
    elif ids[0] == chore.id:
        _move(ground, *ground.parent(chore.path), chore.new_path)
    elif ids[1] == chore.other_id:
        _move(ground, *ground.parent(chore.new_path), chore.path)


def _id_at(ground: Ground, path: bytes) -> int | None:
    try:
        parent, name = ground.parent(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ground.label_id(parent.fd, name)


def _made_parent(ground: Ground, path: bytes) -> tuple[Carrier, bytes]:
    """Return the directory of *path*, made where somebody removed it behind our back.

    It is closed and has no label: the next file that needs such a carrier gives it both.
    """
    directory, _, name = path.rpartition(b"/")
    carrier = ground.root()
    for part in directory.split(b"/") if directory else ():
        with contextlib.suppress(FileExistsError):
            ground.disk.make_dir(carrier.fd, part, mode=0o700, uid=os.geteuid(), gid=os.getegid())
        carrier = Carrier(ground.disk.open_subdir(carrier.fd, part))
    return carrier, name
