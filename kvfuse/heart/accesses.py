"""Last accesses, gathered for a moment and written to the catalog together.

FUSE inodes have no access time of their own: kvfuse counts an open for reading, and an explicit
``utimensat`` of the access time, as an access. Nothing of it touches a disk.
"""

import threading

from kvfuse.catalog.catalog import Catalog
from kvfuse.catalog.numbers import Numbers
from kvfuse.core import records
from kvfuse.core.eviction import Policy

GATHERED_MAX = 1024


class Accesses:
    """Access times by id that the catalog does not have yet; at most ``GATHERED_MAX`` of them."""

    def __init__(self, catalog: Catalog, numbers: Numbers, order: Policy) -> None:
        self._catalog = catalog
        self._order = order
        self._numbers = numbers
        self._mutex = threading.Lock()
        self._times_ns: dict[int, int] = {}
        self.noted = 0  # ever: grows while clients read

    def note(self, node_id: int, now_ns: int) -> None:
        """Record an access."""
        with self._mutex:
            self._times_ns.pop(node_id, None)  # in the order of the last access to each
            self._times_ns[node_id] = now_ns
            self.noted += 1
            full = len(self._times_ns) >= GATHERED_MAX
        if full:
            self.flush()

    def get(self, node_id: int) -> int | None:
        """Return an access time that is newer than the record's, if there is one."""
        return self._times_ns.get(node_id)

    def flush(self) -> None:
        """Write what was gathered."""
        with self._mutex:
            times_ns, self._times_ns = self._times_ns, {}
        if not times_ns:
            return
        with self._catalog.write() as txn:
            for node_id, atime_ns in times_ns.items():
                node = txn.node(node_id)
                if node is not None:
                    number = self._numbers.generation()
                    place, hits = self._order.accessed(
                        node.access, records.hits_of(node.flags), number
                    )
                    flags = records.with_hits(node.flags, hits)
                    used = node.replace(atime_ns=atime_ns, access=place, flags=flags)
                    txn.put_node(used, node)
