"""Requests of the kernel are read as its structs say, and anything else is refused."""

import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.drivers.direct import protocol
from kvfuse.drivers.direct.abi import Opcode
from tests.fusestructs import struct_of

MUTATIONS = int(os.environ.get("KVFUSE_FUZZ_MUTATIONS", "30000"))
SEED = 20261130

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

u32s = st.integers(0, 2**32 - 1)
u64s = st.integers(0, 2**64 - 1)
names = st.binary(min_size=1, max_size=255).filter(lambda raw: b"\0" not in raw)


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

    assert request == protocol.Request(Opcode.STATFS, unique, node, 1000, 1001, 4242, None)


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
    """Seconds are signed; with their nanoseconds they make one number, of 64 bits at most."""
    seconds, part = times
    parsed = args_of(
        Opcode.SETATTR, body("setattr", atime=seconds, atimensec=part, mtimensec=7, **fields)
    )

    exact_ns = seconds * 10**9 + part
    assert parsed.atime_ns == max(protocol.TIME_MIN_NS, min(exact_ns, protocol.TIME_MAX_NS))
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
