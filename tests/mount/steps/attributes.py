"""Extended attributes."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    attempt,
    changed_times,
    read_file,
    register,
    step,
    write_file,
)


def _attributes(kind: str, follow: bool) -> list[object]:
    KINDS[kind]("name")
    return [
        attempt(os.getxattr, "name", "user.a", follow_symlinks=follow),
        attempt(os.setxattr, "name", "user.a", b"1", follow_symlinks=follow),
        attempt(lambda: os.getxattr("name", "user.a", follow_symlinks=follow).decode()),
        attempt(lambda: _own(os.listxattr("name", follow_symlinks=follow))),
        attempt(os.removexattr, "name", "user.a", follow_symlinks=follow),
        attempt(os.removexattr, "name", "user.a", follow_symlinks=follow),
    ]


def _own(names: list[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("user."))


for _kind in KINDS:
    register(f"attributes.of_{_kind}", partial(_attributes, _kind, True))
    register(f"attributes.nofollow_of_{_kind}", partial(_attributes, _kind, False))


@step
def create_and_replace_flags() -> list[object]:
    write_file("f")
    return [
        attempt(os.setxattr, "f", "user.a", b"1", os.XATTR_REPLACE),
        attempt(os.setxattr, "f", "user.a", b"2", os.XATTR_CREATE),
        attempt(os.setxattr, "f", "user.a", b"3", os.XATTR_CREATE),
        attempt(os.setxattr, "f", "user.a", b"4", os.XATTR_REPLACE),
        attempt(os.setxattr, "f", "user.a", b"5", 7),
        os.getxattr("f", "user.a").decode(),
    ]


def _value(length: int) -> list[object]:
    write_file("f")
    value = bytes(i % 256 for i in range(length))
    return [
        attempt(os.setxattr, "f", "user.a", value),
        attempt(lambda: os.getxattr("f", "user.a") == value),
    ]


for _length in (0, 1, 4, 100, 2000, 70_000):
    register(f"attributes.value_of_{_length}_bytes", partial(_value, _length))


@step
def names_of_all_lengths() -> list[object]:
    write_file("f")
    return [attempt(os.setxattr, "f", "user." + "n" * n, b"v") for n in (1, 100, 250, 251, 300)]


@step
def odd_names() -> list[object]:
    write_file("f")
    names = ("user.", "user", "nothing.x", "", "User.x", b"user.\xff\xfe", "user.with space")
    return [attempt(os.setxattr, "f", name, b"v") for name in names]


@step
def many_attributes_are_listed() -> list[str]:
    write_file("f")
    for number in range(20):
        os.setxattr("f", f"user.n{number:02d}", b"%d" % number)
    for number in range(0, 20, 2):
        os.removexattr("f", f"user.n{number:02d}")
    return _own(os.listxattr("f"))


@step
def setting_and_removing_moves_only_ctime() -> list[object]:
    write_file("f")
    os.mkdir("d")
    return [
        changed_times("f", lambda: os.setxattr("f", "user.a", b"1")),
        changed_times("f", lambda: os.removexattr("f", "user.a")),
        changed_times("f", lambda: attempt(os.getxattr, "f", "user.a")),
        changed_times("d", lambda: os.setxattr("d", "user.a", b"1")),
    ]


@step
def attributes_follow_renames_and_links() -> list[object]:
    write_file("f", b"data")
    os.setxattr("f", "user.crc", b"\xde\xad")
    os.link("f", "g")
    os.rename("f", "h")
    write_file("g", b"rewritten")
    return [os.getxattr("h", "user.crc").hex(), os.getxattr("g", "user.crc").hex()]


@step
def a_replaced_file_takes_its_attributes_along() -> list[object]:
    write_file("old")
    os.setxattr("old", "user.crc", b"old")
    write_file("new")
    os.setxattr("new", "user.crc", b"new")
    os.setxattr("new", "user.more", b"")
    os.rename("new", "old")
    return [os.getxattr("old", "user.crc").decode(), _own(os.listxattr("old"))]


@step
def attributes_by_descriptor() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.setxattr(fd, "user.a", b"1")
    found = [os.getxattr("f", "user.a").decode(), _own(os.listxattr(fd))]
    os.close(fd)
    return list(found)


@step
def attributes_of_an_unlinked_open_file() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.setxattr(fd, "user.a", b"1")
    os.unlink("f")
    found = [
        attempt(lambda: os.getxattr(fd, "user.a").decode()),
        attempt(os.setxattr, fd, "user.b", b"2"),
        attempt(lambda: _own(os.listxattr(fd))),
    ]
    os.close(fd)
    return list(found)


@step
def attributes_of_directories_stay_when_they_move() -> list[object]:
    os.mkdir("d")
    os.setxattr("d", "user.note", b"here")
    os.mkdir("e")
    os.rename("d", "e/d")
    return [os.getxattr("e/d", "user.note").decode()]


@step
def file_capabilities_are_absent() -> object:
    write_file("f")
    return attempt(os.getxattr, "f", "security.capability")


@step
def access_control_lists() -> list[object]:
    write_file("f")
    os.mkdir("d")
    acl = bytes.fromhex("02000000" "01000600ffffffff" "02000400dcff0000" "04000400ffffffff"
                        "10000600ffffffff" "20000400ffffffff")  # fmt: skip
    return [
        attempt(os.setxattr, "f", "system.posix_acl_access", acl),
        attempt(os.setxattr, "d", "system.posix_acl_default", acl),
    ]


@step
def trusted_and_security_names() -> list[object]:
    write_file("f")
    return [
        attempt(os.setxattr, "f", "trusted.note", b"v"),
        attempt(os.getxattr, "f", "trusted.absent"),
        attempt(os.setxattr, "f", "security.note", b"v"),
    ]


@step
def no_trusted_names_are_listed_on_a_plain_file() -> list[str]:
    write_file("f")
    return os.listxattr("f")


@step
def a_copy_with_attributes_is_whole() -> list[object]:
    import shutil

    write_file("f", b"data", 0o640)
    os.setxattr("f", "user.a", b"1")
    os.utime("f", ns=(10**18, 10**18))
    shutil.copy2("f", "g")
    return [read_file("g").decode(), os.stat("g").st_mtime_ns, _own(os.listxattr("g"))]
