"""What older kernels cannot do is done otherwise or refused, and said."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvfuse import doctor
from kvfuse.drivers.direct import abi
from tests.directmount import DirectMount
from tests.mount.test_restart import Load, check, server, wait_until
from tests.mounting import PROJECT, Mounted, runnable_setups

BUILD = PROJECT / "tests" / "builds" / "oldkernel"
ALL = (1 << 64) - 1
KERNELS: dict[str, dict[str, int]] = {
    "6.8": {"mask_flags": ALL & ~abi.PASSTHROUGH & ~abi.HAS_RESEND, "minor_max": 39},
    "6.11": {"mask_flags": ALL, "minor_max": 40},
}
MIB = 1 << 20

pytestmark = pytest.mark.fuse


@pytest.fixture(autouse=True)
def _direct() -> None:
    if (obstacle := runnable_setups()["direct"]) is not None:
        pytest.skip(obstacle)


def mounted(base: Path, kernel: str) -> Mounted:
    """A mount whose servers take the kernel for *kernel*."""
    return Mounted(
        base, 2, setup="direct", build=BUILD,
        environment={"KVFUSE_TEST_KERNEL": json.dumps(KERNELS[kernel])},
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_open_for_writing_is_written_through_the_server(
    tmp_path: Path, kernel: str
) -> None:
    """Before Linux 6.12 the kernel would not see the file grow; reads it passes from 6.9 on."""
    data = os.urandom(3 * MIB)
    with DirectMount(tmp_path, 1, **KERNELS[kernel]) as mount:
        with mount.counted() as writing, (mount.path / "file").open("wb") as file:
            file.write(data)
            file.flush()
            assert os.fstat(file.fileno()).st_size == len(data)
        with mount.counted() as reading:
            read = subprocess.run(["cat", mount.path / "file"], capture_output=True, check=True)
            assert read.stdout == data
        obstacle = mount.ask("ids")["obstacle"]

    assert writing["write"] >= 3
    if kernel == "6.8":
        assert "Linux 6.9" in obstacle
    else:
        assert obstacle is None
        assert "read" not in reading


def test_linux_6_8_has_neither_passthrough_nor_hot_restart_and_says_so(tmp_path: Path) -> None:
    """A killed server is followed by one that mounts anew; an upgrade is refused with the cause."""
    with mounted(tmp_path, "6.8") as mount:
        (mount.path / "file").write_bytes(b"data")
        pool = mount.status()["pool"]
        assert not pool["passthrough"]
        assert "Linux 6.9" in pool["passthrough_obstacle"]
        refused = subprocess.run(
            [sys.executable, "-m", "kvfuse", "upgrade", str(mount.path)], cwd=PROJECT,
            capture_output=True, text=True, check=False, env={
                **os.environ, "KVFUSE_POOL_RUN_DIR": str(mount.base / "run"),
            },
        )  # fmt: skip
        assert refused.returncode == 1
        assert "cannot be handed over" in refused.stderr
        assert "Linux 6.9" in refused.stderr
        with (mount.path / "file").open("rb") as held:
            before = server(mount)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: server(mount) != before)
            with pytest.raises(OSError, match="not connected"):
                os.read(held.fileno(), 4)
        assert (mount.path / "file").read_bytes() == b"data"


@pytest.mark.slow
def test_linux_6_11_has_a_hot_restart(tmp_path: Path) -> None:
    """With files written through the server: no call fails when it is killed."""
    with mounted(tmp_path, "6.11") as mount:
        assert mount.status()["pool"]["passthrough"]
        load = Load(mount, 2)
        try:
            for _ in range(2):
                before = server(mount)
                os.kill(before, signal.SIGKILL)
                wait_until(lambda before=before: server(mount) != before)
            time.sleep(2)  # two kills are over in a second: let every client do its share
            told = load.end()
        finally:
            load.kill()
        check(told)


@pytest.mark.parametrize(
    ("release", "texts"),
    [
        ("5.15.0-91-generic", ["no passthrough", "no hot restart"]),
        ("6.8.12", ["no passthrough", "no hot restart"]),
        ("6.9.0", ["opened for writing are not passed through"]),
        ("6.11.11-amd64", ["opened for writing are not passed through"]),
        ("6.12.0", []),
    ],
)
def test_doctor_says_what_a_kernel_lacks(release: str, texts: list[str]) -> None:
    """By its release alone, with the kernel to install instead."""
    told = doctor.check_kernel(release)
    assert all(text in told.text for text in texts), told
    assert told.level == ("warn" if texts else "ok")
    assert "Linux 6.12" in told.remedy or not texts
