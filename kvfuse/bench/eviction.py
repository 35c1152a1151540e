"""Hit ratio of the eviction policies on three traces, beside those of an existing simulator.

Needs libcachesim (the extra ``bench``, and the system's libglib2.0-0). kvfuse's own policies run in
it as plugins, by the code that the evictor uses. Traces are generated: the same for a seed.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvfuse.bench.queues import Queues
from kvfuse.core.eviction import POLICIES

SIZES = (0.01, 0.05, 0.1, 0.3)  # of what a trace asks for in all
PEERS = ("LRU", "FIFO", "S3FIFO", "TwoQ", "ARC")


class Asked(NamedTuple):
    """One request of a trace."""

    key: int
    size_bytes: int


def zipf(requests: int, rng: random.Random) -> Iterator[Asked]:
    """Popular blocks and a long tail: shared system prompts, random questions."""
    keys = requests // 10
    weights = [1 / (rank + 1) ** 0.9 for rank in range(keys)]
    for key in rng.choices(range(keys), weights, k=requests):
        yield Asked(key, _size(key))


def scan(requests: int, rng: random.Random) -> Iterator[Asked]:
    """The same, and now and then a long run of blocks that nobody asks for again: batch jobs."""
    next_key = 1 << 40
    for count, asked in enumerate(zipf(requests, rng)):
        if count % (requests // 10) == 0:
            for _ in range(requests // 20):
                yield Asked(next_key, _size(next_key))
                next_key += 1
        yield asked


def prefixes(requests: int, rng: random.Random) -> Iterator[Asked]:
    """Conversations: each turn reads the blocks of all turns before, then stores new ones."""
    sessions: list[list[int]] = []
    next_key, count = 0, 0
    shared = [list(range(-100 * (n + 1), -100 * (n + 1) + 20)) for n in range(8)]
    while count < requests:
        if len(sessions) < 200 or rng.random() < 0.1:
            sessions.append(list(rng.choice(shared)))
            if len(sessions) > 200:
                sessions.pop(0)
        session = sessions[min(int(rng.expovariate(1 / 40)), len(sessions) - 1)]
        session += range(next_key, next_key + 6)
        next_key += 6
        for key in session:
            yield Asked(key & (1 << 62) - 1, _size(0))
            count += 1


def _size(key: int) -> int:
    return (1 + key * 2654435761 % 16) << 20


TRACES: dict[str, Callable[[int, random.Random], Iterator[Asked]]] = {
    "zipf": zipf,
    "scan": scan,
    "prefixes": prefixes,
}


class Row(NamedTuple):
    """The hit ratio of a policy on a trace, with room for a part of what it asks for."""

    trace: str
    room: float
    policy: str
    hit_ratio: float


def main() -> None:
    """Run all policies on all traces, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(prog="bench-eviction", description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000, help="of each trace")
    parser.add_argument("--quick", action="store_true", help="a tenth of that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    try:
        import libcachesim
    except ImportError as exc:
        sys.exit(f"bench-eviction: {exc}; install kvfuse[bench], and libglib2.0-0 of the system")
    requests = given.requests // 10 if given.quick else given.requests
    rows: list[Row] = []
    for name, trace in TRACES.items():
        asked = list(trace(requests, random.Random(given.seed)))  # noqa: S311
        total_bytes = sum(dict(asked).values())
        for room in SIZES:
            for policy, cache in _caches(libcachesim, int(room * total_bytes)):
                sys.stderr.write(f"\r{name} {room:.0%} {policy:12}")
                rows.append(Row(name, room, policy, _run(libcachesim, cache, asked)))
    sys.stderr.write("\r\033[K")
    _show(rows)
    if given.json:
        given.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


def _caches(sim: Any, room_bytes: int) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - untyped
    for policy in POLICIES:
        yield f"kvfuse {policy}", _plugin(sim, policy, room_bytes)
    for peer in PEERS:
        yield peer, getattr(sim, peer)(cache_size=room_bytes)


def _plugin(sim: Any, policy: str, room_bytes: int) -> Any:  # noqa: ANN401 - untyped
    """Return a cache of the simulator whose victims *policy* chooses."""
    return sim.PluginCache(
        cache_size=room_bytes,
        cache_name=policy,
        cache_init_hook=lambda _params: Queues(policy),
        cache_hit_hook=lambda queues, asked: queues.used(asked.obj_id),
        cache_miss_hook=lambda queues, asked: queues.stored(asked.obj_id, asked.obj_size),
        cache_eviction_hook=lambda queues, _asked: queues.evict(),
        cache_remove_hook=lambda queues, key: queues.remove(key) if key in queues else None,
        cache_free_hook=lambda _queues: None,
    )


def _run(sim: Any, cache: Any, trace: list[Asked]) -> float:  # noqa: ANN401 - untyped
    hits = 0
    request = sim.Request(op=sim.ReqOp.OP_GET)
    for asked in trace:
        request.obj_id, request.obj_size = asked
        hits += cache.get(request)
    return hits / len(trace)


def _show(rows: list[Row]) -> None:
    policies = list(dict.fromkeys(row.policy for row in rows))
    print("| trace | room | " + " | ".join(policies) + " |")  # noqa: T201 - its output
    print("|---" * (len(policies) + 2) + "|")  # noqa: T201
    found = {(row.trace, row.room, row.policy): row.hit_ratio for row in rows}
    for trace in TRACES:
        for room in SIZES:
            ratios = [f"{found[trace, room, policy]:.3f}" for policy in policies]
            print(f"| {trace} | {room:.0%} | " + " | ".join(ratios) + " |")  # noqa: T201


if __name__ == "__main__":
    main()
