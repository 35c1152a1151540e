"""The records of the catalog and of the disks, and their bytes. Pure.

All integers in keys are big endian, so that LMDB's byte order is their numeric order; values are
little endian. ``FORMAT`` changes when any layout below, or the placement function, changes.
"""

import stat
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, cast

import msgspec
from blake3 import blake3

FORMAT = 1

ROOT_ID = 1
FIRST_ID = 1 << 16  # ids below are reserved (FUSE's root is 1)
NAME_BYTES_MAX = 255
NO_DISK = 0xFFFF  # disk number of what lies on no disk: directories

BLOCK_BYTES = 512  # unit of st_blocks


class State(IntEnum):
    """How durable a file is. Never about visibility: every created name is visible."""

    PENDING = 0  # being written; torn if nobody holds a handle after a restart
    COMMITTED = 1  # renamed into place, or closed by its last writer


_COMMITTED = int(State.COMMITTED)

STALE = 1  # its owner is another disk by now, and displaced files are not served
RESIDENT = 2  # at home where it lies: its temp name did not say where it would belong
_HITS_SHIFT, HITS_BITS = 4, 0x30  # in the flags: uses, as an eviction policy counts them


class Node(msgspec.Struct, frozen=True, gc=False):
    """One file, directory or symlink: everything LOOKUP and GETATTR answer, plus where it lies.

    *parent* and *name* are one of its names (the first; further hard links are kept apart), *disk*
    the number of its disk in this catalog, *ino* its inode number there, *flags* STALE, RESIDENT.
    *access* orders committed files by last use; it grows over restarts, and *atime_ns* need not.
    """

    id: int
    mode: int
    uid: int
    gid: int
    nlink: int
    state: int
    flags: int
    disk: int
    ino: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    generation: int
    access: int
    parent: int
    name: bytes

    def replace(self, **changes: int | bytes) -> "Node":
        """Return this record with other values in some fields."""
        return msgspec.structs.replace(self, **changes)

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        """Whether this is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_stale(self) -> bool:
        """Whether clients do not see it because it is not where its name belongs by now."""
        return bool(self.flags & STALE)

    @property
    def is_evictable(self) -> bool:
        """Whether this is in the order of last use: a committed regular file."""
        return self.state == State.COMMITTED and stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        """Whether this is a symbolic link."""
        return stat.S_ISLNK(self.mode)


class DirEntry(NamedTuple):
    """One name in a directory. *cookie* is unique in the pool, stable, and sorts the listing."""

    cookie: int
    id: int
    mode: int  # only the S_IFMT bits
    disk: int  # lets a listing leave out what lies on an unusable disk
    name: bytes


class Caller(NamedTuple):
    """Who asks: the credentials a FUSE request carries."""

    uid: int
    gid: int
    umask: int
    pid: int


# mode uid gid nlink, state flags disk, ino size blocks, times, generation access parent
_NODE = struct.Struct("<IIIIBBHQQQqqqQQQ")
_NODE_BYTES = _NODE.size
_TIMES = struct.Struct("<qq")
_MTIME_OFFSET = struct.calcsize("<IIIIBBHQQQq")
_PARENT = struct.Struct("<Q")
_PARENT_OFFSET = _NODE_BYTES - _PARENT.size
_STATE_OFFSET = struct.calcsize("<IIII")
_FLAGS_OFFSET = _STATE_OFFSET + 1
_ATIME_OFFSET = struct.calcsize("<IIIIBBHQQQ")
_GENERATION_OFFSET = struct.calcsize("<IIIIBBHQQQqqq")
_ACCESS_OFFSET = _GENERATION_OFFSET + 8
_new = tuple.__new__  # half the time of _make
_ENTRY = struct.Struct("<QQI")  # child id, cookie, type bits
_CHILD = struct.Struct("<QIH")  # child id, type bits, disk
_CHILD_BYTES = _CHILD.size
_U64 = struct.Struct(">Q")
_RECENCY = struct.Struct(">HQQ")  # disk, access, id
_DIR_COOKIE = struct.Struct(">QQ")


def pack_id(node_id: int) -> bytes:
    """Return the 8-byte key of *node_id*."""
    return _U64.pack(node_id)


def unpack_id(key: bytes) -> int:
    """Return the id in an 8-byte key."""
    return int(_U64.unpack(key)[0])


def pack_node(node: Node) -> bytes:
    """Return the value stored under ``pack_id(node.id)``."""
    return _NODE.pack(*msgspec.structs.astuple(node)[1:-1]) + node.name  # the fields in their order


def unpack_node(node_id: int, value: bytes) -> Node:
    """Return the node packed in *value*.

    Raises:
        ValueError: the value is shorter than a record.
    """
    try:
        return Node(*(node_id, *_NODE.unpack_from(value), value[_NODE_BYTES:]))
    except struct.error:
        raise ValueError(
            f"node {node_id}: record of {len(value)} bytes, need {_NODE_BYTES}"
        ) from None


def with_times(value: bytes, *, mtime_ns: int, ctime_ns: int) -> bytes:
    """Return the packed record *value* with these times, without unpacking it."""
    end = _MTIME_OFFSET + _TIMES.size
    return value[:_MTIME_OFFSET] + _TIMES.pack(mtime_ns, ctime_ns) + value[end:]


def with_last_use(value: bytes, old: bytes) -> bytes:
    """Return the packed record *value* with the last use of *old*, an earlier record of its id.

    As it is where *old* is of another generation, or was not committed.
    """
    generation = slice(_GENERATION_OFFSET, _ACCESS_OFFSET)
    if old[generation] != value[generation] or old[_STATE_OFFSET] != _COMMITTED:
        return value
    flags = value[_FLAGS_OFFSET] & ~HITS_BITS | old[_FLAGS_OFFSET] & HITS_BITS
    return b"".join(
        (
            value[:_FLAGS_OFFSET], bytes((flags,)), value[_FLAGS_OFFSET + 1 : _ATIME_OFFSET],
            old[_ATIME_OFFSET:_MTIME_OFFSET], value[_MTIME_OFFSET:_ACCESS_OFFSET],
            old[_ACCESS_OFFSET:_PARENT_OFFSET], value[_PARENT_OFFSET:],
        )
    )  # fmt: skip


def access_of(value: bytes) -> int:
    """Return the place in the order of last use of the packed record *value*."""
    return int(_PARENT.unpack_from(value, _ACCESS_OFFSET)[0])


def place_of(value: bytes) -> tuple[int, bytes]:
    """Return (directory id, name) of the packed record *value*, without unpacking the rest."""
    return _PARENT.unpack_from(value, _PARENT_OFFSET)[0], value[_NODE_BYTES:]


def hits_of(flags: int) -> int:
    """Return the uses an eviction policy has counted, 0 to 3."""
    return (flags & HITS_BITS) >> _HITS_SHIFT


def with_hits(flags: int, hits: int) -> int:
    """Return *flags* with that many uses."""
    return flags & ~HITS_BITS | hits << _HITS_SHIFT


def recency_key(disk: int, access: int, node_id: int) -> bytes:
    """Return the key of a committed file in the order of last use on its disk."""
    return _RECENCY.pack(disk, access, node_id)


def unpack_recency(key: bytes) -> tuple[int, int, int]:
    """Return (disk number, access, id)."""
    return cast(tuple[int, int, int], _RECENCY.unpack(key))


def entry_key(parent: int, name: bytes) -> bytes:
    """Return the key of a name: directory id, then the name as it is."""
    return _U64.pack(parent) + name


def split_entry_key(key: bytes) -> tuple[int, bytes]:
    """Return (directory id, name) of an entry key."""
    return unpack_id(key[:8]), bytes(key[8:])


def pack_entry(child: int, cookie: int, mode: int) -> bytes:
    """Return the value of a name: what it names, its cookie and its type."""
    return _ENTRY.pack(child, cookie, stat.S_IFMT(mode))


def unpack_entry(value: bytes) -> tuple[int, int, int]:
    """Return (child id, cookie, type bits)."""
    child, cookie, mode = _ENTRY.unpack(value)
    return child, cookie, mode


def child_key(parent: int, cookie: int) -> bytes:
    """Return the key of the listing index: directory id, cookie."""
    return _DIR_COOKIE.pack(parent, cookie)


def pack_child(child: int, mode: int, disk: int, name: bytes) -> bytes:
    """Return the value of the listing index."""
    return _CHILD.pack(child, stat.S_IFMT(mode), disk) + name


def unpack_child(key: bytes, value: bytes) -> DirEntry:
    """Return the directory entry stored in the listing index."""
    fields = (*_U64.unpack_from(key, 8), *_CHILD.unpack_from(value), value[_CHILD_BYTES:])
    return _new(DirEntry, fields)


class Label(NamedTuple):
    """What a file or carrier on a disk says of itself, in ``trusted.kvfuse``.

    *verify* is a hash of (directory id, name): a file moved behind kvfuse's back does not match.
    """

    id: int
    generation: int
    verify: bytes
    flags: int


LABEL_PENDING = 1  # being written
LABEL_LINKED = 2  # has, or had, several names: verify says nothing
LABEL_RESIDENT = 4  # at home where it lies
_LABEL = struct.Struct("<BQQ8sB")
_PLAIN_FLAGS = (0, LABEL_RESIDENT)


def verify_hash(parent: int, name: bytes) -> bytes:
    """Return 8 bytes that bind a file to its place in the namespace."""
    return blake3(_U64.pack(parent) + name).digest(length=8)


def pack_label(label: Label) -> bytes:
    """Return the value of the ``trusted.kvfuse`` attribute (26 bytes)."""
    return _LABEL.pack(FORMAT, label.id, label.generation, label.verify, label.flags)


def label_of(node: Node, place: tuple[int, bytes], *, is_linked: bool = False) -> Label:
    """Return what a file at *place* has to say of itself; *is_linked* leaves the place out."""
    flags = LABEL_PENDING if node.state == State.PENDING else 0
    if is_linked or node.nlink > 1:
        flags |= LABEL_LINKED
    if node.flags & RESIDENT:
        flags |= LABEL_RESIDENT
    return Label(node.id, node.generation, verify_hash(*place), flags)


def directory_label(node_id: int, generation: int) -> Label:
    """Return what a carrier says of itself: which directory it is, and not where."""
    return Label(node_id, generation, bytes(8), LABEL_LINKED)


def unpack_label(value: bytes) -> Label | None:
    """Return the label in *value*, or None when it is not one this version wrote."""
    if len(value) != _LABEL.size or value[0] != FORMAT:
        return None
    _, node_id, generation, verify, flags = _LABEL.unpack(value)
    return Label(node_id, generation, verify, flags)


def carrier_bit(number: int) -> int:
    """Return the bit that stands for disk *number* in the ``ino`` of a directory's record.

    Numbers are never reused; those from 63 on share the last bit, which costs a few vain chores.
    """
    return 1 << min(number, 63)


def is_shared_bit(bit: int) -> bool:
    """Whether a carrier bit stands for several disks."""
    return bit == 1 << 63


def is_reserved(parent: int, name: bytes) -> bool:
    """Whether a name at the top of the pool is not part of it: it is the disks' own."""
    return parent == ROOT_ID and name in (b".kvfuse", b"lost+found")


# Of a file: key and value for ``nodes``, ``entries`` and ``children``, key for ``recency``, blocks
Packed = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, int]


def plain_packer(
    number: int, dir_id: int, device: int, floor: int, unsure: Sequence[tuple[int, int]]
) -> Callable[[bytes, Any, bytes], Packed | None]:
    """Return what makes the records of plain files in one directory, as fast as it goes.

    It is called with the name of a regular file, its ``os.stat_result`` and its label, and returns
    None for a file that is not plain: one that is not committed, has several names or a label that
    does not bind it to where it is, or lies on another *device*. Neither is one with an id from
    *floor* on or a generation between the pairs of *unsure*.

    The place in the order of last use is that of the commit: nobody knows of later reads.
    """
    prefix = _U64.pack(dir_id)
    pack_id, pack_node, unpack_label = _U64.pack, _NODE.pack, _LABEL.unpack
    pack_entry, pack_child, pack_recency = _ENTRY.pack, _CHILD.pack, _RECENCY.pack

    def pack(name: bytes, found: Any, label: bytes) -> Packed | None:  # noqa: ANN401 - no os here
        try:
            label_format, node_id, generation, verify, flags = unpack_label(label)
        except struct.error:  # of another version, or nobody's
            return None
        mode, ino, its_device, links, uid, gid, size, _, _, _ = found
        entry_key = prefix + name
        if (
            label_format != FORMAT
            or flags not in _PLAIN_FLAGS
            or not FIRST_ID <= node_id < floor
            or links != 1
            or its_device != device
            or verify != blake3(entry_key).digest(8)
            or (unsure and is_between(generation, unsure))
        ):
            return None
        key, blocks = pack_id(node_id), found.st_blocks
        value = pack_node(
            mode & ~0o6000, uid, gid, 1, _COMMITTED, RESIDENT if flags else 0, number, ino, size,
            blocks, found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns, generation,
            generation, dir_id,
        )  # fmt: skip
        return (
            key, value + name, entry_key, pack_entry(node_id, node_id, stat.S_IFREG), prefix + key,
            pack_child(node_id, stat.S_IFREG, number) + name,
            pack_recency(number, generation, node_id), blocks,
        )  # fmt: skip

    return pack


def is_between(generation: int, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether *generation* lies between two numbers of a pair."""
    return any(low < generation < high for low, high in pairs)
