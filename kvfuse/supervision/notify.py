"""Telling systemd how the daemon is, and letting it keep descriptors: sd_notify(3), its fd store.

Standard library only, and little of it: the supervisor imports this.
"""

import array
import os
import socket
from collections.abc import Sequence

_FIRST_FD = 3
_TIMEOUT_S = 5.0


def notify(*lines: str, fds: Sequence[int] = ()) -> bool:
    """Send *lines*, such as ``READY=1``, to the service manager, with copies of *fds*.

    Return whether there is one and it took them. A manager that is gone is no error.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # A leading @ stands for the NUL of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.settimeout(_TIMEOUT_S)
            manager.connect(target)
            manager.sendmsg(["\n".join(lines).encode()], rights)
    except OSError:
        return False
    return True


def keep(name: str, fd: int) -> bool:
    """Let the manager keep a copy of *fd* as *name* while this service is down."""
    # FDPOLL=0: a connection that is dead is still ours to take down.
    return notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])


def forget(name: str) -> bool:
    """Let the manager close what it keeps as *name*."""
    return notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def kept_names() -> list[str]:
    """Return the names of the descriptors the manager gave back, the first is descriptor 3."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(os.environ.get("LISTEN_FDS", "0"))
    except ValueError:
        return []
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    return names if count > 0 and len(names) == count else []


def kept() -> list[tuple[str, int]]:
    """Return (name, descriptor) of what the manager gave back; they are the caller's, once."""
    found = [(name, _FIRST_FD + number) for number, name in enumerate(kept_names())]
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)
    for _, fd in found:
        os.set_inheritable(fd, False)
    return found
