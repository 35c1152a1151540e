"""What a comparison of catalog and disks finds, and what would mend it."""

from enum import StrEnum
from typing import Any, Final

import msgspec


class Kind(StrEnum):
    """What is wrong, or merely there."""

    CATALOG = "catalog"  # the catalog contradicts itself
    MISSING = "missing"  # a record whose file is not on its disk
    DIFFERENT = "different"  # a file that is not as its record says
    OWNER = "owner"  # owner or mode: clients see the record's
    ORPHAN = "orphan"  # a labelled file or directory no record speaks of
    UNFINISHED = "unfinished"  # said, and not done yet: normal while a disk is away
    UNREADABLE = "unreadable"  # the disk did not answer
    FOREIGN = "foreign"  # not ours, never served: no fault of the pool
    ASIDE = "aside"  # foreign things that stood in the way, kept for the operator


# What a mount leaves or finds without being broken.
HARMLESS: Final = frozenset((Kind.FOREIGN, Kind.UNFINISHED, Kind.OWNER, Kind.ASIDE))


class Row(msgspec.Struct, frozen=True, array_like=True, tag="row"):
    """A row of a table is wrong; it is judged anew before it is mended. Key b"": the table."""

    table: str
    key: bytes


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """The usage noted under *key* is too low by so much, whatever has been added to it since."""

    key: bytes
    files: int
    blocks: int


class Spot(msgspec.Struct, frozen=True, array_like=True, tag="spot"):
    """A name on disk *number*: in directory *dir_id*, 0 where no record tells, at *path* there."""

    number: int
    dir_id: int
    path: bytes


Mend = Row | Count | Spot


class Finding(msgspec.Struct, frozen=True):
    """One finding. *disk* is a disk's path, "" for the catalog; *path* is below the root.

    *mend* is where to look again, and what to mend there; *repair* is what was done, "" nothing.
    """

    kind: Kind
    disk: str
    path: bytes
    text: str
    mend: Mend | None = None
    repair: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether this should not be, and still is."""
        return self.kind not in HARMLESS and not self.repair

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "kind": self.kind.value,
            "disk": self.disk,
            "path": self.path.decode(errors="backslashreplace"),
            "text": self.text,
            "repair": self.repair,
        }
