"""``kvfuse upgrade``."""

import os
import signal
import time
from typing import Any

import click

from kvfuse.control.client import call
from kvfuse.control.registry import Registration, choose
from kvfuse.core.errors import KernelError, KvfuseError, NotMountedError
from kvfuse.output import json_option, say, show_json
from kvfuse.system.mounts import mountpoint_of

_TIMEOUT_S = 90.0
_CALL_TIMEOUT_S = 5.0
_POLL_S = 0.05


@click.command(
    epilog="""\b
Examples:
  pip install --upgrade kvfuse && kvfuse upgrade
  kvfuse upgrade /kvcache --json
"""
)
@click.argument("mountpoint", required=False)
@json_option
def command(mountpoint: str | None, as_json: bool) -> None:
    """Replace the running server of a mount by the kvfuse that is installed now.

    The mount stays: what is open stays open, requests wait for a moment. Refused, with the reason
    and exit code 1, when the installed kvfuse cannot go on where the running one stops.
    """
    entry = choose(None if mountpoint is None else mountpoint_of(mountpoint))
    supervisor = _supervisor(entry, time.monotonic() + _CALL_TIMEOUT_S)
    last = supervisor["upgrade"] or {}
    before = last.get("number", 0)
    if last.get("result") in _UNDECIDED:
        # It may have begun before what is installed now was: it is not the answer to this command.
        _wait(entry, before)
        supervisor = _supervisor(entry, time.monotonic() + _CALL_TIMEOUT_S)
    # Another command may have asked meanwhile: one that follows *before* answers this one as well.
    try:
        os.kill(supervisor["pid"], signal.SIGHUP)
    except PermissionError as exc:
        raise KernelError(f"{entry.mountpoint}: only root may upgrade; run it as root") from exc
    upgrade = _wait(entry, before + 1)
    if upgrade["result"] != "done":
        raise KvfuseError(f"{entry.mountpoint}: {upgrade['result']}: {upgrade['reason']}")
    if as_json:
        show_json({"mountpoint": entry.mountpoint, **upgrade})
    else:
        say(
            f"{entry.mountpoint}: kvfuse {upgrade['from']} -> {upgrade['to']}, "
            f"requests waited {upgrade['stall_s'] * 1000:.0f} ms"
        )


def _wait(entry: Registration, number: int) -> dict[str, Any]:
    """Return how the upgrade *number*, or a later one, went."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        upgrade: dict[str, Any] = _supervisor(entry, deadline_s)["upgrade"] or {"number": 0}
        if upgrade["number"] >= number and upgrade["result"] not in _UNDECIDED:
            return upgrade
    raise KvfuseError(
        f"{entry.mountpoint}: no new server within {_TIMEOUT_S:.0f} s; "
        f"look: kvfuse status {entry.mountpoint}; its log: {entry.log or 'the journal'}"
    )


def _supervisor(entry: Registration, deadline_s: float) -> dict[str, Any]:
    """Return what a server tells of its supervisor, if need be the next one."""
    while True:
        try:
            status = call(entry, "status", timeout_s=_CALL_TIMEOUT_S)
        except KvfuseError as exc:
            # the server may be about to end, and the next one not there yet
            is_gone = isinstance(exc, NotMountedError) and not entry.is_alive
            if is_gone or time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
            continue
        supervisor: dict[str, Any] | None = status["processes"].get("supervisor")
        if supervisor is None:
            raise KvfuseError(
                f"{entry.mountpoint}: its supervisor is lost; unmount and mount to upgrade"
            )
        return supervisor


_UNDECIDED = ("checking", "running")
