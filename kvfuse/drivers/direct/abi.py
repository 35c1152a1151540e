"""Numbers of the kernel's FUSE interface (include/uapi/linux/fuse.h, protocol 7.45). Pure."""

from enum import IntEnum

KERNEL_MAJOR = 7
KERNEL_MINOR = 45  # the newest minor this driver speaks; Linux 6.18

MINOR_PASSTHROUGH = 40  # Linux 6.9
MINOR_PASSTHROUGH_WRITES = 41  # Linux 6.12: i_size follows a passthrough write
MINOR_EPOCH = 44  # Linux 6.16: NOTIFY_INC_EPOCH

UNIQUE_RESENT = 1 << 63  # set in the id of a request the kernel sends a second time


class Opcode(IntEnum):
    """enum fuse_opcode."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


OPCODES_MAX = 64  # length of tables indexed by opcode
UNKNOWN = 0  # stands for every opcode beyond


def opcode_name(opcode: int) -> str:
    """Return what *opcode* is called, also when nobody here knows it."""
    return Opcode(opcode).name if opcode in _KNOWN else f"opcode {opcode}"


_KNOWN = frozenset(Opcode)


class Notify(IntEnum):
    """enum fuse_notify_code."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6
    RESEND = 7
    INC_EPOCH = 8


# Flags of INIT, flags and flags2 as one 64-bit number
ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
EXPORT_SUPPORT = 1 << 4
BIG_WRITES = 1 << 5
AUTO_INVAL_DATA = 1 << 12
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
ASYNC_DIO = 1 << 15
WRITEBACK_CACHE = 1 << 16
PARALLEL_DIROPS = 1 << 18
ABORT_ERROR = 1 << 21
MAX_PAGES = 1 << 22
CACHE_SYMLINKS = 1 << 23
HANDLE_KILLPRIV_V2 = 1 << 28
INIT_EXT = 1 << 30
HAS_EXPIRE_ONLY = 1 << 35
DIRECT_IO_ALLOW_MMAP = 1 << 36
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39

# FOPEN_*: flags of an OPEN or CREATE reply
OPEN_DIRECT_IO = 1 << 0
OPEN_NOFLUSH = 1 << 5
OPEN_PARALLEL_DIRECT_WRITES = 1 << 6
OPEN_PASSTHROUGH = 1 << 7

# FATTR_*: which fields of SETATTR count
ATTR_MODE = 1 << 0
ATTR_UID = 1 << 1
ATTR_GID = 1 << 2
ATTR_SIZE = 1 << 3
ATTR_ATIME = 1 << 4
ATTR_MTIME = 1 << 5
ATTR_FH = 1 << 6
ATTR_ATIME_NOW = 1 << 7
ATTR_MTIME_NOW = 1 << 8

GETATTR_FH = 1 << 0
FSYNC_DATA_ONLY = 1 << 0
EXPIRE_ONLY = 1 << 0  # INVAL_ENTRY: ask again, but keep what hangs below the name

# _IOC numbers of /dev/fuse; BACKING_OPEN returns the id, its argument is struct fuse_backing_map
IOC_BACKING_OPEN = 0x4010E501
IOC_BACKING_CLOSE = 0x4004E502
