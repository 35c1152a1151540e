"""The command line without a mount: what it says, what it refuses, what it loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvfuse.cli.group import cli
from kvfuse.output import human_bytes, printable

PROJECT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ["mount"], ["umount"], ["status"], ["locate"], ["disk", "init"], ["disk", "list"],
    ["config", "check"], ["config", "show"], ["doctor"], ["bench"],
]  # fmt: skip


def kvfuse(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli, list(arguments), prog_name="kvfuse")


def kvfuse_process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvfuse", *arguments],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        **options,
    )  # fmt: skip


def refusal(result: Result) -> str:
    """Return the one line that *result* says; assert that it is one."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("kvfuse: ")
    return lines[0]


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    """An empty directory."""
    path = tmp_path / "mount"
    path.mkdir()
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty directory that could be a disk."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
def test_help_of_every_command_shows_an_example_and_json(command: list[str]) -> None:
    """Help teaches: there is an example to type, and --json everywhere."""
    result = kvfuse(*command, "--help")

    assert result.exit_code == 0
    assert "Example" in result.output
    assert "--json" in result.output


def test_help_lists_every_command_and_exit_code() -> None:
    """The first page names what there is."""
    output = kvfuse("--help").output

    assert {name for name, *_ in COMMANDS} <= set(output.split())
    assert all(f"{code} " in output for code in range(7))
    assert "daemon" not in output.split("Commands:")[1].split("Start here")[0].replace(
        "its daemon", ""
    )


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["mont"], "'mount'"), (["status", "--jsn"], "'--json'"), (["mount", "--disc"], "'--disk'")],
)
def test_a_mistyped_word_is_told_with_the_nearest(arguments: list[str], hint: str) -> None:
    """Unknown commands and options name what was probably meant, exit code 2."""
    result = kvfuse(*arguments)

    assert result.exit_code == 2
    assert hint in result.stderr


def test_a_failure_is_an_object_for_programs() -> None:
    """With --json a failure is on stdout as well, with its exit code."""
    result = kvfuse("status", "/nowhere", "--json")

    assert result.exit_code == 3
    assert json.loads(result.stdout) == {
        "error": json.loads(result.stdout)["error"], "exit_code": 3,
    }  # fmt: skip
    assert "/nowhere" in refusal(result)


@pytest.mark.parametrize("command", [["status"], ["umount"], ["disk", "list"], ["locate"]])
def test_commands_for_a_mount_that_is_not_there_exit_with_3(
    command: list[str], mountpoint: Path
) -> None:
    """No pool at the path: one line, exit code 3."""
    result = kvfuse(*command, str(mountpoint))

    assert result.exit_code == 3
    assert str(mountpoint) in refusal(result)


def test_config_check_tells_every_mistake_at_once(tmp_path: Path) -> None:
    """Two mistakes, two lines, each with the key."""
    path = tmp_path / "wrong.toml"
    path.write_text('[pool]\nplacment = "rendezvous"\n[space]\nreserve = "200%"\n')

    result = kvfuse("config", "check", str(path))

    assert result.exit_code == 2
    assert "placement" in result.stderr
    assert "space.reserve" in result.stderr


@pytest.mark.parametrize("text", [b"[pool", b"\xff\xfe", b"pool = 3"])
def test_config_check_refuses_what_is_no_configuration(tmp_path: Path, text: bytes) -> None:
    """Wrong TOML and bytes that are not text: exit code 2 and the file's name."""
    path = tmp_path / "wrong.toml"
    path.write_bytes(text)

    result = kvfuse("config", "check", str(path))

    assert result.exit_code == 2
    assert str(path) in refusal(result)


def test_config_check_accepts_what_is_right(tmp_path: Path) -> None:
    """A good file: exit code 0, for programs too."""
    path = tmp_path / "right.toml"
    path.write_text('[pool]\nmountpoint = "/kvcache"\ndisks = ["/mnt/a"]\n')

    assert kvfuse("config", "check", str(path)).exit_code == 0
    assert json.loads(kvfuse("config", "check", str(path), "--json").stdout)["ok"] is True


def test_config_show_tells_where_a_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, environment and default are told apart."""
    path = tmp_path / "pool.toml"
    path.write_text('[pool]\nmountpoint = "/kvcache"\ndisks = ["/mnt/a"]\n')
    monkeypatch.setenv("KVFUSE_POOL_PLACEMENT", "striped")

    shown = json.loads(kvfuse("config", "show", "--config", str(path), "--json").stdout)

    assert shown["pool.mountpoint"] == {"value": "/kvcache", "origin": f"file {path}"}
    assert shown["pool.placement"]["value"] == "striped"
    assert "KVFUSE_POOL_PLACEMENT" in shown["pool.placement"]["origin"]
    assert shown["pool.driver"]["origin"] == "default"
    assert "striped" in kvfuse("config", "show", "--config", str(path)).stdout


def test_disk_init_makes_an_empty_directory_a_disk(disk: Path) -> None:
    """The answer has the id that is on the disk."""
    result = kvfuse("disk", "init", str(disk), "--json")

    made = json.loads(result.stdout)["disks"]
    assert result.exit_code == 0
    assert json.loads((disk / ".kvfuse" / "disk.json").read_text())["disk_id"] == made[0]["id"]


@pytest.mark.parametrize("path", ["/", "/root", "/etc"])
def test_disk_init_refuses_places_nobody_means(path: str) -> None:
    """The root, a home, a top directory: exit code 4."""
    result = kvfuse("disk", "init", path)

    assert result.exit_code == 4
    assert path in refusal(result)


def test_disk_init_refuses_files_and_adopts_them_only_when_told(disk: Path) -> None:
    """Without --adopt: 4. Without an answer: 2, nothing written. With --yes: done."""
    (disk / "precious").write_text("data")

    assert kvfuse("disk", "init", str(disk)).exit_code == 4
    unasked = kvfuse("disk", "init", str(disk), "--adopt")
    assert unasked.exit_code == 2
    assert "will delete these files" in unasked.stderr
    assert os.listdir(disk) == ["precious"]
    assert kvfuse("disk", "init", str(disk), "--adopt", "--yes").exit_code == 0
    assert (disk / "precious").read_text() == "data"


def test_mount_refuses_a_mountpoint_that_cannot_be_one(mountpoint: Path, disk: Path) -> None:
    """Missing, a file, not empty: exit code 2, and the disk stays as it was."""
    (mountpoint / "file").write_text("x")

    for path in (mountpoint, mountpoint / "file", mountpoint / "missing"):
        result = kvfuse("mount", str(path), "--disk", str(disk), "--init")
        assert result.exit_code == 2
        assert str(path) in refusal(result)
    assert os.listdir(disk) == []


def test_mount_refuses_a_mountpoint_where_something_else_is_mounted(disk: Path) -> None:
    """Another file system there: exit code 5."""
    result = kvfuse("mount", "/proc", "--disk", str(disk), "--init")

    assert result.exit_code == 5
    assert "proc" in refusal(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "disk"),
        (["MOUNTPOINT"], "disk"),
        (["--disk", "DISK"], "mountpoint"),
        (["MOUNTPOINT", "--disk", "DISK", "-o", "noatme"], "noatime"),
        (["MOUNTPOINT", "--disk", "DISK", "-o", "ro"], "ro"),
        (["MOUNTPOINT", "--disk", "DISK", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_mount_refuses_arguments_it_cannot_use(
    arguments: list[str], said: str, mountpoint: Path, disk: Path
) -> None:
    """What is missing or unknown is named, exit code 2."""
    names = {"MOUNTPOINT": str(mountpoint), "DISK": str(disk)}

    result = kvfuse("mount", *(names.get(word, word) for word in arguments))

    assert result.exit_code == 2
    assert said in refusal(result)


def test_mount_options_of_fstab_are_accepted(mountpoint: Path, disk: Path) -> None:
    """They get as far as the disk, which is refused as it has no mark and --init is not given."""
    result = kvfuse_process(
        "mount", str(mountpoint), "--disk", str(disk), "-o", "rw,_netdev,x-systemd.automount"
    )

    assert result.returncode == 4
    assert str(disk) in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up a privilege")
@pytest.mark.parametrize(
    "given_up",
    [
        # May read everything, so that it reaches the interpreter wherever that is.
        ["--reuid=65534", "--clear-groups", "--inh-caps=+dac_read_search",
         "--ambient-caps=+dac_read_search"],
        ["--bounding-set=-sys_admin"],
    ],
    ids=["user", "capability"],
)  # fmt: skip
def test_mount_without_privilege_exits_with_6(
    given_up: list[str], mountpoint: Path, disk: Path
) -> None:
    """An ordinary user, and root without CAP_SYS_ADMIN, are told what is missing."""
    result = subprocess.run(
        ["setpriv", *given_up, sys.executable, "-m", "kvfuse", "mount", str(mountpoint),
         "--disk", str(disk), "--init"],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert result.returncode == 6, result.stderr
    assert result.stderr.startswith("kvfuse: privilege: ")
    assert os.listdir(disk) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide /dev")
def test_mount_without_the_device_exits_with_6(mountpoint: Path, disk: Path) -> None:
    """In a namespace whose /dev has no fuse: one line, nothing written."""
    command = (
        f"mount -t tmpfs none /dev && {sys.executable} -m kvfuse mount {mountpoint} "
        f"--disk {disk} --init"
    )

    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert result.returncode == 6
    assert result.stderr.startswith("kvfuse: /dev/fuse: missing")
    assert os.listdir(disk) == []


def test_doctor_tells_levels_and_remedies() -> None:
    """Each check has a level; everything that is not well has a remedy."""
    result = kvfuse("doctor", "--json")

    answer = json.loads(result.stdout)
    assert result.exit_code == (0 if answer["can_mount"] else 6)
    assert {check["level"] for check in answer["checks"]} <= {"ok", "warn", "fail"}
    assert all(check["remedy"] for check in answer["checks"] if check["level"] != "ok")
    assert "kernel" in kvfuse("doctor").stdout


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain", "plain"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("\udcff", "\\xff"),
        ("a\nb\x1b[2J", "a\\nb\\x1b[2J"),
        ("[b]x", "[b]x"),
        ("schön", "schön"),
    ],
)
def test_names_that_are_not_text_are_escaped(name: str | bytes, shown: str) -> None:
    """A hostile name moves no cursor and breaks no output."""
    assert printable(name) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 40, "3.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_are_shown_in_powers_of_1024(count: int, shown: str) -> None:
    """The largest unit that leaves at least one."""
    assert human_bytes(count) == shown


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["status", "/nowhere", "--json"], {"rich", "pydantic", "trio", "pyfuse3", "asyncio"}),
        (["umount", "/nowhere"], {"rich", "pydantic", "trio", "pyfuse3", "asyncio"}),
        (["config", "check", "/nowhere", "--json"], {"rich", "trio", "pyfuse3"}),
        (["mount", "/nowhere", "--disk", "/nowhere2"], {"rich", "trio", "pyfuse3"}),
    ],
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], unwanted: set[str]) -> None:
    """Commands start fast because they do not import what others need."""
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr))\n"
        "from kvfuse.__main__ import main\n"
        f"sys.argv = ['kvfuse', *{arguments!r}]\n"
        "main()\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    loaded = set(result.stderr.partition("LOADED ")[2].split())
    assert "kvfuse.cli.group" in loaded
    assert not loaded & unwanted


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bogus"],
        ["bogus"],
        ["mount", "--driver", "bogus"],
        ["mount", "/nowhere", "--disk"],
        ["tasks", "nope"],
        ["disk", "bogus"],
        ["disk", "list", "one", "two"],
        ["locate"],
    ],
    ids="-".join,
)
def test_a_command_line_that_is_not_understood_is_one_line_and_an_object(
    arguments: list[str],
) -> None:
    """Exit code 2 and one line; with --json the object, without it nothing on stdout."""
    # One that lacks the value of its last option would take --json for that.
    words = ["--json", *arguments] if arguments[-1] == "--disk" else [*arguments, "--json"]
    plain, for_programs = kvfuse(*arguments), kvfuse(*words)

    assert (plain.exit_code, for_programs.exit_code) == (2, 2)
    assert plain.stdout == ""
    assert "--help" in refusal(plain)
    answer = json.loads(for_programs.stdout)
    assert set(answer) == {"error", "exit_code"}
    assert answer["exit_code"] == 2
    assert refusal(for_programs) == f"kvfuse: {answer['error']}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["mount", "/mnt", "--disk", ""],
        ["mount", "", "--disk", "DISK"],
        ["mount", "/mnt", "--config", ""],
        ["umount", ""],
        ["status", ""],
        ["locate", ""],
        ["disk", "init", ""],
        ["disk", "list", ""],
        ["fsck", "--disk", ""],
        ["doctor", "--disk", ""],
        ["clean", "--all", "--disk", ""],
        ["tasks", "--mountpoint", ""],
    ],
    ids="-".join,
)
def test_an_empty_path_is_refused_and_is_not_the_working_directory(
    arguments: list[str], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that was never set in a script: exit code 2, one line, nothing written."""
    monkeypatch.chdir(disk)

    result = kvfuse(*(str(disk) if word == "DISK" else word for word in arguments))

    assert result.exit_code == 2
    assert "empty" in refusal(result)
    assert os.listdir(disk) == []


def test_several_mistakes_are_a_line_each_and_a_list_for_programs(tmp_path: Path) -> None:
    """On stderr a line each; in the object joined by line ends, and as a list."""
    path = tmp_path / "wrong.toml"
    path.write_text('[pool]\ndisks = [""]\n[space]\nreserve = "200%"\n')

    result = kvfuse("config", "check", str(path), "--json")

    answer = json.loads(result.stdout)
    assert result.stderr.splitlines() == [f"kvfuse: {line}" for line in answer["errors"]]
    assert answer["error"].splitlines() == answer["errors"]
    assert len(answer["errors"]) == 2
    assert "pool.disks[0]: path is empty" in answer["error"]


def test_a_home_is_refused_as_a_home_whatever_it_holds(mountpoint: Path) -> None:
    """A mount does not propose to adopt the files of a home."""
    result = kvfuse_process("mount", str(mountpoint), "--disk", os.path.expanduser("~"), "--init")

    assert result.returncode == 4
    assert "home directory" in result.stderr
    assert "adopt" not in result.stderr
