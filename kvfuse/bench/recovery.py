"""What a restart costs: a mount over many files, with its catalog and without.

Files are laid on the disks as a pool leaves them, by the pool's own placement and labels, without
going through a mount. Then kvfuse is mounted as people do, and asked.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfuse.core import placement, records
from kvfuse.core.routing import routing_name
from kvfuse.core.topology import Member
from kvfuse.disks.carrier import Ground, Wanted
from kvfuse.disks.disk import Disk
from kvfuse.disks.identity import read_identity

_KVFUSE = [sys.executable, "-m", "kvfuse"]
_PER_DIRECTORY = 2000
_LOOKUPS = 3000
_ROUNDS = 500  # lookups between two looks at the status
_PAUSE_S = 0.002
_WAIT_S = 600.0


def tell(text: str) -> None:
    """Show progress."""
    sys.stderr.write(text + "\n")


class Lab:
    """A pool of *disks* below *base* that commands are run on."""

    def __init__(self, base: Path, disks: list[Path]) -> None:
        self.base = base
        self.disks = disks
        self.mountpoint = base / "mnt"
        self.mountpoint.mkdir()
        self.config = base / "config.toml"
        paths = ", ".join(f'"{disk}"' for disk in disks)
        self.config.write_text(
            f'[pool]\nmountpoint = "{self.mountpoint}"\ndisks = [{paths}]\n'
            f'state_dir = "{base}/state"\nrun_dir = "{base}/run"\nallow_shared_device = true\n',
            encoding="utf-8",
        )

    def run(self, *words: str) -> str:
        """Run a command of kvfuse; return what it prints."""
        done = subprocess.run([*_KVFUSE, *words], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        return done.stdout

    def mount(self) -> float:
        """Mount, and return how many seconds it took until the mount answered."""
        began_s = time.monotonic()
        self.run("mount", "--config", str(self.config), "--init")
        os.listdir(self.mountpoint)
        return time.monotonic() - began_s

    def umount(self) -> None:
        """Unmount."""
        self.run("umount", str(self.mountpoint))

    def status(self) -> dict[str, Any]:
        """Return the status of the mount."""
        found: dict[str, Any] = json.loads(self.run("status", "--json", str(self.mountpoint)))
        return found

    def lose_catalog(self) -> None:
        """Remove the live catalog and its copy."""
        for place in ("run", "state"):
            for path in (self.base / place).glob("*/catalog*"):
                shutil.rmtree(path, ignore_errors=True)


def lay_files(disks: list[Path], count: int) -> int:
    """Lay *count* files on *disks*; return how many directories they are in."""
    opened = [Disk.open_root(str(path)) for path in disks]
    identities = [read_identity(disk) for disk in opened]
    members = [Member(identity.disk_id, 1.0) for identity in identities if identity is not None]
    number_of = {member.disk_id: number for number, member in enumerate(members)}
    next_id = time.time_ns()
    directories = max(1, count // _PER_DIRECTORY)
    for index in range(directories):
        name, dir_id, next_id = b"%03x" % index, next_id, next_id + 1
        carriers = []
        for disk in opened:
            ground = Ground(disk)
            wanted = Wanted(dir_id, dir_id, 0o755, os.geteuid(), os.getegid())
            carriers.append(ground.ensure(ground.root(), name, wanted))
        for path in _names(index, count // directories):
            key = name + b"/" + path
            owner = placement.candidates(routing_name(key), members, placement.Policy.RENDEZVOUS)[0]
            number = number_of[owner]
            label = records.Label(next_id, next_id, records.verify_hash(dir_id, path), 0)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=carriers[number].fd)
            os.setxattr(fd, opened[number].label_name, records.pack_label(label))
            os.close(fd)
            next_id += 1
        if index % 50 == 0:
            tell(f"laying files: directory {index} of {directories}")
    for disk in opened:
        disk.close()
    return directories


def _names(index: int, count: int) -> Iterator[bytes]:
    for number in range(count):
        yield b"%016x%016x.bin" % (index * 0x9E3779B97F4A7C15 % 2**64, number)


class Lookups:
    """Times lookups of names nobody asked for before."""

    def __init__(self, mountpoint: Path, directories: int) -> None:
        self._mountpoint = os.fsencode(mountpoint)
        self._directories = directories
        self._next = 0

    def time_some(self, count: int) -> list[float]:
        """Return the microseconds that each of *count* lookups took, with a pause between them."""
        times: list[float] = []
        for _ in range(count):
            self._next += 1
            index = self._next * 7919 % self._directories
            number = self._next * 104729 % _PER_DIRECTORY
            name = b"%016x%016x.bin" % (index * 0x9E3779B97F4A7C15 % 2**64, number)
            path = b"%s/%03x/%s" % (self._mountpoint, index, name)
            began_s = time.perf_counter()
            os.stat(path)
            times.append((time.perf_counter() - began_s) * 1e6)
            time.sleep(_PAUSE_S)
        return times


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no RssAnon")


def measure(lab: Lab, files: int, directories: int) -> dict[str, Any]:
    """Mount without and with the catalog; return the figures."""
    lookups = Lookups(lab.mountpoint, directories)
    figures: dict[str, Any] = {"files": files}
    lab.lose_catalog()
    figures["mount_without_catalog_s"] = round(lab.mount(), 2)
    pid = int(lab.status()["processes"]["server"]["pid"])
    before_bytes = anonymous_bytes(pid)
    wait(lab, lambda: time.sleep(_PAUSE_S * _ROUNDS))
    status = lab.status()
    figures |= {
        "scan_files_per_s": _rate(status["recovery"]),
        "anonymous_bytes_per_file": round((anonymous_bytes(pid) - before_bytes) / files, 2),
        "catalog_bytes_per_file": round(status["catalog"]["bytes"] / files),
    }
    began_s = time.monotonic()
    lab.umount()
    figures["umount_s"] = round(time.monotonic() - began_s, 2)
    figures["mount_with_catalog_s"] = round(lab.mount(), 2)
    lab.umount()
    lab.lose_catalog()
    lab.mount()
    during: list[float] = []
    wait(lab, lambda: during.extend(lookups.time_some(_ROUNDS)))
    figures |= {
        "scan_files_per_s_while_asked": _rate(lab.status()["recovery"]),
        "lookups_during": len(during),
        "lookup_during_us": round(statistics.median(during), 1),
        "lookup_after_us": round(statistics.median(lookups.time_some(_LOOKUPS)), 1),
    }
    lab.umount()
    return figures


def wait(lab: Lab, meanwhile: Callable[[], None]) -> None:
    """Wait until all disks were read; do *meanwhile* between two looks at the status."""
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        meanwhile()
        recovery = lab.status()["recovery"]
        tell(f"{recovery['files']} files found")
        if recovery["state"] == "complete":
            return
    raise TimeoutError(f"not read within {_WAIT_S:.0f} s")


def _rate(recovery: dict[str, Any]) -> int:
    files, seconds = int(recovery["files"]), float(recovery["seconds"])
    return round(files / max(seconds, 1e-3))


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench-recovery", description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000, help="how many (default: 10^6)")
    parser.add_argument("--disk", action="append", type=Path, help="an empty directory; repeat")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args(arguments)
    base = Path(tempfile.mkdtemp(prefix="kvfuse-recovery-", dir="/dev/shm"))
    try:
        disks = given.disk or [base / f"disk{number}" for number in range(4)]
        for disk in disks:
            disk.mkdir(exist_ok=True)
        lab = Lab(base, disks)
        lab.mount()
        lab.umount()
        directories = lay_files(disks, given.files)
        figures = measure(lab, given.files, directories)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for name, value in figures.items():
        sys.stdout.write(f"{name:28} {value}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
