"""A connection to the kernel that outlives the process which made it.

The kernel keeps a mount alive while anybody holds the descriptor, and says INIT once only: what was
agreed on then lies beside the live catalog, for the server that goes on.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvfuse.core.errors import KvfuseError
from kvfuse.drivers.direct.negotiation import Agreement

FORMAT = 1


class _Agreed(msgspec.Struct, frozen=True):
    format: int
    minor: int
    flags: int
    stack_depth: int
    obstacle: str | None


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a connection is kept. *fd* is that of the mount to go on with, None to mount anew.

    *keep* is given the descriptor of a new mount, before the mount answers anybody.
    """

    path: Path
    fd: int | None
    keep: Callable[[int], None]

    def write(self, agreement: Agreement) -> None:
        """Note what was agreed on."""
        agreed = _Agreed(
            FORMAT, agreement.minor, agreement.flags, agreement.stack_depth, agreement.obstacle
        )
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(agreed))
        os.replace(fresh, self.path)

    def read(self) -> Agreement:
        """Return what was agreed on.

        Raises:
            KvfuseError: it cannot be read, or another version wrote it.
        """
        try:
            agreed = msgspec.json.decode(self.path.read_bytes(), type=_Agreed)
        except (OSError, msgspec.MsgspecError) as exc:
            raise KvfuseError(f"{self.path}: the mount cannot be taken over: {exc}") from exc
        if agreed.format != FORMAT:
            raise KvfuseError(f"{self.path}: format {agreed.format}, this version reads {FORMAT}")
        return Agreement(
            minor=agreed.minor,
            flags=agreed.flags,
            stack_depth=agreed.stack_depth,
            obstacle=agreed.obstacle,
        )
