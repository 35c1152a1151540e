"""Processes that run a verb and die in it, forked from one without threads."""

import multiprocessing
import os
import traceback
from pathlib import Path

from tests.shell.faults import make_faulty
from tests.shell.pools import Box
from tests.shell.verbs import VERBS

KILLED = 9
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.shell.deaths"])


def _run(base: Path, disks: list[Path], verb_name: str, at: int) -> None:
    """Make a pool, run the verb, and end: with KILLED before step *at*, with 0 after the verb."""
    try:
        (verb,) = (verb for verb in VERBS if verb.name == verb_name)
        pool = Box(base, disks).open(upkeep=False)
        arguments = verb.prepare(pool)
        faults = make_faulty(pool)
        faults.arm(at, lambda: os._exit(KILLED))
        verb.act(pool, *arguments)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
        os._exit(1)


def die_at(box: Box, verb_name: str, at: int) -> bool:
    """Let a process die in the verb before step *at*; False when it came to the end first."""
    process = _context.Process(target=_run, args=(box.base, box.paths, verb_name, at))
    process.start()
    process.join()
    assert process.exitcode in (0, KILLED), f"{verb_name}: step {at}: exit {process.exitcode}"
    return process.exitcode == KILLED
