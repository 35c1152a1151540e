"""Each connector's sequence of syscalls, on a native directory and on the mount."""

import os
import uuid
from pathlib import Path

import pytest

from tests.connectors.place import SEQUENCES, Capabilities, Place
from tests.connectors.sglang import page_path, set_page
from tests.mounting import Mounted

CAPABILITIES = {
    "pyfuse3": Capabilities(fallocate=False, seek_data=False, beyond_disk=False),
    "direct": Capabilities(beyond_disk=False),
    "direct-nopass": Capabilities(beyond_disk=False),
}

FINAL = "meta-llama-SEP-Llama@0x01@0@{hex}.data"
HEX = "{number:032x}"
# Each temp form from which the final name can be derived: (temp, final).
DERIVABLE = {
    "vllm": ("{hex}.bin_9223372036854775807.tmp", "{hex}.bin"),
    "llmd": ("{hex}.bin_4294967295.tmp", "{hex}.bin"),
    "lmcache": ("m@0@{hex}.tmp", "m@0@{hex}.data"),
    "lmcache_nixl": ("m@{hex}.data.tmp.0123456789abcdef0123456789abcdef", "m@{hex}.data"),
    "lmcache_gds": ("{hex}.kvcache.safetensors.tmp0a1b2c3d", "{hex}.kvcache.safetensors"),
    "lmcache_gds_metadata": (
        "{hex}.kvcache.safetensors.metadata.tmp0a1b2c3d",
        "{hex}.kvcache.safetensors.metadata",
    ),
    "lmcache_proposed": ("m@{hex}.data.0123456789abcdef0123456789abcdef.tmp", "m@{hex}.data"),
    "older_sglang": (
        "{hex}_m_0_1.bin.tmp.123.456.6fa459ea-ee8a-3ca4-894e-db77e160355e",
        "{hex}_m_0_1.bin",
    ),
    "relative_tmp_dir": ("reltmp/m@{hex}.data", "m@{hex}.data"),
}
KEYS = 16


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_passes_on_a_native_directory(name: str, native: Path) -> None:
    """The replay itself is right: it passes where the connector was observed."""
    root = native / f"sequence-{name}"
    root.mkdir()

    SEQUENCES[name](Place(root))


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_passes_on_the_mount(name: str, setup: str, mounted: Mounted) -> None:
    """A connector finds on the mount what it finds on ext4."""
    root = mounted.path / f"sequence-{name}"
    root.mkdir()

    SEQUENCES[name](Place(root, CAPABILITIES[setup]))


@pytest.fixture(scope="module")
def routed(
    setup: str, filesystems: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Mounted:
    """A pool with a directory for temps, over enough disks that chance does not help."""
    base = tmp_path_factory.mktemp("routed")
    disks = [filesystems[1 + i % 2] / f"{base.name}-{i}" for i in range(5)]
    settings = {"pool": {"temp_dirs": ["reltmp"]}}
    with Mounted(base, disks, setup=setup, settings=settings) as mount:
        (mount.path / "reltmp").mkdir()
        yield mount


@pytest.mark.parametrize("form", DERIVABLE)
def test_temp_and_final_name_have_one_disk(form: str, routed: Mounted) -> None:
    """A temp whose final name is derivable is written on the owner of the final name."""
    temp_form, final_form = DERIVABLE[form]
    disks = set()
    for number in range(KEYS):
        digits = f"{form.encode().hex()[:8]}{number:024x}"
        temp, final = temp_form.format(hex=digits), final_form.format(hex=digits)
        (routed.path / temp).write_bytes(b"x" * 100)
        written_on = routed.disk_of(temp)
        os.rename(routed.path / temp, routed.path / final)

        assert routed.disk_of(final) == written_on
        where, owner = (
            os.getxattr(routed.path / final, f"user.kvfuse.{name}") for name in ("disk", "owner")
        )
        assert where == owner
        disks.add(written_on)

    assert len(disks) > 1, "sixteen keys on one disk of five: nothing was shown"


def test_a_direct_write_of_the_final_name_goes_where_the_temp_went(routed: Mounted) -> None:
    """Storing without a temp and storing with one give the same disk."""
    for number in range(KEYS):
        name = f"direct{number:026x}.data"
        (routed.path / name).write_bytes(b"x")
        plain = routed.disk_of(name)
        os.unlink(routed.path / name)
        temp = f"direct{number:026x}.tmp"
        (routed.path / temp).write_bytes(b"x")
        os.rename(routed.path / temp, routed.path / name)

        assert routed.disk_of(name) == plain


def test_underivable_temps_are_found_after_rename_and_after_a_remount(routed: Mounted) -> None:
    """A temp that says nothing of its final name leaves a file that is found all the same."""
    folder = routed.path / "underivable"
    folder.mkdir()
    for number in range(KEYS):
        path = page_path(folder, number)
        set_page(path, b"page %d" % number)
        other = folder / f"model.layers.{number}.safetensors"
        temp = folder / f".tmp{uuid.uuid4().hex[:6]}"
        temp.write_bytes(b"layer %d" % number)
        os.rename(temp, other)
        assert path.read_bytes() == b"page %d" % number

    routed.restart()

    for number in range(KEYS):
        assert page_path(folder, number).read_bytes() == b"page %d" % number
        layer = folder / f"model.layers.{number}.safetensors"
        assert layer.read_bytes() == b"layer %d" % number
    assert len(os.listdir(folder)) == 2 * KEYS
