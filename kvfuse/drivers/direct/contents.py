"""Requests about open files.

Where the kernel passes data through, only opening, closing, syncing and the like arrive here.
Where it does not, bytes go between the disk and the buffers of the thread: read with one copy into
a buffer the thread keeps, written straight from the buffer the request was read into.

Concurrency: any thread. The kernel releases a handle after every other request on it.
"""

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from kvfuse.core import routing
from kvfuse.core.records import Node
from kvfuse.drivers.direct import abi, replies
from kvfuse.drivers.direct.abi import Opcode
from kvfuse.drivers.direct.names import caller_of, check_name
from kvfuse.drivers.direct.negotiation import MAX_WRITE_BYTES
from kvfuse.drivers.direct.passthrough import DataModes
from kvfuse.drivers.direct.protocol import (
    CopyRange,
    Create,
    Fallocate,
    Read,
    Request,
    Seek,
    Sync,
    Write,
)
from kvfuse.drivers.direct.replies import Timeouts
from kvfuse.heart.handletable import MEDIATED, UNDECIDED, OpenSlot
from kvfuse.pool.pool import Pool

log = logging.getLogger(__name__)

Reply = bytes | tuple[bytes, memoryview]

# Offsets come from the kernel: O_APPEND would make the disk ignore them. Buffers of this process
# meet no disk's alignment for every request: O_DIRECT stays between the client and the kernel,
# which opens the file on the disk with the client's own flags when it passes data through.
_FLAGS_KEPT_BACK = os.O_APPEND | os.O_DIRECT
_COPY_BYTES_MAX = 128 << 20  # one request must end within the deadline; the client asks again
_WARM_MAX = 1 << 17  # ids of one half of the memory of files opened before

# A first open reads an inode from the disk, or finds it in the disk's kernel. Passing the lead on
# costs about as much as an NVMe read, so it pays only where first opens were seen to take longer.
_COLD_NS = 500_000
_COLD_FOR = 64  # first opens that are taken for slow after one that was


class _WarmFiles:
    """Ids of files whose inode the disk's kernel probably has in memory. Bounded: two halves."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._recent or node_id in self._older

    def add(self, node_id: int) -> None:
        self._recent.add(node_id)
        if len(self._recent) > _WARM_MAX:
            self._older = self._recent
            self._recent = set()


class Contents:
    """Handlers of open files."""

    def __init__(self, pool: Pool, modes: DataModes, *, created: Timeouts, temp: Timeouts) -> None:
        self._pool = pool
        self._modes = modes
        self._created = created
        self._temp = temp
        self._files: dict[int, tuple[int, int]] = {}  # fh -> node id, descriptor
        self._warm = _WarmFiles()
        self._taken_for_cold = 0
        self._unanswered: dict[int, int] = {}  # unique -> fh, of opens the kernel has no reply to
        self._kept = threading.local()

    def handlers(self) -> dict[Opcode, Callable[[Request], Reply]]:
        """Return the handler of each opcode answered here."""
        return {
            Opcode.CREATE: self._create,
            Opcode.TMPFILE: self._tmpfile,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: self._fsync,
            Opcode.FALLOCATE: self._fallocate,
            Opcode.LSEEK: self._lseek,
            Opcode.COPY_FILE_RANGE: self._copy_range,
            Opcode.COPY_FILE_RANGE_64: self._copy_range_64,
        }

    def is_cold(self, node_id: int) -> bool:
        """Return whether opening the file is likely to wait for the disk."""
        return self._taken_for_cold > 0 and node_id not in self._warm

    def restore(self, opens: dict[int, list[OpenSlot]]) -> None:
        """Take over the open files of the server before."""
        self._modes.restore(opens)
        handles = self._pool.handles
        for node_id, slots in opens.items():
            for slot in slots:
                if slot.is_closing:
                    handles.free(slot.fh)
                    continue
                self._files[slot.fh] = (node_id, handles.file(slot.fh).fd)
                if slot.backing_id == UNDECIDED:
                    self._unanswered[slot.unique] = slot.fh
        for fh in list(self._files):
            self._warm.add(self._files[fh][0])

    def opened_before(self, request: Request, unique: int) -> Reply | None:
        """Return the reply to an OPEN that was executed before it was sent again, if it was."""
        fh = self._unanswered.pop(unique, None)
        if fh is None:
            fh = self._fh_by_unique(request.node, unique)
        if fh is None:
            return None
        if self._pool.fd(fh) < 0:  # it went meanwhile, and nothing held it: opened as if never
            self._close(fh)
            return None
        flags: int = request.args
        open_flags, backing_id = self._opened(request.node, fh, flags, temp=False)
        return replies.opened(request.unique, fh, open_flags, backing_id)

    def created_before(self, request: Request, unique: int, node_id: int) -> Reply:
        """Return the reply to a CREATE that made *node_id* before it was sent again."""
        args: Create = request.args
        node = self._pool.getattr(node_id)
        fh = self._unanswered.pop(unique, None)
        if fh is None:
            fh = self._fh_by_unique(node_id, unique)
        if fh is None:
            flags = args.flags & ~(_FLAGS_KEPT_BACK | os.O_TRUNC)
            fh = self._pool.open(node_id, flags)
        return self._created_reply(request, node, fh)

    def _fh_by_unique(self, node_id: int, unique: int) -> int | None:
        """Return the handle a request opened whose reply, it seems, was not sent."""
        for slot in self._pool.opens.get(node_id, ()):
            if slot.unique == unique and not slot.is_closing:
                return slot.fh
        return None

    def close_unsent(self, fh: int) -> None:
        """Close a handle whose reply nobody received."""
        self._close(fh)

    def close_unanswered(self) -> None:
        """Close what the server before had opened for requests that nobody sent again."""
        for unique in list(self._unanswered):
            fh = self._unanswered.pop(unique, None)
            if fh is not None:
                self._close(fh)

    def _opened(self, node: int, fh: int, flags: int, *, temp: bool) -> tuple[int, int]:
        """Take the open *fh* in; return the flags and the backing id of its reply."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        fd = self._pool.fd(fh)
        tight = writable and self._pool.is_tight(fh)
        open_flags, backing_id = self._modes.opened(node, fh, fd, writable=writable, mediated=tight)
        self._pool.handles.note_backing(fh, backing_id or MEDIATED)
        self._files[fh] = (node, fd)
        self._warm.add(node)
        if temp or not writable:
            open_flags |= abi.OPEN_NOFLUSH  # only a writer's close of a final name means something
        return open_flags, backing_id

    def _create(self, request: Request) -> bytes:
        args: Create = request.args
        check_name(args.name)
        node: Node
        node, fh = self._pool.create(
            request.node,
            args.name,
            args.flags & ~_FLAGS_KEPT_BACK,
            args.mode,
            caller_of(request, args.umask),
        )
        try:
            return self._created_reply(request, node, fh)
        except BaseException:
            self.close_unsent(fh)
            raise

    def _created_reply(self, request: Request, node: Node, fh: int) -> bytes:
        args: Create = request.args
        temp = routing.is_temp(args.name)
        open_flags, backing_id = self._opened(node.id, fh, args.flags, temp=temp)
        # A temp is renamed at once, and without a timeout the kernel would look it up again first;
        # but then it answers for the final name by itself, and an eviction has to wait for that.
        keeps = temp and not self._pool.answers_quietly
        timeouts = self._temp if keeps else self._created
        return replies.created(request.unique, node, timeouts, fh, open_flags, backing_id)

    def _tmpfile(self, request: Request) -> bytes:
        return replies.error(request.unique, errno.EOPNOTSUPP)

    def _open(self, request: Request) -> bytes:
        flags: int = request.args
        begin_ns = time.perf_counter_ns()
        fh = self._pool.open(request.node, flags & ~_FLAGS_KEPT_BACK)
        if request.node not in self._warm:
            slow = time.perf_counter_ns() - begin_ns > _COLD_NS
            self._taken_for_cold = _COLD_FOR if slow else max(0, self._taken_for_cold - 1)
        try:
            open_flags, backing_id = self._opened(request.node, fh, flags, temp=False)
        except BaseException:
            self.close_unsent(fh)
            raise
        return replies.opened(request.unique, fh, open_flags, backing_id)

    def _descriptor(self, fh: int) -> int:
        try:
            return self._files[fh][1]
        except KeyError:
            raise OSError(errno.EBADF, f"no open file {fh}") from None

    def _buffer(self) -> memoryview:
        """Return a page-aligned buffer of the calling thread, as large as the largest request."""
        try:
            buffer: memoryview = self._kept.buffer
        except AttributeError:
            buffer = self._kept.buffer = memoryview(mmap.mmap(-1, MAX_WRITE_BYTES))
        return buffer

    def _read(self, request: Request) -> Reply:
        args: Read = request.args
        buffer = self._buffer()[: args.size]
        fd = self._descriptor(args.fh)
        try:
            size = os.preadv(fd, [buffer], args.offset)
            while 0 < size < args.size and (
                more := os.preadv(fd, [buffer[size:]], args.offset + size)
            ):
                size += more
        except OSError:  # asked again through the pool, which notes what its disks do
            return replies.data(request.unique, self._pool.read(args.fh, args.offset, args.size))
        return replies.data_header(request.unique, size), buffer[:size]

    def _write(self, request: Request) -> bytes:
        args: Write = request.args
        fd = self._descriptor(args.fh)
        data = args.data
        size = 0
        try:
            while size < len(data):
                size += os.pwrite(fd, data[size:] if size else data, args.offset + size)
        except OSError:  # asked again through the pool, which notes what its disks do
            try:
                size += self._pool.write(args.fh, args.offset + size, bytes(data[size:]))
            except OSError:
                if size == 0:
                    raise
        return replies.size(request.unique, size)

    def _flush(self, request: Request) -> bytes:
        self._pool.flush(request.args)
        return replies.done(request.unique)

    def _release(self, request: Request) -> bytes:
        self._close(request.args)
        return replies.done(request.unique)

    def _close(self, fh: int) -> None:
        """Close a handle: first the file, then the kernel's id of it, then its slot is free.

        A server that dies between leaves a slot that says how far it came.
        """
        try:
            self._pool.release(fh)
        except OSError as exc:
            if exc.errno == errno.EBADF:  # not one of ours
                raise
            log.warning("a file was closed, but not well: %s", exc)
        node, _ = self._files.pop(fh, (0, 0))
        self._modes.released(node, fh)
        self._pool.handles.free(fh)

    def _fsync(self, request: Request) -> bytes:
        args: Sync = request.args
        self._pool.fsync(args.fh, bool(args.flags & abi.FSYNC_DATA_ONLY))
        return replies.done(request.unique)

    def _fallocate(self, request: Request) -> bytes:
        args: Fallocate = request.args
        self._pool.fallocate(args.fh, args.mode, args.offset, args.length)
        return replies.done(request.unique)

    def _lseek(self, request: Request) -> bytes:
        args: Seek = request.args
        offset = self._pool.lseek(args.fh, args.offset, args.whence)
        return replies.long_size(request.unique, offset)

    def _copied(self, request: Request) -> int:
        args: CopyRange = request.args
        return self._pool.copy_file_range(
            args.fh_in, args.offset_in, args.fh_out, args.offset_out,
            min(args.length, _COPY_BYTES_MAX),
        )  # fmt: skip

    def _copy_range(self, request: Request) -> bytes:
        return replies.size(request.unique, self._copied(request))

    def _copy_range_64(self, request: Request) -> bytes:
        return replies.long_size(request.unique, self._copied(request))
