"""A pool is the dictionary model, whatever is called in whatever order; also after a restart."""

from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.model import Directory, File, FileSystemMachine, Target
from tests.shell.pool_target import PoolTarget

BUDGET = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    # Told as it was found: to shrink it takes minutes on real disks, longer than a test may take.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def lies_on_a_disk(directory: Directory) -> bool:
    """Say whether a file or link lies below: other directories only the catalog knows."""
    return any(
        not isinstance(node, Directory) or lies_on_a_disk(node)
        for node in directory.children.values()
    )


def machine_in(parent: Path) -> type[FileSystemMachine]:
    """Return a machine whose every run has a new pool below *parent*."""

    class Machine(FileSystemMachine):
        runs = 0

        def make_target(self) -> Target:
            Machine.runs += 1
            base = parent / f"run{Machine.runs}"
            base.mkdir()
            self.pool = PoolTarget(base)
            return self.pool

        @rule(often=st.integers(0, 5))
        def restart(self, often: int) -> None:
            """A clean end and a new start change nothing."""
            if often:
                return
            self._close_files()
            self.pool.reopen()
            self._compare_all()

        def _close_files(self) -> None:
            while self.open_files:
                self.pool.close(self.open_files.pop()[0])

        def teardown(self) -> None:
            """Compare, then once more what the disks alone remember."""
            try:
                self._compare_all()
                self._close_files()
                self.pool.reopen(forget=True)
                self._compare_files()
            finally:
                self.pool.close_all()

        def _compare_files(self) -> None:
            for path, node in self.model.paths():
                if isinstance(node, File):
                    assert self.pool.read(path) == bytes(node.data), path
                    assert self.pool.xattrs(path) == node.xattrs, path
                    mode, nlink, _ = self.pool.stat(path)
                    assert (mode & 0o777, nlink) == (node.mode, node.nlink), path
                elif isinstance(node, Directory) and lies_on_a_disk(node):
                    found = set(self.pool.listing(path))
                    known = set(node.children)
                    assert found <= known, f"{path}: {found - known} came back"

    return Machine


def test_a_pool_is_the_model(tmp_path: Path) -> None:
    """Names, data, links, attributes and handles agree; files survive even without the catalog."""
    run_state_machine_as_test(machine_in(tmp_path), settings=BUDGET)
