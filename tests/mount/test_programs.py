"""The programs everybody uses, on a tree of many files: on the mount as on ext4."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.mounting import Mounted

FILES = 1000
DIRECTORIES = 40

pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return what a program prints; it must succeed and complain about nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert not done.stderr, f"{command}: {done.stderr}"
    return done.stdout


def make_tree(root: Path, files: int) -> None:
    """Make a tree of small files, links, modes, owners, times and attributes."""
    dice = random.Random(1)
    for number in range(DIRECTORIES):
        (root / f"d{number % 7}" / f"e{number}").mkdir(parents=True)
    directories = sorted(path for path in root.rglob("e*"))
    for number in range(files):
        path = directories[number % DIRECTORIES] / f"file {number}.bin"
        path.write_bytes(b"x" * dice.randrange(3000))
        if number % 10 == 0:
            os.chmod(path, dice.choice((0o600, 0o640, 0o755)))
        if number % 15 == 0:
            os.chown(path, 1000 + number % 3, 100)
        if number % 20 == 0:
            os.symlink(path.name, f"{path}.symlink")
        if number % 25 == 0:
            os.link(path, f"{path}.hard")
        if number % 30 == 0:
            os.setxattr(path, "user.crc", b"%d" % number)
        os.utime(path, ns=(10**18 + number, 10**18 + 2 * number))


def described(root: Path) -> list[str]:
    """Return one line for each name: type, mode, owners, time, target; size and links of files."""
    files = run(
        "find", ".", "-not", "-type", "d", "-printf", "%P|%y|%m|%U|%G|%T@|%l|%s|%n\n", cwd=root
    )
    folders = run(
        "find", ".", "-mindepth", "1", "-type", "d", "-printf", "%P|%y|%m|%U|%G\n", cwd=root
    )
    return sorted(files.splitlines()) + sorted(folders.splitlines())


def contents(root: Path) -> str:
    """Return the checksums of all files, and their attributes."""
    sums = run("sh", "-c", "find . -type f -print0 | sort -z | xargs -0 sha1sum", cwd=root)
    marked = sorted(path for path in root.rglob("*.bin") if os.listxattr(path))
    return sums + "".join(f"{p.relative_to(root)} {os.getxattr(p, 'user.crc')!r}\n" for p in marked)


@pytest.fixture(scope="module")
def original(setup: str, native: Path) -> Path:
    """A tree on ext4."""
    root = native / f"tree-{setup}"
    root.mkdir()
    make_tree(root, FILES)
    return root


@pytest.mark.parametrize(
    "copy",
    [
        ("cp", "-a", "--", "{source}/.", "{target}"),
        ("rsync", "-aHX", "{source}/", "{target}/"),
        ("sh", "-c", "tar -C {source} --xattrs -cf - . | tar -C {target} --xattrs -xpf -"),
    ],
    ids=("cp", "rsync", "tar"),
)
def test_a_copied_tree_is_the_same(
    copy: tuple[str, ...], original: Path, mounted: Mounted, native: Path
) -> None:
    """Copied onto the mount and back again, nothing is lost: data, modes, owners, times, links."""
    there = mounted.path / copy[0]
    back = native / f"{mounted.base.name}-{copy[0]}"
    for source, target in ((original, there), (there, back)):
        target.mkdir()
        run(*(part.format(source=source, target=target) for part in copy))

    assert described(there) == described(original)
    assert contents(there) == contents(original)
    assert described(back) == described(original)
    assert contents(back) == contents(original)
    assert run("diff", "-r", "--no-dereference", original, there) == ""

    run("rm", "-rf", there)
    assert not there.exists()


def test_listings_and_sums_are_those_of_ext4(original: Path, mounted: Mounted) -> None:
    """``ls -la``, ``du`` and ``find`` tell of the mount what they tell of ext4."""
    there = mounted.path / "listed"
    there.mkdir()
    run("cp", "-a", f"{original}/.", there)
    os.sync()

    for folder in sorted(
        path.relative_to(original) for path in original.rglob("e*") if path.is_dir()
    ):
        columns = "ls -lAn --time-style=full-iso | tail -n +2"  # without the total
        assert run("sh", "-c", columns, cwd=there / folder) == run(
            "sh", "-c", columns, cwd=original / folder
        )
    sizes = "find . -type f -printf '%s %b\n' | awk '{s += $1; b += $2} END {print s, b}'"
    assert run("sh", "-c", sizes, cwd=there) == run("sh", "-c", sizes, cwd=original)
    apparent = int(run("du", "-sb", there).split()[0])
    unique = {(s.st_dev, s.st_ino): s.st_size for p in there.rglob("*") if (s := os.lstat(p))}
    assert apparent == sum(unique.values()) + os.stat(there).st_size

    run("rm", "-rf", there)


def test_df_and_du_agree(mounted: Mounted) -> None:
    """What ``df`` shows as used grows by what ``du`` counts, and falls again."""

    def used() -> int:
        os.sync()
        return int(run("df", "--output=used", "-B1", mounted.path).split()[1])

    there = mounted.path / "counted"
    before = used()
    there.mkdir()
    for number in range(40):
        (there / f"{number}.bin").write_bytes(b"x" * 1_000_000)
    os.sync()
    grown = used() - before
    counted = int(run("du", "-s", "-B1", there).split()[0])

    assert abs(grown - counted) <= counted // 50
    run("rm", "-rf", there)
    assert used() - before <= counted // 50


def test_a_name_of_255_bytes_at_depth_100(mounted: Mounted) -> None:
    """Long names deep down work; renaming the top moves all of it at once."""
    os.chdir(mounted.path)
    try:
        top = "deep"
        os.mkdir(top)
        os.chdir(top)
        for _ in range(100):
            os.mkdir("n" * 255)
            os.chdir("n" * 255)
        name = "f" * 255
        Path(name).write_bytes(b"deep down")
        os.rename(mounted.path / top, mounted.path / "moved")
        assert Path(name).read_bytes() == b"deep down"
        Path("second").write_bytes(b"also")
        os.rename("second", name)
        assert Path(name).read_bytes() == b"also"
    finally:
        os.chdir("/")
    run("rm", "-rf", mounted.path / "moved")
