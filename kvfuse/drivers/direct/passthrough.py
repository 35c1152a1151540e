"""Data mode of open files: past the server where the kernel can, through it where not.

The mode belongs to the inode, from its first open to its last release: the kernel answers EIO to
an open in another mode. *Passthrough*: every handle names the inode's one backing id. *Mediated*:
every handle is FOPEN_DIRECT_IO, where no id can be had. A backing id is closed after the last
release only: until then another open may need it.

Concurrency: any thread; one mutex, held over the ioctls, which do no I/O.
"""

import collections
import contextlib
import errno
import fcntl
import logging
import struct
import threading
from dataclasses import dataclass, field

from kvfuse.drivers.direct import abi
from kvfuse.heart.handletable import MEDIATED, UNDECIDED, OpenSlot

log = logging.getLogger(__name__)

_BACKING_MAP = struct.Struct("<iIQ")  # fuse_backing_map: fd, flags 0, padding 0
_BACKING_ID = struct.Struct("<I")
_MEDIATED = 0
_UNNOTED_MAX = 512  # ids given and not noted yet: at most one for each thread
_MEDIATED_FLAGS = abi.OPEN_DIRECT_IO | abi.OPEN_PARALLEL_DIRECT_WRITES


@dataclass(slots=True)
class _OpenInode:
    backing_id: int
    handles: set[int] = field(default_factory=set)


class DataModes:
    """The data mode of every open inode of one connection."""

    def __init__(self, device_fd: int, *, obstacle: str | None, mediates_writers: bool) -> None:
        self._device_fd = device_fd
        self._mediates_writers = mediates_writers
        self._inodes: dict[int, _OpenInode] = {}
        self._mutex = threading.Lock()
        self.obstacle = obstacle
        self.refusals: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Return how many inodes are open."""
        return len(self._inodes)

    @property
    def backing_ids(self) -> dict[int, int]:
        """Return the backing id of each inode in passthrough mode, by node id."""
        with self._mutex:
            return {
                node: inode.backing_id
                for node, inode in self._inodes.items()
                if inode.backing_id != _MEDIATED
            }

    def restore(self, opens: dict[int, list[OpenSlot]]) -> None:
        """Take over what the kernel was told by the server before.

        Of an inode that is open the kernel knows one backing id, or that it is mediated; an open
        whose reply may not have been sent yet is decided when it is asked for again. Ids nobody
        uses are closed: each would pin a file's bytes.
        """
        owned: set[int] = set()
        seen: set[int] = set()
        for node_id, slots in opens.items():
            known = {slot.backing_id for slot in slots if slot.backing_id != UNDECIDED}
            seen |= known
            handles = {
                slot.fh for slot in slots if not slot.is_closing and slot.backing_id != UNDECIDED
            }
            if handles:
                # One id for all of them, or MEDIATED: the mode belongs to the inode.
                backing_id = next(
                    s.backing_id for s in slots if s.fh in handles and s.backing_id != UNDECIDED
                )
                mode = _MEDIATED if backing_id == MEDIATED else backing_id
                self._inodes[node_id] = _OpenInode(mode, handles)
                owned.add(backing_id)
        self._sweep(seen - {MEDIATED}, owned)

    def _sweep(self, seen: set[int], owned: set[int]) -> None:
        """Close the ids nobody uses, noted ones and those given just before the server died."""
        newest = max(seen, default=0)
        last = range(max(1, newest - _UNNOTED_MAX), newest + _UNNOTED_MAX)
        for backing_id in (seen | set(last)) - owned:
            with contextlib.suppress(OSError):  # ENOENT: it is not one
                self._ioctl_close(backing_id)

    def backing_of(self, node_id: int) -> int:
        """Return what the table of open files keeps of an inode's mode."""
        with self._mutex:
            inode = self._inodes.get(node_id)
            if inode is None:
                return UNDECIDED
            return MEDIATED if inode.backing_id == _MEDIATED else inode.backing_id

    def opened(
        self, node_id: int, fh: int, fd: int, *, writable: bool, mediated: bool = False
    ) -> tuple[int, int]:
        """Return (FOPEN flags, backing id) for the reply to a new open *fh* of *node_id*.

        *fd* is the file on its disk; it is not kept. With *mediated* what a writer writes comes
        through here in any case.
        """
        with self._mutex:
            inode = self._inodes.get(node_id)
            if inode is None:
                inode = self._inodes[node_id] = _OpenInode(self._new_backing_id(fd))
            inode.handles.add(fh)
        if inode.backing_id == _MEDIATED:
            return _MEDIATED_FLAGS, 0
        if writable and (mediated or self._mediates_writers):
            return abi.OPEN_PASSTHROUGH | abi.OPEN_DIRECT_IO, inode.backing_id
        return abi.OPEN_PASSTHROUGH, inode.backing_id

    def released(self, node_id: int, fh: int) -> None:
        """Forget the open *fh*; an unknown one changes nothing."""
        with self._mutex:
            inode = self._inodes.get(node_id)
            if inode is None:
                return
            inode.handles.discard(fh)
            if inode.handles:
                return
            del self._inodes[node_id]
            if inode.backing_id != _MEDIATED:
                self._close_backing_id(inode.backing_id)

    def _new_backing_id(self, fd: int) -> int:
        """Return a backing id for *fd*, _MEDIATED when there is none to be had."""
        if self.obstacle is not None:
            return _MEDIATED
        # a bytearray: for an immutable argument fcntl.ioctl returns the buffer, not the result
        argument = bytearray(_BACKING_MAP.pack(fd, 0, 0))
        try:
            backing_id: int = fcntl.ioctl(self._device_fd, abi.IOC_BACKING_OPEN, argument, True)
        except OSError as exc:
            self._note_refusal(exc)
            return _MEDIATED
        return backing_id

    def _note_refusal(self, exc: OSError) -> None:
        name = errno.errorcode.get(exc.errno or 0, "?")
        if exc.errno == errno.EPERM:  # the privilege of this process, hence of every file
            self.obstacle = "passthrough takes CAP_SYS_ADMIN; run as root"
            log.warning("files are read and written through the server: %s", self.obstacle)
        elif name not in self.refusals:
            log.warning("a file is not passed through: %s; further ones are counted", exc.strerror)
        self.refusals[name] += 1

    def _close_backing_id(self, backing_id: int) -> None:
        try:
            self._ioctl_close(backing_id)
        except OSError as exc:
            log.warning("backing id %d cannot be closed: %s", backing_id, exc.strerror)

    def _ioctl_close(self, backing_id: int) -> None:
        argument = bytearray(_BACKING_ID.pack(backing_id))
        fcntl.ioctl(self._device_fd, abi.IOC_BACKING_CLOSE, argument, True)
