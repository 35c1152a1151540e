"""How many requests of each kind were answered, how many failed, and how long they took."""


class Counter:
    """Requests of one kind. Plain integers: cheap to count, read without a lock."""

    __slots__ = ("duration_ns", "failed", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.duration_ns = 0

    def add(self, duration_ns: int, *, failed: bool) -> None:
        """Count one answered request."""
        self.requests += 1
        self.failed += failed
        self.duration_ns += duration_ns


class RequestCounters:
    """A counter for each kind of request, since the mount.

    Concurrency: one thread counts; others may read, and see numbers of slightly different moments.
    """

    def __init__(self) -> None:
        self.active = 0  # requests that are not answered yet
        self._by_op: dict[str, Counter] = {}

    def of(self, op: str) -> Counter:
        """Return the counter of *op*."""
        counter = self._by_op.get(op)
        if counter is None:
            counter = self._by_op[op] = Counter()
        return counter

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return by kind: requests, how many of them failed, and their summed ns."""
        return {
            op: {
                "requests": counter.requests,
                "failed": counter.failed,
                "duration_ns": counter.duration_ns,
            }
            for op, counter in sorted(self._by_op.copy().items())
        }
