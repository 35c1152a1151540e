"""Run steps in a directory and print one JSON object a line: ``python -m … DIRECTORY ID …``.

A process of its own, because steps change its working directory, umask and user, and because a
step that hangs on a broken filesystem must not hang the test run.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

HANG_S = 20.0


def run_here(root: Path, ids: Sequence[str]) -> None:
    """Run the steps *ids*, each in a new directory below *root*, and print their outcomes."""
    from tests.mount.steps.registry import STEPS, attempt, snapshot

    os.umask(0o022)
    for step_id in ids:
        place = root / step_id
        place.mkdir()
        os.chdir(place)
        _say({"begin": step_id})
        try:
            outcome: object = attempt(STEPS[step_id])
        except Exception:  # noqa: BLE001 - a bug in a step is an outcome that both sides share
            outcome = "raised " + traceback.format_exc(limit=-1).strip().replace("\n", " | ")
        os.umask(0o022)
        os.chdir(place)
        try:
            left: object = snapshot()
        except OSError as exc:
            left = f"snapshot failed: {exc!r}"
        os.chdir(root)
        _say({"id": step_id, "outcome": [outcome, left]})


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message, default=repr) + "\n")
    sys.stdout.flush()


def run_apart(root: Path, ids: Sequence[str], *, hang_s: float = HANG_S) -> dict[str, object]:
    """Run the steps *ids* below *root* in child processes and return {id: outcome}.

    A step that kills its process, or does not end within *hang_s*, has that as its outcome, and
    the steps after it run in a new process.
    """
    outcomes: dict[str, object] = {}
    waiting = list(ids)
    while waiting:
        begun = _run_child(root, waiting, outcomes, hang_s)
        waiting = [step_id for step_id in waiting if step_id not in outcomes]
        if waiting and begun is None:
            raise AssertionError(f"the step runner does not start below {root}")
    return outcomes


def _run_child(
    root: Path, ids: Sequence[str], outcomes: dict[str, object], hang_s: float
) -> str | None:
    project = Path(__file__).resolve().parents[3]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.mount.steps.runner", str(root), *ids],
        stdout=subprocess.PIPE, text=True, cwd=project,
    )  # fmt: skip
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    stream = child.stdout

    def pump() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    pumping = threading.Thread(target=pump, daemon=True)
    pumping.start()
    begun: str | None = None
    verdict = "the process died"
    try:
        while (line := lines.get(timeout=hang_s)) is not None:
            message = json.loads(line)
            if "begin" in message:
                begun = message["begin"]
            else:
                outcomes[message["id"]] = message["outcome"]
    except queue.Empty:
        verdict = f"still running after {hang_s:g} s"
        child.kill()
    child.wait()
    pumping.join()
    stream.close()
    if begun is not None and begun not in outcomes:
        outcomes[begun] = verdict
    return begun


if __name__ == "__main__":
    run_here(Path(sys.argv[1]), sys.argv[2:])
