"""Rates of several rounds, and their ratios to those of another directory in the same rounds."""

from dataclasses import dataclass, field
from statistics import median

from kvfuse.bench.jobs import Job


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the lowest and highest value it stands for."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        """Return the spread of *values*, None when there are none."""
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(slots=True)
class Line:
    """What was measured of one job: the rates of each target, a value for each round.

    *failures* says why a target could not do the job. *data* are rates inside read and write calls.
    """

    job: Job
    rates: dict[str, list[float]] = field(default_factory=dict)
    data: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rate(self, target: str) -> Spread | None:
        """Return the rate of *target*."""
        return Spread.of(self.rates.get(target, []))

    def ratio(self, target: str, base: str) -> Spread | None:
        """Return how many times as fast as *base* the *target* was, paired by round."""
        return _paired(self.rates.get(target, []), self.rates.get(base, []))

    def data_ratio(self, target: str, base: str) -> Spread | None:
        """Return the same of the rates inside read and write calls."""
        return _paired(self.data.get(target, []), self.data.get(base, []))

    def to_json(self, base: str) -> dict[str, object]:
        """Return the line JSON-ready, ratios against *base*."""
        job = self.job
        return {
            "job": job.name, "kind": str(job.kind), "clients": job.clients, "unit": job.unit,
            "size_bytes": job.size_bytes, "direct": job.direct, "cold": job.cold,
            "targets": {
                target: {
                    "rates": self.rates[target],
                    "rate": _json(self.rate(target)),
                    "ratio": _json(self.ratio(target, base)),
                    "data_ratio": _json(self.data_ratio(target, base)),
                }
                for target in self.rates
            },
            "failures": self.failures,
        }  # fmt: skip


def _paired(ours: list[float], theirs: list[float]) -> Spread | None:
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=False) if b > 0])


def _json(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {"median": spread.median, "low": spread.low, "high": spread.high}
