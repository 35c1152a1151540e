"""Which thread is at work on which disk, readable by the next server.

A thread of a killed server that hangs inside a system call does not die, and its call may take
effect much later. The next server finds its thread id here, and so the disk not to believe.

Concurrency: a thread writes only its own slot.
"""

import itertools
import mmap
import os
import struct
import threading
from pathlib import Path

SLOTS = 1024
_SLOT = struct.Struct("<IH")  # thread id, disk number + 1 (0: at work on none)


class _Own(threading.local):
    offset = -1
    thread = 0  # to ask the kernel for it each time takes longer than the rest
    entered = 0


class Inflight:
    """The table of one server; *path* on tmpfs, None where nobody takes over."""

    def __init__(self, path: Path | None) -> None:
        size_bytes = SLOTS * _SLOT.size
        if path is None:
            self._data: bytearray | mmap.mmap = bytearray(size_bytes)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size_bytes)
                self._data = mmap.mmap(fd, size_bytes)
            finally:
                os.close(fd)
        self._numbers = itertools.count()
        self._own = _Own()

    def enter(self, disk: int) -> int:
        """Note that this thread works on *disk* now; return what ``leave`` puts back."""
        own = self._own
        if own.offset < 0:
            # More threads than slots share one: then a disk is believed busy too long, no worse.
            own.offset = (next(self._numbers) % SLOTS) * _SLOT.size
            own.thread = threading.get_native_id()
        before = own.entered
        own.entered = disk + 1
        _SLOT.pack_into(self._data, own.offset, own.thread, disk + 1)
        return before

    def leave(self, before: int) -> None:
        """Note that the work is done."""
        own = self._own
        own.entered = before
        _SLOT.pack_into(self._data, own.offset, own.thread, before)

    def disk_of(self, thread: int) -> int | None:
        """Return the disk a thread, by its native id, works on now; None when it asks none."""
        disk: int = dict(_SLOT.iter_unpack(bytes(self._data))).get(thread, 0)
        return disk - 1 if disk else None

    def busy(self) -> set[int]:
        """Return the numbers of the disks some thread is at work on."""
        found = {disk - 1 for _, disk in _SLOT.iter_unpack(bytes(self._data))}
        found.discard(-1)
        return found


def stuck_disks(path: Path, pids: list[int]) -> set[int]:
    """Return the numbers of the disks that threads of dead servers still hang on."""
    try:
        data = path.read_bytes()
    except OSError:
        return set()
    by_tid = dict(_SLOT.iter_unpack(data[: len(data) // _SLOT.size * _SLOT.size]))
    tids = {tid for pid in pids for tid in threads_of(pid)}
    return {disk - 1 for tid, disk in by_tid.items() if tid in tids and disk}


def threads_of(pid: int) -> list[int]:
    """Return the thread ids a process still has, none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (OSError, ValueError):
        return []
