"""Which disk a request waits for, if it waits for one. Asked only when a disk is slow.

Concurrency: any thread; the pool's answers come from memory.
"""

from collections.abc import Callable

from kvfuse.drivers.direct.abi import OPCODES_MAX, Opcode
from kvfuse.drivers.direct.protocol import Rename, Request
from kvfuse.pool.pool import Pool


class Targets:
    """Names the disk of a request, by the pool's number; None = memory only."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        by_handle, by_node = self._by_handle, self._by_node
        self._of: list[Callable[[Request], int | None] | None] = [None] * OPCODES_MAX
        rules: dict[Opcode, Callable[[Request], int | None]] = {
            Opcode.READ: by_handle,
            Opcode.WRITE: by_handle,
            Opcode.FSYNC: by_handle,
            Opcode.FALLOCATE: by_handle,
            Opcode.LSEEK: by_handle,
            Opcode.FLUSH: lambda request: pool.disk_of_handle(request.args),
            Opcode.RELEASE: lambda request: pool.disk_of_handle(request.args),
            Opcode.COPY_FILE_RANGE: self._by_source,
            Opcode.COPY_FILE_RANGE_64: self._by_source,
            Opcode.GETATTR: by_node,
            Opcode.SETATTR: by_node,
            Opcode.OPEN: by_node,
            Opcode.READLINK: by_node,
            Opcode.GETXATTR: by_node,
            Opcode.SETXATTR: by_node,
            Opcode.LISTXATTR: by_node,
            Opcode.REMOVEXATTR: by_node,
            Opcode.CREATE: self._by_new_name,
            Opcode.MKNOD: self._by_new_name,
            Opcode.SYMLINK: self._by_new_name,
            Opcode.UNLINK: lambda request: pool.disk_of_name(request.node, request.args),
            Opcode.RMDIR: lambda request: pool.disk_of_name(request.node, request.args),
            Opcode.RENAME: self._by_names,
            Opcode.RENAME2: self._by_names,
            Opcode.LINK: lambda request: pool.disk_of(request.args.node),
        }
        for opcode, rule in rules.items():
            self._of[opcode] = rule

    def disk_of(self, request: Request) -> int | None:
        """Return the number of the disk *request* waits for."""
        rule = self._of[request.opcode]
        if rule is None:
            return None
        try:
            return rule(request)
        except OSError:  # what it names is gone: executing it will say so, and waits for nothing
            return None

    def _by_handle(self, request: Request) -> int | None:
        return self._pool.disk_of_handle(request.args.fh)

    def _by_source(self, request: Request) -> int | None:
        return self._pool.disk_of_handle(request.args.fh_in)

    def _by_node(self, request: Request) -> int | None:
        return self._pool.disk_of(request.node)

    def _by_new_name(self, request: Request) -> int | None:
        return self._pool.disk_of_create(request.node, request.args.name)

    def _by_names(self, request: Request) -> int | None:
        args: Rename = request.args
        source = self._pool.disk_of_name(request.node, args.name)
        if source is not None:
            return source
        return self._pool.disk_of_name(args.new_parent, args.new_name)
