"""scripts/quickstart: interrupted anywhere it leaves nothing, and it makes no disks for nothing.

It runs in a mount namespace with its own /var/lib, /run and /mnt, and takes this interpreter for
the installed one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BASE = "/var/lib/kvfuse-quickstart"

# Sourced by the script's shell, not by those below it: a signal before the first command of a kind.
SIGNALLER = """\
unset BASH_ENV
trap '[[ $BASH_COMMAND != "$BEFORE"* ]] || { BEFORE=never; kill -"$SIGNAL" $$; }' DEBUG
"""
WORLD = f"""\
for place in /var/lib /run /mnt; do mount -t tmpfs none $place; done
bash() {{ command bash "$@" </dev/null; }}
left() {{
  ls -A /mnt /var/lib | grep -v : | tr -d '\\n'
  grep -o -e '{BASE}[^ ]*' -e '/mnt/kvcache' /proc/self/mountinfo
  losetup -n -l -O BACK-FILE | grep -F {BASE}/
}}
"""

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts"),
    pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="mkfs.ext4 is missing"),
    pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices"),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The script where it finds everything installed."""
    for directory in ("scripts", ".venv/bin"):
        (tmp_path / directory).mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "quickstart", tmp_path / "scripts")
    programs = {
        "scripts/install": "exit 0",
        ".venv/bin/kvfuse": f'PYTHONPATH={PROJECT} exec {sys.executable} -m kvfuse "$@"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "signaller").write_text(SIGNALLER)
    return tmp_path


def in_a_world(project: Path, script: str, **environment: str) -> str:
    """Return what *script* writes to stdout, in a mount namespace of its own."""
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", WORLD + script],
        cwd=project, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    return result.stdout


@pytest.mark.parametrize(
    ("before", "signal"),
    [
        ("mkdir -m 0700", "TERM"),
        ("shared=0", "INT"),
        ("mkfs.ext4", "INT"),
        ("mount -o loop", "TERM"),
        ('echo "    $disk: ext4', "INT"),
        ("arguments=()", "TERM"),
        ('run "$kvfuse" mount', "INT"),
        ("work=", "TERM"),
        ('mv "$temporary"', "INT"),
        ('run "$kvfuse" locate', "TERM"),
    ],
)
def test_an_interrupted_run_leaves_nothing(project: Path, before: str, signal: str) -> None:
    """No mount, no loop device, no image, whether the step just noted was done or not."""
    script = """
        BASH_ENV=$PWD/signaller bash scripts/quickstart >output 2>&1
        echo "ended with $?"
        left
    """

    said = in_a_world(project, script, BEFORE=before, SIGNAL=signal)

    code = {"TERM": 143, "INT": 130}[signal]
    assert said == f"ended with {code}\n", (project / "output").read_text()


def test_images_of_disks_in_use_are_not_removed(project: Path) -> None:
    """While a program holds a trial disk its image stays; --stop says so and ends it later."""
    script = f"""
        bash scripts/quickstart >output 2>&1 || cat output
        sleep 100 <{BASE}/disk1 & holder=$!
        bash scripts/quickstart --stop >output 2>&1; echo "ended with $?"
        ls {BASE}/disk1.img; grep -o 'disk1 is in use' output
        kill $holder; wait $holder 2>/dev/null
        bash scripts/quickstart --stop >output 2>&1; echo "ended with $?"
        left
    """

    assert in_a_world(project, script).splitlines() == [
        "ended with 5", f"{BASE}/disk1.img", "disk1 is in use", "ended with 0",
    ]  # fmt: skip


def test_no_trial_disks_are_made_beside_a_pool_of_other_disks(project: Path) -> None:
    """Nor does a run with other disks pass the mounted pool off as theirs."""
    script = f"""
        mkdir -p /mnt/own /mnt/other
        for disk in own other; do mount -t tmpfs none /mnt/$disk; done
        bash scripts/quickstart --disk /mnt/own >output 2>&1 || cat output
        for disks in "" "--disk /mnt/other"; do
          bash scripts/quickstart $disks >output 2>&1; echo "ended with $?"
          tail -n 1 output
          ls -A {BASE} /mnt/other
        done
        bash scripts/quickstart --stop >output 2>&1; echo "ended with $?"
    """

    said = in_a_world(project, script)

    assert said.count("ended with 5") == 2, said
    assert "ended with 0" in said
    assert f"without {BASE}/disk0 is mounted at /mnt/kvcache already" in said
    assert "without /mnt/other is mounted at /mnt/kvcache already" in said
    assert "disk0.img" not in said
