"""Clients that write a mount over and over, and clients that read what they wrote.

Each byte read is compared. A lookup that said yes must be followed, within the lease, by a load
that succeeds; a file that is not there any more is a miss and no failure.
"""

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 1 << 20
_LEASE_USED = 0.8  # of a lease, at most, between a lookup and its load
_HEAD_BYTES = 40


class Flood:
    """One flood of *total_bytes* below *path*."""

    def __init__(
        self,
        path: Path,
        total_bytes: int,
        *,
        largest_bytes: int,
        lease_s: float,
        writers: int = 8,
        readers: int = 3,
        seed: int = 1,
    ) -> None:
        self.path = path
        self.failures: list[str] = []
        self.reads = 0
        self.misses = 0
        self.written_bytes = 0
        self.also: Callable[[], bool] = lambda: True  # asked all the time; False is a failure
        self._total_bytes = total_bytes
        self._largest_blocks = max(1, largest_bytes // BLOCK_BYTES)
        self._lease_s = lease_s
        self._writers, self._readers, self._seed = writers, readers, seed
        self._names: list[str] = []
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._block = random.Random(seed).randbytes(BLOCK_BYTES)

    def run(self) -> None:
        """Write it all; return when every client has ended."""
        for number in range(3):
            (self.path / f"d{number}").mkdir(exist_ok=True)
        writers = [self._thread(self._write, n) for n in range(self._writers)]
        others = [self._thread(self._read, n) for n in range(self._readers)]
        others.append(self._thread(self._ask_also, 0))
        for thread in writers:
            thread.join()
        self._stop.set()
        for thread in others:
            thread.join()

    def _thread(self, target: Callable[[int], None], number: int) -> threading.Thread:
        def run() -> None:
            try:
                target(number)
            except Exception as exc:  # noqa: BLE001 - the test shows it
                self._fail(f"{target.__name__} {number}: {exc!r}")

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        if len(self.failures) > 20:
            self._stop.set()

    def _head(self, name: str, size: int) -> bytes:
        return size.to_bytes(8, "little") + hashlib.sha256(name.encode()).digest()

    def _write(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        for count in range(1 << 30):
            with self._mutex:
                if self.written_bytes >= self._total_bytes or self._stop.is_set():
                    return
            blocks = rng.randint(1, self._largest_blocks)
            name = f"d{number % 3}/w{number}-{count}.data"
            temp = self.path / f"{name}_{count}.tmp"
            try:
                with temp.open("xb", buffering=0) as file:
                    head = self._head(name, blocks * BLOCK_BYTES)
                    file.write(head + self._block[_HEAD_BYTES:])
                    for _ in range(blocks - 1):
                        file.write(self._block)
                os.rename(temp, self.path / name)
            except OSError as exc:
                self._fail(f"store {name}: {exc!r} {exc.filename or 'in a write'}")
                continue
            with self._mutex:
                self.written_bytes += blocks * BLOCK_BYTES
                self._names.append(name)

    def _read(self, number: int) -> None:
        rng = random.Random(f"{self._seed} -{number}")
        while not self._stop.is_set():
            with self._mutex:
                recent = self._names[-80:]
                names = recent if rng.random() < 0.7 else self._names
                name = rng.choice(names or [""])
            if not name:
                time.sleep(0.01)
                continue
            began_s = time.monotonic()
            if not (self.path / name).exists():
                self.misses += 1
                continue
            if rng.random() < 0.5:
                time.sleep(rng.random() * _LEASE_USED * self._lease_s)
            self._load(name, began_s)

    def _load(self, name: str, began_s: float) -> None:
        try:
            data = (self.path / name).read_bytes()
        except OSError as exc:
            if time.monotonic() - began_s < self._lease_s:  # else this machine was too slow
                self._fail(f"lookup said yes, load of {name}: {exc!r}")
            return
        self.reads += 1
        size = len(data)
        if data[:_HEAD_BYTES] != self._head(name, size):
            self._fail(f"{name}: wrong head, or {size} bytes long")
        body = data[_HEAD_BYTES:]
        blocks = size // BLOCK_BYTES
        if body != (self._block * blocks)[_HEAD_BYTES:]:
            self._fail(f"{name}: wrong bytes")

    def _ask_also(self, _number: int) -> None:
        while not self._stop.wait(0.1):
            if not self.also():
                self._fail("what was asked besides is not so")
