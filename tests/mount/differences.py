"""The wanted differences between a kvfuse mount and a native directory: the only list of them.

``docs/semantics.md`` shows the same patterns with the same reasons; a test holds both together.
A difference that is no longer there fails the suite, as does one that is not in this list, and one
that differs otherwise than it should.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

ALL = ("pyfuse3", "direct", "direct-nopass")


@dataclass(frozen=True, slots=True)
class Difference:
    """Steps whose id matches *pattern* differ on *setups*, for *reason*.

    *instead* is what such a step then returns; None where it depends on the step.
    """

    pattern: str
    reason: str
    setups: tuple[str, ...] = ALL
    instead: object = None

    def covers(self, step_id: str, setup: str) -> bool:
        """Whether the step may and must differ on *setup*."""
        return setup in self.setups and fnmatchcase(step_id, self.pattern)


_NO_FALLOCATE = "pyfuse3 has no handler for fallocate(2): EOPNOTSUPP; posix_fallocate(3) works"
_BEYOND_DISK = "a size that the disk of the file can never hold is refused at once: ENOSPC"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "opening.setid_bits_at_creation",
        "setuid and setgid mean nothing on a cache file: never kept, the mount is nosuid",
        instead=["100755 0 0", "100755 0 0"],
    ),
    Difference(
        "modes.setid_bits_of_a_file",
        "setuid and setgid mean nothing on a cache file: chmod drops them and succeeds",
        instead=["100755 0 0"] * 3,
    ),
    Difference(
        "modes.writing_drops_setid_bits",
        "setuid and setgid mean nothing on a cache file: there is nothing to drop",
        instead=["100777 0 0", "ok", "100777 0 0"],
    ),
    Difference(
        "opening.tmpfile_is_nameless_until_linked",
        "O_TMPFILE is EOPNOTSUPP: programs fall back to a temp name",
        instead="ENOTSUP",
    ),
    Difference(
        "directories.link_count_of_directories",
        "st_nlink of a directory is 1, as on btrfs: nothing is counted",
        instead=[1, 1],
    ),
    Difference(
        "directories.rmdir_of_the_working_directory",
        "a removed directory is gone for its holders too: listing it is ESTALE, not empty",
        instead=["ok", "ENOENT", "ESTALE", "ENOENT", "ENOENT"],
    ),
    Difference(
        "directories.reading_a_removed_directory",
        "a removed directory is gone for its holders too: listing and fstat are ESTALE",
        instead=["ESTALE", "ESTALE"],
    ),
    Difference("sizes.fallocate_plain_*", _NO_FALLOCATE, ("pyfuse3",), ["ENOTSUP", 20_000]),
    Difference("sizes.fallocate_keep_size_*", _NO_FALLOCATE, ("pyfuse3",), ["ENOTSUP", 20_000]),
    Difference("sizes.fallocate_punch_*", _NO_FALLOCATE, ("pyfuse3",), ["ENOTSUP", 20_000]),
    Difference("sizes.fallocate_zero_*", _NO_FALLOCATE, ("pyfuse3",), ["ENOTSUP", 20_000]),
    Difference(
        "sizes.fallocate_collapse_*",
        "the kernel passes no FALLOC_FL_COLLAPSE_RANGE to a FUSE file system: EOPNOTSUPP",
        instead=["ENOTSUP", 20_000],
    ),
    Difference("sizes.truncate_to_impossible_sizes", _BEYOND_DISK, instead=["EINVAL", "ENOSPC"]),
    Difference("sizes.sparse_files_beyond_the_disk", _BEYOND_DISK, instead=["ENOSPC", 7]),
    Difference(
        "sizes.seeking_data_and_holes",
        "pyfuse3 has no handler for lseek: the kernel takes a file for data without holes",
        ("pyfuse3",),
        [0, 1 << 20, 1 << 20, (1 << 19) + 8192, "ENXIO"],
    ),
    Difference(
        "times.value_15032385535_0",
        "times are 64-bit nanoseconds: what is later than 2262-04-11 becomes that",
        instead=["ok", *[2**63 - 1] * 2, "ok", *[2**63 - 1] * 2],
    ),
    Difference(
        "attributes.access_control_lists",
        "no POSIX ACLs: EOPNOTSUPP, so that nobody believes in one that is not enforced",
        instead=["ENOTSUP", "ENOTSUP"],
    ),
    Difference(
        "attributes.trusted_and_security_names",
        "trusted.* is the pool's own and security.* is not kept: setting is EOPNOTSUPP",
        instead=["ENOTSUP", "ENODATA", "ENOTSUP"],
    ),
    Difference(
        "holding.direct_io_at_odd_offsets_and_lengths",
        "without passthrough O_DIRECT stays between client and server, which needs no alignment",
        ("pyfuse3", "direct-nopass"),
        [4096, 100, 4096],
    ),
    Difference(
        "nodes.mknod_of_a_*",
        "only regular files, directories and symlinks are kept: EPERM",
        instead="EPERM",
    ),
    Difference(
        "nodes.binding_a_socket",
        "only regular files, directories and symlinks are kept: EPERM",
        instead="EPERM",
    ),
)


def difference_for(step_id: str, setup: str) -> Difference | None:
    """Return how *step_id* differs on *setup*, or None when it must not."""
    for difference in DIFFERENCES:
        if difference.covers(step_id, setup):
            return difference
    return None
