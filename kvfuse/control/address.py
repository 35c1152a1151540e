"""Addresses of Unix sockets, which the kernel limits to 107 bytes, for paths of any length."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvfuse.core.errors import ConfigError

ADDRESS_BYTES_MAX = 107
_NAME_BYTES_MAX = ADDRESS_BYTES_MAX - len("/proc/self/fd/1234567/")


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Give an address for *path*, to bind or connect to inside this context.

    Raises:
        ConfigError: the last component of *path* is longer than any address.
        OSError: the directory cannot be opened.
    """
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield str(path)
        return
    if len(os.fsencode(path.name)) > _NAME_BYTES_MAX:
        raise ConfigError(
            f"{path}: a name of over {_NAME_BYTES_MAX} bytes, too long for a socket; "
            f"set control.socket to a shorter one"
        )
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
