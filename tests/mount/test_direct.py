"""The direct driver on a real kernel: what reaches the server, and what does not."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.drivers.direct.session import can_run
from tests.directmount import DirectMount, opened, settled

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(can_run() is not None, reason=str(can_run())),
]

LONG_S = 60.0  # as long as no test takes: what is cached stays cached


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[DirectMount]:
    """A mount where the kernel believes for long what it was told."""
    with DirectMount(
        tmp_path, entry_timeout_s=LONG_S, attr_timeout_s=LONG_S, negative_ttl_s=LONG_S,
        temp_timeout_s=LONG_S,
    ) as mounted:  # fmt: skip
        yield mounted


# ---------------------------------------------------------------- requests


def test_the_requests_of_each_operation_are_those_the_documents_say(mounted: DirectMount):
    """The table of docs/performance.md, row by row, as the kernel of this machine asks."""
    root = mounted.path
    (root / "d").mkdir()
    documented = _documented_requests()
    steps = {
        "first access, a miss": lambda: os.access(root / "d" / "missing", os.F_OK),
        "access again, a miss": lambda: os.access(root / "d" / "missing", os.F_OK),
        "access below a missing directory, again": lambda: os.access(root / "no" / "f", os.F_OK),
        "put: create, write, close, rename": lambda: _put(root / "d"),
        "first access of what was put": lambda: os.access(root / "d" / "final", os.F_OK),
        "access again, a hit": lambda: os.access(root / "d" / "final", os.F_OK),
        "get: open, read, close": lambda: _get(root / "d" / "final"),
        "write in place: open, write, close": lambda: _rewrite(root / "d" / "final"),
        "fsync": lambda: _fsync(root / "d" / "final"),
        "unlink": lambda: os.unlink(root / "d" / "final"),
        "mkdir": lambda: os.mkdir(root / "d" / "e"),
        "rmdir": lambda: os.rmdir(root / "d" / "e"),
    }
    os.access(root / "no" / "f", os.F_OK)
    os.stat(root / "d")

    found = {}
    for name, step in steps.items():
        os.stat(root / "d")
        with mounted.counted() as requests:
            step()
            settled(mounted)
        found[name] = requests

    assert found == documented


def _put(directory: Path) -> None:
    with opened(directory / "final_7.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"data")
    os.rename(directory / "final_7.tmp", directory / "final")


def _get(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        assert os.read(fd, 100) == b"data"


def _rewrite(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"data")


def _fsync(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def _documented_requests() -> dict[str, dict[str, int]]:
    """Return the table "Requests of each operation": operation, then what the server is asked."""
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    table: dict[str, dict[str, int]] = {}
    section = text.partition("## Requests of each operation")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] in ("operation", "---"):
            continue
        requests: dict[str, int] = {}
        for word in cells[1].replace("none", "").split():
            name = word.strip(",").lower()
            requests[name] = requests.get(name, 0) + 1
        table[cells[0]] = requests
    return table


def test_the_owner_alone_may_enter_a_mount_of_an_owner(tmp_path: Path):
    """With access "owner" the kernel turns everybody else away, root included."""
    with DirectMount(tmp_path, access="owner", owner_uid=4242, owner_gid=4242) as mounted:
        with pytest.raises(PermissionError):
            os.listdir(mounted.path)
        done = subprocess.run(
            ["ls", mounted.path], check=False, capture_output=True,
            user=4242, group=4242, extra_groups=[],
        )  # fmt: skip

    # below a temporary directory only root may search the mount is out of his reach as well
    assert done.returncode == 0 or b"Permission denied" in done.stderr


def test_a_directory_is_listed_whole_while_it_changes(mounted: DirectMount):
    """Thousands of names, asked in pieces: those that stay are listed once, whatever goes."""
    directory = mounted.path / "many"
    directory.mkdir()
    for number in range(3000):
        os.mkdir(directory / f"{number:04}")

    names = []
    with os.scandir(directory) as listing:
        for entry in listing:
            assert entry.is_dir(follow_symlinks=False)
            names.append(entry.name)
            if len(names) == 100:
                for number in range(0, 3000, 2):
                    os.rmdir(directory / f"{number:04}")

    odd = [f"{number:04}" for number in range(1, 3000, 2)]
    assert [name for name in sorted(names) if int(name) % 2] == odd
    assert len(set(names)) == len(names)
    assert sorted(os.listdir(directory)) == odd


def test_what_is_refused_has_an_errno_of_its_own(mounted: DirectMount):
    """Device nodes, names too long, foreign attributes; and nothing of it ends the mount."""
    path = mounted.path / "file"
    path.write_bytes(b"")
    refused = {
        errno.EPERM: lambda: os.mkfifo(mounted.path / "fifo"),
        errno.ENAMETOOLONG: lambda: os.mkdir(mounted.path / ("x" * 256)),
        errno.EOPNOTSUPP: lambda: os.setxattr(path, "trusted.x", b"1"),
        errno.ENODATA: lambda: os.getxattr(path, "security.capability"),
        errno.ENOENT: lambda: os.unlink(mounted.path / "missing"),
        errno.EEXIST: lambda: os.mkdir(path),
        errno.ENOTDIR: lambda: os.listdir(path),
        errno.EINVAL: lambda: os.readlink(path),
    }

    for code, verb in refused.items():
        with pytest.raises(OSError, match=os.strerror(code)):
            verb()

    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        os.open(mounted.path, os.O_TMPFILE | os.O_RDWR)
    with opened(path, os.O_RDONLY) as fd, pytest.raises(OSError, match=os.strerror(errno.ENOTTY)):
        fcntl.ioctl(fd, termios.TCGETS)
    birth = subprocess.run(["stat", "-c", "%W %s", path], check=True, capture_output=True)
    assert birth.stdout == b"0 0\n"  # STATX is answered; a time of birth is not kept

    os.setxattr(path, "user.crc", b"12345678")
    assert os.getxattr(path, "user.crc") == b"12345678"
    assert os.listxattr(path) == ["user.crc"]


# ---------------------------------------------------------------- notifications


def _behind(mounted: DirectMount, name: str) -> None:
    """Make *name* known to the kernel as missing."""
    assert not os.path.exists(mounted.path / name)
    with mounted.counted() as requests:
        assert not os.path.exists(mounted.path / name)
    assert requests == {}


@pytest.mark.parametrize(
    "command", [("changed", 1, "name"), ("expired", 1, "name"), ("epoch",)], ids=lambda c: c[0]
)
def test_a_notification_makes_the_kernel_ask_again(mounted: DirectMount, command: tuple):
    """A name it takes for missing is looked up once more."""
    _behind(mounted, "name")

    mounted.ask(*command)
    _until_asked(mounted, "name")


def _until_asked(mounted: DirectMount, name: str) -> None:
    for _ in range(500):
        with mounted.counted() as requests:
            os.path.exists(mounted.path / name)
        if "lookup" in requests:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{name} is not asked for again")


def test_an_expired_directory_keeps_what_is_open_below_it(mounted: DirectMount):
    """EXPIRE_ONLY drops neither a working directory nor a mount below the name."""
    (mounted.path / "d").mkdir()
    (mounted.path / "d" / "f").write_bytes(b"data")
    with opened(mounted.path / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        mounted.ask("expired", 1, "d")
        _until_asked(mounted, "d")

        assert os.listdir(fd) == ["f"]
        assert os.stat("f", dir_fd=fd).st_size == 4


def test_a_file_that_went_behind_the_kernels_back_is_made_anew_by_open(mounted: DirectMount):
    """Requests by an id that is gone are answered ESTALE, so open(O_CREAT) creates."""
    path = mounted.path / "file"
    path.write_bytes(b"data")
    assert path.read_bytes() == b"data"
    for disk in mounted.disks:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(disk / "file")

    with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
        os.write(fd, b"anew")

    assert path.read_bytes() == b"anew"


# ---------------------------------------------------------------- the end


def test_a_mount_ends_when_somebody_else_unmounts_it(tmp_path: Path):
    """umount by another process: the driver returns, cleanly."""
    with DirectMount(tmp_path) as mounted:
        (mounted.path / "file").write_bytes(b"data")
        subprocess.run(["umount", mounted.path], check=True)
        assert mounted.process.wait(30) == 0


@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3")
def test_a_process_that_may_not_mount_has_fusermount3_do_it(tmp_path: Path):
    """The descriptor comes from there; the options are the same, and so is the end."""
    with DirectMount(tmp_path, by_fusermount=True) as mounted:
        (mounted.path / "file").write_bytes(b"data")
        assert (mounted.path / "file").read_bytes() == b"data"
        line = next(
            line for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if f" {mounted.path} " in line
        )  # fmt: skip
        for word in ("nosuid", "nodev", "fuse.kvfuse", "default_permissions", "allow_other"):
            assert word in line


def test_a_mount_in_use_is_detached_and_its_users_go_on_reading(tmp_path: Path):
    """A file that stays open keeps its bytes: the kernel passes them through to the end."""
    with DirectMount(tmp_path) as mounted:
        (mounted.path / "file").write_bytes(b"data")
        fd = os.open(mounted.path / "file", os.O_RDONLY)
    try:
        assert os.pread(fd, 4, 0) == b"data"
    finally:
        with contextlib.suppress(OSError):  # ENOTCONN: nobody answers FLUSH any more
            os.close(fd)
