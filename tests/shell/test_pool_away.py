"""Whatever is done in whatever order, with disks that come and go: nothing stale, nothing back.

A dict knows what each name holds, and on which disk. While that disk is away the name is a miss.
"""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvfuse.pool.pool import Pool
from kvfuse.scan.scanner import Scanner
from tests.shell.pools import (
    boxed,
    commit,
    disk_path,
    files,
    find,
    ids,
    mkdir,
    node_of,
    read,
    rename,
    tree,
    unlink,
)

DISKS = 3
BUDGET = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
directories = st.sampled_from(("a", "b", "a/c", "b/c"))
paths = st.builds("{}/{}.bin".format, directories, st.integers(0, 3))


class Machine(RuleBasedStateMachine):
    """Drives a pool of three disks, of which one may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.box = self.stack.enter_context(boxed(DISKS))
        self.pool = self.open_box(self.box.paths)
        self.there = set(range(DISKS))
        self.holds: dict[str, tuple[bytes, int]] = {}  # path -> content, disk
        self.version = 0

    def open_box(self, disks: list[Path]) -> Pool:
        return self.box.open(disks)

    def teardown(self) -> None:
        try:
            self.remount("kill", set(range(DISKS)))
            assert files(tree(self.pool)) == self.seen()
            assert self.pool.wait_complete(30)
            self.box.check()
        finally:
            self.stack.close()

    def remount(self, how: str, there: set[int]) -> None:
        if how == "clean":
            self.box.close()
        else:
            self.box.drop()
        self.there = there
        self.pool = self.open_box([self.box.paths[number] for number in sorted(there)])

    def seen(self) -> dict[str, bytes]:
        return {path: data for path, (data, disk) in self.holds.items() if disk in self.there}

    def note(self, path: str, data: bytes) -> None:
        place = disk_path(self.pool, path)
        (disk,) = [n for n in self.there if place.is_relative_to(self.box.paths[n])]
        self.holds[path] = (data, disk)

    @rule(path=paths)
    def put(self, path: str) -> None:
        self.version += 1
        data = b"%d" % self.version
        mkdir(self.pool, path.rpartition("/")[0])
        commit(self.pool, path, data)
        self.note(path, data)

    @rule(path=paths)
    def remove(self, path: str) -> None:
        if path in self.seen():
            unlink(self.pool, path)
            del self.holds[path]

    @rule(old=paths, new=paths)
    def move(self, old: str, new: str) -> None:
        if old in self.seen() and old != new:
            mkdir(self.pool, new.rpartition("/")[0])
            rename(self.pool, old, new)
            self.holds[new] = self.holds.pop(old)

    @rule(old=st.sampled_from(("a", "b", "a/c", "b/c")), new=st.sampled_from(("a", "b", "b/c")))
    def move_directory(self, old: str, new: str) -> None:
        above = new.rpartition("/")[0]
        if find(self.pool, old) is None or find(self.pool, new) is not None:
            return
        if (above and find(self.pool, above) is None) or new.startswith(f"{old}/"):
            return
        rename(self.pool, old, new)
        for path in [path for path in self.holds if path.startswith(f"{old}/")]:
            self.holds[new + path.removeprefix(old)] = self.holds.pop(path)

    @rule(name=directories)
    def remove_directory(self, name: str) -> None:
        """One that seems empty goes with what is hidden in it."""
        node = find(self.pool, name)
        if node is not None and not self.pool.readdir(node.id, 0, 1):
            self.pool.rmdir(*ids(self.pool, name))
            for path in [path for path in self.holds if path.startswith(f"{name}/")]:
                del self.holds[path]

    @rule(path=paths)
    def read_while_removed(self, path: str) -> None:
        """An open file stays what it was whatever becomes of its name."""
        if path not in self.seen():
            return
        fh = self.pool.open(node_of(self.pool, path).id, os.O_RDONLY)
        data, _ = self.holds.pop(path)
        unlink(self.pool, path)
        assert self.pool.read(fh, 0, 99) == data
        self.pool.release(fh)

    @rule(how=st.sampled_from(("clean", "kill")), away=st.sampled_from((None, 0, 1, 2)))
    def restart(self, how: str, away: int | None) -> None:
        self.remount(how, set(range(DISKS)) - ({away} if away is not None else set()))

    @rule(how=st.sampled_from(("clean", "kill")))
    def lose_catalog(self, how: str) -> None:
        """What lies on a disk that is away is not believed when it returns."""
        self.box.findings()  # the disks that are there have done their chores
        if how == "clean":
            self.box.close()
        else:
            self.box.drop()
        self.box.lose_catalog()
        self.holds = {p: held for p, held in self.holds.items() if held[1] in self.there}
        self.pool = self.open_box([self.box.paths[number] for number in sorted(self.there)])

    @invariant()
    def nothing_stale(self) -> None:
        assert files(tree(self.pool)) == self.seen()


def test_nothing_stale_is_served_and_nothing_removed_returns() -> None:
    """Random verbs, restarts, lost catalogs, and disks that are away for a while."""
    run_state_machine_as_test(Machine, settings=BUDGET)


class EarlyMachine(Machine):
    """The same while disks are being read, or not yet: verbs take in what they need themselves."""

    def __init__(self) -> None:
        self.opened = 0
        super().__init__()

    def open_box(self, disks: list[Path]) -> Pool:
        self.opened += 1
        with pytest.MonkeyPatch.context() as patch:
            if self.opened % 4:
                patch.setattr(Scanner, "start", lambda _self: None)
            return self.box.open(disks, at_once=True)

    def teardown(self) -> None:
        self.opened = 3  # this time all is read
        super().teardown()

    @rule(path=paths)
    def look(self, path: str) -> None:
        held = self.seen().get(path)
        if held is None:
            assert find(self.pool, path) is None, f"{path}: is back"
        else:
            assert read(self.pool, path) == held

    @rule(often=st.integers(0, 7))
    def compare(self, often: int) -> None:
        if not often:
            assert files(tree(self.pool)) == self.seen()

    @invariant()
    def nothing_stale(self) -> None:
        """Asking for everything would take in everything."""


def test_nothing_stale_is_served_while_disks_are_read() -> None:
    """The same histories, but nobody waits until the disks have been read."""
    run_state_machine_as_test(EarlyMachine, settings=BUDGET)
