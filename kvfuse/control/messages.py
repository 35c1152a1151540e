"""What a command and the daemon say to each other: one JSON object a line, each way.

Keys and names are bytes on a file system, so they travel as base64 (msgspec's form of bytes).
"""

from typing import Any

import msgspec

REQUEST_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = 64 << 20


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call: the verb, and its arguments as the verb reads them."""

    verb: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Reply(msgspec.Struct, frozen=True):
    """The answer: *result* when *error* is empty, else one line and the exit code it means."""

    result: Any = None
    error: str = ""
    exit_code: int = 0


class LocateArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``locate``: paths below the mountpoint."""

    keys: list[bytes]


class CleanArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``clean``: see :meth:`kvfuse.cleaning.cleanups.Cleanups.clean`."""

    disk: str | None = None
    keys: list[bytes] = []
    regex: str | None = None
    everything: bool = False
    dry_run: bool = False


class TasksArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``tasks``: one of them, or all."""

    id: int | None = None


class FsckArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``fsck``."""

    repair: bool = False


class FindingsArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``findings``: the comparison that ``fsck`` began."""

    id: int


class NoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of a verb that takes none."""


encoder = msgspec.json.Encoder()
request_decoder = msgspec.json.Decoder(Request)
reply_decoder = msgspec.json.Decoder(Reply)
