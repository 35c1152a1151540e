"""Run LMCache's C++ client ``fs_native`` on a directory: ``python lmcache_fs_native.py DIR``.

Stores, finds, loads and deletes batches, buffered and with O_DIRECT, with and without a temp
directory, from two clients at once. Ends with exit code 0 and one line for each round.
"""

import hashlib
import mmap
import os
import select
import sys
import threading
import time
from pathlib import Path

import torch  # noqa: F401 - the extension needs its libraries loaded
from lmcache.lmcache_fs import LMCacheFSClient

CHUNK_BYTES = 2 << 20
KEYS = 24
TIMEOUT_S = 60.0


class Client:
    """A native client whose batches are waited for."""

    def __init__(self, directory: Path, *, temp: str, direct: bool) -> None:
        self._client = LMCacheFSClient(str(directory), 4, temp, direct, 0)
        self._poller = select.poll()
        self._poller.register(self._client.event_fd(), select.POLLIN)

    def wait(self, future: int) -> list[bool]:
        """Return the answers of the batch *future*, by key."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._poller.poll(500)
            for done, ok, error, answers in self._client.drain_completions():
                assert done == future, f"an answer to {done}, which nobody waits for"
                assert ok, f"batch failed: {error}"
                return list(answers or [])
        raise AssertionError(f"no completion within {TIMEOUT_S} s")

    def store(self, keys: list[str], buffers: list[mmap.mmap]) -> None:
        """Store one buffer for each key."""
        self.wait(self._client.submit_batch_set(keys, [memoryview(b) for b in buffers]))

    def load(self, keys: list[str], buffers: list[mmap.mmap]) -> list[bool]:
        """Load each key into a buffer."""
        return self.wait(self._client.submit_batch_get(keys, [memoryview(b) for b in buffers]))

    def exists(self, keys: list[str]) -> list[bool]:
        """Tell which keys are there."""
        return self.wait(self._client.submit_batch_exists(keys))

    def delete(self, keys: list[str]) -> list[bool]:
        """Delete keys."""
        return self.wait(self._client.submit_batch_delete(keys))

    def close(self) -> None:
        """End the client's threads."""
        self._client.close()


def key(label: str, number: int) -> str:
    """Return a key as LMCache writes them."""
    digest = hashlib.sha256(f"{label}{number}".encode()).hexdigest()
    return f"meta-llama/Llama-3.1-8B-Instruct@01000100@0@{digest}"


def filled(seed: str) -> mmap.mmap:
    """Return a page-aligned chunk of bytes that *seed* determines."""
    memory = mmap.mmap(-1, CHUNK_BYTES)
    pattern = hashlib.sha256(seed.encode()).digest() * 128
    memory[:] = pattern * (CHUNK_BYTES // len(pattern))
    return memory


def round_trip(directory: Path, label: str, *, temp: str, direct: bool) -> None:
    """Store, find, load, overwrite and delete one batch."""
    client = Client(directory, temp=temp, direct=direct)
    keys = [key(label, number) for number in range(KEYS)]
    chunks = [filled(f"{label}{number}") for number in range(KEYS)]
    assert client.exists(keys) == [False] * KEYS
    client.store(keys, chunks)
    assert client.exists(keys) == [True] * KEYS
    client.store(keys[:4], chunks[:4])
    loaded = [mmap.mmap(-1, CHUNK_BYTES) for _ in keys]
    assert client.load(keys, loaded) in ([True] * KEYS, [])
    assert [m[:] for m in loaded] == [m[:] for m in chunks]
    missing = [key(label, 1000 + number) for number in range(4)]
    mixed = client.exists([keys[0], missing[0], keys[1], missing[1]])
    assert mixed == [True, False, True, False]
    client.delete(keys[: KEYS // 2])
    assert client.exists(keys) == [False] * (KEYS // 2) + [True] * (KEYS - KEYS // 2)
    client.close()


def two_engines(directory: Path) -> None:
    """Two clients store the same and different keys at once; whoever finds a key loads it whole."""
    shared = [key("shared", number) for number in range(8)]
    chunks = [filled(f"shared{number}") for number in range(8)]
    failures: list[BaseException] = []

    def work(engine: int) -> None:
        try:
            client = Client(directory, temp=f"tmp{engine}", direct=False)
            own = [key(f"own{engine}", number) for number in range(8)]
            client.store(own, chunks)
            client.store(shared, chunks)
            loaded = [mmap.mmap(-1, CHUNK_BYTES) for _ in shared]
            client.load(shared, loaded)
            assert [m[:] for m in loaded] == [m[:] for m in chunks]
            client.close()
        except BaseException as exc:  # noqa: BLE001 - told by the main thread
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(engine,)) for engine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def main(root: Path) -> None:
    """Run every round below *root*."""
    for temp in ("", "tmp"):
        for direct in (False, True):
            label = f"temp={temp or 'beside'} direct={direct}"
            directory = root / f"fs_native-{temp}-{direct}"
            directory.mkdir()
            round_trip(directory, label, temp=temp, direct=direct)
            left = [n for n in os.listdir(directory) if n.endswith(".tmp")]
            assert not left, f"temps left: {left}"
            print(f"lmcache fs_native: {label}: ok")  # noqa: T201
    shared = root / "fs_native-shared"
    shared.mkdir()
    two_engines(shared)
    print("lmcache fs_native: two engines: ok")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
