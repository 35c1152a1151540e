"""How far the bytes of a disk are known to have reached it: ``<root>/.kvfuse/synced``.

Nobody fsyncs KV files, so after a power cut a renamed file may be short or zeros. The upkeep calls
syncfs now and then and notes the generation it covers, with the boot it happened in. After another
boot only files up to that generation are believed; in the same boot the page cache is intact.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvfuse.disks.disk import Disk

_FILE = b"synced"
_DOUBT = b"missed"
_FILE_BYTES_MAX = 4096


class Synced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    boot_id: str
    generation: int
    unsure: list[tuple[int, int]] = []


def boot_id() -> str:
    """Return what the kernel calls this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_synced(disk: Disk) -> Synced | None:
    """Return what was noted last, None when nothing readable was."""
    try:
        mark_fd = disk.open_dir(b".kvfuse")
    except OSError:
        return None
    try:
        fd = disk.open(mark_fd, _FILE, os.O_RDONLY)
        try:
            return msgspec.json.decode(disk.read(fd, _FILE_BYTES_MAX, 0), type=Synced)
        finally:
            os.close(fd)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(mark_fd)


def sync(disk: Disk, generation: int, unsure: Sequence[tuple[int, int]] = ()) -> None:
    """Make the disk durable, then note that *generation* and all before are on it.

    But for those between the pairs of *unsure*: a power cut came before they did, and the files
    have not been looked at since.

    Raises:
        OSError: the disk refused; nothing new is believed then.
    """
    disk.sync()
    mark_fd = disk.open_dir(b".kvfuse")
    try:
        fresh = _FILE + b".new"
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(mark_fd, fresh)
        fd = disk.create(mark_fd, fresh, mode=0o600, uid=os.geteuid(), gid=os.getegid())
        try:
            noted = Synced(boot_id=boot_id(), generation=generation, unsure=list(unsure))
            content = msgspec.json.encode(noted)
            disk.write(fd, content, 0)
            disk.fsync(fd, data_only=False)
        finally:
            os.close(fd)
        disk.rename(mark_fd, fresh, mark_fd, _FILE)
    finally:
        os.close(mark_fd)


def unsure(disk: Disk, floor: int) -> list[tuple[int, int]]:
    """Return the generations not to believe on this disk: those between each two numbers.

    All that is on the disk has a generation below *floor*.
    """
    noted = read_synced(disk)
    if noted is None:
        return [(0, floor)]
    if noted.boot_id == boot_id():
        return noted.unsure
    return [*noted.unsure, (noted.generation, floor)]


# A disk that missed a mount, and has not been gone through since: without a catalog that knows it,
# nothing on it can be believed, whichever mounts it saw later.


def doubt(disk: Disk) -> None:
    """Note on a disk that it missed a mount; raises OSError."""
    mark_fd = disk.open_dir(b".kvfuse")
    try:
        with contextlib.suppress(FileExistsError):
            fd = disk.create(mark_fd, _DOUBT, mode=0o600, uid=os.geteuid(), gid=os.getegid())
            try:
                disk.fsync(fd, data_only=False)
            finally:
                os.close(fd)
    finally:
        os.close(mark_fd)


def is_doubted(disk: Disk) -> bool:
    """Whether the disk says so; raises OSError when it does not answer."""
    mark_fd = disk.open_dir(b".kvfuse")
    try:
        disk.stat(mark_fd, _DOUBT)
    except FileNotFoundError:
        return False
    else:
        return True
    finally:
        os.close(mark_fd)


def trust(disk: Disk) -> None:
    """A disk was gone through, or the catalog knows all of it; raises OSError."""
    mark_fd = disk.open_dir(b".kvfuse")
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(mark_fd, _DOUBT)
    finally:
        os.close(mark_fd)
