"""``kvfuse upgrade``."""

import os
import signal
import time
from typing import Any

import click

from kvfuse.cli.output import json_option, say, show_json
from kvfuse.control.client import call
from kvfuse.control.registry import Registration, choose
from kvfuse.errors import KernelError, KvfuseError, NotMountedError
from kvfuse.mounts import mountpoint_of

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
    supervisor = call(entry, "status")["processes"].get("supervisor")
    if supervisor is None:
        raise KvfuseError(
            f"{entry.mountpoint}: its supervisor is lost; unmount and mount to upgrade"
        )
    before = supervisor["upgrade"]["number"] if supervisor["upgrade"] else 0
    try:
        os.kill(supervisor["pid"], signal.SIGHUP)
    except PermissionError as exc:
        raise KernelError(f"{entry.mountpoint}: only root may upgrade; run it as root") from exc
    upgrade = _wait(entry, before)
    if upgrade["result"] != "done":
        raise KvfuseError(f"{entry.mountpoint}: {upgrade['result']}: {upgrade['reason']}")
    if as_json:
        show_json({"mountpoint": entry.mountpoint, **upgrade})
    else:
        say(
            f"{entry.mountpoint}: kvfuse {upgrade['from']} -> {upgrade['to']}, "
            f"requests waited {upgrade['stall_s'] * 1000:.0f} ms"
        )


def _wait(entry: Registration, before: int) -> dict[str, Any]:
    """Return how the upgrade after number *before* went."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        try:
            status = call(entry, "status", timeout_s=_CALL_TIMEOUT_S)
        except NotMountedError:
            if not entry.is_alive:
                raise
            continue  # between the old server and the new one
        except KvfuseError:
            continue
        upgrade: dict[str, Any] | None = (status["processes"].get("supervisor") or {}).get(
            "upgrade"
        )
        if upgrade and upgrade["number"] > before and upgrade["result"] not in _UNDECIDED:
            return upgrade
    raise KvfuseError(
        f"{entry.mountpoint}: no new server within {_TIMEOUT_S:.0f} s; "
        f"look: kvfuse status {entry.mountpoint}; its log: {entry.log or 'the journal'}"
    )


_UNDECIDED = ("checking", "running")
