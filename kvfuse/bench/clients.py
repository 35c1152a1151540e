"""Runs the clients of one job at the same time, each in a process of its own."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from kvfuse.bench import workload
from kvfuse.bench.jobs import Bounds, Job, Sample, together
from kvfuse.core.errors import KvfuseError

_PHASE_TIMEOUT_S = 120.0
_fork = multiprocessing.get_context("fork")


class JobFailedError(KvfuseError):
    """A job cannot be done on a directory: a system call failed there."""


def measure(base: Path, job: Job, bounds: Bounds, settle: Callable[[], None]) -> Sample:
    """Do *job* once below *base* and return what all its clients did together.

    *settle* is called when they are ready and have not begun.

    Raises:
        JobFailedError: a call failed, or a client did not end.
    """
    processes = 1 if job.kind.is_data else job.clients
    pipes: list[Connection] = []
    children: list[multiprocessing.process.BaseProcess] = []
    try:
        for number in range(processes):
            ours, theirs = _fork.Pipe()
            client = workload.client(base, job, number, bounds)
            children.append(_fork.Process(target=_serve, args=(client, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        _all(job, pipes)
        settle()
        _tell(pipes)
        samples = [sample for sample in _all(job, pipes) if isinstance(sample, Sample)]
        _tell(pipes)
        _all(job, pipes)
        return together(samples)
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(1.0)
            if child.is_alive():
                child.kill()
                child.join(1.0)


def _tell(pipes: list[Connection]) -> None:
    for pipe in pipes:
        with contextlib.suppress(BrokenPipeError):  # it ended: noticed when its answer is read
            pipe.send_bytes(b"go")


def _all(job: Job, pipes: list[Connection]) -> list[Sample | None]:
    """Return what each client says at the end of a phase."""
    answers: list[Sample | None] = []
    for pipe in pipes:
        try:
            if not pipe.poll(_PHASE_TIMEOUT_S):
                raise JobFailedError(f"{job.name}: a client hangs for {_PHASE_TIMEOUT_S:.0f} s")
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise JobFailedError(f"{job.name}: a client ended early") from None
        if isinstance(answer, str):
            raise JobFailedError(f"{job.name}: {answer}")
        answers.append(answer)
    return answers


def _serve(client: workload.Client, pipe: Connection) -> None:
    """Be one client: prepare, run, clean, each when told to."""
    try:
        client.prepare()
        pipe.send(None)
        pipe.recv_bytes()
        pipe.send(client.run())
        pipe.recv_bytes()
        client.clean()
        pipe.send(None)
    except EOFError:
        pass  # another client failed: the run is over
    except OSError as exc:
        with contextlib.suppress(OSError):
            pipe.send(f"{exc.strerror or exc} ({exc.filename or os.getpid()})")
    finally:
        pipe.close()
