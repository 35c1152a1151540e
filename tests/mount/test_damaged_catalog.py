"""Noise in the catalog of a mount that is gone: the disks are read again, and no file is lost."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounting import Mounted

FILES = {f"{number}.bin": b"%d" % number * 1000 for number in range(20)}


def wait_until(is_so: Callable[[], bool]) -> None:
    """What is left of a mount that died may be taken for the new one."""
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def mounts(mount: Mounted) -> int:
    """Return how often the log says that it was mounted."""
    return mount.tail().count(f"kvfuse.daemon: {mount.path}: mounted, pool")


@pytest.mark.parametrize("clean", [True, False])
def test_noise_in_its_first_pages_costs_no_file(setup: str, clean: bool, tmp_path: Path) -> None:
    """After an unmount, and after the death of the supervisor and its server."""
    with Mounted(tmp_path, setup=setup) as mount:
        for name, data in FILES.items():
            (mount.path / f"{name}_1.tmp").write_bytes(data)
            os.rename(mount.path / f"{name}_1.tmp", mount.path / name)
        mounts_before = mounts(mount)
        if clean:
            mount.stop()
        else:
            mount.kill()
            mount.clean()
        catalogs = [*tmp_path.glob("run/*/catalog"), *tmp_path.glob("state/*/catalog")]
        assert catalogs
        for catalog in catalogs:
            with (catalog / "data.mdb").open("r+b") as data:
                data.write(os.urandom(2 * 4096))
        mount.start()
        wait_until(lambda: mounts(mount) > mounts_before)
        assert {name: (mount.path / name).read_bytes() for name in FILES} == FILES
        assert "the disks are scanned instead" in mount.tail()
