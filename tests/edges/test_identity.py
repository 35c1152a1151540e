"""What a disk says of itself: written to be old or new, read to believe nothing."""

import errno
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.core.errors import BusyError, DiskRefusedError
from kvfuse.core.records import FORMAT
from kvfuse.core.topology import Member, Topology
from kvfuse.disks.adoption import init_disk, survey
from kvfuse.disks.disk import Disk
from kvfuse.disks.identity import (
    DiskIdentity,
    lock,
    make_mark,
    read_identity,
    read_topology,
    write_identity,
    write_topology,
)
from tests.disks import loop_disks

A, B, P, T = (f"{c * 8}-{c * 4}-4{c * 3}-8{c * 3}-{c * 12}" for c in "abcd")
IDENTITY = DiskIdentity(
    format=FORMAT, disk_id=A, pool_id=P, created="2026-01-02T03:04:05Z", session=7
)
TOPOLOGY = Topology.first(P, T, [Member(A), Member(B, 2.5)])
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk.open_root(str(root))
    yield disk
    disk.close()


@pytest.fixture
def marked(disk: Disk) -> Disk:
    make_mark(disk)
    write_identity(disk, IDENTITY)
    write_topology(disk, TOPOLOGY)
    return disk


def mark(disk: Disk) -> Path:
    return Path(disk.path, ".kvfuse")


def test_what_is_written_is_read(marked: Disk) -> None:
    """Identity and topology come back equal; writing again replaces them."""
    assert read_identity(marked) == IDENTITY
    assert read_topology(marked) == TOPOLOGY
    write_topology(marked, TOPOLOGY.changed([Member(A)], B))
    found = read_topology(marked)
    assert found is not None
    assert found.epoch == TOPOLOGY.epoch + 1
    assert sorted(os.listdir(mark(marked))) == ["disk.json", "lock", "quarantine", "topology.json"]


def test_the_files_are_what_the_interface_promises(marked: Disk) -> None:
    """Scripts read these keys; nobody but the owner reads the files."""
    identity = json.loads((mark(marked) / "disk.json").read_text())
    assert identity.keys() == {"format", "disk_id", "pool_id", "created", "session"}
    assert stat.S_IMODE(mark(marked).stat().st_mode) == 0o700
    for name in ("disk.json", "topology.json", "lock"):
        assert stat.S_IMODE((mark(marked) / name).stat().st_mode) == 0o600


def test_an_unmarked_directory_has_neither(disk: Disk) -> None:
    """No mark, an empty one, and one left by a crash in the middle are all "not a disk"."""
    assert read_identity(disk) is None
    make_mark(disk)
    (mark(disk) / "disk.json.tmp").write_text("{")
    assert read_identity(disk) is None
    assert read_topology(disk) is None
    make_mark(disk)
    write_identity(disk, IDENTITY)
    assert read_identity(disk) == IDENTITY


GOOD = json.loads('{"format": 1, "disk_id": "%s", "pool_id": null}' % A) | {  # noqa: UP031
    "created": IDENTITY.created,
    "session": 0,
}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"\0" * 4096, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": 1', "not JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b" " * (MIB + 1), "larger than"),
        (json.dumps(GOOD | {"format": FORMAT + 1, "new": 1}).encode(), "newer than"),
        (json.dumps(GOOD | {"format": 10**30}).encode(), "newer than|is out of"),
        (json.dumps(GOOD | {"format": 0}).encode(), "format 0"),
        (json.dumps(GOOD | {"format": "1"}).encode(), "format"),
        (json.dumps(GOOD | {"format": True}).encode(), "format"),
        (json.dumps(GOOD | {"disk_id": "../../etc"}).encode(), "not a UUID"),
        (json.dumps(GOOD | {"disk_id": A.upper()}).encode(), "not a UUID"),
        (json.dumps(GOOD | {"disk_id": A + "\n"}).encode(), "not a UUID"),
        (json.dumps(GOOD | {"disk_id": None}).encode(), "disk_id"),
        (json.dumps(GOOD | {"pool_id": 5}).encode(), "pool_id"),
        (json.dumps(GOOD | {"session": -1}).encode(), "session"),
        (json.dumps(GOOD | {"session": 1 << 63}).encode(), "session"),
        (json.dumps(GOOD | {"session": 1.5}).encode(), "session"),
        (json.dumps(GOOD | {"created": "yesterday\x1b[2J"}).encode(), "created"),
        (json.dumps(GOOD | {"extra": 1}).encode(), "extra"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "session"}).encode(), "session"),
    ],
)
def test_an_odd_identity_is_refused_with_one_line(marked: Disk, content: bytes, says: str) -> None:
    """Whatever is in disk.json: one line that names the file, printable, and no write."""
    (mark(marked) / "disk.json").write_bytes(content)
    with pytest.raises(DiskRefusedError, match=says) as refusal:
        read_identity(marked)
    text = str(refusal.value)
    assert text.startswith(f"{marked.path}/.kvfuse/disk.json: ")
    assert text.isprintable()
    assert len(text) < 500


def test_an_odd_topology_is_refused(marked: Disk) -> None:
    """A topology of a newer version, or of no meaning, names its file."""
    for content, says in ((b'{"format": 99}', "newer"), (b'{"format": 1}', "pool_id"), (b"7", "7")):
        (mark(marked) / "topology.json").write_bytes(content)
        with pytest.raises(DiskRefusedError, match=says):
            read_topology(marked)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "device"])
def test_something_else_than_a_file_is_refused(marked: Disk, tmp_path: Path, kind: str) -> None:
    """Nothing planted in place of disk.json is followed, opened or waited for."""
    path = mark(marked) / "disk.json"
    path.rename(tmp_path / "elsewhere.json")
    match kind:
        case "symlink":
            path.symlink_to(tmp_path / "elsewhere.json")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    with pytest.raises(DiskRefusedError, match="not a regular file"):
        read_identity(marked)


def test_a_mark_that_is_no_directory_is_refused(marked: Disk, tmp_path: Path) -> None:
    """A symlink to another disk's mark does not make this one that disk."""
    mark(marked).rename(tmp_path / "moved")
    mark(marked).symlink_to(tmp_path / "moved")
    with pytest.raises(DiskRefusedError, match=r"\.kvfuse: not a directory"):
        read_identity(marked)
    mark(marked).unlink()
    mark(marked).write_text("")
    with pytest.raises(DiskRefusedError, match=r"\.kvfuse: not a directory"):
        read_identity(marked)


class Failing(Disk):
    """A disk on which one step fails."""

    failing = ""

    def rename(self, *args) -> None:
        self._step("rename")
        super().rename(*args)

    def fsync(self, fd: int, *, data_only: bool) -> None:
        self._step("fsync")
        super().fsync(fd, data_only=data_only)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._step("write")
        return super().write(fd, data, offset)

    def create(self, *args, **kwargs) -> int:
        self._step("create")
        return super().create(*args, **kwargs)

    def _step(self, name: str) -> None:
        if self.failing == name:
            raise OSError(errno.EIO, "bad disk")


@pytest.mark.parametrize("step", ["create", "write", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_file(marked: Disk, step: str) -> None:
    """Whichever step fails, what is read afterwards is whole."""
    failing = Failing.open_root(marked.path)
    failing.failing = step
    with pytest.raises(OSError, match="bad disk"):
        write_identity(failing, DiskIdentity(**_fields(session=8)))
    assert read_identity(marked) == IDENTITY
    failing.failing = ""
    write_identity(failing, DiskIdentity(**_fields(session=8)))
    failing.close()
    assert read_identity(marked) == DiskIdentity(**_fields(session=8))


def _fields(**changes) -> dict:
    return {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__} | changes


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_a_full_disk_can_still_be_noted_on(filesystem: str) -> None:
    """With no block left the session is written over the old one: the disk must come up."""
    with loop_disks(1, filesystem) as (_, (path,)):
        disk = Disk.open_root(str(path))
        make_mark(disk)
        write_identity(disk, IDENTITY)
        fill(path)
        after = DiskIdentity(**_fields(session=IDENTITY.session + 1))
        write_identity(disk, after)
        assert read_identity(disk) == after
        shorter = DiskIdentity(**_fields(pool_id=None, session=9))
        write_identity(disk, shorter)
        assert read_identity(disk) == shorter
        disk.close()


def fill(path: Path) -> None:
    """Leave not one block."""
    fd = os.open(path / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
    size_bytes = MIB
    while size_bytes >= 512:
        try:
            os.write(fd, b"x" * size_bytes)
            os.fsync(fd)
        except OSError:
            size_bytes //= 2
    os.close(fd)


def test_a_locked_disk_is_busy_until_it_is_closed(marked: Disk) -> None:
    """Also from the same process, and with the lock file missing."""
    for _ in range(2):
        held = lock(marked)
        other = Disk.open_root(marked.path)
        with pytest.raises(BusyError, match="in use"):
            lock(other)
        os.close(held)
        os.close(lock(other))
        other.close()
        (mark(marked) / "lock").unlink(missing_ok=True)


# -- making a directory a disk ------------------------------------------------------------------


def test_init_makes_a_private_disk(tmp_path: Path) -> None:
    """Identity without topology, root 0700; a second time is refused."""
    tmp_path.chmod(0o755)
    identity = init_disk(str(tmp_path), adopt=False)
    assert identity.pool_id is None
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    disk = Disk.open_root(str(tmp_path))
    assert read_identity(disk) == identity
    disk.close()
    with pytest.raises(DiskRefusedError, match=f"already a disk, {identity.disk_id}"):
        init_disk(str(tmp_path), adopt=False)


def test_a_directory_with_files_must_be_adopted(tmp_path: Path) -> None:
    """Refused without a trace; adopted with every file in its place; lost+found is no file."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_bytes(b"x" * 8192)
    os.mkfifo(tmp_path / "data" / "p")
    with pytest.raises(DiskRefusedError, match="--adopt"):
        init_disk(str(tmp_path), adopt=False)
    assert not (tmp_path / ".kvfuse").exists()
    assert survey(str(tmp_path)) == (1, 8192)
    init_disk(str(tmp_path), adopt=True)
    assert (tmp_path / "data" / "f").read_bytes() == b"x" * 8192
    assert survey(str(tmp_path)) == (1, 8192)


@pytest.mark.parametrize(("path", "says"), [("/", "root dir"), ("/root", "home"), ("/opt", "top")])
def test_places_nobody_means_are_refused(path: str, says: str) -> None:
    """The root, homes, and top directories of the root file system."""
    with pytest.raises(DiskRefusedError, match=says):
        init_disk(path, adopt=True)
    assert not Path(path, ".kvfuse").exists()


def test_disks_do_not_lie_in_each_other(tmp_path: Path) -> None:
    """Neither a disk in a disk nor a disk around one."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    init_disk(str(inner), adopt=False)
    with pytest.raises(DiskRefusedError, match="has a disk in it"):
        init_disk(str(tmp_path), adopt=True)
    below = inner / "c" / "d"
    below.mkdir(parents=True)
    with pytest.raises(DiskRefusedError, match="inside the disk"):
        init_disk(str(below), adopt=False)


def test_a_missing_or_wrong_place_is_refused(tmp_path: Path) -> None:
    """A path that is not there, and one that is a file, say so."""
    (tmp_path / "f").touch()
    with pytest.raises(DiskRefusedError, match="No such file"):
        init_disk(str(tmp_path / "x"), adopt=False)
    with pytest.raises(DiskRefusedError, match="not a directory"):
        init_disk(str(tmp_path / "f"), adopt=False)


def test_a_default_acl_is_refused(tmp_path: Path) -> None:
    """Files would inherit it, and with it permissions the mount does not show."""
    entries = b"".join(
        t.to_bytes(2, "little") + p.to_bytes(2, "little") + b"\xff" * 4
        for t, p in ((1, 7), (4, 5), (32, 5))
    )
    os.setxattr(tmp_path, "system.posix_acl_default", b"\x02\0\0\0" + entries)
    with pytest.raises(DiskRefusedError, match="default ACL"):
        init_disk(str(tmp_path), adopt=False)


def test_a_file_system_without_labels_is_refused(tmp_path: Path) -> None:
    """What cannot keep trusted.kvfuse cannot be a disk, and is left as it was."""
    subprocess.run(["mount", "-t", "ramfs", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(DiskRefusedError, match="does not keep the attribute"):
            init_disk(str(tmp_path), adopt=False)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_failed_init_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    """A disk that fails half-way is as it was, and can be tried again."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "bad disk")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", fail)
        with pytest.raises(DiskRefusedError, match="bad disk"):
            init_disk(str(tmp_path), adopt=False)
    assert os.listdir(tmp_path) == []
    init_disk(str(tmp_path), adopt=False)
