"""Replies and notifications for the kernel: values in, bytes out, one pack for each. Pure.

Layouts are those of include/uapi/linux/fuse.h, named in the comment beside each.
"""

import operator
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfuse.core.records import Node
from kvfuse.drivers.direct.abi import KERNEL_MAJOR, Notify

_HEADER = "IiQ"  # fuse_out_header
_ATTR = "QQQqqqIIIIIIIIII"  # fuse_attr: ino size blocks, times, their parts, mode nlink uid gid …
_ENTRY = "QQQQII" + _ATTR  # fuse_entry_out
_OPEN = "QIi"  # fuse_open_out: fh, flags, backing id

_OUT = struct.Struct("<" + _HEADER)
_OUT_ENTRY = struct.Struct("<" + _HEADER + _ENTRY)
_OUT_CREATED = struct.Struct("<" + _HEADER + _ENTRY + _OPEN)
_OUT_ATTR = struct.Struct("<" + _HEADER + "QIxxxx" + _ATTR)  # fuse_attr_out
_OUT_OPENED = struct.Struct("<" + _HEADER + _OPEN)
_OUT_U32 = struct.Struct("<" + _HEADER + "Ixxxx")  # fuse_write_out, fuse_getxattr_out
_OUT_U64 = struct.Struct("<" + _HEADER + "Q")  # fuse_lseek_out, fuse_copy_file_range_out
_OUT_STATFS = struct.Struct("<" + _HEADER + "QQQQQIII28x")  # fuse_statfs_out
# fuse_init_out: major minor readahead flags, background congestion, write granularity,
# pages alignment, flags2 stack_depth, request_timeout and 11 unused
_OUT_INIT = struct.Struct("<" + _HEADER + "IIIIHHIIHHIIH22x")
# fuse_statx_out and the fuse_statx in it: valid, nsec flags | mask blksize attributes,
# nlink uid gid mode, ino size blocks attributes_mask, atime btime ctime mtime, device numbers
_OUT_STATX = struct.Struct(
    "<" + _HEADER + "QII16x" + "IIQ" + "IIIHxx" + "QQQQ" + "qIxxxx" * 4 + "16x112x"
)
_ENTRY_OUT = struct.Struct("<" + _ENTRY)
_OPEN_OUT = struct.Struct("<" + _OPEN)
_DIRENT = struct.Struct("<QQII")  # fuse_dirent: ino off namelen type
_NOTE_INODE = struct.Struct("<" + _HEADER + "Qqq")  # fuse_notify_inval_inode_out
_NOTE_ENTRY = struct.Struct("<" + _HEADER + "QII")  # fuse_notify_inval_entry_out

# What of a node is sent, in one step and whatever the order of its fields is.
_SENT = (
    "id", "mode", "uid", "gid", "nlink", "size", "blocks", "atime_ns", "mtime_ns", "ctime_ns",
)  # fmt: skip
_sent: Callable[[Node], tuple[int, ...]] = operator.attrgetter(*_SENT)

_PADDING = [bytes(-length % 8) for length in range(8)]  # after a name of that length, modulo 8

HEADER_BYTES = _OUT.size
_BLOCK_SIZE_BYTES = 4096
_NS = 1_000_000_000
_STATX_BASIC_STATS = 0x7FF
_NO_ENTRY = bytes(_ENTRY_OUT.size)  # node 0: the kernel takes the name, but no inode


class Timeouts(NamedTuple):
    """How long the kernel may believe a name and its attributes; whole seconds and the rest."""

    entry_s: int
    entry_ns: int
    attr_s: int
    attr_ns: int

    @classmethod
    def of(cls, entry_s: float, attr_s: float) -> "Timeouts":
        """Return the timeouts of *entry_s* and *attr_s*, both in seconds."""
        return cls(*divmod(round(entry_s * _NS), _NS), *divmod(round(attr_s * _NS), _NS))


class StatFs(NamedTuple):
    """What STATFS answers; sizes in units of *frsize* bytes."""

    blocks: int
    bfree: int
    bavail: int
    files: int
    ffree: int
    bsize: int
    namemax: int
    frsize: int


class InitReply(NamedTuple):
    """What INIT answers. *flags* is flags and flags2 as one number."""

    minor: int
    max_readahead_bytes: int
    flags: int
    max_background: int
    congestion_threshold: int
    max_write_bytes: int
    max_pages: int
    stack_depth: int


def error(unique: int, errno: int) -> bytes:
    """Return the reply that fails with *errno* (positive)."""
    return _OUT.pack(HEADER_BYTES, -errno, unique)


def done(unique: int) -> bytes:
    """Return the reply that says only that it is done."""
    return _OUT.pack(HEADER_BYTES, 0, unique)


def data_header(unique: int, size_bytes: int) -> bytes:
    """Return the header of a reply whose *size_bytes* bytes follow in the same write."""
    return _OUT.pack(HEADER_BYTES + size_bytes, 0, unique)


def data(unique: int, value: bytes) -> bytes:
    """Return the reply that carries *value*."""
    return _OUT.pack(HEADER_BYTES + len(value), 0, unique) + value


def entry(unique: int, node: Node, timeouts: Timeouts) -> bytes:
    """Return the reply to LOOKUP, MKDIR, MKNOD, SYMLINK and LINK."""
    # Written out: this reply and that to GETATTR are most of what is sent.
    node_id, mode, uid, gid, nlink, size_bytes, blocks, atime_ns, mtime_ns, ctime_ns = _sent(node)
    entry_s, entry_ns, attr_s, attr_ns = timeouts
    return _OUT_ENTRY.pack(
        _OUT_ENTRY.size, 0, unique, node_id, 0, entry_s, attr_s, entry_ns, attr_ns,
        node_id, size_bytes, blocks, atime_ns // _NS, mtime_ns // _NS, ctime_ns // _NS,
        atime_ns % _NS, mtime_ns % _NS, ctime_ns % _NS, mode, nlink, uid, gid, 0,
        _BLOCK_SIZE_BYTES, 0,
    )  # fmt: skip


def no_entry(unique: int, timeouts: Timeouts) -> bytes:
    """Return the reply to LOOKUP that the kernel may remember: there is no such name."""
    entry_s, entry_ns, _, _ = timeouts
    return _OUT_ENTRY.pack(
        _OUT_ENTRY.size, 0, unique, 0, 0, entry_s, 0, entry_ns, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def created(
    unique: int, node: Node, timeouts: Timeouts, fh: int, flags: int, backing_id: int
) -> bytes:
    """Return the reply to CREATE."""
    return _OUT_CREATED.pack(
        _OUT_CREATED.size, 0, unique, *_entry(node, timeouts), fh, flags, backing_id
    )


def attributes(unique: int, node: Node, timeouts: Timeouts) -> bytes:
    """Return the reply to GETATTR and SETATTR."""
    node_id, mode, uid, gid, nlink, size_bytes, blocks, atime_ns, mtime_ns, ctime_ns = _sent(node)
    return _OUT_ATTR.pack(
        _OUT_ATTR.size, 0, unique, timeouts[2], timeouts[3],
        node_id, size_bytes, blocks, atime_ns // _NS, mtime_ns // _NS, ctime_ns // _NS,
        atime_ns % _NS, mtime_ns % _NS, ctime_ns % _NS, mode, nlink, uid, gid, 0,
        _BLOCK_SIZE_BYTES, 0,
    )  # fmt: skip


def statx(unique: int, node: Node, timeouts: Timeouts) -> bytes:
    """Return the reply to STATX: the basic fields; a birth time is not known."""
    times = [
        part
        for at_ns in (node.atime_ns, 0, node.ctime_ns, node.mtime_ns)
        for part in divmod(at_ns, _NS)
    ]
    return _OUT_STATX.pack(
        _OUT_STATX.size, 0, unique, timeouts.attr_s, timeouts.attr_ns, 0,
        _STATX_BASIC_STATS, _BLOCK_SIZE_BYTES, 0,
        node.nlink, node.uid, node.gid, node.mode,
        node.id, node.size, node.blocks, 0, *times,
    )  # fmt: skip


def opened(unique: int, fh: int, flags: int, backing_id: int) -> bytes:
    """Return the reply to OPEN and OPENDIR."""
    return _OUT_OPENED.pack(_OUT_OPENED.size, 0, unique, fh, flags, backing_id)


def opened_fh(reply: bytes) -> int | None:
    """Return the fh in a reply to OPEN or CREATE, None when it failed."""
    if len(reply) < _OPEN_OUT.size + HEADER_BYTES:
        return None
    return int(_OPEN_OUT.unpack_from(reply, len(reply) - _OPEN_OUT.size)[0])


def size(unique: int, size_bytes: int) -> bytes:
    """Return the reply to WRITE and COPY_FILE_RANGE, and to xattr requests that ask a length."""
    return _OUT_U32.pack(_OUT_U32.size, 0, unique, size_bytes)


def long_size(unique: int, size_bytes: int) -> bytes:
    """Return the reply to LSEEK and COPY_FILE_RANGE_64."""
    return _OUT_U64.pack(_OUT_U64.size, 0, unique, size_bytes)


def statfs(unique: int, space: StatFs) -> bytes:
    """Return the reply to STATFS."""
    return _OUT_STATFS.pack(_OUT_STATFS.size, 0, unique, *space)


def init(unique: int, reply: InitReply) -> bytes:
    """Return the reply to INIT."""
    return _OUT_INIT.pack(
        _OUT_INIT.size, 0, unique, KERNEL_MAJOR, reply.minor, reply.max_readahead_bytes,
        reply.flags & 0xFFFFFFFF, reply.max_background, reply.congestion_threshold,
        reply.max_write_bytes, 1, reply.max_pages, 0, reply.flags >> 32, reply.stack_depth, 0,
    )  # fmt: skip


def dirent(cookie: int, node_id: int, mode: int, name: bytes) -> bytes:
    """Return one entry of a READDIR reply; *cookie* is the offset that goes on after it."""
    length = len(name)
    return _DIRENT.pack(node_id, cookie, length, mode >> 12) + name + _PADDING[length & 7]


def dirent_plus(entry: bytes, node: Node | None, timeouts: Timeouts) -> bytes:
    """Return one entry of a READDIRPLUS reply: *entry* of `dirent`, and what LOOKUP would say."""
    return (_NO_ENTRY if node is None else _ENTRY_OUT.pack(*_entry(node, timeouts))) + entry


def invalidate_entry(parent: int, name: bytes, flags: int) -> bytes:
    """Return the notification that *name* in *parent* must be looked up again."""
    length = _NOTE_ENTRY.size + len(name) + 1
    return _NOTE_ENTRY.pack(length, Notify.INVAL_ENTRY, 0, parent, len(name), flags) + name + b"\0"


def invalidate_attributes(node_id: int) -> bytes:
    """Return the notification that the attributes of *node_id* must be asked again."""
    return _NOTE_INODE.pack(_NOTE_INODE.size, Notify.INVAL_INODE, 0, node_id, -1, 0)


def invalidate_all_entries() -> bytes:
    """Return the notification that every name of the mount must be looked up again."""
    return _OUT.pack(HEADER_BYTES, Notify.INC_EPOCH, 0)


def resend() -> bytes:
    """Return the notification that asks for every unanswered request once more."""
    return _OUT.pack(HEADER_BYTES, Notify.RESEND, 0)


def xattr_list(names: Sequence[bytes]) -> bytes:
    """Return the value of LISTXATTR."""
    return b"".join(name + b"\0" for name in names)


def _attr(node: Node) -> tuple[int, ...]:
    node_id, mode, uid, gid, nlink, size_bytes, blocks, atime_ns, mtime_ns, ctime_ns = _sent(node)
    atime, atime_part = divmod(atime_ns, _NS)
    mtime, mtime_part = divmod(mtime_ns, _NS)
    ctime, ctime_part = divmod(ctime_ns, _NS)
    return (
        node_id, size_bytes, blocks, atime, mtime, ctime, atime_part, mtime_part, ctime_part,
        mode, nlink, uid, gid, 0, _BLOCK_SIZE_BYTES, 0,
    )  # fmt: skip


def _entry(node: Node, timeouts: Timeouts) -> tuple[int, ...]:
    entry_s, entry_ns, attr_s, attr_ns = timeouts
    return (node.id, 0, entry_s, attr_s, entry_ns, attr_ns, *_attr(node))
