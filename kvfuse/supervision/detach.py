"""Taking away a mount whose server is gone. A program of its own, for what may hang.

``python -m kvfuse.supervision.detach MOUNTPOINT``: aborts the connection, so that nobody waits for
an answer any longer, and takes the mount out of the tree.
"""

import contextlib
import sys
from pathlib import Path

from kvfuse.drivers.direct.device import unmount
from kvfuse.system.mounts import mount_at

_CONNECTIONS = Path("/sys/fs/fuse/connections")


def detach(mountpoint: str) -> None:
    """Abort and detach the kvfuse mount at *mountpoint*; without one nothing is done.

    Raises:
        OSError: it cannot be detached.
    """
    mount = mount_at(mountpoint)
    if mount is None or not mount.is_kvfuse:
        return
    minor = mount.device.partition(":")[2]
    with contextlib.suppress(OSError):  # fusectl need not be mounted
        (_CONNECTIONS / minor / "abort").write_text("1", encoding="ascii")
    unmount(mountpoint, lazy=True)


if __name__ == "__main__":
    detach(sys.argv[1])
