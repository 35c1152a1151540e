"""``kvfuse fsck``: catalog and disks of a pool that is not mounted, compared both ways."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvfuse.catalog import soundness
from kvfuse.catalog.catalog import Catalog
from kvfuse.cli import fsck as fsck_command
from kvfuse.cli.group import cli
from kvfuse.pool.findings import Kind
from kvfuse.pool.pool import RENAME_EXCHANGE
from tests.shell.pools import (
    Box,
    boxed,
    commit,
    disk_path,
    files,
    find,
    ids,
    mkdir,
    node_of,
    put,
    read,
    rename,
    tree,
    unlink,
)  # fmt: skip


@pytest.fixture
def box():
    """A pool of two disks with some files, that is not open."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        for number in range(6):
            commit(pool, f"d/{number}.bin", b"%d" % number)
        box.close()
        yield box


def fsck(box: Box, *arguments: str) -> Result:
    config = box.base / "kvfuse.toml"
    disks = ", ".join(f'"{path}"' for path in box.paths)
    config.write_text(
        f'[pool]\ndisks = [{disks}]\nstate_dir = "{box.base}/state"\n'
        f'run_dir = "{box.base}/run"\nallow_shared_device = true\n'
    )
    return CliRunner().invoke(cli, ["fsck", "--config", str(config), *arguments])


def findings(box: Box) -> set[tuple[str, str]]:
    """Return kind and path of each finding."""
    answer = json.loads(fsck(box, "--json").stdout)
    return {(found["kind"], found["path"]) for found in answer["findings"]}


def place(box: Box, number: int) -> Path:
    (path,) = [p / f"d/{number}.bin" for p in box.paths if (p / f"d/{number}.bin").exists()]
    return path


def test_sound_pool_has_no_findings(box):
    """Exit code 0, after a clean end and after a death."""
    done = fsck(box)
    assert done.exit_code == 0, done.output
    assert "2 disks, 0 faults" in done.stdout
    box.open()
    assert box.pool is not None
    put(box.pool, "more.bin")
    box.drop()
    assert fsck(box).exit_code == 0
    assert findings(box) == set()


def test_each_fault_is_told(box):
    """What is missing, different, orphan, foreign: by disk and path."""
    place(box, 0).unlink()
    place(box, 1).write_bytes(b"longer than it was")
    os.chmod(place(box, 2), 0o600)
    shutil.copy2(place(box, 3), place(box, 3).with_name("copy.bin"))  # keeps the label
    place(box, 4).with_name("foreign.bin").write_bytes(b"?")
    assert findings(box) == {
        ("missing", "d/0.bin"),
        ("different", "d/1.bin"),
        ("owner", "d/2.bin"),
        ("orphan", "d/copy.bin"),
        ("foreign", "d/foreign.bin"),
    }
    done = fsck(box)
    assert done.exit_code == 1
    assert "3 faults" in done.stdout
    assert "d/copy.bin" in done.stdout


def test_mounted_pool_is_busy(box):
    """The disks are locked; nothing is looked at."""
    box.open()
    done = fsck(box)
    assert done.exit_code == 5
    assert len(done.stderr.strip().splitlines()) == 1


def test_lost_catalog_and_strange_directories_are_refused_in_one_line(box, tmp_path):
    """What is missing, where, and what comes of it."""
    box.lose_catalog()
    done = fsck(box)
    assert done.exit_code == 1
    assert "the next mount scans the disks" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    strange = CliRunner().invoke(cli, ["fsck", "--disk", str(tmp_path)])
    assert strange.exit_code == 4
    assert "not a disk of kvfuse" in strange.stderr
    none = CliRunner().invoke(cli, ["fsck"])
    assert none.exit_code == 2


def test_file_of_the_pool_is_where_the_findings_say(box):
    """The paths of findings are those below the mountpoint and the disk's root alike."""
    pool = box.open()
    path = disk_path(pool, "d/5.bin")
    assert node_of(pool, "d/5.bin").ino == path.stat().st_ino
    box.close()
    path.unlink()
    assert findings(box) == {("missing", "d/5.bin")}


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("pages", [(0, 2), (2, 20)])
def test_damaged_catalog_is_one_line(box, clean, pages):
    """Noise in it, whether it was closed or not: what, where, and what comes of it; never more."""
    if not clean:
        box.open()
        box.drop()
    for catalog in box.catalogs():
        with (catalog / "data.mdb").open("r+b") as data:
            data.seek(pages[0] * 4096)
            data.write(os.urandom((pages[1] - pages[0]) * 4096))
    done = fsck(box)
    assert done.exit_code == 1, done.output
    (line,) = done.stderr.strip().splitlines()
    assert "catalog" in line
    assert "the next mount scans the disks" in line
    told = json.loads(fsck(box, "--json").stdout)
    assert "the next mount scans the disks" in json.dumps(told)
    box.open()
    box.check()


def test_file_a_chore_is_about_to_remove_is_no_fault(box):
    """It is said to be unfinished; no finding shows how Python writes things."""
    held = place(box, 0)
    pool = box.open()
    subprocess.run(["chattr", "+i", held], check=True)
    try:
        unlink(pool, "d/0.bin")
        box.close()
        shutil.copy2(place(box, 3), place(box, 3).with_name("copy.bin"))
        place(box, 4).with_name("foreign.bin").write_bytes(b"?")
        told = json.loads(fsck(box, "--json").stdout)
    finally:
        subprocess.run(["chattr", "-i", held], check=True)
    assert {(found["kind"], found["path"]) for found in told["findings"]} == {
        ("unfinished", "d/0.bin"),
        ("orphan", "d/copy.bin"),
        ("foreign", "d/foreign.bin"),
    }
    assert told["faults"] == 1
    for found in told["findings"]:
        assert not any(sign in found["text"] for sign in ("(", "None", "b'"))


def test_disk_with_a_damaged_identity_is_named_once(box):
    """One line: the file, what is wrong with it, and what to do."""
    (box.paths[1] / ".kvfuse" / "disk.json").write_bytes(b"")
    done = fsck(box)
    assert done.exit_code == 4
    (line,) = done.stderr.strip().splitlines()
    assert line.count(str(box.paths[1])) == 1
    assert line.endswith("or leave it out of the list of disks")


def waiting(box: Box) -> dict[str, str]:
    """Return what is found of a pool whose daemon died before the disks had followed."""
    box.drop()
    told = json.loads(fsck(box, "--json").stdout)
    assert told["faults"] == 0, told["findings"]
    return {found["kind"]: found["text"] for found in told["findings"]}


@pytest.mark.parametrize("step", ["rename", "above", "exchange", "onto", "remove"])
def test_carriers_are_not_wrong_while_changes_of_directories_wait(box, step):
    """The disks are as they were before: only that something is unfinished is told."""
    pool = box.open()
    for name in ("d/sub/a.bin", "d/sub/deep/b.bin", "other/c.bin"):
        mkdir(pool, name.rpartition("/")[0])
        commit(pool, name, name.encode())
    mkdir(pool, "new/below")
    if step == "remove":
        unlink(pool, "other/c.bin")
    box.findings()  # the disks have followed until here
    pool._upkeep.stop(timeout_s=10)
    match step:
        case "rename":
            rename(pool, "d/sub", "d/moved")
        case "above":
            rename(pool, "d", "new/below/d")
            rename(pool, "new", "newer")
        case "exchange":
            rename(pool, "d/sub", "other", RENAME_EXCHANGE)
        case "onto":
            rename(pool, "d/sub", "new/below")
        case "remove":
            pool.rmdir(*ids(pool, "other"))
    # An exchange is done on the disks by the verb itself.
    assert set(waiting(box)) == (set() if step == "exchange" else {"unfinished"})
    box.open()
    box.check()


def repaired(box: Box) -> list[tuple[str, str, str]]:
    """Repair; return kind, path and what was done of each finding."""
    answer = json.loads(fsck(box, "--repair", "--json").stdout)
    return [(found["kind"], found["path"], found["repair"]) for found in answer["findings"]]


def test_repair_mends_and_says_each_in_one_line(box):
    """Afterwards nothing is wrong; the next mount reads no disk for it, and nothing is lost."""
    gone, kept = place(box, 0), place(box, 3)
    gone.unlink()
    shutil.copy2(kept, kept.with_name("copy.bin"))  # keeps the label
    kept.with_name("foreign.bin").write_bytes(b"?")
    (live,) = [path for path in box.catalogs() if "run" in path.parts]
    catalog = Catalog(live)
    with catalog.write() as txn:
        txn.add_usage(b"\0\0", 5, 40)
    catalog.close()
    soundness.seal(live)
    assert fsck(box).exit_code == 1
    shown = fsck(box, "--repair")
    assert shown.exit_code == 0, shown.output
    assert "0 faults, 3 repaired" in shown.stdout
    lines = [line for line in shown.stdout.splitlines() if "copy.bin" in line]
    assert len(lines) == 1
    assert "taken in" in lines[0]
    assert fsck(box).exit_code == 0
    assert repaired(box) == [("foreign", "d/foreign.bin", "")]
    pool = box.open()
    assert find(pool, "d/0.bin") is None
    assert read(pool, "d/copy.bin") == b"3"
    assert len(files(tree(pool))) == 6
    assert kept.with_name("foreign.bin").exists()
    box.check(allowed=(Kind.FOREIGN,))


def test_fault_that_cannot_be_mended_stays_and_is_told(box):
    """Exit code 1, as without --repair."""
    place(box, 1).write_bytes(b"longer than it was")
    shown = fsck(box, "--repair")
    assert shown.exit_code == 1
    assert "1 faults, 0 repaired" in shown.stdout
    assert place(box, 1).read_bytes() == b"longer than it was"


def test_repair_without_a_disk_of_the_pool_is_refused(box):
    """Opened without it the pool would go on without it."""
    done = CliRunner().invoke(cli, ["fsck", "--repair", "--disk", str(box.paths[0])])
    assert done.exit_code == 4
    assert "is not named" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    box.open()
    done = fsck(box, "--repair")
    assert done.exit_code == 5
    assert len(done.stderr.strip().splitlines()) == 1


def test_repair_keeps_the_weights_of_the_disks(box):
    """The set of disks is the same afterwards: no new epoch, also where only disks are named."""
    topologies = [json.loads((p / ".kvfuse" / "topology.json").read_text()) for p in box.paths]
    arguments = [word for path in box.paths for word in ("--disk", str(path))]
    places = {
        "KVFUSE_POOL_STATE_DIR": f"{box.base}/state",
        "KVFUSE_POOL_RUN_DIR": f"{box.base}/run",
    }
    done = CliRunner().invoke(cli, ["fsck", "--repair", *arguments], env=places)
    assert done.exit_code == 0, done.output
    assert topologies == [
        json.loads((p / ".kvfuse" / "topology.json").read_text()) for p in box.paths
    ]


def test_progress_is_told_when_it_takes_long(box, monkeypatch):
    """Lines on stderr, none in the answer."""
    monkeypatch.setattr(fsck_command, "_QUIET_S", 0.0)
    monkeypatch.setattr(fsck_command, "_TOLD_S", 0.0)
    done = fsck(box, "--json")
    assert "rows and names compared" in done.stderr
    assert json.loads(done.stdout)["faults"] == 0
