"""Telling systemd how the daemon is: the datagrams of sd_notify."""

import logging
import os
import socket

_log = logging.getLogger("kvfuse.notify")


def notify(*lines: str) -> bool:
    """Send *lines*, such as ``READY=1``, to the service manager.

    Return whether there is one and it took them. A manager that is gone is logged, never raised.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # A leading @ stands for the NUL of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.connect(target)
            manager.sendall("\n".join(lines).encode())
    except OSError as exc:
        _log.warning("service manager at %s not told %s: %s", address, lines, exc.strerror)
        return False
    return True
