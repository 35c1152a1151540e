"""llm-d's pvc_evictor: crawls the tree, deletes by access time, removes empty directories."""

import os
import subprocess
import time
from pathlib import Path

from tests.connectors.llmd import block_path, store
from tests.connectors.place import Place, payload, sequence
from tests.mount.steps.registry import tick

HEX = set("0123456789abcdef")


def crawl(models: Path) -> list[tuple[Path, float]]:
    """Return each ``.bin`` file with its access time, found the way a crawler does."""
    found = []
    for model in os.scandir(models):
        if not model.is_dir():
            continue
        for bucket in os.scandir(model.path):
            if not (bucket.is_dir() and set(bucket.name) <= HEX and 2 <= len(bucket.name) <= 4):
                continue
            with os.scandir(bucket.path) as probe:
                if next(probe, None) is None:
                    continue
            for second in os.scandir(bucket.path):
                if not second.is_dir():
                    continue
                found += [
                    (Path(entry.path), os.stat(entry.path).st_atime)
                    for entry in os.scandir(second.path)
                    if entry.is_file() and entry.name.endswith(".bin")
                ]
    return found


def delete(paths: list[Path]) -> None:
    """Delete a batch through ``xargs -0 rm -f``, then empty parents upwards."""
    for path in paths:
        assert os.path.exists(path)
        assert os.stat(path).st_size > 0
    names = b"\0".join(os.fsencode(path) for path in paths)
    subprocess.run(["xargs", "-0", "rm", "-f"], input=names, check=True, timeout=60)
    for path in paths:
        parent = path.parent
        for _ in range(2):
            try:
                os.rmdir(parent)
            except OSError:
                break
            parent = parent.parent


def _fill(root: Path, count: int) -> Path:
    base = root / "models" / "m_0123456789ab_r0"
    for number in range(count):
        store(block_path(base, number), payload(4096, number), number)
    return base


@sequence
def crawls_and_deletes_what_was_not_read(place: Place) -> None:
    base = _fill(place.root, 120)
    stray = block_path(base, 0).with_name("left.bin_1.tmp")
    stray.write_bytes(b"x")
    found = crawl(place.root / "models")
    assert len(found) == 120
    assert all(abs(time.time() - atime) < 3600 for _, atime in found)
    old = time.time() - 7200
    for path, _ in found[:100]:
        os.utime(path, (old, old))
    victims = [path for path, atime in crawl(place.root / "models") if time.time() - atime > 3600]
    assert len(victims) == 100

    delete(victims)

    left = crawl(place.root / "models")
    assert len(left) == 20
    assert stray.exists()
    delete([path for path, _ in left])
    assert crawl(place.root / "models") == []


@sequence
def reading_moves_the_access_time(place: Place) -> None:
    base = _fill(place.root, 3)
    path = block_path(base, 1)
    before = os.stat(path).st_atime_ns
    tick()
    with open(path, "rb") as stream:
        stream.read()
    # pyfuse3 may leave a stat to the kernel for a second; the evictor thinks in minutes
    deadline_s = time.monotonic() + 5
    while os.stat(path).st_atime_ns <= before:
        assert time.monotonic() < deadline_s, "the access time does not move"
        time.sleep(0.1)
    assert {p.name for p, atime in crawl(place.root / "models") if atime >= before / 1e9} >= {
        path.name
    }


@sequence
def deleting_twice_is_harmless(place: Place) -> None:
    base = _fill(place.root, 2)
    path = block_path(base, 0)
    delete([path])
    subprocess.run(["xargs", "-0", "rm", "-f"], input=os.fsencode(path), check=True, timeout=60)
    store(path, payload(10), 1)
    assert path.read_bytes() == payload(10)


@sequence
def used_share_falls_as_files_are_deleted(place: Place) -> None:
    def used_blocks() -> int:
        os.sync()
        space = os.statvfs(place.root)
        return space.f_blocks - space.f_bfree

    base = place.root / "models" / "m_r0"
    before = used_blocks()
    for number in range(4):
        store(block_path(base, number), payload(5 << 20, number), 1)
    during = used_blocks()
    delete([path for path, _ in crawl(place.root / "models")])
    assert during - before >= 4 * (5 << 20) // 4096 * 9 // 10
    assert during - used_blocks() >= 4 * (5 << 20) // 4096 * 9 // 10
