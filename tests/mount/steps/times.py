"""utimensat(2) and the order of times."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    UTIME_NOW,
    UTIME_OMIT,
    attempt,
    changed_times,
    register,
    step,
    tick,
    utimensat,
    write_file,
)


def _utime(kind: str, follow: bool) -> list[object]:
    KINDS[kind]("name")
    found = attempt(utimensat, "name", (1000, 1), (2000, 2), follow=follow)
    status = attempt(os.stat, "name", follow_symlinks=follow)
    if isinstance(status, str):
        return [found, status]
    return [found, status.st_atime_ns, status.st_mtime_ns]


for _kind in KINDS:
    register(f"times.utimensat_of_{_kind}", partial(_utime, _kind, True))
    register(f"times.utimensat_nofollow_of_{_kind}", partial(_utime, _kind, False))


def _values(seconds: int, nanoseconds: int) -> list[object]:
    write_file("f")
    os.mkdir("d")
    found: list[object] = []
    for name in ("f", "d"):
        found.append(attempt(utimensat, name, (seconds, nanoseconds), (seconds, nanoseconds)))
        status = os.stat(name)
        found += [status.st_atime_ns, status.st_mtime_ns]
    return found if found[0] == "ok" else [found[0]]


for _seconds, _nanoseconds in ((0, 0), (0, 1), (0, 999_999_999), (1, 123_456_789),
                               (2**31 - 1, 7), (2**31, 8), (2**32, 9),
                               (2**33, 1), (15_032_385_535, 0)):  # fmt: skip
    register(f"times.value_{_seconds}_{_nanoseconds}", partial(_values, _seconds, _nanoseconds))
for _seconds, _nanoseconds in ((-1, 0), (-1, 5), (-(2**31), 0)):
    register(
        f"times.value_minus_{-_seconds}_{_nanoseconds}", partial(_values, _seconds, _nanoseconds)
    )


@step
def impossible_nanoseconds() -> list[object]:
    write_file("f")
    return [
        attempt(utimensat, "f", (0, 10**9), (0, 0)),
        attempt(utimensat, "f", (0, -1), (0, 0)),
        attempt(utimensat, "f", (0, 0), (0, 2 * 10**9)),
    ]


def _special(atime: tuple[int, int], mtime: tuple[int, int]) -> list[object]:
    write_file("f")
    os.utime("f", ns=(10**18, 10**18))
    before = os.stat("f")
    tick()
    utimensat("f", atime, mtime)
    after = os.stat("f")

    def word(old: int, new: int) -> str:
        return "kept" if new == old else "now" if new > before.st_ctime_ns else "set"

    return [
        word(before.st_atime_ns, after.st_atime_ns),
        word(before.st_mtime_ns, after.st_mtime_ns),
        after.st_ctime_ns > before.st_ctime_ns,
    ]


_CHOICES = {"now": (0, UTIME_NOW), "omit": (0, UTIME_OMIT), "value": (5, 5)}
for _a_name, _a in _CHOICES.items():
    for _m_name, _m in _CHOICES.items():
        register(f"times.atime_{_a_name}_mtime_{_m_name}", partial(_special, _a, _m))


@step
def touch_moves_all() -> list[str]:
    write_file("f")
    return changed_times("f", lambda: os.utime("f"))


@step
def futimens_on_an_open_and_an_unlinked_file() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.utime(fd, ns=(5, 6))
    found = [os.fstat(fd).st_mtime_ns, os.stat("f").st_atime_ns]
    os.unlink("f")
    os.utime(fd, ns=(7, 8))
    found += [os.fstat(fd).st_atime_ns, os.fstat(fd).st_mtime_ns]
    os.close(fd)
    return list(found)


@step
def set_times_survive_the_close_of_a_writer() -> list[object]:
    fd = os.open("f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"data")
    os.utime("f", ns=(10**18 + 1, 10**18 + 2))
    os.close(fd)
    tick()
    status = os.stat("f")
    return [status.st_atime_ns, status.st_mtime_ns]


@step
def set_times_survive_reading_metadata() -> list[object]:
    write_file("f")
    os.utime("f", ns=(10**18 + 1, 10**18 + 2))
    os.listdir(".")
    os.chmod("f", 0o600)
    os.rename("f", "g")
    os.link("g", "h")
    status = os.stat("h")
    return [status.st_atime_ns, status.st_mtime_ns]


@step
def atime_moves_on_the_first_read_after_a_write() -> bool:
    write_file("f")
    before = os.stat("f").st_atime_ns
    tick()
    with open("f", "rb") as stream:
        stream.read()
    return os.stat("f").st_atime_ns > before


@step
def a_new_files_times_are_of_its_creation() -> list[bool]:
    os.mkdir("before")
    tick()
    write_file("f")
    tick()
    os.mkdir("after")
    first, found, last = (os.stat(name).st_ctime_ns for name in ("before", "f", "after"))
    status = os.stat("f")
    inside = [first < t < last for t in (status.st_atime_ns, status.st_mtime_ns)]
    return [*inside, first < found < last]


@step
def later_writes_have_later_times() -> list[bool]:
    times = []
    for name in "abc":
        write_file(name)
        times.append(os.stat(name).st_mtime_ns)
        tick()
    return [times[0] < times[1], times[1] < times[2]]
