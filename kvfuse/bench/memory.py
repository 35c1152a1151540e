"""``python -m kvfuse.bench.memory``: what a million lookups cost, and what of it comes back.

Looks up names that are there and names that are not, each once, then makes the kernel drop what it
holds of them. Memory of the server must not grow by what the kernel has asked for.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from kvfuse.bench import lab, rounds
from kvfuse.control import registry
from kvfuse.control.client import call
from kvfuse.core.errors import KernelError, KvfuseError
from kvfuse.output import note, show_table

_SLABINFO = Path("/proc/slabinfo")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_DIRECTORY_NAMES = 1000
_CACHES = ("fuse_inode", "dentry")


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory at one moment: the server's, and how many objects the kernel has."""

    what: str
    server_bytes: int
    fuse_inodes: int
    dentries: int


def objects() -> dict[str, tuple[int, int]]:
    """Return (objects in use, bytes of each) of the caches the kernel keeps names in.

    Raises:
        KernelError: /proc/slabinfo cannot be read.
    """
    try:
        lines = _SLABINFO.read_text(encoding="ascii").splitlines()
    except OSError as exc:
        raise KernelError(f"{_SLABINFO}: {exc.strerror}; run it as root") from exc
    found = dict.fromkeys(_CACHES, (0, 0))
    for line in lines:
        name, *fields = line.split()
        if name in found:
            found[name] = (int(fields[0]), int(fields[2]))
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, but for files it maps."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def moment(what: str, pid: int) -> Moment:
    """Return how it is now."""
    found = objects()
    return Moment(what, resident_bytes(pid), found["fuse_inode"][0], found["dentry"][0])


def measure(place: lab.Lab, lookups: int, existing: int) -> list[Moment]:
    """Return the moments of a run over a new mount."""
    target = place.mount("kvfuse")
    entry = registry.registration(str(target.base.parent))
    assert entry is not None, "just mounted"
    pid = int(call(entry, "status")["processes"]["server"]["pid"])
    note(f"making {existing} names")
    directories = [target.base / f"{number:05}" for number in range(lookups // _DIRECTORY_NAMES)]
    for directory in directories:
        directory.mkdir()
    for number in range(existing):
        os.mkdir(directories[number % len(directories)] / f"there-{number:07}")
    _DROP_CACHES.write_text("2", encoding="ascii")
    moments = [moment("before", pid)]
    note(f"looking up {lookups} names")
    for number in range(lookups):
        word = "there" if number < existing else "missing"
        os.access(directories[number % len(directories)] / f"{word}-{number:07}", os.F_OK)
    moments.append(moment(f"after {lookups} lookups", pid))
    _DROP_CACHES.write_text("2", encoding="ascii")
    moments.append(moment("after memory pressure", pid))
    return moments


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lookups", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--existing", type=click.IntRange(0), default=50_000, show_default=True,
              help="How many of the names are there.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
              help="Write every value there.")  # fmt: skip
def main(lookups: int, existing: int, json_file: Path | None) -> None:
    """Show what a million lookups cost in memory, and what of it comes back."""
    existing = min(existing, lookups)
    with rounds.ended_by_signals(), lab.Lab("ext4") as place:
        moments = measure(place, lookups, existing)
    sizes = {name: size for name, (_, size) in objects().items()}
    show_table(
        ["", " server MiB", " fuse inodes", " dentries"],
        [
            [m.what, f"{m.server_bytes / (1 << 20):.1f}", str(m.fuse_inodes), str(m.dentries)]
            for m in moments
        ],
        title=f"fuse inode {sizes['fuse_inode']} bytes, dentry {sizes['dentry']} bytes",
    )
    if json_file is not None:
        told = {"moments": [asdict(m) for m in moments], "bytes": sizes}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))


if __name__ == "__main__":
    try:
        main(prog_name="kvfuse.bench.memory")
    except KvfuseError as exc:
        note(str(exc))
        sys.exit(exc.exit_code)
