"""The pool serves while its disks are read: nobody can tell, and in the end all is as it was."""

import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from kvfuse.pool.pool import Pool
from tests.shell.pools import (
    CALLER,
    Box,
    boxed,
    commit,
    files,
    find,
    ids,
    mkdir,
    node_of,
    read,
    rename,
    tree,
    unlink,
)  # fmt: skip

WORKERS = 3
DIRECTORIES = ("a", "a/b", "c", "c/d/e")
NAMES = 12  # of each worker in each directory
STEPS = 120


def names_of(worker: int) -> list[str]:
    return [f"{d}/w{worker}-{n}.bin" for d in DIRECTORIES for n in range(NAMES)]


def fill(box: Box) -> dict[str, bytes]:
    """Make files for all workers, and directories to be moved; return the contents."""
    pool = box.open()
    content: dict[str, bytes] = {}
    for directory in (*DIRECTORIES, "movers/m0/in", "movers/m1", "elsewhere"):
        mkdir(pool, directory)
    for worker in range(WORKERS):
        for path in names_of(worker)[::2]:
            content[path] = f"old {path}".encode()
    for path in ("movers/m0/in/f", "movers/m0/g", "movers/m1/h", "elsewhere/i"):
        for number in range(4):
            content[f"{path}{number}"] = f"old {path}{number}".encode()
    for path, data in content.items():
        commit(pool, path, data)
    return content


class Worker:
    """Does what clients do, on names nobody else uses; knows what must be there."""

    def __init__(self, pool: Pool, number: int, content: dict[str, bytes]) -> None:
        self.pool = pool
        self.names = names_of(number)
        self.content = {path: content[path] for path in self.names if path in content}
        self.random = random.Random(number)
        self.failure: BaseException | None = None

    def run(self) -> None:
        verbs: list[Callable[[str], None]] = [
            self.look, self.look, self.store, self.remove, self.move, self.list, self.link,
        ]  # fmt: skip
        try:
            for _ in range(STEPS):
                self.random.choice(verbs)(self.random.choice(self.names))
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            self.failure = exc

    def look(self, path: str) -> None:
        node = find(self.pool, path)
        if path in self.content:
            assert node is not None, f"{path}: is a miss"
            assert read(self.pool, path) == self.content[path], path
        else:
            assert node is None, f"{path}: is back"

    def store(self, path: str) -> None:
        data = f"new {path} {self.random.random()}".encode()
        commit(self.pool, path, data)
        self.content[path] = data

    def remove(self, path: str) -> None:
        if self.content.pop(path, None) is not None:
            unlink(self.pool, path)
        else:
            with pytest.raises(OSError) as raised:  # noqa: PT011 - its errno is what counts
                unlink(self.pool, path)
            assert raised.value.errno == errno.ENOENT

    def move(self, path: str) -> None:
        target = self.random.choice(self.names)
        if path in self.content and path != target:
            rename(self.pool, path, target)
            self.content[target] = self.content.pop(path)

    def list(self, path: str) -> None:
        directory = path.rpartition("/")[0]
        dir_id = node_of(self.pool, directory).id
        found = {os.fsdecode(e.name) for e in self.pool.readdir(dir_id, 0, 10_000)}
        mine = {p.rpartition("/")[2] for p in self.names if p.rpartition("/")[0] == directory}
        there = {p.rpartition("/")[2] for p in self.content if p.rpartition("/")[0] == directory}
        assert found & mine == there, directory

    def link(self, path: str) -> None:
        """Give a file a second name, and take the first away."""
        target = self.random.choice(self.names)
        if path in self.content and target not in self.content:
            self.pool.link(node_of(self.pool, path).id, *ids(self.pool, target))
            unlink(self.pool, path)
            self.content[target] = self.content.pop(path)


def move_directories(pool: Pool, content: dict[str, bytes]) -> dict[str, bytes]:
    """Rename, fill and remove directories; return what must be below them."""
    rename(pool, "movers/m0", "elsewhere/moved")
    rename(pool, "movers/m1/h0", "elsewhere/moved/h0")
    with pytest.raises(OSError) as raised:  # noqa: PT011 - its errno is what counts
        pool.rmdir(*ids(pool, "movers/m1"))
    assert raised.value.errno == errno.ENOTEMPTY
    mkdir(pool, "movers/m0")
    commit(pool, "movers/m0/g1", b"new")
    for number in (1, 2, 3):
        unlink(pool, f"movers/m1/h{number}")
    pool.rmdir(*ids(pool, "movers/m1"))
    found = {p: c for p, c in content.items() if p.startswith(("movers/", "elsewhere/"))}
    found = {p.replace("movers/m0", "elsewhere/moved"): c for p, c in found.items()}
    found["elsewhere/moved/h0"] = found.pop("movers/m1/h0")
    found = {p: c for p, c in found.items() if not p.startswith("movers/")}
    return found | {"movers/m0/g1": b"new"}


def work_against(box: Box, content: dict[str, bytes]) -> None:
    """Let clients race with the reading of the disks, then compare everything."""
    pool = box.pool
    assert pool is not None
    workers = [Worker(pool, number, content) for number in range(WORKERS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    moved = move_directories(pool, content)
    for thread in threads:
        thread.join()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
    wanted = moved
    for worker in workers:
        wanted = wanted | worker.content
    assert files(tree(pool)) == wanted
    assert pool.wait_complete(30)
    assert files(tree(pool)) == wanted, "what was read later changed something"
    box.check()
    pool = box.reopen()
    assert files(tree(pool)) == wanted
    box.drop()
    box.lose_catalog()
    pool = box.open()
    assert files(tree(pool)) == wanted, "the disks say something else"
    box.check()


def test_clients_race_with_stewards() -> None:
    """Lookups, stores, removals, renames and listings are right at every moment."""
    with boxed(3) as box:
        content = fill(box)
        box.drop()
        box.lose_catalog()
        box.open(at_once=True)
        work_against(box, content)


def test_everything_is_found_before_any_disk_is_read() -> None:
    """Without a single steward each verb takes in what it needs."""
    with boxed(3) as box:
        content = fill(box)
        box.drop()
        box.lose_catalog()
        pool = box.open(at_once=True)
        pool._scanner.stop(timeout_s=10)
        assert find(pool, "a/nothing") is None
        for path, data in content.items():
            assert read(pool, path) == data, path
        assert files(tree(pool)) == content


def test_stewards_are_killed_again_and_again() -> None:
    """A steward goes on where the one before it was killed."""
    with boxed(3) as box:
        content = fill(box)
        box.drop()
        box.lose_catalog()
        pool = box.open(at_once=True)
        ending = threading.Event()

        def kill() -> None:
            while not ending.wait(0.02):
                for pid in pool.status()["recovery"]["stewards"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        time.sleep(0.5)
        try:
            work_against_kept_open(pool, content)
        finally:
            ending.set()
            killer.join()
        assert pool.wait_complete(30)
        assert files(tree(pool)) == content
        assert pool.status()["recovery"]["state"] == "complete"
        box.check()


def work_against_kept_open(pool: Pool, content: dict[str, bytes]) -> None:
    for path, data in list(content.items())[::5]:
        assert read(pool, path) == data, path


def test_server_is_killed_while_disks_are_read() -> None:
    """The next one goes on reading; what was removed meanwhile does not come back."""
    with boxed(3) as box:
        content = fill(box)
        box.drop()
        box.lose_catalog()
        pool = box.open(at_once=True)
        pool._scanner.stop(timeout_s=10)
        for path in list(content)[:10]:
            unlink(pool, path)
            del content[path]
        commit(pool, "a/after", b"after")
        content["a/after"] = b"after"
        pool = box.reopen()
        assert files(tree(pool)) == content
        box.check()


def test_removed_name_does_not_come_back_from_a_disk_that_could_not_be_asked() -> None:
    """A disk that fails before it was read keeps nothing that was removed or renamed meanwhile."""
    with boxed(2) as box:
        content = fill(box)
        box.drop()
        box.lose_catalog()
        pool = box.open(at_once=True, upkeep=False)
        pool._scanner.stop(timeout_s=10)
        state = pool._state
        while state.slots[1].health.readable:
            state.note_error(1, errno.EIO)
        lost = [path for path in content if find(pool, path) is None]
        assert lost, "no file on that disk"
        for path in lost[:5]:
            commit(pool, path, b"newer")
            unlink(pool, path)
        found = mkdir(pool, "made/while")
        assert found.is_dir
        pool = box.reopen()
        now = files(tree(pool))
        assert not set(lost[:5]) & set(now)
        assert {path: content[path] for path in set(content) - set(lost[:5])} == now
        assert pool.create(*ids(pool, lost[0]), os.O_RDWR | os.O_EXCL, 0o644, CALLER)
