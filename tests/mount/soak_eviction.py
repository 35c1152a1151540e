"""The long form of the eviction tests, as a program: writes a mount over many times, and measures.

Prints one JSON object. Exit code 1 when a store, a load or a byte was wrong.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from tests.disks import MIB, loop_disks
from tests.mount.flood import Flood
from tests.mounting import Mounted


def fill(disk: Path) -> float:
    """Return how full a disk is, as kvfuse counts it."""
    space = os.statvfs(disk)
    return 1 - space.f_bavail / (space.f_blocks - (space.f_bfree - space.f_bavail))


def p99_ms(times_s: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    times_s = sorted(times_s)
    return round(1000 * times_s[int(0.99 * (len(times_s) - 1))], 3) if times_s else 0.0


def read_times(path: Path, seconds: float, stop: threading.Event | None = None) -> list[float]:
    """Open and read a small file again and again; return how long each took."""
    times: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not (stop is not None and stop.is_set()):
        began_s = time.perf_counter()
        path.read_bytes()
        times.append(time.perf_counter() - began_s)
        time.sleep(0.002)
    return times


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="soak-eviction", description=__doc__)
    parser.add_argument("--filesystem", choices=["ext4", "xfs", "btrfs"], default="ext4")
    parser.add_argument("--disks", type=int, default=4)
    parser.add_argument("--size-mib", type=int, default=512, help="of each disk")
    parser.add_argument("--total-mib", type=int, default=20480, help="to write in all")
    parser.add_argument("--largest-mib", type=int, default=16, help="file")
    parser.add_argument("--lease-s", type=int, default=1)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument(
        "--lease-trials", type=int, default=0, help="of a lookup and a load within the lease"
    )
    parser.add_argument("--small-files", type=int, default=0, help="4 KiB files to clean away")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take everything down
    with tempfile.TemporaryDirectory(prefix="kvfuse-soak-") as base, loop_disks() as (made, _):
        disks = [made.add(given.filesystem, given.size_mib * MIB) for _ in range(given.disks)]
        space = {"lease_ttl": f"{given.lease_s}s"}
        with Mounted(Path(base), disks, setup="direct", settings={"space": space}) as mount:
            found = soak(mount, given)
            if given.lease_trials:
                found |= trials(mount, given.lease_trials, given.lease_s)
            if given.small_files:
                found |= clean(mount, given.small_files)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    lease = found.get("lease")
    is_broken = isinstance(lease, dict) and lease["broken"] > 0
    return 1 if found["failures"] or is_broken else 0


def soak(mount: Mounted, given: argparse.Namespace) -> dict[str, object]:
    """Flood the mount; return what was seen."""
    hot = mount.path / "hot"
    hot.write_bytes(b"h" * 65536)
    idle = read_times(hot, 3)
    flood = Flood(
        mount.path, given.total_mib * MIB, largest_bytes=given.largest_mib * MIB,
        lease_s=given.lease_s, readers=given.readers,
    )  # fmt: skip
    peaks: list[float] = []
    flood.also = lambda: peaks.append(max(fill(disk) for disk in mount.disks)) is None
    stop = threading.Event()
    busy: list[float] = []
    reader = threading.Thread(target=lambda: busy.extend(read_times(hot, 1e9, stop)))
    reader.start()
    began_s = time.monotonic()
    flood.run()
    seconds = time.monotonic() - began_s
    stop.set()
    reader.join()
    time.sleep(5)
    tasks = mount.command("tasks", "--mountpoint", str(mount.path))["tasks"]
    return {
        "written_mib": flood.written_bytes // MIB,
        "mib_per_s": round(flood.written_bytes / MIB / seconds, 1),
        "loads": flood.reads,
        "misses": flood.misses,
        "failures": flood.failures,
        "peak_fill": round(max(peaks, default=0.0), 3),
        "end_fill": [round(fill(disk), 3) for disk in mount.disks],
        "read_p99_ms_idle": p99_ms(idle),
        "read_p99_ms_loaded": p99_ms(busy),
        "tasks": len(tasks),
        "rejected": mount.status()["space"]["rejected"],
    }


def trials(mount: Mounted, count: int, lease_s: float) -> dict[str, object]:
    """Look files up, and load those that were there within the lease, while all is overwritten.

    A load that comes too late, as this process was not given the processor, is no trial.
    """
    data = b"t" * 65536
    names: deque[Path] = deque(maxlen=6000)
    done = {"trials": 0, "missing": 0, "late": 0, "broken": 0}
    stop = threading.Event()

    def store(number: int) -> None:
        for each in range(1 << 30):
            if stop.is_set():
                return
            final = mount.path / f"d{number % 3}" / f"t{number}-{each}.data"
            temp = final.with_name(f"{final.name}_{number}.tmp")
            temp.write_bytes(data)
            temp.rename(final)
            names.append(final)

    def look(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            if len(names) < 100:
                time.sleep(0.01)
                continue
            asked: list[tuple[float, Path]] = []
            for _ in range(40):
                path = names[rng.randrange(len(names) - 1)]
                for _ in range(rng.choice((1, 1, 2))):  # the second answer is the kernel's
                    began_s = time.monotonic()
                    is_there = path.exists()
                if is_there:
                    asked.append((began_s, path))
                else:
                    done["missing"] += 1
            time.sleep(rng.choice((0.0, rng.random() * 0.7 * lease_s)))
            for began_s, path in asked:
                try:
                    is_right = path.read_bytes() == data
                except OSError:
                    is_right = False
                if time.monotonic() - began_s > lease_s:
                    done["late"] += 1
                    continue
                done["trials"] += 1
                done["broken"] += not is_right

    threads = [threading.Thread(target=store, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=look, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while done["trials"] < count and all(thread.is_alive() for thread in threads):
        time.sleep(1)
        sys.stderr.write(f"\r{done}")
    stop.set()
    for thread in threads:
        thread.join()
    return {"lease": done}


def clean(mount: Mounted, files: int) -> dict[str, float]:
    """Make small files, clean them all away; return how many went a second, and how reads did."""
    directory = mount.path / "small"
    directory.mkdir()
    for number in range(files):
        (directory / f"{number}").write_bytes(b"s" * 4096)
    idle = read_times(mount.path / "hot", 2.5)
    stop = threading.Event()
    busy: list[float] = []
    reader = threading.Thread(target=lambda: busy.extend(read_times(mount.path / "hot", 99, stop)))
    reader.start()
    began = time.time()
    tasks = mount.command("clean", str(mount.path), "--regex", "^small/")["tasks"]
    stop.set()
    reader.join()
    ended = max(task["ended"] for task in tasks)
    return {
        "cleaned_files_per_s": round(sum(task["files"] for task in tasks) / (ended - began), 1),
        "read_p99_ms_before_cleaning": p99_ms(idle),
        "read_p99_ms_cleaning": p99_ms(busy),
    }


if __name__ == "__main__":
    sys.exit(main())
