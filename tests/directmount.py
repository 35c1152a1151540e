"""A mount by the direct driver with any of its options, and a line to ask its process.

As a program: ``python -m tests.directmount BASE JSON`` mounts at ``BASE/mount`` and answers each
line of its standard input with a line of JSON:

* ``counters``: requests by kind
* ``ids``: backing ids in use, open handles, and why there is no passthrough
* ``changed PARENT NAME`` / ``expired PARENT NAME``: a notification about a name
* ``epoch``: the notification about every name
* ``timeouts``: disks that were noted for a timeout
* ``handles``: how many files the pool has open
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROJECT = Path(__file__).resolve().parents[1]
END_S = 30.0


class DirectMount:
    """A pool mounted at ``path`` from ``with`` to its end.

    *by_fusermount* mounts and unmounts as a process without privilege does.
    """

    def __init__(
        self,
        base: Path,
        disks: Sequence[Path] | int = 2,
        *,
        by_fusermount: bool = False,
        **options: object,
    ) -> None:
        self.base = base
        self.path = base / "mount"
        if isinstance(disks, int):
            disks = [base / f"disk{number}" for number in range(disks)]
        self.disks = list(disks)
        self._options = options
        self._by_fusermount = by_fusermount
        self._log = base / "daemon.log"

    def __enter__(self) -> Self:
        for directory in (self.base, self.path, *self.disks):
            directory.mkdir(parents=True, exist_ok=True)
        what = {
            "disks": [str(disk) for disk in self.disks],
            "options": self._options,
            "by_fusermount": self._by_fusermount,
        }
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.directmount", str(self.base), json.dumps(what)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=PROJECT, text=True,
            )  # fmt: skip
        if self._line() != "ready":
            self._end()
            raise AssertionError(f"not mounted:\n{self.log()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # the end of its input is the end of the mount
        code = self._end()
        if kind is None:
            assert code == 0, f"exit code {code}:\n{self.log()}"
            assert not os.path.ismount(self.path)

    def _end(self) -> int:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        subprocess.run(["umount", "-l", self.path], check=False, capture_output=True)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return code

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def log(self) -> str:
        """Return what the process logged."""
        return self._log.read_text()

    def ask(self, *words: object) -> Any:
        """Send a command and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def counts(self) -> dict[str, int]:
        """Return how many requests of each kind were answered."""
        return {op: counter["requests"] for op, counter in self.ask("counters").items()}

    @contextlib.contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """Give a dictionary that holds, after the block, the requests made in it, by kind.

        FORGET is left out: it comes when the kernel likes.
        """
        before = self.counts()
        counted: dict[str, int] = {}
        yield counted
        for op, requests in self.counts().items():
            more = requests - before.get(op, 0)
            if more and "forget" not in op:
                counted[op] = more

    def name_on(self, number: int, prefix: str = "") -> str:
        """Return a name in the root directory, not there yet, whose file goes to disk *number*."""
        for attempt in range(1000):
            name = f"{prefix}{attempt}"
            (self.path / name).write_bytes(b"")
            found = (self.disks[number] / name).exists()
            (self.path / name).unlink()
            if found:
                return name
        raise AssertionError(f"no name goes to disk {number}")


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def settled(mounted: DirectMount) -> None:
    """Wait until every RELEASE has arrived: they come after close has returned."""
    for _ in range(500):
        state = mounted.ask("ids")
        if state["open"] == 0 and not state["backing"]:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"still open: {state}")


def _answer(session: Any, timeouts: list[int], words: list[str]) -> object:
    match words:
        case ["counters"]:
            return session.counters()
        case ["ids"]:
            modes = session._modes
            return {
                "backing": modes.backing_ids,
                "open": len(modes),
                "obstacle": session.obstacle,
                "refusals": modes.refusals,
            }
        case ["changed", parent, name]:
            session.notices.name_changed(None, int(parent), os.fsencode(name))
        case ["expired", parent, name]:
            session.notices.name_expired(None, int(parent), os.fsencode(name))
        case ["epoch"]:
            return session.notices.everything_changed()
        case ["timeouts"]:
            return timeouts
        case ["handles"]:
            return len(session._pool.handles)
    return None


def main() -> None:
    """Serve until the standard input ends, or somebody unmounts."""
    from kvfuse.core.config import parse
    from kvfuse.disks.diskset import DiskSpec, open_disks
    from kvfuse.drivers.direct import device
    from kvfuse.drivers.direct.session import DirectOptions, DirectSession
    from kvfuse.pool.pool import open_pool
    from kvfuse.system.stop import Stop

    logging.basicConfig(level=logging.INFO)
    base, what = Path(sys.argv[1]), json.loads(sys.argv[2])
    mountpoint = str(base / "mount")
    flags = {
        "pool.mountpoint": mountpoint,
        "pool.disks": what["disks"],
        "pool.state_dir": str(base / "state"),
        "pool.run_dir": str(base / "run"),
        "pool.allow_shared_device": True,
    }
    config = parse(None, source="test", environment={}, flags=flags).config
    disks = open_disks(
        [DiskSpec(disk.path, disk.weight, disk.mode) for disk in config.pool.disks],
        mountpoint=mountpoint, state_dir=config.pool.state_dir, run_dir=config.pool.run_dir,
        require_all=False, allow_shared_device=True, init=True,
    )  # fmt: skip
    (base / "run" / disks.pool_id).mkdir(parents=True, exist_ok=True)
    pool = open_pool(config, disks)
    if what["by_fusermount"]:
        device.may_mount = lambda: False
    timeouts: list[int] = []
    note_timeout = pool.note_timeout
    pool.note_timeout = lambda number: (timeouts.append(number), note_timeout(number))[1]
    session = DirectSession(pool, mountpoint, DirectOptions(**what["options"]))
    stop = Stop()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def obey() -> None:
        for line in sys.stdin:
            say(json.dumps(_answer(session, timeouts, line.split())))
        stop.request()

    threading.Thread(target=obey, daemon=True).start()
    session.serve(lambda: say("ready"), stop)
    pool.close()
    disks.close()
    os._exit(0)  # a thread that a disk keeps does not keep the process


if __name__ == "__main__":
    main()
