"""Requests of the kernel: bytes in, typed tuples out. Pure.

Layouts are those of include/uapi/linux/fuse.h, named in the comment beside each. All numbers are
little endian here: the driver runs on little-endian machines only (`supported`).
"""

import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvfuse.drivers.direct.abi import OPCODES_MAX, UNKNOWN, Opcode


class ProtocolError(Exception):
    """A message that no kernel sends. *unique* is what to answer, 0 when there is nothing."""

    def __init__(self, text: str, unique: int = 0) -> None:
        super().__init__(text)
        self.unique = unique


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. *args* is the tuple of its opcode below, a name, or None.

    ``Write.data`` and ``SetXattr.value`` are views of the message: valid until the next read.
    """

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    args: Any


class Init(NamedTuple):
    """INIT. *flags* is flags and flags2 as one number."""

    major: int
    minor: int
    max_readahead_bytes: int
    flags: int


class GetAttr(NamedTuple):
    """GETATTR, and STATX with its *mask*."""

    flags: int
    fh: int
    mask: int = 0


class SetAttr(NamedTuple):
    """SETATTR. *valid* says which of the rest count.

    Times are kept within 64 bits of nanoseconds, which end in 2262.
    """

    valid: int
    fh: int
    size: int
    atime_ns: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int


class MkNod(NamedTuple):
    """MKNOD."""

    mode: int
    rdev: int
    umask: int
    name: bytes


class MkDir(NamedTuple):
    """MKDIR."""

    mode: int
    umask: int
    name: bytes


class Symlink(NamedTuple):
    """SYMLINK."""

    name: bytes
    target: bytes


class Rename(NamedTuple):
    """RENAME and RENAME2."""

    new_parent: int
    flags: int
    name: bytes
    new_name: bytes


class Link(NamedTuple):
    """LINK: *node* gets one more name."""

    node: int
    name: bytes


class Create(NamedTuple):
    """CREATE and TMPFILE."""

    flags: int
    mode: int
    umask: int
    name: bytes


class Read(NamedTuple):
    """READ, READDIR and READDIRPLUS."""

    fh: int
    offset: int
    size: int


class Write(NamedTuple):
    """WRITE."""

    fh: int
    offset: int
    flags: int
    data: memoryview


class Sync(NamedTuple):
    """FSYNC and FSYNCDIR."""

    fh: int
    flags: int


class SetXattr(NamedTuple):
    """SETXATTR."""

    flags: int
    name: bytes
    value: memoryview


class GetXattr(NamedTuple):
    """GETXATTR, and LISTXATTR with an empty name. *size* 0 asks for the length only."""

    size: int
    name: bytes


class Fallocate(NamedTuple):
    """FALLOCATE."""

    fh: int
    mode: int
    offset: int
    length: int


class Seek(NamedTuple):
    """LSEEK."""

    fh: int
    offset: int
    whence: int


class CopyRange(NamedTuple):
    """COPY_FILE_RANGE and COPY_FILE_RANGE_64."""

    fh_in: int
    offset_in: int
    node_out: int
    fh_out: int
    offset_out: int
    length: int


_HEADER = struct.Struct("<IIQQIIIHH")  # fuse_in_header; the last two: total_extlen, padding
HEADER_BYTES = _HEADER.size
WRITE_HEADER_BYTES = HEADER_BYTES + 40  # where the bytes of a WRITE begin

_INIT = struct.Struct("<IIII")  # fuse_init_in before 7.36
_INIT_FLAGS2 = struct.Struct("<I")  # its flags2
_U32 = struct.Struct("<I")  # fuse_open_in and fuse_access_in: the first field
_U64 = struct.Struct("<Q")  # fuse_rename_in, fuse_link_in, fuse_interrupt_in, fuse_release_in.fh
_GETATTR = struct.Struct("<IxxxxQ")  # fuse_getattr_in
_STATX = struct.Struct("<IxxxxQII")  # fuse_statx_in: getattr_flags, fh, sx_flags, sx_mask
_SETATTR = struct.Struct("<IxxxxQQ8xqq8xIIxxxxIxxxxII4x")  # fuse_setattr_in, 88
_MKNOD = struct.Struct("<IIIxxxx")  # fuse_mknod_in
_MKDIR = struct.Struct("<II")  # fuse_mkdir_in
_RENAME2 = struct.Struct("<QIxxxx")  # fuse_rename2_in
_CREATE = struct.Struct("<IIIxxxx")  # fuse_create_in; the last: open_flags
_READ = struct.Struct("<QQI20x")  # fuse_read_in
_WRITE = struct.Struct("<QQII16x")  # fuse_write_in
_SYNC = struct.Struct("<QIxxxx")  # fuse_fsync_in
_SETXATTR = struct.Struct("<II")  # fuse_setxattr_in without SETXATTR_EXT
_GETXATTR = struct.Struct("<Ixxxx")  # fuse_getxattr_in
_COUNT = struct.Struct("<Ixxxx")  # fuse_batch_forget_in
_FALLOCATE = struct.Struct("<QQQIxxxx")  # fuse_fallocate_in
_LSEEK = struct.Struct("<QQIxxxx")  # fuse_lseek_in
_COPY = struct.Struct("<QQQQQQ8x")  # fuse_copy_file_range_in

TIME_MIN_NS, TIME_MAX_NS = -(1 << 63), (1 << 63) - 1
_FORGET_ONE_BYTES = 16  # fuse_forget_one
_NS = 1_000_000_000


def supported() -> bool:
    """Return whether this machine's byte order is the one the layouts are written in."""
    return sys.byteorder == "little"


def parse(message: memoryview) -> Request:
    """Return the request in *message*, which is what one read of /dev/fuse gave.

    An opcode this driver does not know gives a request without arguments; one beyond its tables
    is UNKNOWN.

    Raises:
        ProtocolError: no kernel sends this.
    """
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"message of {len(message)} bytes: a header has {HEADER_BYTES}")
    length, opcode, unique, node, uid, gid, pid, extensions, _ = _HEADER.unpack_from(message)
    end = length - 8 * extensions
    if length != len(message) or end < HEADER_BYTES:
        raise ProtocolError(
            f"opcode {opcode}: header says {length} bytes, {extensions} extensions;"
            f" the message has {len(message)}",
            unique,
        )
    if opcode >= OPCODES_MAX:
        opcode = UNKNOWN
    parser = _PARSERS[opcode]
    if parser is None:
        return Request(opcode, unique, node, uid, gid, pid, None)
    try:
        args = parser(message[HEADER_BYTES:end])
    except (struct.error, ValueError) as exc:
        answer = 0 if opcode in WITHOUT_REPLY else unique
        raise ProtocolError(f"{Opcode(opcode).name}: {exc}", answer) from exc
    return Request(opcode, unique, node, uid, gid, pid, args)


def _name(body: memoryview) -> bytes:
    """Return the one NUL-terminated name that fills *body*."""
    raw = bytes(body)
    if raw.find(0) != len(raw) - 1 or len(raw) < 2:
        raise ValueError(f"{len(raw)} bytes are not one NUL-terminated name")
    return raw[:-1]


def _two_names(body: memoryview) -> tuple[bytes, bytes]:
    parts = bytes(body).split(b"\0")
    if len(parts) != 3 or parts[2] or not parts[0] or not parts[1]:
        raise ValueError(f"{len(body)} bytes are not two NUL-terminated names")
    return parts[0], parts[1]


def _init(body: memoryview) -> Init:
    major, minor, readahead, flags = _INIT.unpack_from(body)
    if len(body) >= _INIT.size + _INIT_FLAGS2.size:
        flags |= _INIT_FLAGS2.unpack_from(body, _INIT.size)[0] << 32
    return Init(major, minor, readahead, flags)


def _getattr(body: memoryview) -> GetAttr:
    return GetAttr(*_GETATTR.unpack_from(body))


def _statx(body: memoryview) -> GetAttr:
    flags, fh, _sync, mask = _STATX.unpack_from(body)
    return GetAttr(flags, fh, mask)


def _setattr(body: memoryview) -> SetAttr:
    valid, fh, size, atime, mtime, atime_part, mtime_part, mode, uid, gid = _SETATTR.unpack_from(
        body
    )
    return SetAttr(
        valid, fh, size, _time_ns(atime, atime_part), _time_ns(mtime, mtime_part), mode, uid, gid
    )


def _time_ns(seconds: int, part_ns: int) -> int:
    return max(TIME_MIN_NS, min(seconds * _NS + part_ns, TIME_MAX_NS))


def _symlink(body: memoryview) -> Symlink:
    return Symlink(*_two_names(body))


def _mknod(body: memoryview) -> MkNod:
    mode, rdev, umask = _MKNOD.unpack_from(body)
    return MkNod(mode, rdev, umask, _name(body[_MKNOD.size :]))


def _mkdir(body: memoryview) -> MkDir:
    mode, umask = _MKDIR.unpack_from(body)
    return MkDir(mode, umask, _name(body[_MKDIR.size :]))


def _rename(body: memoryview) -> Rename:
    return Rename(_U64.unpack_from(body)[0], 0, *_two_names(body[_U64.size :]))


def _rename2(body: memoryview) -> Rename:
    new_parent, flags = _RENAME2.unpack_from(body)
    return Rename(new_parent, flags, *_two_names(body[_RENAME2.size :]))


def _link(body: memoryview) -> Link:
    return Link(_U64.unpack_from(body)[0], _name(body[_U64.size :]))


def _create(body: memoryview) -> Create:
    flags, mode, umask = _CREATE.unpack_from(body)
    return Create(flags, mode, umask, _name(body[_CREATE.size :]))


def _u32(body: memoryview) -> int:
    return int(_U32.unpack_from(body)[0])


def _u64(body: memoryview) -> int:
    return int(_U64.unpack_from(body)[0])


def _read(body: memoryview) -> Read:
    return Read(*_READ.unpack_from(body))


def _write(body: memoryview) -> Write:
    fh, offset, size, flags = _WRITE.unpack_from(body)
    data = body[_WRITE.size :]
    if len(data) != size:
        raise ValueError(f"{size} bytes announced, {len(data)} sent")
    return Write(fh, offset, flags, data)


def _sync(body: memoryview) -> Sync:
    return Sync(*_SYNC.unpack_from(body))


def _setxattr(body: memoryview) -> SetXattr:
    size, flags = _SETXATTR.unpack_from(body)
    rest = body[_SETXATTR.size :]
    split = len(rest) - size
    if split < 0:
        raise ValueError(f"a value of {size} bytes announced, {len(rest)} sent with its name")
    return SetXattr(flags, _name(rest[:split]), rest[split:])


def _getxattr(body: memoryview) -> GetXattr:
    return GetXattr(_GETXATTR.unpack_from(body)[0], _name(body[_GETXATTR.size :]))


def _listxattr(body: memoryview) -> GetXattr:
    return GetXattr(_GETXATTR.unpack_from(body)[0], b"")


def _batch_forget(body: memoryview) -> int:
    count = int(_COUNT.unpack_from(body)[0])
    if len(body) < _COUNT.size + count * _FORGET_ONE_BYTES:
        raise ValueError(f"{count} forgets announced in {len(body)} bytes")
    return count


def _fallocate(body: memoryview) -> Fallocate:
    fh, offset, length, mode = _FALLOCATE.unpack_from(body)
    return Fallocate(fh, mode, offset, length)


def _seek(body: memoryview) -> Seek:
    return Seek(*_LSEEK.unpack_from(body))


def _copy_range(body: memoryview) -> CopyRange:
    return CopyRange(*_COPY.unpack_from(body))


WITHOUT_REPLY = frozenset(
    {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.NOTIFY_REPLY}
)

_PARSER_OF: dict[Opcode, Callable[[memoryview], object]] = {
    Opcode.LOOKUP: _name,
    Opcode.FORGET: _u64,  # how many lookups
    Opcode.GETATTR: _getattr,
    Opcode.SETATTR: _setattr,
    Opcode.SYMLINK: _symlink,
    Opcode.MKNOD: _mknod,
    Opcode.MKDIR: _mkdir,
    Opcode.UNLINK: _name,
    Opcode.RMDIR: _name,
    Opcode.RENAME: _rename,
    Opcode.LINK: _link,
    Opcode.OPEN: _u32,  # flags of open(2)
    Opcode.READ: _read,
    Opcode.WRITE: _write,
    Opcode.RELEASE: _u64,  # fh
    Opcode.FSYNC: _sync,
    Opcode.SETXATTR: _setxattr,
    Opcode.GETXATTR: _getxattr,
    Opcode.LISTXATTR: _listxattr,
    Opcode.REMOVEXATTR: _name,
    Opcode.FLUSH: _u64,  # fh
    Opcode.INIT: _init,
    Opcode.OPENDIR: _u32,
    Opcode.READDIR: _read,
    Opcode.RELEASEDIR: _u64,
    Opcode.FSYNCDIR: _sync,
    Opcode.ACCESS: _u32,  # mask of access(2)
    Opcode.CREATE: _create,
    Opcode.INTERRUPT: _u64,  # unique of the request nobody waits for any more
    Opcode.BATCH_FORGET: _batch_forget,
    Opcode.FALLOCATE: _fallocate,
    Opcode.READDIRPLUS: _read,
    Opcode.RENAME2: _rename2,
    Opcode.LSEEK: _seek,
    Opcode.COPY_FILE_RANGE: _copy_range,
    Opcode.TMPFILE: _create,
    Opcode.STATX: _statx,
    Opcode.COPY_FILE_RANGE_64: _copy_range,
}
_PARSERS: list[Callable[[memoryview], object] | None] = [None] * OPCODES_MAX
for _opcode, _parser in _PARSER_OF.items():
    _PARSERS[_opcode] = _parser
