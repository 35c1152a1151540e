"""What the configuration says the verbs shall do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfuse.core import placement
from kvfuse.core.eviction import Pins, Watermarks
from kvfuse.core.routing import TempPattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The configured policy the verbs follow."""

    policy: placement.Policy
    serve_displaced: bool
    temp_dirs: frozenset[bytes]
    temp_patterns: Sequence[TempPattern]
    reserve_bytes: Callable[[int], int]  # capacity of a disk -> bytes never handed out
    op_timeout_s: float
    watermarks: Watermarks
    lease_ttl_s: float
    temp_max_age_s: float
    pins: Pins
    eviction: str  # the policy's name
    stale_first: bool
    counts_evictable: bool  # statfs calls available what would be evicted
