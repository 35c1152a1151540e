"""C structures of the kernel's FUSE interface for tests.

Written field by field as in include/uapi/linux/fuse.h: the C rules of alignment, not the formats of
the code under test, decide where a field lies.
"""

import ctypes
from typing import Any

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
