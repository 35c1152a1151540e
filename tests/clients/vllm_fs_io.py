"""Run vLLM's fs-tier I/O on a directory: ``python vllm_fs_io.py DIR``.

Both its C and its Python path: probe, store, look up and load batches of blocks from many threads
and from several processes. Ends with exit code 0 and one line for each round.
"""

import hashlib
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401 - the C part needs its libraries loaded
from vllm.v1.kv_offload.tiering.fs import io

BLOCK_BYTES = 1 << 20
BLOCKS = 16
THREADS = 8
LOOKUPS = 8192
PROCESSES = 2


def path(base: Path, number: int) -> str:
    """Return the place of a block: two directories of fan-out."""
    digits = hashlib.sha256(b"%d" % number).hexdigest()
    return str(base / digits[:3] / f"{digits[3:5]}_g0" / f"{digits}.bin")


def fill(view: memoryview, numbers: list[int]) -> None:
    """Fill one block after the other with what its number determines."""
    for index, number in enumerate(numbers):
        pattern = hashlib.sha256(b"block %d" % number).digest() * 128
        start = index * BLOCK_BYTES
        view[start : start + BLOCK_BYTES] = pattern * (BLOCK_BYTES // len(pattern))


def store_and_load(base: Path, numbers: list[int], *, direct: bool) -> None:
    """Store *numbers* in one batch, load them in another, compare."""
    paths = [path(base, number) for number in numbers]
    offsets = [index * BLOCK_BYTES for index in range(len(numbers))]
    memory = mmap.mmap(-1, BLOCK_BYTES * len(numbers))
    view = memoryview(memory)
    fill(view, numbers)
    io.batch_store_block(paths, view, offsets, BLOCK_BYTES, direct)
    wanted = bytes(view)
    view[:] = bytes(len(view))
    io.batch_load_block(paths, view, offsets, BLOCK_BYTES, direct)
    assert bytes(view) == wanted, "what was loaded is not what was stored"


def look_up(base: Path) -> None:
    """Look up thousands of blocks in one batch, of which few are there, twice."""
    from vllm.fs_io_C import batch_lookup

    numbers = range(LOOKUPS)
    for _ in range(2):
        found = batch_lookup([path(base, number) for number in numbers])
        assert found == [number < BLOCKS for number in numbers]


def misses_and_short_files(base: Path) -> None:
    """A missing block says how many came before; a short one is removed by its reader."""
    good, short, missing = path(base, 1), path(base, 90_001), path(base, 90_002)
    view = memoryview(mmap.mmap(-1, BLOCK_BYTES * 2))
    for second in (missing, short):
        if second == short:
            os.makedirs(os.path.dirname(short), exist_ok=True)
            Path(short).write_bytes(b"x" * 1000)
        try:
            io.batch_load_block([good, second], view, [0, BLOCK_BYTES], BLOCK_BYTES, False)
        except OSError as exc:
            assert exc.num_succeeded == 1, exc  # type: ignore[attr-defined]  # noqa: PT017
        else:
            raise AssertionError("loading it must fail")
    assert not os.path.exists(short), "the short file is still there"


def worker(base: Path, process: int, direct: bool, in_c: bool) -> None:
    """Work as one engine: most blocks its own, some shared with the others."""
    io._HAS_FSIO_C = in_c
    with ThreadPoolExecutor(THREADS) as pool:
        rounds = [
            pool.submit(
                store_and_load,
                base,
                [
                    n if n % 4 == 0 else (process * 100 + thread) * 100 + n
                    for n in range(BLOCKS // 4)
                ],
                direct=direct,
            )
            for thread in range(THREADS)
        ]
        for done in rounds:
            done.result()


def rounds(root: Path, label: str) -> None:
    """Run everything once below *root*."""
    direct = io.probe_o_direct(str(root))
    base = root / f"blocks-{label}"
    for mode in sorted({False, direct}):
        store_and_load(base / str(mode), list(range(BLOCKS)), direct=mode)
        if io._HAS_FSIO_C:
            look_up(base / str(mode))
        shared = base / f"shared-{mode}"
        in_c = io._HAS_FSIO_C
        _together(worker, [(shared, process, mode, in_c) for process in range(PROCESSES)])
    misses_and_short_files(base / "False")
    temps = [name for _, _, names in os.walk(base) for name in names if name.endswith(".tmp")]
    assert not temps, f"temps left: {temps}"
    print(f"vllm fs tier: {label}: ok, O_DIRECT {'works' if direct else 'refused'}")  # noqa: T201


def _together(function: Callable[..., None], calls: list[tuple[object, ...]]) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=function, args=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def main(root: Path) -> None:
    """Run the C path where there is one, then the Python path."""
    assert io._HAS_FSIO_C, "the C part cannot be loaded"
    rounds(root, "C")
    io._HAS_FSIO_C = False
    rounds(root, "Python")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
