"""Verbs of a pool, their errors, and what many threads see of each other."""

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfuse.core.records import ROOT_ID, State
from kvfuse.pool.pool import RENAME_EXCHANGE, RENAME_NOREPLACE, AttrChanges, Pool
from tests.disks import loop_disks
from tests.shell.pools import (
    CALLER,
    Box,
    boxed,
    commit,
    files,
    find,
    mkdir,
    node_of,
    put,
    read,
    rename,
    tree,
    truncate,
    unlink,
)
from tests.shell.verbs import name_on

LONG = b"x" * 256
GONE = 1 << 40


@pytest.fixture
def pool():
    """A pool with a file f.bin, a directory d with a file in it, an empty one e, a symlink s."""
    with boxed() as box:
        pool = box.open()
        mkdir(pool, "d")
        mkdir(pool, "e")
        commit(pool, "f.bin", b"0123456789")
        commit(pool, "d/g.bin", b"g")
        pool.symlink(ROOT_ID, b"s", b"nowhere", CALLER)
        yield pool
        box.check()


@pytest.fixture(scope="module")
def ext4() -> Iterator[list[Path]]:
    """Two ext4 file systems: they give inode numbers again at once, as tmpfs does not."""
    with loop_disks(2) as (_, paths):
        yield paths


@pytest.fixture
def racing(ext4: list[Path], tmp_path: Path) -> Iterator[Pool]:
    """A pool on ext4 with the directories e and d."""
    disks = [path / tmp_path.name for path in ext4]
    for disk in disks:
        disk.mkdir()
    box = Box(tmp_path, disks)
    try:
        pool = box.open()
        mkdir(pool, "d")
        mkdir(pool, "e")
        yield pool
        box.check()
        box.reopen()
        box.check()
    finally:
        box.drop()


def node(pool: Pool, path: str) -> int:
    return node_of(pool, path).id


def opened(pool: Pool, path: str, flags: int = os.O_RDONLY) -> int:
    return pool.open(node(pool, path), flags)


R = ROOT_ID
ERRORS: list[tuple[str, int, Callable[[Pool], object]]] = [
    ("lookup long", errno.ENAMETOOLONG, lambda p: p.lookup(R, LONG)),
    ("create long", errno.ENAMETOOLONG, lambda p: p.create(R, LONG, os.O_RDWR, 0o600, CALLER)),
    ("mkdir long", errno.ENAMETOOLONG, lambda p: p.mkdir(R, LONG, 0o700, CALLER)),
    ("rename to long", errno.ENAMETOOLONG, lambda p: p.rename(R, b"f.bin", R, LONG, 0)),
    ("create slash", errno.EINVAL, lambda p: p.create(R, b"a/b", os.O_RDWR, 0o600, CALLER)),
    ("mkdir dot", errno.EINVAL, lambda p: p.mkdir(R, b"..", 0o700, CALLER)),
    ("create exclusive", errno.EEXIST,
     lambda p: p.create(R, b"f.bin", os.O_RDWR | os.O_EXCL, 0o600, CALLER)),
    ("create over a directory", errno.EISDIR,
     lambda p: p.create(R, b"d", os.O_RDWR, 0o600, CALLER)),
    ("create in a file", errno.ENOTDIR,
     lambda p: p.create(node(p, "f.bin"), b"x", os.O_RDWR, 0o600, CALLER)),
    ("create in nothing", errno.ESTALE, lambda p: p.create(GONE, b"x", os.O_RDWR, 0o600, CALLER)),
    ("mknod device", errno.EPERM, lambda p: p.mknod(R, b"dev", stat.S_IFBLK | 0o600, CALLER)),
    ("mknod socket", errno.EPERM, lambda p: p.mknod(R, b"sock", stat.S_IFSOCK | 0o600, CALLER)),
    ("mknod existing", errno.EEXIST, lambda p: p.mknod(R, b"f.bin", 0o600, CALLER)),
    ("mkdir existing", errno.EEXIST, lambda p: p.mkdir(R, b"f.bin", 0o700, CALLER)),
    ("mkdir in nothing", errno.ESTALE, lambda p: p.mkdir(GONE, b"x", 0o700, CALLER)),
    ("symlink existing", errno.EEXIST, lambda p: p.symlink(R, b"d", b"x", CALLER)),
    ("unlink missing", errno.ENOENT, lambda p: p.unlink(R, b"none")),
    ("unlink directory", errno.EISDIR, lambda p: p.unlink(R, b"d")),
    ("rmdir missing", errno.ENOENT, lambda p: p.rmdir(R, b"none")),
    ("rmdir file", errno.ENOTDIR, lambda p: p.rmdir(R, b"f.bin")),
    ("rmdir full", errno.ENOTEMPTY, lambda p: p.rmdir(R, b"d")),
    ("rename missing", errno.ENOENT, lambda p: p.rename(R, b"none", R, b"x", 0)),
    ("rename flags", errno.EINVAL, lambda p: p.rename(R, b"f.bin", R, b"x", 3)),
    ("rename whiteout", errno.EINVAL, lambda p: p.rename(R, b"f.bin", R, b"x", 4)),
    ("rename no replace", errno.EEXIST,
     lambda p: p.rename(R, b"f.bin", node(p, "d"), b"g.bin", RENAME_NOREPLACE)),
    ("rename file over directory", errno.EISDIR, lambda p: p.rename(R, b"f.bin", R, b"e", 0)),
    ("rename directory over file", errno.ENOTDIR, lambda p: p.rename(R, b"e", R, b"f.bin", 0)),
    ("rename directory over full", errno.ENOTEMPTY, lambda p: p.rename(R, b"e", R, b"d", 0)),
    ("rename into itself", errno.EINVAL, lambda p: p.rename(R, b"d", node(p, "d"), b"x", 0)),
    ("rename into nothing", errno.ESTALE, lambda p: p.rename(R, b"d", GONE, b"x", 0)),
    ("exchange with nothing", errno.ENOENT,
     lambda p: p.rename(R, b"f.bin", R, b"none", RENAME_EXCHANGE)),
    ("exchange with what is below", errno.EINVAL,
     lambda p: p.rename(R, b"d", node(p, "d"), b"g.bin", RENAME_EXCHANGE)),
    ("link directory", errno.EPERM, lambda p: p.link(node(p, "d"), R, b"x")),
    ("link existing", errno.EEXIST, lambda p: p.link(node(p, "f.bin"), R, b"d")),
    ("link nothing", errno.ESTALE, lambda p: p.link(GONE, R, b"x")),
    ("open directory", errno.EISDIR, lambda p: p.open(node(p, "d"), os.O_RDONLY)),
    ("open symlink", errno.ELOOP, lambda p: p.open(node(p, "s"), os.O_RDONLY)),
    ("open nothing", errno.ESTALE, lambda p: p.open(GONE, os.O_RDONLY)),
    ("getattr nothing", errno.ESTALE, lambda p: p.getattr(GONE)),
    ("setattr nothing", errno.ESTALE, lambda p: p.setattr(GONE, AttrChanges(mode=0o600))),
    ("truncate directory", errno.EISDIR, lambda p: truncate(p, "d", 0)),
    ("readlink file", errno.EINVAL, lambda p: p.readlink(node(p, "f.bin"))),
    ("readdir file", errno.ENOTDIR, lambda p: p.readdir(node(p, "f.bin"), 0, 9)),
    ("readdir nothing", errno.ESTALE, lambda p: p.readdir(GONE, 0, 9)),
    ("read closed", errno.EBADF, lambda p: p.read(GONE, 0, 1)),
    ("release twice", errno.EBADF, lambda p: p.release(GONE)),
    ("write read-only", errno.EBADF, lambda p: p.write(opened(p, "f.bin"), 0, b"x")),
    ("seek past the end", errno.ENXIO, lambda p: p.lseek(opened(p, "f.bin"), 99, os.SEEK_DATA)),
    ("seek from the end", errno.EINVAL, lambda p: p.lseek(opened(p, "f.bin"), 0, os.SEEK_END)),
    ("xattr missing", errno.ENODATA, lambda p: p.getxattr(node(p, "f.bin"), b"user.none")),
    ("xattr missing of a directory", errno.ENODATA,
     lambda p: p.getxattr(node(p, "d"), b"user.none")),
    ("xattr of the system", errno.ENODATA,
     lambda p: p.getxattr(node(p, "f.bin"), b"security.capability")),
    ("xattr label", errno.ENODATA, lambda p: p.getxattr(node(p, "f.bin"), b"trusted.kvfuse")),
    ("xattr set trusted", errno.EOPNOTSUPP,
     lambda p: p.setxattr(node(p, "f.bin"), b"trusted.kvfuse", b"x", 0)),
    ("xattr set acl", errno.EOPNOTSUPP,
     lambda p: p.setxattr(node(p, "d"), b"system.posix_acl_default", b"x", 0)),
    ("xattr set own", errno.EPERM,
     lambda p: p.setxattr(node(p, "f.bin"), b"user.kvfuse.disk", b"x", 0)),
    ("xattr set label", errno.EPERM,
     lambda p: p.setxattr(node(p, "f.bin"), b"user.kvfuse..", b"x", 0)),
    ("xattr of a symlink", errno.EPERM, lambda p: p.setxattr(node(p, "s"), b"user.a", b"x", 0)),
    ("xattr replace missing", errno.ENODATA,
     lambda p: p.setxattr(node(p, "d"), b"user.a", b"x", 2)),
    ("xattr remove missing", errno.ENODATA, lambda p: p.removexattr(node(p, "f.bin"), b"user.a")),
    ("xattr long value", errno.E2BIG,
     lambda p: p.setxattr(node(p, "d"), b"user.a", bytes(65537), 0)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "act"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_refusal_has_its_errno_and_changes_nothing(pool, code, act):
    """Each bad call answers the errno of ext4, or of a file that is gone, and leaves the tree."""
    before = tree(pool)
    with pytest.raises(OSError) as refused:  # noqa: PT011 - its errno is compared
        act(pool)
    assert refused.value.errno == code, refused.value
    assert tree(pool) == before


def test_directory_xattr_can_be_made_replaced_removed(pool):
    """The catalog keeps them, as a file system would."""
    inode = node(pool, "d")
    pool.setxattr(inode, b"user.a", b"1", 1)
    with pytest.raises(OSError, match="exists"):
        pool.setxattr(inode, b"user.a", b"2", 1)
    pool.setxattr(inode, b"user.a", b"3", 2)
    assert pool.getxattr(inode, b"user.a") == b"3"
    assert pool.listxattr(inode) == [b"user.a"]
    pool.removexattr(inode, b"user.a")
    assert pool.listxattr(inode) == []


def test_xattrs_are_kept_across_rename_and_labels_not_listed(pool):
    """``user.*`` travels with the file; nothing of kvfuse's own is seen."""
    pool.setxattr(node(pool, "f.bin"), b"user.crc", b"1", 0)
    rename(pool, "f.bin", "d/moved.bin")
    assert pool.listxattr(node(pool, "d/moved.bin")) == [b"user.crc"]
    assert pool.getxattr(node(pool, "d/moved.bin"), b"user.crc") == b"1"
    assert pool.getxattr(node(pool, "d/moved.bin"), b"user.kvfuse.state") == b"committed"


def test_file_is_pending_while_it_is_written_and_visible_all_the_time(pool):
    """Its generation grows with each writer; a rename before the last close keeps it pending."""
    first = node_of(pool, "f.bin")
    fh = opened(pool, "f.bin", os.O_WRONLY)
    during = node_of(pool, "f.bin")
    assert during.state == State.PENDING
    assert during.generation > first.generation
    pool.write(fh, 10, b"more")
    assert node_of(pool, "f.bin").size == 14
    rename(pool, "f.bin", "d/g.bin")
    assert node_of(pool, "d/g.bin").state == State.PENDING
    pool.release(fh)
    after = node_of(pool, "d/g.bin")
    assert after.state == State.COMMITTED
    assert after.generation > during.generation
    assert (after.id, after.size) == (first.id, 14)
    assert read(pool, "d/g.bin") == b"0123456789more"


def test_truncating_open_keeps_the_inode(pool):
    """O_TRUNC is the same file, empty; a reader that has it open sees it empty."""
    reader = opened(pool, "f.bin")
    writer = opened(pool, "f.bin", os.O_WRONLY | os.O_TRUNC)
    assert node_of(pool, "f.bin").size == 0
    assert pool.read(reader, 0, 9) == b""
    pool.release(writer)
    pool.release(reader)
    assert read(pool, "f.bin") == b""


def test_replaced_open_file_stays_readable(pool):
    """The reader of an overwritten or unlinked file keeps what it opened."""
    old = node_of(pool, "f.bin")
    fh = opened(pool, "f.bin")
    commit(pool, "f.bin", b"new")
    assert pool.read(fh, 0, 99) == b"0123456789"
    assert pool.getattr(old.id).nlink == 0
    pool.setattr(old.id, AttrChanges(mode=0o600))
    assert stat.S_IMODE(pool.getattr(old.id).mode) == 0o600
    again = pool.open(old.id, os.O_RDONLY)
    pool.release(fh)
    assert pool.read(again, 0, 99) == b"0123456789"
    pool.release(again)
    assert is_gone(pool, old.id)  # after it has lingered
    assert read(pool, "f.bin") == b"new"


def is_gone(pool, node_id: int) -> bool:
    """Whether an id is gone within seconds: what a rename replaced lingers for one."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            pool.getattr(node_id)
        except OSError as exc:
            return exc.errno == errno.ESTALE
        time.sleep(0.05)
    return False


def test_listing_goes_on_where_it_was_while_names_come_and_go(pool):
    """Every name that is there all the time is listed once; removed ones disturb nothing."""
    directory = mkdir(pool, "big").id
    for number in range(60):
        put(pool, f"big/{number}.bin", b"")
    listed: list[bytes] = []
    cookie = 0
    while batch := pool.readdir(directory, cookie, 7):
        listed += [entry.name for entry in batch]
        cookie = batch[-1].cookie
        for entry in batch[::2]:  # gone behind the reader, and one before it
            unlink(pool, f"big/{os.fsdecode(entry.name)}")
        later = pool.readdir(directory, cookie, 99)[3:4]
        for entry in later:
            rename(pool, f"big/{os.fsdecode(entry.name)}", f"e/{os.fsdecode(entry.name)}")
    assert len(listed) == len(set(listed))
    stayed = {e.name for e in pool.readdir(directory, 0, 99)}
    assert stayed <= set(listed)


def test_set_group_id_directory_hands_down_its_group(pool):
    """Files get its group, directories the bit too; set-id bits on files are dropped."""
    inode = node(pool, "d")
    pool.setattr(inode, AttrChanges(gid=55, mode=0o2775))
    made = put(pool, "d/new.bin", b"", mode=0o6755)
    assert (made.gid, stat.S_IMODE(made.mode)) == (55, 0o755)
    below = pool.mkdir(inode, b"below", 0o755, CALLER)
    assert below.gid == 55
    assert below.mode & stat.S_ISGID


# -- threads


def together(*acts: Callable[[], object]) -> list[object]:
    """Run *acts* at once, each in its thread; return results or errnos."""
    barrier = threading.Barrier(len(acts))
    results: list[object] = [None] * len(acts)

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = acts[number]()
        except OSError as exc:
            results[number] = -(exc.errno or 0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_exclusive_create_has_one_winner(racing):
    """O_EXCL is exact across threads."""
    pool = racing
    flags = os.O_RDWR | os.O_EXCL
    for number in range(20):
        name = b"x%d.bin" % number
        results = together(*[lambda n=name: pool.create(R, n, flags, 0o600, CALLER)[1]] * 6)
        winners = [result for result in results if result != -errno.EEXIST]
        assert len(winners) == 1
        pool.release(winners[0])


def test_racing_mkdirs_give_each_its_directory(racing):
    """One makes it, the others are told that it is there, and all can write below."""
    pool = racing

    def work(number: int) -> None:
        parent = R
        for part in (b"a", b"b", b"c"):
            try:
                parent = pool.mkdir(parent, part, 0o755, CALLER).id
            except FileExistsError:
                found = pool.lookup(parent, part)
                assert found is not None
                parent = found.id
        commit(pool, f"a/b/c/{number}.bin", b"%d" % number)

    assert together(*[lambda n=n: work(n) for n in range(8)]) == [None] * 8
    assert len(pool.readdir(node(pool, "a/b/c"), 0, 99)) == 8


def test_many_writers_of_one_name_leave_one_whole_file(racing):
    """Commits of one key race from both disks; a reader sees one of them, never a mixture."""
    pool = racing
    names = [name_on(pool, number % 2, f"t{number}x") for number in range(6)]
    stop = threading.Event()
    seen: set[bytes] = set()

    def reader() -> None:
        while not stop.is_set():
            found = find(pool, "key.bin")
            if found is None:
                continue
            try:
                fh = pool.open(found.id, os.O_RDONLY)
            except OSError as exc:
                if exc.errno == errno.ESTALE:
                    continue
                raise
            seen.add(pool.read(fh, 0, 1 << 16))
            pool.release(fh)

    def writer(number: int) -> None:
        for _ in range(15):
            put(pool, names[number], bytes([number]) * 5000)
            rename(pool, names[number], "key.bin")

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        assert together(*[lambda n=n: writer(n) for n in range(6)]) == [None] * 6
    finally:
        stop.set()
        thread.join()
    assert seen <= {bytes([number]) * 5000 for number in range(6)}
    assert len(read(pool, "key.bin")) == 5000


def test_files_are_put_while_directories_are_renamed(racing):
    """Nothing is lost, whatever the directory is called when the file arrives."""
    pool = racing
    directory = mkdir(pool, "w/from").id
    stop = threading.Event()

    def renamer() -> None:
        places = ["w/from", "to", "e/deep", "w/from"]
        while not stop.is_set():
            for old, new in itertools.pairwise(places):
                rename(pool, old, new)

    def writer(first: int) -> None:
        for number in range(first, first + 25):
            temp, name = b"%d.bin_7.tmp" % number, b"%d.bin" % number
            _, fh = pool.create(directory, temp, os.O_RDWR | os.O_EXCL, 0o600, CALLER)
            pool.write(fh, 0, name)
            pool.release(fh)
            pool.rename(directory, temp, directory, name, 0)

    thread = threading.Thread(target=renamer)
    thread.start()
    try:
        assert together(*[lambda n=n: writer(n * 100) for n in range(3)]) == [None] * 3
    finally:
        stop.set()
        thread.join()
    found = files(tree(pool))
    assert len([path for path in found if path.startswith("w/from/")]) == 75
    for path, content in found.items():
        if path.startswith("w/from/"):
            assert os.fsencode(path.rpartition("/")[2]) == content


def test_files_come_and_go_in_a_directory_that_is_removed_again_and_again(racing):
    """rmdir fails while something is there; what was put is never in a removed directory."""
    pool = racing

    def writer(number: int) -> int:
        done = 0
        for _ in range(40):
            try:
                parent = pool.mkdir(R, b"tmp", 0o755, CALLER).id
            except FileExistsError:
                found = pool.lookup(R, b"tmp")
                if found is None:
                    continue
                parent = found.id
            name = b"%d.bin" % number
            try:
                _, fh = pool.create(parent, name, os.O_RDWR, 0o600, CALLER)
                pool.release(fh)
                pool.unlink(parent, name)
                done += 1
                pool.rmdir(R, b"tmp")
            except OSError as exc:
                if exc.errno not in (errno.ESTALE, errno.ENOENT, errno.ENOTEMPTY):
                    raise
        return done

    assert all(isinstance(done, int) and done >= 0 for done in
               together(*[lambda n=n: writer(n) for n in range(4)]))  # fmt: skip
    with_left = find(pool, "tmp")
    assert with_left is None or pool.readdir(with_left.id, 0, 9) == []
