"""``kvfuse takeover-check``: what a supervisor runs before an upgrade. Not for people."""

import json

import click

import kvfuse.daemon  # noqa: F401 - all that a server needs must be there and importable
from kvfuse.supervision.takeover import check


@click.command(hidden=True)
@click.argument("formats")
def command(formats: str) -> None:
    """Exit with code 0 when this code can go on where a server with FORMATS stopped."""
    check(json.loads(formats))
