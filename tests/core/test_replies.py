"""Replies and notifications lie as the kernel reads them."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.core.records import Node
from kvfuse.drivers.direct import abi, replies
from tests.fusestructs import struct_of

ATTR = (
    "u64:ino size blocks s64:atime mtime ctime u32:atimensec mtimensec ctimensec mode nlink uid gid"
    " rdev blksize flags "
)
ENTRY = "u64:nodeid generation entry_valid attr_valid u32:entry_valid_nsec attr_valid_nsec " + ATTR
OUT = "u32:len s32:error u64:unique "
OPEN = "u64:fh u32:open_flags s32:backing_id "
OUT_ENTRY = struct_of("entry_out", OUT + ENTRY)
OUT_CREATED = struct_of("create_out", OUT + ENTRY + OPEN)
OUT_ATTR = struct_of("attr_out", OUT + "u64:attr_valid u32:attr_valid_nsec dummy " + ATTR)
OUT_OPEN = struct_of("open_out", OUT + OPEN)
OUT_INIT = struct_of(
    "init_out",
    OUT + "u32:major minor max_readahead flags u16:max_background congestion_threshold"
    " u32:max_write time_gran u16:max_pages map_alignment u32:flags2 max_stack_depth"
    " u16:request_timeout a b c d e f g h i j k",
)
OUT_STATFS = struct_of(
    "statfs_out",
    OUT + "u64:blocks bfree bavail files ffree u32:bsize namelen frsize padding a b c d e f",
)
OUT_STATX = struct_of(
    "statx_out",
    OUT + "u64:attr_valid u32:attr_valid_nsec flags u64:s1 s2 "
    "u32:mask blksize u64:attributes u32:nlink uid gid u16:mode spare0 "
    "u64:ino size blocks attributes_mask s64:atime u32:atimensec s32:r1 s64:btime u32:btimensec"
    " s32:r2 s64:ctime u32:ctimensec s32:r3 s64:mtime u32:mtimensec s32:r4 "
    "u32:rdev_major rdev_minor dev_major dev_minor u64:" + " ".join(f"z{n}" for n in range(14)),
)


u32s = st.integers(0, 2**32 - 1)
u64s = st.integers(0, 2**64 - 1)
names = st.binary(min_size=1, max_size=255).filter(lambda raw: b"\0" not in raw)
times_ns = st.integers(-(2**62), 2**62)
NODE_FIELDS = dict.fromkeys(Node.__struct_fields__, u64s) | {
    "mode": st.integers(0, 0o177777), "uid": u32s, "gid": u32s, "nlink": u32s, "name": names,
    "atime_ns": times_ns, "mtime_ns": times_ns, "ctime_ns": times_ns,
}  # fmt: skip
nodes = st.builds(Node, **NODE_FIELDS)


def split_ns(at_ns: int) -> tuple[int, int]:
    return at_ns // 10**9, at_ns % 10**9


def check_attr(out: Any, node: Node) -> None:
    """Assert that the attributes in a reply are those of *node*."""
    assert (out.ino, out.size, out.blocks) == (node.id, node.size, node.blocks)
    assert (out.mode, out.nlink, out.uid, out.gid) == (node.mode, node.nlink, node.uid, node.gid)
    assert (out.atime, out.atimensec) == split_ns(node.atime_ns)
    assert (out.mtime, out.mtimensec) == split_ns(node.mtime_ns)
    assert (out.ctime, out.ctimensec) == split_ns(node.ctime_ns)
    assert out.blksize == 4096


def check_entry(out: Any, node: Node) -> None:
    """Assert that the entry in a reply names *node*, for 1.5 and 0.25 seconds."""
    assert (out.nodeid, out.generation) == (node.id, 0)
    assert (out.entry_valid, out.entry_valid_nsec) == (1, 500_000_000)
    assert (out.attr_valid, out.attr_valid_nsec) == (0, 250_000_000)
    check_attr(out, node)


TIMEOUTS = replies.Timeouts.of(1.5, 0.25)


def unpack(kind: type[ctypes.Structure], raw: bytes, unique: int) -> Any:
    """Return *raw* as the C struct *kind*, after its header was found right."""
    out: Any = kind.from_buffer_copy(raw)
    assert (out.len, out.error, out.unique) == (len(raw), 0, unique)
    assert len(raw) == ctypes.sizeof(kind)
    return out


@given(node=nodes, unique=u64s)
def test_replies_about_a_node_lie_as_the_kernel_reads_them(node, unique):
    """LOOKUP, CREATE, GETATTR and STATX."""
    check_entry(unpack(OUT_ENTRY, replies.entry(unique, node, TIMEOUTS), unique), node)
    created = unpack(OUT_CREATED, replies.created(unique, node, TIMEOUTS, 9, 128, -1), unique)
    check_entry(created, node)
    assert (created.fh, created.open_flags, created.backing_id) == (9, 128, -1)
    attr = unpack(OUT_ATTR, replies.attributes(unique, node, TIMEOUTS), unique)
    assert (attr.attr_valid, attr.attr_valid_nsec) == (0, 250_000_000)
    check_attr(attr, node)
    statx = unpack(OUT_STATX, replies.statx(unique, node, TIMEOUTS), unique)
    assert (statx.mask, statx.btime) == (0x7FF, 0)
    check_attr(statx, node)


def test_the_reply_that_denies_a_name_has_no_node_and_a_timeout():
    """Node 0 with an entry timeout is what the kernel keeps as a negative entry."""
    out = unpack(OUT_ENTRY, replies.no_entry(5, TIMEOUTS), 5)

    assert (out.nodeid, out.entry_valid, out.entry_valid_nsec) == (0, 1, 500_000_000)


@given(fh=u64s, flags=u32s, backing=st.integers(-(2**31), 2**31 - 1))
def test_the_open_reply_has_sixteen_bytes_with_the_backing_id_last(fh, flags, backing):
    """The backing id takes what was padding."""
    out = unpack(OUT_OPEN, replies.opened(3, fh, flags, backing), 3)

    assert (out.fh, out.open_flags, out.backing_id) == (fh, flags, backing)


def test_the_init_reply_lies_as_the_kernel_reads_it():
    """Both halves of the flags, the limits and the stack depth."""
    reply = replies.InitReply(
        minor=45, max_readahead_bytes=131072, flags=abi.PASSTHROUGH | abi.INIT_EXT,
        max_background=256, congestion_threshold=192, max_write_bytes=1 << 20, max_pages=256,
        stack_depth=2,
    )  # fmt: skip
    out = unpack(OUT_INIT, replies.init(1, reply), 1)

    assert (out.major, out.minor, out.flags, out.flags2) == (7, 45, 1 << 30, 1 << 5)
    assert (out.max_background, out.congestion_threshold) == (256, 192)
    assert (out.max_write, out.time_gran, out.max_pages, out.max_stack_depth) == (
        1 << 20, 1, 256, 2,
    )  # fmt: skip


def test_the_statfs_reply_lies_as_the_kernel_reads_it():
    """Each number in its place."""
    space = replies.StatFs(
        blocks=1, bfree=2, bavail=3, files=4, ffree=5, bsize=4096, namemax=255, frsize=4096
    )
    out = unpack(OUT_STATFS, replies.statfs(1, space), 1)

    assert (out.blocks, out.bfree, out.bavail, out.files, out.ffree) == (1, 2, 3, 4, 5)
    assert (out.bsize, out.namelen, out.frsize) == (4096, 255, 4096)


@given(entry_name=names, cookie=u64s, node=nodes)
def test_directory_entries_are_padded_to_eight_bytes(entry_name, cookie, node):
    """fuse_dirent and fuse_direntplus, with the type in the place of the mode."""
    plain = replies.dirent(cookie, node.id, 0o040755, entry_name)
    plus = replies.dirent_plus(plain, node, TIMEOUTS)

    assert len(plain) % 8 == 0
    assert plain[:16] == node.id.to_bytes(8, "little") + cookie.to_bytes(8, "little")
    assert plain[16:24] == len(entry_name).to_bytes(4, "little") + (4).to_bytes(4, "little")
    assert plain[24:].rstrip(b"\0") == entry_name.rstrip(b"\0")
    assert plus == replies.entry(0, node, TIMEOUTS)[16:] + plain
    assert replies.dirent_plus(plain, None, TIMEOUTS) == bytes(128) + plain


@pytest.mark.parametrize(
    ("raw", "code", "rest"),
    [
        (
            replies.invalidate_entry(7, b"name", abi.EXPIRE_ONLY), abi.Notify.INVAL_ENTRY,
            bytes(struct_of("inval_entry", "u64:parent u32:namelen flags")(7, 4, 1)) + b"name\0",
        ),
        (
            replies.invalidate_attributes(7), abi.Notify.INVAL_INODE,
            bytes(struct_of("inval_inode", "u64:ino s64:off len")(7, -1, 0)),
        ),
        (replies.invalidate_all_entries(), abi.Notify.INC_EPOCH, b""),
        (replies.resend(), abi.Notify.RESEND, b""),
    ],
)  # fmt: skip
def test_a_notification_is_a_reply_to_nothing_with_its_code(raw, code, rest):
    """unique 0, the code in the place of the error, then the struct of the code."""
    header = struct_of("out_header", OUT)(len(raw), code, 0)

    assert raw == bytes(header) + rest


@pytest.mark.parametrize(
    ("build", "value"),
    [(replies.size, 3), (replies.long_size, 2**40)],
)
def test_sizes_are_answered_in_eight_bytes(build: Callable[[int, int], bytes], value: int):
    """WRITE and xattr sizes in four and padding; LSEEK and COPY_FILE_RANGE_64 in eight."""
    raw = build(6, value)

    assert raw == bytes(struct_of("out", OUT + "u64:size")(24, 0, 6, value))


def test_plain_replies_carry_only_what_they_say():
    """Errors are negative in the header; data follows the header."""
    assert replies.error(6, 2) == bytes(struct_of("out", OUT)(16, -2, 6))
    assert replies.done(6) == bytes(struct_of("out", OUT)(16, 0, 6))
    assert replies.data(6, b"abc") == replies.data_header(6, 3) + b"abc"
    assert replies.xattr_list([b"user.a", b"user.b"]) == b"user.a\0user.b\0"
