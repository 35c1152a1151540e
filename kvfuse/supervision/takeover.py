"""Whether the code of this version can go on where a server of another version stopped."""

from collections.abc import Mapping

from kvfuse.core import records
from kvfuse.core.errors import KvfuseError
from kvfuse.drivers.direct import connection
from kvfuse.heart import handletable
from kvfuse.pool import resume
from kvfuse.system import fdstore


def formats() -> dict[str, int]:
    """Return the format of everything that a server leaves to the next one."""
    return {
        "channel": fdstore.FORMAT,
        "connection": connection.FORMAT,
        "handles": handletable.FORMAT,
        "mount": resume.FORMAT,
        "records": records.FORMAT,
    }


def check(running: Mapping[str, object]) -> None:
    """Check that a server with the formats *running* can be followed by this code.

    Raises:
        KvfuseError: one differs.
    """
    own = formats()
    for name in sorted({*own, *running}):
        if own.get(name) != running.get(name):
            raise KvfuseError(
                f"the format of {name} is {running.get(name)} in the running server and "
                f"{own.get(name)} in the installed kvfuse; unmount and mount to upgrade"
            )
