"""How many requests of which kind the kernel sends for what a client does.

The numbers are those of the table in docs/performance.md, and of Linux 6.9 to 6.18: later kernels
ask less often for the attributes of a directory.
"""

import contextlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfuse.control import registry
from kvfuse.control.client import call
from tests.mounting import SETUPS, Mounted, runnable_setups

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        runnable_setups()["direct"] is not None, reason=str(runnable_setups()["direct"])
    ),
]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SETTLE_S = 10.0
_TRIES = 3  # a machine that is busy lets timeouts pass in the middle; the fewest is what it takes
_LONG = {"negative_ttl_secs": 60}


class Client:
    """Does things below a mount and counts the requests each of them takes."""

    def __init__(self, mounted: Mounted, access: str) -> None:
        self.mounted = mounted
        self.is_posix = access == "posix"
        self.base = mounted.path / "engine"
        self.base.mkdir()
        self._fresh = 0
        self.put(self.name())
        entry = registry.registration(str(mounted.path))
        assert entry is not None
        self._entry = entry

    def counters(self) -> Counter[str]:
        answer = call(self._entry, "status")
        assert isinstance(answer, dict)
        return Counter({op: row["requests"] for op, row in answer["requests"].items()})

    def name(self) -> Path:
        """Return a path never used before."""
        self._fresh += 1
        return self.base / f"block-{self._fresh:04}.bin"

    def requests(self, prepare: Callable[[], Path], action: Callable[[Path], object]) -> str:
        """Return the fewest requests that *action* took on what *prepare* returned."""
        return min((self._once(prepare, action) for _ in range(_TRIES)), key=len)

    def _once(self, prepare: Callable[[], Path], action: Callable[[Path], object]) -> str:
        path = prepare()
        self._wait_for_releases()
        os.stat(self.base)  # what was prepared changed it: with posix the next walk asks for it
        before = self.counters()
        action(path)
        self._wait_for_releases()
        took = self.counters() - before
        del took["forget"]  # sent when it suits the kernel
        return " ".join(op if count == 1 else f"{op}*{count}" for op, count in sorted(took.items()))

    def _wait_for_releases(self) -> None:
        """A RELEASE is sent after close(2) has returned."""
        deadline_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline_s:
            now = self.counters()
            files = now["release"] == now["open"] + now["create"]
            if files and now["releasedir"] == now["opendir"]:
                return
            time.sleep(0.005)

    # -- what clients do

    def temporary(self, path: Path) -> Path:
        """Return the temp name vLLM gives *path*."""
        return path.with_name(f"{path.name}_7.tmp")

    def put(self, path: Path) -> None:
        fd = os.open(self.temporary(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, b"x" * 4096)
        os.close(fd)
        os.rename(self.temporary(path), path)

    def get(self, path: Path, flags: int = 0) -> None:
        buffer = mmap.mmap(-1, 4096)
        fd = os.open(path, os.O_RDONLY | flags)
        assert os.preadv(fd, [buffer], 0) == 4096
        os.close(fd)

    def stored(self) -> Path:
        """Return a file nobody asked for since it was stored."""
        path = self.name()
        self.put(path)
        time.sleep(0.25)  # what is left of the timeout of its temp name
        return path

    def known(self) -> Path:
        """Return a file that was read before."""
        path = self.stored()
        self.get(path)
        return path

    def forgotten(self) -> Path:
        """Return a file of which the kernel has nothing any more."""
        path = self.known()
        _DROP_CACHES.write_text("2")
        return path

    def missed(self) -> Path:
        """Return a name that was asked for in vain."""
        path = self.name()
        assert not os.access(path, os.F_OK)
        return path


@pytest.fixture(scope="module", params=["posix", "owner"])
def client(
    request: pytest.FixtureRequest,
    filesystems: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of a pool over two ext4 filesystems, for each way of access."""
    base = tmp_path_factory.mktemp("counts")
    disks = [filesystem / base.name for filesystem in filesystems[1:]]
    settings = {"pool": {"access": request.param}, "metadata_cache": _LONG}
    assert SETUPS["direct"].driver == "direct"
    with Mounted(base, disks, setup="direct", settings=settings) as mounted:
        yield Client(mounted, request.param)


def test_put(client: Client):
    """A put takes five round trips, and with access=posix the create costs a sixth.

    Each change of a directory makes the next walk through it ask for its attributes.
    """
    wanted = "create getxattr lookup*2 release rename"
    if client.is_posix:
        wanted = "create getattr getxattr lookup*2 release rename"
    assert client.requests(client.name, client.put) == wanted


def test_first_get(client: Client):
    """The first question about a stored file reaches the pool."""
    assert client.requests(client.stored, client.get) == "lookup open release"


def test_get_again(client: Client):
    """A file that was read before takes one round trip; its release nobody waits for."""
    assert client.requests(client.known, client.get) == "open release"


def test_get_of_what_the_kernel_forgot(client: Client):
    """After the kernel dropped its names, the name is looked up once."""
    assert client.requests(client.forgotten, client.get) == "lookup open release"


def test_first_hit(client: Client):
    """access(2) of a file the kernel has no name of is one lookup."""
    assert client.requests(client.stored, lambda path: os.access(path, os.F_OK)) == "lookup"


def test_hit_again(client: Client):
    """access(2) of a known file reaches nobody."""
    assert client.requests(client.known, lambda path: os.access(path, os.F_OK)) == ""


def test_first_miss(client: Client):
    """access(2) of a name that is not there is one lookup."""
    assert client.requests(client.name, lambda path: os.access(path, os.F_OK)) == "lookup"


def test_miss_again(client: Client):
    """... and none within the time a miss is believed."""
    assert client.requests(client.missed, lambda path: os.access(path, os.F_OK)) == ""


def test_miss_below_a_missing_directory(client: Client):
    """A miss that ends at a directory is one lookup, and none the second time."""

    def ask(path: Path) -> None:
        assert not os.access(path / "below" / "file", os.F_OK)

    assert client.requests(client.name, ask) == "lookup"
    assert client.requests(client.missed, ask) == ""


def test_stat_after_read(client: Client):
    """The size of a file that was read is known, without its access time."""

    def measure(path: Path) -> None:
        assert os.stat(path).st_size == 4096

    found = client.requests(client.known, measure)
    assert found in {"", "getattr"}  # stat(2) takes the access time along: asked where relatime is


def test_mmap(client: Client):
    """A mapping is read from the page cache of the disk."""

    def map_and_read(path: Path) -> None:
        with (
            open(path, "rb", buffering=0) as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages,
        ):
            assert pages[:4096] == b"x" * 4096

    found = client.requests(client.known, map_and_read)
    assert set(found.split()) <= {"open", "release", "getattr"}


def test_direct_io(client: Client):
    """O_DIRECT reaches the disk without a request for bytes."""
    found = client.requests(client.known, lambda path: client.get(path, os.O_DIRECT))
    assert found == "open release"


def test_unlink(client: Client):
    """The removal of a known file is one round trip."""
    assert client.requests(client.known, os.unlink) == "unlink"


def test_listdir(client: Client):
    """A directory is listed in one opening; what kinds its reads are is the kernel's choice."""
    found = client.requests(lambda: client.base, os.listdir)
    kinds = {word.partition("*")[0] for word in found.split()}
    assert {"opendir", "releasedir"} <= kinds
    assert kinds <= {"opendir", "releasedir", "readdir", "readdirplus", "getattr"}


def test_no_byte_passes_the_server(client: Client):
    """While passthrough is on no READ and no WRITE reaches the server, however big a file is."""
    path = client.name()
    with contextlib.ExitStack() as files:
        file = files.enter_context(open(path, "wb", buffering=0))
        for _ in range(8):
            file.write(b"y" * (1 << 20))
    assert path.read_bytes() == b"y" * (8 << 20)
    client.get(path, os.O_DIRECT)
    now = client.counters()
    assert client.mounted.status()["pool"]["passthrough"]
    assert (now["read"], now["write"]) == (0, 0)
