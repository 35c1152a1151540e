"""``kvfuse locate``."""

import os
from typing import Any

import click

from kvfuse.cli.paths import absolute
from kvfuse.control.client import call
from kvfuse.control.registry import Registration, enclosing
from kvfuse.core.errors import KvfuseError
from kvfuse.output import human_bytes, json_option, show_json, show_table

_ASK_MAX = 1000


@click.command(
    epilog="""\b
Examples:
  kvfuse locate /kvcache/model/block-17.bin
  cd /kvcache/model && kvfuse locate *.bin --json

\b
The answer's "why": owner (the placement function puts it there), index (placement index put it
there), displaced (the owner is another disk by now, or could not take it; served all the same),
resident (its temporary name did not tell the owner), stale (as displaced, but not served:
serve_displaced is off), directory (a record of the pool, on no disk).
Stale copies are waiting to be removed.
"""
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@json_option
def command(paths: tuple[str, ...], as_json: bool) -> None:
    """Show on which disk files of a mounted pool lie, and why there."""
    found: list[dict[str, Any]] = []
    for entry, keys in _by_mount(paths):
        for start in range(0, len(keys), _ASK_MAX):
            found.extend(call(entry, "locate", {"keys": keys[start : start + _ASK_MAX]}))
    if as_json:
        show_json(found)
        return
    show_table(
        ["path", "disk", "file on the disk", "why", " size", "state", "stale copies"],
        [
            [
                str(item["path"]),
                str(item["disk"] or "-")[:8],
                str(item["disk_path"] or "-"),
                str(item["why"] or "-"),
                human_bytes(item["size_bytes"]),
                str(item["state"]),
                " ".join(disk_id[:8] for disk_id in item["stale_copies"]) or "-",
            ]
            for item in found
        ],
    )


def _by_mount(paths: tuple[str, ...]) -> list[tuple[Registration, list[bytes]]]:
    """Return the paths as keys, those that follow each other in one mount together."""
    groups: list[tuple[Registration, list[bytes]]] = []
    for path in paths:
        entry, key = _split(path)
        if not groups or groups[-1][0] != entry:
            groups.append((entry, []))
        groups[-1][1].append(key)
    return groups


def _split(path: str) -> tuple[Registration, bytes]:
    absolute = _absolute(path)
    entry = enclosing(absolute)
    key = os.path.relpath(absolute, entry.mountpoint)
    if key == ".":
        raise KvfuseError(f"{path}: this is the mountpoint; name a file in it")
    return entry, os.fsencode(key)


def _absolute(path: str) -> str:
    """Return *path* absolute, links above its last component followed, that one left alone."""
    parent, name = os.path.split(absolute(path, "PATH"))
    return os.path.join(os.path.realpath(parent), name)
