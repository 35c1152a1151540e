"""Limits of names and paths, and names that are not text."""

import os
from functools import partial

from tests.mount.steps.registry import (
    attempt,
    attempt_open,
    read_file,
    register,
    renameat2,
    step,
    write_file,
)


def _verbs(name: str) -> list[object]:
    write_file("source")
    creat = os.O_WRONLY | os.O_CREAT
    return [
        attempt(os.stat, name),
        attempt_open(name, creat),
        attempt(os.truncate, name, 3),
        attempt(os.chmod, name, 0o600),
        attempt(os.utime, name, (1, 1)),
        attempt(os.rename, name, "x"),
        attempt(os.rename, "x", name),
        attempt(os.link, "source", name),
        attempt(os.unlink, name),
        attempt(os.mkdir, name),
        attempt(os.rmdir, name),
        attempt(os.symlink, "t", name),
        attempt(os.readlink, name),
        attempt(os.unlink, name),
        attempt(renameat2, "source", name, 1),
        attempt(os.stat, f"{name}/below"),
    ]


def _shown(found: list[object]) -> list[object]:
    return ["stat" if isinstance(item, os.stat_result) else item for item in found]


_LONG = {"254": "n" * 254, "255": "n" * 255, "256": "n" * 256, "1000": "n" * 1000}
for _label, _name in _LONG.items():
    register(f"naming.length_{_label}", lambda name=_name: _shown(_verbs(name)))
    register(f"naming.length_{_label}_utf8", lambda name=_name: _shown(_verbs("ß" + name[2:])))
    register(f"naming.length_{_label}_below", lambda name=_name: _below(name))


def _below(name: str) -> list[object]:
    os.mkdir("d")
    return _shown(_verbs(f"d/{name}"))


def _path(length: int) -> list[object]:
    component = "c" * 250
    parts: list[str] = []
    while length - len("/".join(parts)) - 1 > 255:
        parts.append(component)
    directory = "/".join(parts)
    os.makedirs(directory)
    path = f"{directory}/" + "f" * (length - len(directory) - 1)
    found = [len(path), attempt_open(path, os.O_WRONLY | os.O_CREAT), attempt(os.mkdir, path)]
    return [*found, attempt(os.symlink, "t", path), attempt(os.rename, path, path)]


for _length in (4094, 4095, 4096, 4097):
    register(f"naming.path_of_{_length}", partial(_path, _length))


def _bytes(name: bytes) -> list[object]:
    encoded = os.fsdecode(name)
    write_file(encoded, b"named")
    os.mkdir(f"{encoded}.d")
    os.rename(encoded, f"{encoded}.d/{encoded}")
    return [
        sorted(os.fsencode(n).hex() for n in os.listdir(".")),
        [os.fsencode(n).hex() for n in os.listdir(f"{encoded}.d")],
        read_file(f"{encoded}.d/{encoded}").decode(),
    ]


for _raw in (b"a b", b"\xff\xfe\x80", b"new\nline", b"\x01", b"...", b".hidden", b"-rf", b"*?[",
             b"\xc3\xa9", b"e\xcc\x81", b"back\\slash", b"%2F", b"a:b", b"~",
             b"UPPER", b" "):  # fmt: skip
    register(f"naming.bytes_{_raw.hex()}", partial(_bytes, _raw))


@step
def case_counts() -> list[str]:
    write_file("name")
    write_file("NAME")
    return sorted(os.listdir("."))


@step
def unicode_forms_are_different_names() -> int:
    write_file("\u00e9")
    write_file("e\u0301")
    return len(os.listdir("."))


@step
def names_a_pool_could_take_for_its_own() -> list[object]:
    names = ("lost+found", ".kvfuse", ".fuse_hidden0001", ".tmp", "x.tmp", "x_1.tmp", ".nfs01")
    found: list[object] = []
    for name in names:
        found += [
            attempt(write_file, name, b"mine"),
            attempt(lambda name=name: len(read_file(name))),
        ]
    return found


@step
def double_and_trailing_slashes() -> list[object]:
    os.makedirs("a//b")
    write_file("a//b///f", b"12")
    return [os.stat("a/./b/../b/f").st_size, attempt(os.stat, "a/b/f/"), os.listdir("a//b//")]
