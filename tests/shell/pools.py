"""A real pool on real directories without FUSE: opened, killed, opened again, and checked."""

import contextlib
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from kvfuse.core.config import Config
from kvfuse.core.records import ROOT_ID, Caller, Node
from kvfuse.disks.diskset import DiskSet, DiskSpec, open_disks
from kvfuse.pool.check import Finding, Kind, check
from kvfuse.pool.pool import READ_FOR_S, AttrChanges, Pool, open_pool

CALLER = Caller(uid=0, gid=0, umask=0o022, pid=1)
COMPARISONS_MAX = 50
Tree = dict[str, bytes | str | None]  # path -> content, "-> target", or None for a directory


def ids(pool: Pool, path: str) -> tuple[int, bytes]:
    """Return (directory id, last name) of *path*; its directories must exist."""
    *above, name = path.encode().split(b"/")
    parent = ROOT_ID
    for part in above:
        node = pool.lookup(parent, part)
        assert node is not None, f"{path}: no {part!r}"
        parent = node.id
    return parent, name


def find(pool: Pool, path: str) -> Node | None:
    """Return the record at *path*, None when a lookup on the way fails."""
    node = pool.getattr(ROOT_ID)
    for part in path.encode().split(b"/"):
        found = pool.lookup(node.id, part)
        if found is None:
            return None
        node = found
    return node


def node_of(pool: Pool, path: str) -> Node:
    """Return the record at *path*, which must exist."""
    node = find(pool, path)
    assert node is not None, f"{path}: not there"
    return node


def mkdir(pool: Pool, path: str, mode: int = 0o755) -> Node:
    """Make a directory and those above it."""
    parent = pool.getattr(ROOT_ID)
    for part in path.encode().split(b"/"):
        found = pool.lookup(parent.id, part)
        parent = found or pool.mkdir(parent.id, part, mode, CALLER)
    return parent


def put(pool: Pool, path: str, data: bytes = b"data", mode: int = 0o644) -> Node:
    """Write a file under its name."""
    parent, name = ids(pool, path)
    node, fh = pool.create(parent, name, os.O_RDWR | os.O_TRUNC, mode, CALLER)
    try:
        if data:
            pool.write(fh, 0, data)
    finally:
        pool.release(fh)
    return node


def commit(pool: Pool, path: str, data: bytes = b"data") -> None:
    """Write a file under a temp name and rename it, as connectors do."""
    put(pool, f"{path}_7.tmp", data)
    rename(pool, f"{path}_7.tmp", path)


def read(pool: Pool, path: str) -> bytes:
    """Return the content of a file."""
    node = node_of(pool, path)
    fh = pool.open(node.id, os.O_RDONLY)
    try:
        data = pool.read(fh, 0, 1 << 20)
    finally:
        pool.release(fh)
    assert len(data) == node.size, f"{path}: {len(data)} bytes, stat says {node.size}"
    return data


def rename(pool: Pool, old: str, new: str, flags: int = 0) -> None:
    """Rename by path."""
    pool.rename(*ids(pool, old), *ids(pool, new), flags)


def unlink(pool: Pool, path: str) -> None:
    """Unlink by path."""
    pool.unlink(*ids(pool, path))


def truncate(pool: Pool, path: str, size: int) -> None:
    """Truncate by path."""
    pool.setattr(node_of(pool, path).id, AttrChanges(size=size))


def disk_path(pool: Pool, path: str) -> Path:
    """Return where a file lies on its disk."""
    return Path(os.fsdecode(pool.getxattr(node_of(pool, path).id, b"user.kvfuse.disk_path")))


def tree(pool: Pool) -> Tree:
    """Return all that clients see."""
    found: Tree = {}
    todo = [("", ROOT_ID)]
    while todo:
        above, dir_id = todo.pop()
        for entry in pool.readdir(dir_id, 0, 1 << 20):
            path = above + os.fsdecode(entry.name)
            node = pool.lookup(dir_id, entry.name)
            assert node is not None, f"{path}: listed, not found"
            assert node.id == entry.id, path
            if node.is_dir:
                found[path] = None
                todo.append((path + "/", node.id))
            elif node.is_symlink:
                found[path] = f"-> {os.fsdecode(pool.readlink(node.id))}"
            else:
                found[path] = read(pool, path)
    return found


def files(found: Tree) -> Tree:
    """Return *found* without directories: what survives the loss of the catalog."""
    return {path: content for path, content in found.items() if content is not None}


class Box:
    """The disks of a pool and the places of its state, and the pool while it is open."""

    def __init__(self, base: Path, disks: list[Path], *, placement: str = "rendezvous") -> None:
        self.base = base
        self.paths = disks
        self.placement = placement
        self.serve_displaced = True
        self.space: dict[str, object] = {"reserve": 0}
        self.recovery: dict[str, object] = {}
        self._uuids = itertools.count(1)  # the same for every box: names have the same owners
        self.pool: Pool | None = None
        self.disks: DiskSet | None = None

    def config(self, paths: list[Path]) -> Config:
        """Return the configuration of a mount of *paths*."""
        pool = {
            "mountpoint": str(self.base / "mnt"),
            "disks": [str(path) for path in paths],
            "state_dir": str(self.base / "state"),
            "run_dir": str(self.base / "run"),
            "placement": self.placement,
            "serve_displaced": self.serve_displaced,
            "allow_shared_device": True,
        }
        sections = {"pool": pool, "space": self.space, "recovery": self.recovery}
        return Config.model_validate(sections)

    def open(
        self, paths: list[Path] | None = None, *, upkeep: bool = True, at_once: bool = False
    ) -> Pool:
        """Open the pool. Without *upkeep* nothing happens but by the calls of the test.

        It is given with all disks read; *at_once*, while processes read them.
        """
        assert self.pool is None, "one at a time"
        paths = self.paths if paths is None else paths
        config = self.config(paths)
        self.disks = open_disks(
            [DiskSpec(str(path)) for path in paths],
            mountpoint=config.pool.mountpoint,
            state_dir=config.pool.state_dir,
            run_dir=config.pool.run_dir,
            allow_shared_device=True,
            init=True,
            new_uuid=lambda: str(uuid.UUID(int=next(self._uuids), version=4)),
        )
        try:
            self.pool = open_pool(config, self.disks, read_for_s=0 if at_once else READ_FOR_S)
        except BaseException:
            self.disks.close()
            raise
        assert at_once or self.pool.wait_complete(30), "the disks are not read"
        if not upkeep:
            self.pool._upkeep.stop(timeout_s=10)
        return self.pool

    def close(self, *, clean: bool = True) -> None:
        """End the mount as the daemon does."""
        assert self.pool is not None
        assert self.disks is not None
        self.pool.close(clean=clean)
        self.disks.close()
        self.pool = self.disks = None

    def drop(self) -> None:
        """Let go of everything as the kernel does for a daemon that was killed."""
        if self.pool is None or self.disks is None:
            return
        state = self.pool._state
        self.pool._reconciling.stop(timeout_s=10)
        assert self.pool._snapshots.stop(timeout_s=60)
        self.pool._scanner.stop(timeout_s=10)
        self.pool._upkeep.stop(timeout_s=10)
        for file in state.handles.all():
            os.close(file.fd)
        for carriers in state.carriers.values():
            carriers.close()
        state.catalog.close()
        self.disks.close()
        self.pool = self.disks = None

    def reopen(self, paths: list[Path] | None = None, *, upkeep: bool = True) -> Pool:
        """Open the pool again after the death of its daemon."""
        self.drop()
        return self.open(paths, upkeep=upkeep)

    def catalogs(self) -> list[Path]:
        """Return the directories of the live catalog and of its copy."""
        return [p for p in self.base.glob("[rs]*/*/catalog") if p.is_dir()]

    def lose_catalog(self) -> None:
        """Delete the live catalog and its copy, while nothing is open."""
        assert self.pool is None
        for path in self.catalogs():
            shutil.rmtree(path)

    def findings(self) -> list[Finding]:
        """Return all findings on the open pool, after its backlogs are done.

        Its evictors may be at work: what was compared counts only if nothing changed meanwhile.
        """
        assert self.pool is not None
        state = self.pool._state
        disks = {number: carriers.disk for number, carriers in state.carriers.items()}
        for _ in range(COMPARISONS_MAX):
            for number, carriers in state.carriers.items():
                if state.slots[number].health.writable:
                    carriers.drain()
            seen = self._catalog_number()
            found = check(state.catalog, disks)
            if self._catalog_number() == seen:
                return found
        raise AssertionError("the pool never rests")

    def _catalog_number(self) -> int:
        with self.pool._state.catalog.read() as txn:
            return txn.number

    def check(self, *, allowed: tuple[Kind, ...] = ()) -> None:
        """Hold the catalog against itself and the disks; only *allowed* kinds may be found."""
        wrong = [found for found in self.findings() if found.kind not in allowed]
        assert not wrong, "\n".join(map(str, wrong))


def make_box(base: Path, count: int = 2, *, placement: str = "rendezvous") -> Box:
    """Return a box with *count* empty directories for disks below *base*."""
    disks = [base / f"disk{number}" for number in range(count)]
    for disk in disks:
        disk.mkdir()
    return Box(base, disks, placement=placement)


@contextlib.contextmanager
def boxed(count: int = 2, *, placement: str = "rendezvous") -> Iterator[Box]:
    """Give a box in memory, and let go of it at the end."""
    base = Path(tempfile.mkdtemp(prefix="kvfuse-pool-", dir="/dev/shm"))
    box = make_box(base, count, placement=placement)
    try:
        yield box
    finally:
        box.drop()
        shutil.rmtree(base, ignore_errors=True)
