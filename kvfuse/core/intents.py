"""What the pool says before it does it: intents and the backlog of each disk. Pure.

An *intent* is written before a step on a disk that a crash could separate from its record; recovery
finds it and decides by inode identity whether the step happened. A *chore* is work that is already
decided and only has to be done on one disk, in order, now or when the disk is back. *unique* names
the request of the client, if a driver gave it: recovery then knows which request was done.
"""

import msgspec


class Create(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A file or symlink is about to be made at (parent, name) on *disk*."""

    disk: int
    id: int
    parent: int
    name: bytes
    unique: int = 0


class Move(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Inode *ino* of *disk* is about to become (new_parent, new_name)."""

    disk: int
    id: int
    ino: int
    generation: int
    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    unique: int = 0


class Swap(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Two files are about to exchange their names; each stays on its own disk."""

    disk: int
    ino: int
    parent: int
    name: bytes
    other_disk: int
    other_ino: int
    other_parent: int
    other_name: bytes
    unique: int = 0


class Link(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Inode *ino* of *disk* is about to get the further name (parent, name)."""

    disk: int
    id: int
    ino: int
    parent: int
    name: bytes
    unique: int = 0


class Unlink(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Remove the file *ino* at *path* (below the root); another inode there is left alone."""

    path: bytes
    id: int
    ino: int
    blocks: int


class RemoveDir(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Remove the carrier of directory *id* at *path*."""

    path: bytes
    id: int


class MakeDir(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Make the carrier of directory *id* at *path*, where it is missing."""

    path: bytes
    id: int
    generation: int
    mode: int
    uid: int
    gid: int


class RenameDir(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Move the carrier of directory *id* from *path* to *new_path*."""

    path: bytes
    id: int
    new_path: bytes


class SwapPaths(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Exchange *id*, at *path* before, with *other_id*, at *new_path* before.

    At least one of them is a directory; either may be absent from the disk.
    """

    path: bytes
    id: int
    new_path: bytes
    other_id: int


class SetDir(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Give the carrier of directory *id* its owner and mode."""

    path: bytes
    id: int
    mode: int
    uid: int
    gid: int


Intent = Create | Move | Swap | Link
Chore = Unlink | RemoveDir | MakeDir | RenameDir | SwapPaths | SetDir

_encoder = msgspec.msgpack.Encoder()
_intents = msgspec.msgpack.Decoder(Intent)
_chores = msgspec.msgpack.Decoder(Chore)


def disks_of(intent: Intent) -> set[int]:
    """Return the numbers of the disks a step of *intent* is done on."""
    return {intent.disk, intent.other_disk} if isinstance(intent, Swap) else {intent.disk}


def places_of(intent: Intent) -> list[tuple[int, bytes]]:
    """Return the names, with their directories, that *intent* changes."""
    places = [(intent.parent, intent.name)]
    match intent:
        case Move():
            places.append((intent.new_parent, intent.new_name))
        case Swap():
            places.append((intent.other_parent, intent.other_name))
        case Create() | Link():
            pass
    return places


def speaks_of(intent: Intent, disk: int, ino: int, place: tuple[int, bytes]) -> bool:
    """Whether *intent* is about inode *ino* of *disk*, or may have replaced it at *place*."""
    match intent:
        case Swap():
            return (disk, ino) in ((intent.disk, intent.ino), (intent.other_disk, intent.other_ino))
        case Move():
            return disk == intent.disk and (
                ino == intent.ino or place == (intent.new_parent, intent.new_name)
            )
        case Create() | Link():
            return False


def moves_paths(chore: Chore) -> bool:
    """Whether *chore* may put something at a path where nothing was."""
    return isinstance(chore, MakeDir | RenameDir | SwapPaths)


def pack(item: Intent | Chore) -> bytes:
    """Return *item* as msgpack."""
    return _encoder.encode(item)


def unpack_intent(value: bytes) -> Intent:
    """Return the intent in *value*.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _intents.decode(value)


def unpack_chore(value: bytes) -> Chore:
    """Return the chore in *value*.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _chores.decode(value)
