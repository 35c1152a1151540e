"""Real file systems for tests: image files on loop devices, and what cleans them up for certain."""

import atexit
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
SMALLEST_BYTES = {"ext4": 16 * MIB, "xfs": 320 * MIB, "btrfs": 128 * MIB}
_MKFS = {
    # no root reserve: tests fill disks; lazy initialisation would write behind their back
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
    "btrfs": ["mkfs.btrfs", "-q", "-f", "-K", "--mixed"],
}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def make_image(path: Path, filesystem: str = "ext4", size_bytes: int | None = None) -> None:
    """Write a sparse image of *filesystem* to *path*; the smallest that works by default."""
    size_bytes = size_bytes or SMALLEST_BYTES[filesystem]
    with path.open("wb") as image:
        image.truncate(size_bytes)
    _run(*_MKFS[filesystem], str(path))


@dataclass
class LoopDisks:
    """Loop-mounted file systems below one temporary directory, all undone by ``close``."""

    base: Path
    _mounted: list[Path] = field(default_factory=list)
    _made: int = 0

    def add(self, filesystem: str = "ext4", size_bytes: int | None = None) -> Path:
        """Return the mountpoint of a new, empty file system."""
        number, self._made = self._made, self._made + 1
        image = self.base / f"{number}.{filesystem}"
        make_image(image, filesystem, size_bytes)
        path = self.base / f"disk{number}"
        path.mkdir()
        self.mount(path)
        return path

    def mount(self, path: Path, options: str = "") -> None:
        """Mount the image of *path* (again)."""
        (image,) = self.base.glob(f"{path.name.removeprefix('disk')}.*")
        _run("mount", "-o", ",".join(filter(None, ("loop", options))), str(image), str(path))
        self._mounted.append(path)

    def umount(self, path: Path) -> None:
        """Take a disk away; its directory stays, empty."""
        _run("umount", str(path))  # the loop device goes with its mount
        self._mounted.remove(path)

    def remount(self, path: Path, options: str) -> None:
        """Change how a disk is mounted, as in ``ro``."""
        _run("mount", "-o", f"remount,{options}", str(path))

    def close(self) -> None:
        """Undo everything, also when a file is still open there."""
        for path in reversed(self._mounted):
            with contextlib.suppress(RuntimeError):
                _run("umount", "--lazy", str(path))
        self._mounted.clear()
        shutil.rmtree(self.base, ignore_errors=True)
        _close_at_exit.discard(self)

    def __hash__(self) -> int:
        return id(self)


_close_at_exit: set[LoopDisks] = set()


@atexit.register
def _sweep() -> None:
    for disks in list(_close_at_exit):
        disks.close()


@contextlib.contextmanager
def loop_disks(count: int = 0, filesystem: str = "ext4") -> Iterator[tuple[LoopDisks, list[Path]]]:
    """Give *count* mounted file systems, and what makes more."""
    base = Path(tempfile.mkdtemp(prefix=f"kvfuse-disks-{os.getpid()}-"))
    disks = LoopDisks(base)
    _close_at_exit.add(disks)
    try:
        yield disks, [disks.add(filesystem) for _ in range(count)]
    finally:
        disks.close()
