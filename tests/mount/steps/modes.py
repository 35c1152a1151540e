"""chmod(2), chown(2) and what the mode bits of directories do."""

import os
from functools import partial

from tests.mount.steps.registry import (
    KINDS,
    OTHER_GID,
    OTHER_UID,
    THIRD_GID,
    THIRD_UID,
    as_user,
    attempt,
    changed_times,
    fchmodat_nofollow,
    mode_of,
    register,
    step,
    write_file,
)


def _chmod(kind: str, mode: int) -> list[object]:
    KINDS[kind]("name")
    found = attempt(os.chmod, "name", mode)
    return [found, attempt(mode_of, "name"), attempt(mode_of, "name.t")]


def _chown(kind: str, follow: bool) -> list[object]:
    KINDS[kind]("name")
    found = attempt(os.chown, "name", 12, 34, follow_symlinks=follow)
    return [found, attempt(mode_of, "name"), attempt(mode_of, "name.t")]


for _kind in KINDS:
    for _mode in (0o000, 0o640, 0o777, 0o1777):
        register(f"modes.chmod_{_mode:04o}_of_{_kind}", partial(_chmod, _kind, _mode))
    register(f"modes.chown_of_{_kind}", partial(_chown, _kind, True))
    register(f"modes.lchown_of_{_kind}", partial(_chown, _kind, False))


@step
def setid_bits_of_a_file() -> list[str]:
    write_file("f")
    found = []
    for mode in (0o4755, 0o2755, 0o6755):
        os.chmod("f", mode)
        found.append(mode_of("f"))
    return found


@step
def setid_bits_of_a_directory() -> list[str]:
    os.mkdir("d")
    found = []
    for mode in (0o2755, 0o3777, 0o4755):
        os.chmod("d", mode)
        found.append(mode_of("d"))
    return found


@step
def chmod_on_a_symlink_itself() -> list[object]:
    write_file("t")
    os.symlink("t", "l")
    return [attempt(fchmodat_nofollow, "l", 0o600), mode_of("l"), mode_of("t")]


@step
def fchmod_and_fchown() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT, 0o600)
    found = [attempt(os.fchmod, fd, 0o644), attempt(os.fchown, fd, 7, 8), mode_of("f")]
    os.close(fd)
    return list(found)


@step
def fchmod_of_an_unlinked_file() -> list[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink("f")
    found = [attempt(os.fchmod, fd, 0o644), attempt(os.fchown, fd, 7, 8)]
    status = os.fstat(fd)
    os.close(fd)
    return [*found, status.st_mode, status.st_uid, status.st_gid, status.st_nlink]


@step
def chown_minus_one_keeps() -> list[object]:
    write_file("f")
    os.chown("f", 12, 34)
    found = []
    for uid, gid in ((-1, -1), (56, -1), (-1, 78)):
        found.append([attempt(os.chown, "f", uid, gid), mode_of("f")])
    return list(found)


@step
def chown_of_large_ids() -> list[object]:
    write_file("f")
    return [attempt(os.chown, "f", 2**31 + 5, 2**32 - 2), mode_of("f")]


@step
def chmod_moves_only_ctime() -> list[object]:
    write_file("f")
    os.mkdir("d")
    return [changed_times(name, lambda name=name: os.chmod(name, 0o700)) for name in ("f", "d")]


@step
def chown_moves_only_ctime() -> list[object]:
    write_file("f")
    os.mkdir("d")
    os.symlink("t", "l")
    return [
        changed_times(name, lambda name=name: os.chown(name, 1, 1, follow_symlinks=False),
                      follow=False)
        for name in ("f", "d", "l")
    ]  # fmt: skip


@step
def chown_of_directories_and_what_is_made_in_them() -> list[str]:
    os.mkdir("d", 0o755)
    os.chown("d", 12, 34)
    write_file("d/f")
    os.mkdir("d/e")
    return [mode_of("d"), mode_of("d/f"), mode_of("d/e")]


@step
def setgid_directories_give_their_group_to_what_is_made_in_them() -> list[str]:
    os.umask(0)
    os.mkdir("d")
    os.chown("d", 12, 34)
    os.chmod("d", 0o2777)
    write_file("d/f")
    os.mkdir("d/e")
    os.symlink("x", "d/l")
    os.mkdir("d/e/deeper")
    return [mode_of(name) for name in ("d/f", "d/e", "d/l", "d/e/deeper")]


@step
def setgid_directories_for_another_user() -> list[object]:
    os.umask(0)
    os.mkdir("d")
    os.chown("d", 12, 34)
    os.chmod("d", 0o2777)

    def make() -> None:
        write_file("d/f")
        os.mkdir("d/e")

    return [as_user(make), mode_of("d/f"), mode_of("d/e")]


@step
def an_owner_changes_mode_and_others_may_not() -> list[object]:
    write_file("f")
    os.chown("f", OTHER_UID, OTHER_GID)
    return [
        as_user(lambda: os.chmod("f", 0o600)),
        as_user(lambda: os.chmod("f", 0o666), uid=THIRD_UID, gid=THIRD_GID),
        mode_of("f"),
    ]


@step
def an_owner_gives_a_file_to_a_group_of_his_only() -> list[object]:
    write_file("f")
    os.chown("f", OTHER_UID, OTHER_GID)
    return [
        as_user(lambda: os.chown("f", -1, THIRD_GID)),
        as_user(lambda: os.chown("f", -1, THIRD_GID), groups=(THIRD_GID,)),
        mode_of("f"),
        as_user(lambda: os.chown("f", THIRD_UID, -1)),
        as_user(lambda: os.chown("f", OTHER_UID, -1)),
        as_user(lambda: os.chown("f", -1, -1)),
    ]


@step
def somebody_elses_file_is_not_chowned() -> list[object]:
    write_file("f")
    return [
        as_user(lambda: os.chown("f", OTHER_UID, -1)),
        as_user(lambda: os.chown("f", -1, OTHER_GID)),
        as_user(lambda: os.chown("f", -1, -1)),
        mode_of("f"),
    ]


@step
def chmod_drops_setgid_outside_the_group() -> list[object]:
    os.mkdir("d")
    os.chown("d", OTHER_UID, THIRD_GID)
    return [as_user(lambda: os.chmod("d", 0o2777)), mode_of("d")]


@step
def writing_drops_setid_bits() -> list[object]:
    write_file("f")
    os.chmod("f", 0o6777)
    before = mode_of("f")

    def write() -> None:
        fd = os.open("f", os.O_WRONLY)
        os.write(fd, b"x")
        os.close(fd)

    return [before, as_user(write), mode_of("f")]


@step
def chown_drops_setid_bits() -> list[object]:
    write_file("f")
    os.chmod("f", 0o6755)
    os.chown("f", 12, 34)
    return [mode_of("f")]
