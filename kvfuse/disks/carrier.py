"""One carrier: a directory on one disk, made, owned, labelled, or moved out of the way.

A carrier is made out of sight, owned and labelled there, and then moved to its place: a crash
leaves none that is open to others or does not say which directory it is.
"""

import contextlib
import os
from typing import NamedTuple

from kvfuse.core import records
from kvfuse.disks.disk import Disk

_MARK = b".kvfuse"
_ASIDE = b"aside"  # what stood in the way and is not ours to delete
_MAKING = b"making"  # carriers before they are moved to their place


class Carrier:
    """An open directory on a disk; its descriptor is closed with the last reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Wanted(NamedTuple):
    """A carrier as it should be: whose it is, and its owner and mode (07777 bits)."""

    id: int
    generation: int
    mode: int
    uid: int
    gid: int


class Ground:
    """The directories of one disk. Knows no catalog; methods raise the errno of the disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def root(self) -> Carrier:
        """Return the root of the disk."""
        return Carrier(self.disk.open_dir(b""))

    def parent(self, path: bytes) -> tuple[Carrier, bytes]:
        """Return the directory a path ends in, and its last name."""
        directory, _, name = path.rpartition(b"/")
        return Carrier(self.disk.open_dir(directory)), name

    def label_id(self, dir_fd: int, name: bytes) -> int | None:
        """Return the id a name on the disk is labelled with; None without label or name."""
        try:
            value = self.disk.read_label_at(dir_fd, name)
        except FileNotFoundError:
            return None
        label = None if value is None else records.unpack_label(value)
        return None if label is None else label.id

    def ensure(self, parent: Carrier, name: bytes, wanted: Wanted) -> Carrier:
        """Return the carrier *name*; where it is not the one *wanted*, make it or take it over."""
        try:
            found = Carrier(self.disk.open_subdir(parent.fd, name))
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            self.set_aside(parent.fd, name)
        else:
            label_id = self.label_id(parent.fd, name)
            if label_id == wanted.id:
                return found
            if label_id is None:  # a foreign directory, or one made for what is below it
                self._own(parent.fd, name, wanted)
                return found
            self.set_aside(parent.fd, name)
        making = self._own_dir(_MAKING)
        fresh = b"%d" % wanted.id
        with contextlib.suppress(FileExistsError):
            self.disk.make_dir(making.fd, fresh, mode=0o700, uid=os.geteuid(), gid=os.getegid())
        self._own(making.fd, fresh, wanted)
        self.disk.rename_new(making.fd, fresh, parent.fd, name)
        return Carrier(self.disk.open_subdir(parent.fd, name))

    def _own(self, dir_fd: int, name: bytes, wanted: Wanted) -> None:
        label = records.directory_label(wanted.id, wanted.generation)
        self.disk.set_dir(dir_fd, name, mode=wanted.mode, uid=wanted.uid, gid=wanted.gid)
        self.disk.write_label_at(dir_fd, name, records.pack_label(label))

    def _own_dir(self, name: bytes) -> Carrier:
        """Return a directory of kvfuse's own, made where it is missing."""
        mark = Carrier(self.disk.open_dir(_MARK))
        with contextlib.suppress(FileNotFoundError):
            return Carrier(self.disk.open_subdir(mark.fd, name))
        with contextlib.suppress(FileExistsError):
            self.disk.make_dir(mark.fd, name, mode=0o700, uid=os.geteuid(), gid=os.getegid())
        return Carrier(self.disk.open_subdir(mark.fd, name))

    def set_aside(self, dir_fd: int, name: bytes) -> None:
        """Move what stands in the way, and is not known to be ours, out of the tree."""
        aside = self._own_dir(_ASIDE)
        found = self.disk.stat(dir_fd, name)
        self.disk.rename(dir_fd, name, aside.fd, b"%d-%s" % (found.st_ino, name[:200]))
