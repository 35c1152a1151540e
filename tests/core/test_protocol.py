"""The kernel's protocol: every request is read as the kernel's structs say, every reply built so.

The structs here are ctypes structures, field by field as in include/uapi/linux/fuse.h, so that the
C rules of alignment, not the formats of the code under test, decide where a field lies.
"""

import ctypes
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.drivers.direct import abi, protocol, replies
from kvfuse.drivers.direct.abi import Opcode
from kvfuse.records import Node

MUTATIONS = int(os.environ.get("KVFUSE_FUZZ_MUTATIONS", "30000"))
SEED = 20261130

KINDS: dict[str, Any] = {
    "u64": ctypes.c_uint64,
    "s64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "s32": ctypes.c_int32,
    "u16": ctypes.c_uint16,
}


def struct_of(name: str, layout: str) -> type[ctypes.Structure]:
    """Return a C structure; *layout* is written "u32:a b u64:c"."""
    fields: list[tuple[str, Any]] = []
    kind: Any = None
    for word in layout.replace(":", ": ").split():
        if word.endswith(":"):
            kind = KINDS[word[:-1]]
        else:
            fields.append((word, kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


IN_HEADER = struct_of(
    "in_header",
    "u32:len opcode u64:unique nodeid u32:uid gid pid u16:total_extlen padding",
)
BODIES = {
    "getattr": struct_of("getattr_in", "u32:flags dummy u64:fh"),
    "setattr": struct_of(
        "setattr_in",
        "u32:valid padding u64:fh size lock_owner s64:atime mtime ctime"
        " u32:atimensec mtimensec ctimensec mode unused4 uid gid unused5",
    ),
    "mknod": struct_of("mknod_in", "u32:mode rdev umask padding"),
    "mkdir": struct_of("mkdir_in", "u32:mode umask"),
    "rename2": struct_of("rename2_in", "u64:newdir u32:flags padding"),
    "create": struct_of("create_in", "u32:flags mode umask open_flags"),
    "read": struct_of("read_in", "u64:fh offset u32:size rflags u64:lock_owner u32:flags padding"),
    "write": struct_of(
        "write_in", "u64:fh offset u32:size wflags u64:lock_owner u32:flags padding"
    ),
    "sync": struct_of("fsync_in", "u64:fh u32:flags padding"),
    "setxattr": struct_of("setxattr_in", "u32:size flags"),
    "getxattr": struct_of("getxattr_in", "u32:size padding"),
    "fallocate": struct_of("fallocate_in", "u64:fh offset length u32:mode padding"),
    "seek": struct_of("lseek_in", "u64:fh offset u32:whence padding"),
    "copy": struct_of("copy_file_range_in", "u64:fh_in off_in node_out fh_out off_out len flags"),
    "statx": struct_of("statx_in", "u32:flags reserved u64:fh u32:sx_flags sx_mask"),
    "init": struct_of(
        "init_in", "u32:major minor max_readahead flags flags2 a b c d e f g h i j k"
    ),
    "open": struct_of("open_in", "u32:flags open_flags"),
    "release": struct_of("release_in", "u64:fh u32:flags release_flags u64:lock_owner"),
    "forgets": struct_of("batch_forget_in", "u32:count dummy"),
}
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
nodes = st.builds(
    Node, id=u64s, mode=st.integers(0, 0o177777), uid=u32s, gid=u32s, nlink=u32s,
    state=st.integers(0, 1), disk=st.integers(0, 65535), ino=u64s, size=u64s, blocks=u64s,
    atime_ns=times_ns, mtime_ns=times_ns, ctime_ns=times_ns, generation=u64s, access=u64s,
    parent=u64s, name=names,
)  # fmt: skip


def message(opcode: int, body: bytes, *, node: int = 1, unique: int = 2, extensions: int = 0):
    """Return a request as the kernel writes it; *extensions* units of 8 bytes follow the body."""
    body += bytes(8 * extensions)
    header = IN_HEADER(40 + len(body), opcode, unique, node, 1000, 1001, 4242, extensions, 0)
    return memoryview(bytes(header) + body)


def body(kind: str, **fields: int) -> bytes:
    """Return the kernel's struct *kind* with *fields*."""
    return bytes(BODIES[kind](**fields))


def args_of(opcode: Opcode, raw: bytes) -> Any:
    """Return the arguments parsed from a request with body *raw*."""
    return protocol.parse(message(opcode, raw)).args


@given(unique=u64s, node=u64s)
def test_the_header_is_read_as_the_kernel_wrote_it(unique, node):
    """Opcode, unique, node and the caller's numbers arrive unchanged."""
    request = protocol.parse(message(Opcode.STATFS, b"", node=node, unique=unique))

    assert request == (Opcode.STATFS, unique, node, 1000, 1001, 4242, None)


@given(name=names)
def test_a_name_is_read_whole(name):
    """LOOKUP, UNLINK, RMDIR and REMOVEXATTR carry one name of any bytes but NUL."""
    for opcode in (Opcode.LOOKUP, Opcode.UNLINK, Opcode.RMDIR, Opcode.REMOVEXATTR):
        assert args_of(opcode, name + b"\0") == name


@given(name=names, new_name=names, parent=u64s, flags=u32s)
def test_renames_links_and_symlinks_carry_two_names_or_a_node(name, new_name, parent, flags):
    """Both names, the new parent and the flags are told apart."""
    two = name + b"\0" + new_name + b"\0"

    assert args_of(Opcode.RENAME, parent.to_bytes(8, "little") + two) == (
        parent, 0, name, new_name,
    )  # fmt: skip
    assert args_of(Opcode.RENAME2, body("rename2", newdir=parent, flags=flags) + two) == (
        parent, flags, name, new_name,
    )  # fmt: skip
    assert args_of(Opcode.LINK, parent.to_bytes(8, "little") + name + b"\0") == (parent, name)
    assert args_of(Opcode.SYMLINK, two) == (name, new_name)


@given(name=names, mode=u32s, umask=u32s, flags=u32s)
def test_creating_requests_carry_mode_umask_and_name(name, mode, umask, flags):
    """CREATE, TMPFILE, MKNOD and MKDIR."""
    raw = name + b"\0"
    create = body("create", flags=flags, mode=mode, umask=umask, open_flags=1) + raw

    assert args_of(Opcode.CREATE, create) == (flags, mode, umask, name)
    assert args_of(Opcode.TMPFILE, create) == (flags, mode, umask, name)
    assert args_of(Opcode.MKDIR, body("mkdir", mode=mode, umask=umask) + raw) == (
        mode, umask, name,
    )  # fmt: skip
    assert args_of(Opcode.MKNOD, body("mknod", mode=mode, rdev=flags, umask=umask) + raw) == (
        mode, flags, umask, name,
    )  # fmt: skip


@given(fh=u64s, offset=u64s, size=u32s, data=st.binary(max_size=5000))
def test_data_requests_carry_handle_offset_and_bytes(fh, offset, size, data):
    """READ and its kin, and WRITE with its bytes untouched."""
    read = body("read", fh=fh, offset=offset, size=size)
    written = args_of(
        Opcode.WRITE, body("write", fh=fh, offset=offset, size=len(data), wflags=4) + data
    )

    for opcode in (Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS):
        assert args_of(opcode, read) == (fh, offset, size)
    assert (written.fh, written.offset, written.flags) == (fh, offset, 4)
    assert bytes(written.data) == data


@given(fh=u64s, a=u64s, b=u64s, c=u64s, d=u64s, small=u32s)
def test_the_other_requests_by_handle_are_read(fh, a, b, c, d, small):
    """FALLOCATE, LSEEK, COPY_FILE_RANGE, FSYNC, GETATTR, STATX, RELEASE, FLUSH and OPEN."""
    copy = body("copy", fh_in=fh, off_in=a, node_out=b, fh_out=c, off_out=d, len=small)

    assert args_of(Opcode.FALLOCATE, body("fallocate", fh=fh, offset=a, length=b, mode=small)) == (
        fh,
        small,
        a,
        b,
    )
    assert args_of(Opcode.LSEEK, body("seek", fh=fh, offset=a, whence=small)) == (fh, a, small)
    assert args_of(Opcode.COPY_FILE_RANGE, copy) == (fh, a, b, c, d, small)
    assert args_of(Opcode.COPY_FILE_RANGE_64, copy) == (fh, a, b, c, d, small)
    assert args_of(Opcode.FSYNC, body("sync", fh=fh, flags=small)) == (fh, small)
    assert args_of(Opcode.GETATTR, body("getattr", flags=small, fh=fh)) == (small, fh, 0)
    assert args_of(Opcode.STATX, body("statx", flags=1, fh=fh, sx_flags=9, sx_mask=small)) == (
        1, fh, small,
    )  # fmt: skip
    assert args_of(Opcode.RELEASE, body("release", fh=fh)) == fh
    assert args_of(Opcode.FLUSH, body("release", fh=fh)) == fh
    assert args_of(Opcode.OPEN, body("open", flags=small)) == small


@given(
    fields=st.fixed_dictionaries({"valid": u32s, "size": u64s, "mode": u32s, "uid": u32s}),
    times=st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 10**9 - 1)),
)
def test_setattr_carries_times_before_and_after_1970(fields, times):
    """Seconds are signed; with their nanoseconds they make one number."""
    seconds, part = times
    parsed = args_of(
        Opcode.SETATTR, body("setattr", atime=seconds, atimensec=part, mtimensec=7, **fields)
    )

    assert parsed.atime_ns == seconds * 10**9 + part
    assert parsed.mtime_ns == 7
    assert parsed._asdict().items() >= fields.items()


@given(name=names, value=st.binary(max_size=3000), flags=u32s, size=u32s)
def test_xattr_requests_carry_name_and_value(name, value, flags, size):
    """SETXATTR, GETXATTR and LISTXATTR."""
    raw = body("setxattr", size=len(value), flags=flags) + name + b"\0" + value
    parsed = args_of(Opcode.SETXATTR, raw)

    assert (parsed.flags, parsed.name, bytes(parsed.value)) == (flags, name, value)
    assert args_of(Opcode.GETXATTR, body("getxattr", size=size) + name + b"\0") == (size, name)
    assert args_of(Opcode.LISTXATTR, body("getxattr", size=size)) == (size, b"")


@given(low=u32s, high=u32s)
def test_init_flags_are_one_number(low, high):
    """flags2 follows flags; an old kernel sends sixteen bytes and has none."""
    raw = body("init", major=7, minor=45, max_readahead=131072, flags=low, flags2=high)

    assert args_of(Opcode.INIT, raw) == (7, 45, 131072, low | high << 32)
    assert args_of(Opcode.INIT, raw[:16]) == (7, 45, 131072, low)


def test_extensions_behind_the_body_are_cut_off():
    """What follows the body by total_extlen is not part of a name."""
    raw = message(Opcode.LOOKUP, b"name\0", extensions=3)

    assert protocol.parse(raw).args == b"name"


def test_an_unknown_opcode_is_a_request_without_arguments():
    """A newer kernel's opcode is answered by the caller, not refused by the parser."""
    assert protocol.parse(message(61, b"anything")).args is None
    assert protocol.parse(message(4096, b"anything")).args is None


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(39), id="short-header"),
        pytest.param(bytes(message(Opcode.LOOKUP, b"a\0"))[:-1], id="cut"),
        pytest.param(bytes(message(Opcode.LOOKUP, b"a\0")) + b"x", id="long"),
        pytest.param(bytes(message(Opcode.LOOKUP, b"a")), id="no-nul"),
        pytest.param(bytes(message(Opcode.LOOKUP, b"\0")), id="no-name"),
        pytest.param(bytes(message(Opcode.LOOKUP, b"a\0b\0")), id="two-names"),
        pytest.param(bytes(message(Opcode.SYMLINK, b"a\0b")), id="cut-target"),
        pytest.param(bytes(message(Opcode.WRITE, body("write", size=3) + b"ab")), id="cut-data"),
        pytest.param(
            bytes(message(Opcode.SETXATTR, body("setxattr", size=9) + b"a\0")), id="xattr"
        ),
        pytest.param(bytes(message(Opcode.GETATTR, bytes(15))), id="short-body"),
        pytest.param(bytes(message(Opcode.BATCH_FORGET, body("forgets", count=2))), id="forgets"),
        pytest.param(bytes(IN_HEADER(40, 3, 2, 1, 0, 0, 0, 9, 0)), id="extensions"),
    ],
)
def test_what_no_kernel_sends_is_a_protocol_error(raw):
    """A message that contradicts itself is refused, never half read."""
    with pytest.raises(protocol.ProtocolError):
        protocol.parse(memoryview(raw))


def test_a_bad_request_without_reply_is_not_to_be_answered():
    """The error of a FORGET carries no unique: answering it would be an error of ours."""
    with pytest.raises(protocol.ProtocolError) as forget:
        protocol.parse(message(Opcode.BATCH_FORGET, body("forgets", count=2)))
    with pytest.raises(protocol.ProtocolError) as lookup:
        protocol.parse(message(Opcode.LOOKUP, b"", unique=77))

    assert (forget.value.unique, lookup.value.unique) == (0, 77)


def samples() -> list[bytes]:
    """Return one good message of each opcode."""
    raw = {
        Opcode.LOOKUP: b"name\0", Opcode.UNLINK: b"a\0", Opcode.RMDIR: b"a\0",
        Opcode.REMOVEXATTR: b"user.a\0", Opcode.TMPFILE: body("create") + b"a\0",
        Opcode.FORGET: bytes(8), Opcode.GETATTR: body("getattr"),
        Opcode.SETATTR: body("setattr"), Opcode.SYMLINK: b"a\0b\0",
        Opcode.MKNOD: body("mknod") + b"a\0", Opcode.MKDIR: body("mkdir") + b"a\0",
        Opcode.RENAME: bytes(8) + b"a\0b\0", Opcode.RENAME2: body("rename2") + b"a\0b\0",
        Opcode.LINK: bytes(8) + b"a\0", Opcode.READ: body("read"),
        Opcode.WRITE: body("write", size=100) + bytes(100), Opcode.FSYNC: body("sync"),
        Opcode.SETXATTR: body("setxattr", size=3) + b"user.a\0abc",
        Opcode.GETXATTR: body("getxattr") + b"user.a\0", Opcode.INIT: body("init"),
        Opcode.CREATE: body("create") + b"a\0", Opcode.STATX: body("statx"),
        Opcode.BATCH_FORGET: body("forgets", count=2) + bytes(32),
        Opcode.FALLOCATE: body("fallocate"), Opcode.LSEEK: body("seek"),
        Opcode.COPY_FILE_RANGE: body("copy"), Opcode.RELEASE: body("release"),
    }  # fmt: skip
    return [bytes(message(opcode, raw.get(opcode, bytes(64)))) for opcode in Opcode]


def mutate(raw: bytes, dice: random.Random) -> bytes:
    """Return *raw* with a few bytes changed, cut off, inserted or its length made to fit."""
    changed = bytearray(raw)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed)) if changed else 0
        match dice.randrange(5):
            case 0 if changed:
                changed[at] = dice.randrange(256)
            case 1 if changed:
                changed[at] ^= 1 << dice.randrange(8)
            case 2:
                del changed[at : at + dice.randint(1, 64)]
            case 3:
                changed[at:at] = dice.randbytes(dice.randint(1, 64))
            case _ if len(changed) >= 4:
                changed[:4] = len(changed).to_bytes(4, "little")
    return bytes(changed)


def test_mutated_messages_raise_nothing_but_protocol_errors():
    """Whatever arrives is a request or a ProtocolError; KVFUSE_FUZZ_MUTATIONS says how many."""
    dice = random.Random(SEED)
    originals = samples()
    outcomes = {"request": 0, "refused": 0}

    for _ in range(MUTATIONS):
        raw = mutate(dice.choice(originals), dice)
        try:
            request = protocol.parse(memoryview(raw))
        except protocol.ProtocolError:
            outcomes["refused"] += 1
        else:
            assert isinstance(request, protocol.Request)
            outcomes["request"] += 1

    assert min(outcomes.values()) > MUTATIONS // 20, outcomes


def test_every_opcode_has_a_sample_that_parses():
    """The fuzzer starts from messages that are good."""
    for raw in samples():
        protocol.parse(memoryview(raw))


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
