"""Every system call on a disk, on real file systems, and what cannot lead out of one."""

import errno
import gc
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.disks.disk import LABEL_TRUSTED, LABEL_USER, Disk, Space
from kvfuse.system import syscalls
from tests.disks import LoopDisks, loop_disks

MIB = 1 << 20
FILESYSTEMS = ("ext4", "xfs", "btrfs")


@pytest.fixture(scope="module")
def loops() -> Iterator[LoopDisks]:
    with loop_disks() as (disks, _):
        yield disks


@pytest.fixture(scope="module", params=FILESYSTEMS)
def mounted(request: pytest.FixtureRequest, loops: LoopDisks) -> Path:
    return loops.add(request.param)


@pytest.fixture
def root(mounted: Path, request: pytest.FixtureRequest) -> Path:
    path = mounted / str(abs(hash(request.node.nodeid)))
    path.mkdir()
    return path


@pytest.fixture(params=(True, False), ids=("openat2", "walk"))
def disk(request: pytest.FixtureRequest, root: Path) -> Iterator[Disk]:
    """A disk, with openat2 and without it."""
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    disk = Disk(str(root), root_fd, use_openat2=request.param)
    yield disk
    disk.close()


@pytest.fixture
def top(disk: Disk) -> Iterator[int]:
    """The root of the disk, as carriers are held."""
    fd = disk.open_dir(b"")
    yield fd
    os.close(fd)


def put(disk: Disk, dir_fd: int, name: bytes, data: bytes = b"") -> None:
    fd = disk.create(dir_fd, name, mode=0o600, uid=0, gid=0)
    assert disk.write(fd, data, 0) == len(data)
    os.close(fd)


def fails(*codes: int):
    return pytest.raises(OSError, check=lambda e: e.errno in codes)


# -- below the root -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"..", b"a/../..", b"/etc", b"out", b"out/sub", b"a/up", b"file"])
def test_no_path_leaves_the_root(disk: Disk, root: Path, path: bytes) -> None:
    """Symlinks, .. and absolute paths are no directories of the disk."""
    (root / "a").mkdir()
    (root / "file").touch()
    (root / "out").symlink_to("/etc")
    (root / "a" / "up").symlink_to("..")
    for readable in (False, True):
        with fails(errno.ENOTDIR):
            disk.open_dir(path, readable=readable)


def test_a_missing_part_is_enoent(disk: Disk, root: Path) -> None:
    """What is not there is told apart from what is in the way."""
    (root / "a").mkdir()
    for path in (b"x", b"a/x", b"a/x/y"):
        with fails(errno.ENOENT):
            disk.open_dir(path)


def test_a_name_with_nul_is_refused(disk: Disk, root: Path) -> None:
    """C would see the shorter name before the NUL."""
    (root / "a").mkdir()
    with fails(errno.EINVAL):
        disk.open_dir(b"a\0b")


def test_another_file_system_below_is_refused(disk: Disk, root: Path, top: int) -> None:
    """A mount below the root is neither entered nor read, whichever way it was made."""
    (root / "m").mkdir()
    (root / "f").touch()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(root / "m")], check=True)
    try:
        (root / "m" / "d").mkdir()
        (root / "m" / "f").touch()
        subprocess.run(["mount", "--bind", str(root / "m/f"), str(root / "f")], check=True)
        try:
            for path in (b"m", b"m/d"):
                with fails(errno.ENOTDIR):
                    disk.open_dir(path)
            with fails(errno.ENOTDIR):
                disk.open_subdir(top, b"m")
            with fails(errno.ENOENT):
                disk.open(top, b"f", os.O_RDONLY)
        finally:
            subprocess.run(["umount", str(root / "f")], check=True)
    finally:
        subprocess.run(["umount", str(root / "m")], check=True)


def test_a_btrfs_subvolume_is_refused(disk: Disk, root: Path) -> None:
    """A subvolume is no mount, yet nothing can be renamed into it."""
    if disk.filesystem != "btrfs":
        return
    subvolume = ["btrfs", "-q", "subvolume"]
    subprocess.run([*subvolume, "create", str(root / "sub")], check=True, capture_output=True)
    with fails(errno.ENOTDIR):
        disk.open_dir(b"sub")


def test_paths_longer_than_one_call_takes_work(disk: Disk) -> None:
    """Names of 255 bytes, forty deep: 10 KiB of path."""
    name = b"n" * 255
    path = b""
    for _ in range(40):
        fd = disk.open_dir(path)
        disk.make_dir(fd, name, mode=0o755, uid=0, gid=0)
        os.close(fd)
        path = path + b"/" + name if path else name
    fd = disk.open_dir(path, readable=True)
    assert list(disk.list_fd(fd)) == []
    os.close(fd)
    with fails(errno.ENOENT):
        disk.open_dir(path + b"/x")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_only_regular_files_are_opened_and_nothing_blocks(
    disk: Disk, root: Path, top: int, flags: int
) -> None:
    """FIFOs, sockets, devices, directories and symlinks are ENOENT, at once."""
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "nothing", stat.S_IFBLK | 0o666, os.makedev(240, 77))
    (root / "dir").mkdir()
    (root / "target").write_bytes(b"secret")
    (root / "link").symlink_to("target")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(root, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        for name in (b"fifo", b"null", b"nothing", b"dir", b"link", b"socket", b"missing"):
            with fails(errno.ENOENT):
                disk.open(top, name, flags)


def test_open_neither_creates_nor_truncates_nor_appends(disk: Disk, top: int) -> None:
    """Of a client's flags only how to read and write reaches the disk."""
    put(disk, top, b"f", b"data")
    client = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND | os.O_DIRECTORY
    fd = disk.open(top, b"f", client)
    assert disk.read(fd, 10, 0) == b"data"
    assert disk.write(fd, b"X", 1) == 1
    assert disk.read(fd, 10, 0) == b"dXta"
    os.close(fd)


def test_no_descriptor_is_leaked_by_a_refusal(disk: Disk, root: Path, top: int) -> None:
    """As many descriptors are open after every kind of refusal as before."""
    (root / "dir").mkdir()
    (root / "out").symlink_to("/etc")
    put(disk, top, b"taken")
    gc.collect()  # what other tests left to it must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    for path in (b"out", b"x/y", b"dir/" * 2000 + b"x", b"dir/x"):
        with fails(errno.ENOTDIR, errno.ENOENT):
            disk.open_dir(path)
    for name in (b"dir", b"out", b"x"):
        with fails(errno.ENOENT):
            disk.open(top, name, os.O_RDONLY)
    with fails(errno.EEXIST):
        disk.create(top, b"taken", mode=0o600, uid=0, gid=0)
    with fails(errno.EEXIST):
        disk.make_dir(top, b"taken", mode=0o700, uid=0, gid=0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_openat2_is_noticed(root: Path, monkeypatch, code: int) -> None:
    """An old kernel says ENOSYS, a sandbox EPERM; the walk takes over."""

    def refuse(*_: object) -> int:
        raise OSError(code, "no openat2")

    monkeypatch.setattr(syscalls, "openat2", refuse)
    disk = Disk.open_root(str(root))
    assert not disk.use_openat2
    os.close(disk.open_dir(b""))
    disk.close()


def test_closing_twice_is_harmless(root: Path) -> None:
    """A disk closed twice does not close somebody else's descriptor."""
    disk = Disk.open_root(str(root))
    disk.close()
    disk.close()
    assert disk.root_fd == -1


@pytest.mark.parametrize(("name", "code"), [("x", errno.ENOENT), ("f", errno.ENOTDIR)])
def test_a_root_must_be_a_directory(root: Path, name: str, code: int) -> None:
    """Missing is ENOENT, a file ENOTDIR."""
    (root / "f").touch()
    with fails(code):
        Disk.open_root(str(root / name))


# -- names --------------------------------------------------------------------------------------


def test_create_gives_owner_and_mode(disk: Disk, top: int) -> None:
    """Set-user-id survives the chown before it; a taken name is EEXIST."""
    fd = disk.create(top, b"f", mode=0o4755, uid=7, gid=8)
    found = disk.fstat(fd)
    os.close(fd)
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (7, 8, 0o4755)
    with fails(errno.EEXIST):
        disk.create(top, b"f", mode=0o600, uid=0, gid=0)


def test_create_does_not_follow_a_planted_symlink(disk: Disk, root: Path, top: int) -> None:
    """A dangling symlink is a taken name, not a place to create at."""
    (root / "f").symlink_to("elsewhere")
    with fails(errno.EEXIST):
        disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    assert not (root / "elsewhere").exists()


def test_a_failed_create_leaves_nothing(disk: Disk, top: int, monkeypatch) -> None:
    """When the owner cannot be set, name and descriptor are gone again."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "quota")

    gc.collect()  # what other tests left to it must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fchown", refuse)
    with fails(errno.EDQUOT):
        disk.create(top, b"f", mode=0o600, uid=1, gid=1)
    monkeypatch.setattr(os, "chown", refuse)
    with fails(errno.EDQUOT):
        disk.make_dir(top, b"d", mode=0o700, uid=1, gid=1)
    with fails(errno.EDQUOT):
        disk.symlink(b"x", top, b"s", uid=1, gid=1)
    assert list(disk.list_dir(b"")) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_directories_keep_sticky_and_setgid(disk: Disk, top: int) -> None:
    """A carrier has the bits of the pool's directory, all of them."""
    disk.make_dir(top, b"d", mode=0o3775, uid=7, gid=8)
    found = disk.stat(top, b"d")
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (7, 8, 0o3775)
    disk.set_dir(top, b"d", mode=0o700, uid=1, gid=2)
    found = disk.stat(top, b"d")
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1, 2, 0o700)
    disk.remove_dir(top, b"d")
    with fails(errno.ENOENT):
        disk.stat(top, b"d")


def test_set_dir_does_not_follow_a_symlink(disk: Disk, root: Path, top: int) -> None:
    """A symlink in place of a carrier does not have its target changed."""
    victim = root / "victim"
    victim.mkdir(mode=0o700)
    (root / "d").symlink_to("victim")
    with fails(errno.ENOTDIR):
        disk.set_dir(top, b"d", mode=0o777, uid=9, gid=9)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o700


def test_rename_replaces_and_its_variants_do_not(disk: Disk, top: int) -> None:
    """Plain, exclusive and exchanging renames, across two directories."""
    disk.make_dir(top, b"d", mode=0o700, uid=0, gid=0)
    sub = disk.open_subdir(top, b"d")
    put(disk, top, b"a", b"A")
    put(disk, sub, b"b", b"B")
    with fails(errno.EEXIST):
        disk.rename_new(top, b"a", sub, b"b")
    disk.exchange(top, b"a", sub, b"b")
    assert read(disk, top, b"a") == b"B"
    disk.rename(top, b"a", sub, b"b")
    assert read(disk, sub, b"b") == b"B"
    disk.rename_new(sub, b"b", top, b"c")
    with fails(errno.ENOENT):
        disk.exchange(top, b"c", top, b"missing")
    os.close(sub)


def read(disk: Disk, dir_fd: int, name: bytes) -> bytes:
    fd = disk.open(dir_fd, name, os.O_RDONLY)
    try:
        return disk.read(fd, MIB, 0)
    finally:
        os.close(fd)


def test_links_symlinks_and_names_that_are_no_text(disk: Disk, top: int) -> None:
    """A link of a symlink is that symlink; names are any bytes."""
    name = bytes(range(1, 47)) + bytes(range(48, 256))
    put(disk, top, name, b"x")
    disk.link(top, name, top, b"second")
    assert disk.stat(top, b"second").st_nlink == 2
    with fails(errno.EEXIST):
        disk.link(top, name, top, b"second")
    disk.symlink(b"/nowhere\xff", top, b"s", uid=3, gid=4)
    disk.link(top, b"s", top, b"t")
    assert disk.readlink(top, b"t") == b"/nowhere\xff"
    assert (disk.stat(top, b"t").st_uid, disk.stat(top, b"t").st_gid) == (3, 4)
    with fails(errno.EINVAL):
        disk.readlink(top, name)
    kinds = {item.name: item.type_bits for item in disk.list_dir(b"")}
    assert kinds[name] == stat.S_IFREG
    assert kinds[b"t"] == stat.S_IFLNK
    disk.unlink(top, name)
    assert disk.stat(top, b"second").st_nlink == 1
    with fails(errno.ENAMETOOLONG):
        disk.stat(top, b"n" * 256)


def test_listing_tells_kinds_and_inodes(disk: Disk, root: Path, top: int) -> None:
    """What is neither file, directory nor symlink has no kind: it is foreign."""
    put(disk, top, b"f")
    (root / "d").mkdir()
    os.mkfifo(root / "p")
    items = {item.name: item for item in disk.list_dir(b"")}
    assert {name: item.type_bits for name, item in items.items()} == {
        b"f": stat.S_IFREG,
        b"d": stat.S_IFDIR,
        b"p": 0,
    }
    assert items[b"f"].ino == disk.stat(top, b"f").st_ino


# -- bytes --------------------------------------------------------------------------------------


def test_reads_and_writes_are_whole(disk: Disk, top: int) -> None:
    """Short only at the end of the file; holes read as zeros."""
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    data = os.urandom(3 * MIB)
    assert disk.write(fd, memoryview(data), 5) == len(data)
    assert disk.read(fd, 10 * MIB, 0) == b"\0" * 5 + data
    assert disk.read(fd, 10, 4 * MIB) == b""
    disk.truncate(fd, 7)
    assert disk.read(fd, 100, 0) == b"\0" * 5 + data[:2]
    disk.fsync(fd, data_only=True)
    disk.fsync(fd, data_only=False)
    os.close(fd)


def test_a_read_or_write_in_pieces_is_put_together(disk: Disk, top: int, monkeypatch) -> None:
    """A disk that moves a few bytes at a time gives the same result."""
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    assert disk.write(fd, b"0123456789" * 3, 0) == 30
    assert disk.read(fd, 1000, 1) == (b"0123456789" * 3)[1:]
    os.close(fd)


def test_a_write_that_fails_part_way_says_how_much(disk: Disk, top: int, monkeypatch) -> None:
    """As a native file system: the count first, the error at the next write."""
    pwrite, failing = os.pwrite, []

    def stingy(fd: int, data: bytes, at: int) -> int:
        if failing:
            raise OSError(errno.ENOSPC, "full")
        failing.append(True)
        return pwrite(fd, data[:4], at)

    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    monkeypatch.setattr(os, "pwrite", stingy)
    assert disk.write(fd, b"0123456789", 0) == 4
    with fails(errno.ENOSPC):
        disk.write(fd, b"456789", 4)
    os.close(fd)


def test_allocating_seeking_and_copying(disk: Disk, top: int) -> None:
    """Ranges are allocated, punched, found and copied by the kernel."""
    keep_size, punch = 1, 2
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    disk.fallocate(fd, 0, 0, MIB)
    assert disk.fstat(fd).st_size == MIB
    disk.write(fd, b"d" * MIB, 0)
    disk.fsync(fd, data_only=False)
    disk.fallocate(fd, punch | keep_size, 0, MIB // 2)
    assert disk.seek(fd, 0, os.SEEK_DATA) == MIB // 2
    assert disk.seek(fd, 0, os.SEEK_HOLE) == 0
    with fails(errno.ENXIO):
        disk.seek(fd, MIB, os.SEEK_DATA)
    with fails(errno.EINVAL):
        disk.seek(fd, 0, os.SEEK_SET)
    with fails(errno.EOPNOTSUPP, errno.EINVAL):
        disk.fallocate(fd, 0x4000, 0, 1)
    copy = disk.create(top, b"g", mode=0o600, uid=0, gid=0)
    assert disk.copy_range(fd, MIB // 2, copy, 3, 10) == 10
    assert disk.copy_range(fd, MIB, copy, 0, 10) == 0
    assert disk.read(copy, 100, 0) == b"\0" * 3 + b"d" * 10
    os.close(copy)
    os.close(fd)


# -- attributes, labels -------------------------------------------------------------------------


def test_owner_mode_and_times(disk: Disk, top: int) -> None:
    """-1 and None keep what is there, to the nanosecond, before 1970 as well."""
    fd = disk.create(top, b"f", mode=0o600, uid=1, gid=2)
    disk.set_mode(fd, stat.S_IFREG | 0o640)
    disk.set_owner(fd, -1, 9)
    disk.set_times(fd, 1_234_567_890, None)
    disk.set_times(fd, None, 1_700_000_000_123_456_789)
    found = disk.fstat(fd)
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1, 9, 0o640)
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_234_567_890, 1_700_000_000_123_456_789)
    disk.set_times(fd, -1, 0)
    assert disk.fstat(fd).st_atime_ns == -1
    os.close(fd)


def test_a_symlink_has_its_own_owner_and_times(disk: Disk, top: int) -> None:
    """Changing a symlink does not change its target."""
    put(disk, top, b"f")
    disk.symlink(b"f", top, b"s", uid=0, gid=0)
    before = disk.stat(top, b"f")
    disk.set_owner_at(top, b"s", 5, 6)
    disk.set_times_at(top, b"s", None, 42)
    assert (disk.stat(top, b"s").st_uid, disk.stat(top, b"s").st_mtime_ns) == (5, 42)
    assert disk.stat(top, b"f") == before


def test_client_attributes(disk: Disk, top: int) -> None:
    """Set, replaced, listed, removed; ENODATA when not there."""
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    with fails(errno.ENODATA):
        disk.get_xattr(fd, b"user.\xff")
    disk.set_xattr(fd, b"user.\xff", b"1", 0)
    with fails(errno.EEXIST):
        disk.set_xattr(fd, b"user.\xff", b"2", os.XATTR_CREATE)
    assert disk.get_xattr(fd, b"user.\xff") == b"1"
    assert b"user.\xff" in disk.list_xattrs(fd)
    disk.remove_xattr(fd, b"user.\xff")
    with fails(errno.ENODATA):
        disk.remove_xattr(fd, b"user.\xff")
    os.close(fd)


@pytest.mark.parametrize("label_name", [LABEL_TRUSTED, LABEL_USER])
def test_labels_are_kept_on_files_directories_and_symlinks(
    disk: Disk, top: int, label_name: str
) -> None:
    """As trusted.kvfuse everywhere; as user.* everywhere but on symlinks, silently."""
    assert disk.label_name == LABEL_TRUSTED  # tests run as root
    assert disk.keeps_labels()
    disk.label_name = label_name
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    disk.make_dir(top, b"d", mode=0o700, uid=0, gid=0)
    disk.symlink(b"f", top, b"s", uid=0, gid=0)
    assert disk.read_label(fd) is None
    assert disk.read_label_at(top, b"s") is None
    disk.write_label(fd, b"F")
    for name in (b"d", b"s"):
        disk.write_label_at(top, name, name)
    assert disk.read_label(fd) == disk.read_label_at(top, b"f") == b"F"
    assert disk.read_label_at(top, b"d") == b"d"
    assert disk.read_label_at(top, b"s") == (b"s" if label_name == LABEL_TRUSTED else None)
    os.close(fd)
    with fails(errno.ENOENT):
        disk.read_label_at(top, b"missing")


# -- the disk as a whole ------------------------------------------------------------------------


def test_a_handle_reopens_a_file_without_a_name(disk: Disk, top: int) -> None:
    """A file unlinked while open is opened again; a file that is gone is ESTALE."""
    fd = disk.create(top, b"f", mode=0o600, uid=0, gid=0)
    disk.write(fd, b"data", 0)
    handle = disk.handle(fd)
    assert handle is not None
    disk.unlink(top, b"f")
    again = disk.open_handle(handle, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    assert disk.read(again, 10, 0) == b"data"
    os.close(again)
    os.close(fd)
    with fails(errno.ESTALE):
        disk.open_handle(handle, os.O_RDONLY)
    for garbage in (b"", b"\x01", handle + b"x", b"\xff" * 40):
        with fails(errno.EINVAL):
            disk.open_handle(garbage, os.O_RDONLY)


def test_a_lease_says_who_has_the_file(disk: Disk, top: int) -> None:
    """A read lease is refused while there is a writer, a write lease while there is anybody."""
    put(disk, top, b"f", b"x")
    mine = disk.open(top, b"f", os.O_RDONLY)
    assert disk.lease_free(mine, for_write=False)
    assert disk.lease_free(mine, for_write=True)
    reader = disk.open(top, b"f", os.O_RDONLY)
    assert disk.lease_free(mine, for_write=False)
    assert not disk.lease_free(mine, for_write=True)
    os.close(reader)
    writer = disk.open(top, b"f", os.O_WRONLY)
    assert not disk.lease_free(mine, for_write=False)
    os.close(writer)
    os.close(mine)


def test_opens_during_lease_probes_neither_fail_nor_kill(disk: Disk, top: int) -> None:
    """A probe holds its lease for microseconds; whoever opens the file then just succeeds."""
    put(disk, top, b"f", b"x")
    mine = disk.open(top, b"f", os.O_RDONLY)
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            disk.lease_free(mine, for_write=True)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        for _ in range(500):
            os.close(disk.open(top, b"f", os.O_RDWR))
    finally:
        stop.set()
        prober.join()
        os.close(mine)


def test_space_counts_no_root_reserve(loops: LoopDisks) -> None:
    """What is reserved for root is neither capacity nor used nor available."""
    path = loops.add("ext4", 64 * MIB)
    image = loops.base / f"{path.name.removeprefix('disk')}.ext4"
    loops.umount(path)
    subprocess.run(["tune2fs", "-m", "20", str(image)], check=True, capture_output=True)
    loops.mount(path)
    disk = Disk.open_root(str(path))
    empty = disk.space()
    assert empty.capacity_bytes == empty.used_bytes + empty.available_bytes
    assert empty.capacity_bytes < 64 * MIB * 0.85
    (path / "f").write_bytes(b"x" * 8 * MIB)
    disk.sync()
    full = disk.space()
    assert full.used_bytes - empty.used_bytes >= 8 * MIB
    assert full.capacity_bytes == empty.capacity_bytes
    assert full.fill > empty.fill
    disk.close()


@pytest.mark.parametrize(
    ("space", "fill"),
    [
        (Space(100, 25, 75, 0, 0), 0.25),
        (Space(100, 25, 75, 100, 10), 0.9),
        (Space(0, 0, 0, 0, 0), 1.0),
    ],
)
def test_fill_is_of_bytes_or_inodes_whichever_is_fuller(space: Space, fill: float) -> None:
    """A disk without inodes is as full as one without blocks."""
    assert space.fill == pytest.approx(fill)


def test_a_read_only_disk_says_so(loops: LoopDisks) -> None:
    """It opens, keeps its label name, and refuses writes with EROFS."""
    path = loops.add()
    (path / "f").touch()
    loops.remount(path, "ro")
    disk = Disk.open_root(str(path))
    assert disk.is_read_only()
    assert disk.label_name == LABEL_TRUSTED
    assert not disk.keeps_labels()
    top = disk.open_dir(b"")
    with fails(errno.EROFS):
        disk.create(top, b"g", mode=0o600, uid=0, gid=0)
    os.close(top)
    disk.close()


def test_file_systems_are_told_by_name(mounted: Path, tmp_path: Path) -> None:
    """The name is what operators call it."""
    disk = Disk.open_root(str(mounted))
    assert disk.filesystem in FILESYSTEMS
    disk.close()
    disk = Disk.open_root("/dev/shm")
    assert disk.filesystem == "tmpfs"
    assert disk.use_openat2
    disk.close()
