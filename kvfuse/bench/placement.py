"""What a changed set of disks costs under each placement: misses, stale bytes, memory, time.

Pools on file systems in memory, driven by the verbs of the pool without a mount. All placements get
the same files, disks and changes, so that they differ in nothing else.
"""

import contextlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from kvfuse import __version__
from kvfuse.bench.lab import do
from kvfuse.bench.rounds import ended_by_signals
from kvfuse.core.config import Config
from kvfuse.core.errors import KernelError, KvfuseError
from kvfuse.core.placement import Policy, candidates
from kvfuse.core.records import ROOT_ID, Caller, Node
from kvfuse.core.routing import routing_name
from kvfuse.disks.diskset import DiskSet, DiskSpec, open_disks
from kvfuse.output import note, show_table
from kvfuse.pool.pool import Pool, open_pool
from kvfuse.system.syscalls import MNT_DETACH, umount

DISKS = 8
TOP = b"model"
_SIZES_BYTES = (4096, 8192, 32768)  # of one file after the other
_CALLER = Caller(uid=0, gid=0, umask=0o022, pid=1)
_BLOCK_BYTES = 512
_SCAN_S = 600.0
_DISK_BYTES_MIN = 16 << 20  # nothing may have to be evicted


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to place files, and whether displaced ones are served."""

    name: str
    policy: Policy
    serve_displaced: bool


VARIANTS = (
    Variant("striped, strict", Policy.STRIPED, serve_displaced=False),
    Variant("rendezvous, strict", Policy.RENDEZVOUS, serve_displaced=False),
    Variant("rendezvous", Policy.RENDEZVOUS, serve_displaced=True),
    Variant("index", Policy.INDEX, serve_displaced=True),
)


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table: *show* makes text of a value."""

    key: str
    title: str
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _plain(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


MEASURES = (
    Measure("restart_misses", "restart: misses", _percent),
    Measure("restart_s", "restart: seconds", _plain),
    Measure("lost_misses", "restart without catalog: misses", _percent),
    Measure("lost_s", "restart without catalog: seconds", _plain),
    Measure("added_misses", "disk added: misses", _percent),
    Measure("added_stale", "disk added: stale bytes", _percent),
    Measure("added_s", "disk added: seconds", _plain),
    Measure("added_share", "disk added: new files on it", _percent),
    Measure("removed_misses", "disk removed: misses", _percent),
    Measure("removed_own", "disk removed: files it held", _percent),
    Measure("back_misses", "disk back: misses", _percent),
    Measure("share_files", "files: fullest/emptiest disk", _plain),
    Measure("share_bytes", "bytes: fullest/emptiest disk", _plain),
    Measure("chi_squared", "files: chi² (7 degrees)", _plain),
    Measure("catalog_bytes", "catalog, bytes a file", _plain),
    Measure("store_us", "store a file, µs of CPU", _plain),
    Measure("hit_us", "lookup, hit, µs of CPU", _plain),
    Measure("miss_us", "lookup, miss, µs of CPU", _plain),
    Measure("owner_us", "owner of a name, µs of CPU", _plain),
)


class Trial:
    """One pool from its first file to its end."""

    def __init__(self, base: Path, variant: Variant, files: int) -> None:
        self.variant = variant
        self.files = files
        self.values: dict[str, float] = {}
        self._base = base
        self._paths = [base / f"disk{number}" for number in range(DISKS + 1)]
        self._disks: DiskSet | None = None
        self._pool: Pool | None = None
        self._directory = 0

    def make_disks(self) -> None:
        """Make the disks, of which the files with all that is added take about half."""
        share_bytes = int(2.5 * self.files * statistics.mean(_SIZES_BYTES) / DISKS)
        size_bytes = max(share_bytes, _DISK_BYTES_MIN)  # few files are spread unevenly
        for path in self._paths:
            path.mkdir(parents=True)
            do(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvfuse-bench", str(path)])

    # -- a mount and its end

    @property
    def pool(self) -> Pool:
        """The pool that is open."""
        assert self._pool is not None, "only asked while it is"
        return self._pool

    def open(self, paths: Sequence[Path]) -> float:
        """Open the pool of these disks and return how long that takes, in seconds."""
        began_s = time.perf_counter()
        config = self._config(paths)
        self._disks = open_disks(
            [DiskSpec(str(path)) for path in paths],
            mountpoint=config.pool.mountpoint,
            state_dir=config.pool.state_dir,
            run_dir=config.pool.run_dir,
            init=True,
        )
        self._pool = open_pool(config, self._disks)
        took_s = time.perf_counter() - began_s
        self._wait_for_scan()
        found = self._pool.lookup(ROOT_ID, TOP)
        self._directory = (found or self._pool.mkdir(ROOT_ID, TOP, 0o755, _CALLER)).id
        return took_s

    def _config(self, paths: Sequence[Path]) -> Config:
        pool = {
            "mountpoint": str(self._base / "mnt"),
            "disks": [str(path) for path in paths],
            "state_dir": str(self._base / "state"),
            "run_dir": str(self._base / "run"),
            "placement": self.variant.policy.value,
            "serve_displaced": self.variant.serve_displaced,
        }
        return Config.model_validate({"pool": pool, "space": {"reserve": 0}})

    def _wait_for_scan(self) -> None:
        if not self.pool.wait_complete(_SCAN_S):
            raise KvfuseError(f"{self._base}: not scanned within {_SCAN_S:.0f} s: see the log")

    def close(self) -> None:
        """End the mount as the daemon does."""
        if self._pool is not None:
            self._pool.close()
        if self._disks is not None:
            self._disks.close()
        self._pool = self._disks = None

    def end(self) -> None:
        """Close the pool and remove all of it."""
        try:
            self.close()
        finally:
            for path in self._paths:
                with contextlib.suppress(OSError):
                    umount(str(path), MNT_DETACH)
            shutil.rmtree(self._base, ignore_errors=True)

    def reopen(self, paths: Sequence[Path]) -> float:
        """Restart cleanly with these disks; return how long the begin takes, in seconds."""
        self.close()
        return self.open(paths)

    # -- files

    def store(self, first: int, count: int) -> None:
        """Store files as a connector does: under a temp name, renamed when complete."""
        data = os.urandom(max(_SIZES_BYTES))
        for number in range(first, first + count):
            temp = _name(number) + b"_17.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            _, fh = self.pool.create(self._directory, temp, flags, 0o644, _CALLER)
            self.pool.write(fh, 0, data[: _SIZES_BYTES[number % len(_SIZES_BYTES)]])
            self.pool.release(fh)
            self.pool.rename(self._directory, temp, self._directory, _name(number), 0)

    def found(self, first: int, count: int) -> list[Node | None]:
        """Look files up."""
        names = map(_name, range(first, first + count))
        return [self.pool.lookup(self._directory, name) for name in names]

    def misses(self) -> float:
        """Return the share of the first files that are not there."""
        return self.found(0, self.files).count(None) / self.files

    # -- what is measured

    def run(self) -> dict[str, float]:
        """Measure everything, and return the values by key."""
        eight, nine = self._paths[:DISKS], self._paths
        values = self.values
        self.open(eight)
        began_s = time.thread_time()
        self.store(0, self.files)
        values["store_us"] = 1e6 * (time.thread_time() - began_s) / self.files
        self._measure_distribution()
        values["restart_s"] = self.reopen(eight)
        values["restart_misses"] = self.misses()
        self.close()
        values["catalog_bytes"] = self._catalog_bytes() / self.files
        self._lose_catalog()
        values["lost_s"] = self._until_scanned(eight)
        values["lost_misses"] = self.misses()
        values["added_s"] = self.reopen(nine)
        values["added_misses"] = self.misses()
        rows = self.pool.status()["disks"]
        stale_bytes = sum(row["stale_bytes"] for row in rows)
        values["added_stale"] = stale_bytes / (stale_bytes + sum(row["used_bytes"] for row in rows))
        self._measure_lookups()
        more = self.files // 4
        self.store(self.files, more)
        ninth = rows[-1]["id"]
        added = [node for node in self.found(self.files, more) if node is not None]
        values["added_share"] = sum(self._disk_id(node) == ninth for node in added) / more
        self._measure_removal(nine)
        return values

    def _until_scanned(self, paths: Sequence[Path]) -> float:
        began_s = time.perf_counter()
        self.open(paths)
        return time.perf_counter() - began_s

    def _measure_distribution(self) -> None:
        nodes = [node for node in self.found(0, self.files) if node is not None]
        counts = Counter(node.disk for node in nodes)
        used = Counter[int]()
        for node in nodes:
            used[node.disk] += node.blocks * _BLOCK_BYTES
        mean = len(nodes) / DISKS
        self.values["share_files"] = max(counts.values()) / min(counts.values())
        self.values["share_bytes"] = max(used.values()) / min(used.values())
        self.values["chi_squared"] = sum((n - mean) ** 2 / mean for n in counts.values())

    def _measure_lookups(self) -> None:
        pool, directory = self.pool, self._directory
        there = [_name(number) for number, node in enumerate(self.found(0, self.files)) if node]
        absent = [b"absent-" + _name(number) for number in range(self.files)]
        for key, names in (("hit_us", there), ("miss_us", absent)):
            began_s = time.thread_time()
            for name in names:
                pool.lookup(directory, name)
            self.values[key] = 1e6 * (time.thread_time() - began_s) / len(names)
        assert self._disks is not None, "open"
        members, policy = self._disks.topology.members, self.variant.policy
        if policy.has_owners:
            began_s = time.thread_time()
            for name in absent:
                candidates(routing_name(TOP + b"/" + name), members, policy)
            self.values["owner_us"] = 1e6 * (time.thread_time() - began_s) / len(absent)

    def _measure_removal(self, nine: Sequence[Path]) -> None:
        """Write everything that is stale anew, then take a disk away and bring it back."""
        for number, node in enumerate(self.found(0, self.files)):
            if node is None:
                self.store(number, 1)
        assert self._disks is not None, "open"
        gone = next(slot for slot in self._disks.slots if slot.path == str(nine[3]))
        held = [node for node in self.found(0, self.files) if node and node.disk == gone.number]
        self.values["removed_own"] = len(held) / self.files
        self.reopen([path for path in nine if path != nine[3]])
        self.values["removed_misses"] = self.misses()
        self.reopen(nine)
        self.values["back_misses"] = self.misses()

    def _disk_id(self, node: Node) -> str:
        return self.pool.getxattr(node.id, b"user.kvfuse.disk").decode()

    def _catalog_bytes(self) -> int:
        """Return the size of the catalog without free pages: that of its copy."""
        (copy,) = (self._base / "state").glob("*/catalog/data.mdb")
        return copy.stat().st_size

    def _lose_catalog(self) -> None:
        for above in ("state", "run"):
            for path in (self._base / above).glob("*/catalog*"):
                shutil.rmtree(path)


def _name(number: int) -> bytes:
    return b"block-%08d.bin" % number


def measure(
    variants: Sequence[Variant], files: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return the values of each round by variant; each round has disks with ids of their own."""
    found: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in variants}
    base = Path(tempfile.mkdtemp(prefix=f"kvfuse-bench.{os.getpid()}.", dir=_memory()))
    try:
        for turn in range(rounds):
            for variant in variants:
                note(f"round {turn + 1} of {rounds}: {variant.name}")
                trial = Trial(base / "pool", variant, files)
                try:
                    trial.make_disks()
                    found[variant.name].append(trial.run())
                finally:
                    trial.end()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return found


def _memory() -> Path:
    memory = Path("/dev/shm")  # noqa: S108 - a fresh directory is made in it
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def table(found: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the rows of the table: medians, with lowest and highest where rounds differ."""
    rows = []
    for measure_ in MEASURES:
        row = [measure_.title]
        for rounds in found.values():
            values = [values[measure_.key] for values in rounds if measure_.key in values]
            row.append(_cell(values, measure_.show))
        rows.append(row)
    return rows


def _cell(values: Sequence[float], show: Callable[[float], str]) -> str:
    if not values:
        return "-"
    low, middle, high = (show(f(values)) for f in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def report(found: dict[str, list[dict[str, float]]], files: int) -> bytes:
    """Return everything measured as JSON."""
    facts = {
        "version": __version__,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "disks": DISKS,
        "files": files,
        "variants": found,
    }
    return msgspec.json.format(msgspec.json.encode(facts), indent=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Half a minute: fewer files, one round.")
@click.option("--files", type=click.IntRange(100), help="Default 20000, with --quick 2000.")
@click.option("--rounds", type=click.IntRange(1), help="Default 5, with --quick 1.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
              help="Write every value there.")  # fmt: skip
def main(quick: bool, files: int | None, rounds: int | None, json_file: Path | None) -> None:
    """Compare placements on pools of eight disks: one more, one less, restarts.

    Prints medians over the rounds, with the lowest and highest. Progress is on stderr.
    """
    if os.geteuid() != 0:
        raise KernelError("the bench makes mounts; run it as root")
    files = files or (2000 if quick else 20_000)
    with ended_by_signals():
        found = measure(VARIANTS, files, rounds or (1 if quick else 5))
    headers = ["8 disks", *(f" {name}" for name in found)]
    show_table(headers, table(found), title=f"{files} files; one disk added, one removed")
    if json_file is not None:
        json_file.write_bytes(report(found, files))


if __name__ == "__main__":
    try:
        main(prog_name="scripts/bench-placement")
    except KvfuseError as exc:
        note(str(exc))
        sys.exit(exc.exit_code)
