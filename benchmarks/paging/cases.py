"""The cases of the paging benchmark: what is measured, what a measured step says, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from benchmarks.limits import LinkCurve, foresight_step_s, in_layer_step_s, share_of_limit
from benchmarks.paging.routing import RANDOM, Trace, make_trace
from benchmarks.report import Value
from benchmarks.routing_traces import RoutingModel
from memory.device.residency import Lane

TIMED_STEPS = {1: 24, 4: 10, 16: 5, 64: 2}
"""By batch: long steps need fewer."""
WARM_STEPS = {1: 48, 4: 16, 16: 6, 64: 2}
"""Of calibrated routing, so that the places hold what it uses; random routing has nothing to learn."""
TRACE_LENGTHS = {1: 192, 4: 128, 16: 48, 64: 24}
"""Steps until a trace repeats itself."""
COLUMNS = (
    "case", "tokens_per_s", "hit_rate", "bytes_per_step", "link_busy", "share", "share_perfect", "step_ms",
    "limit_ms", "resident_ms", "evictions",
)  # fmt: skip
Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. ``quick``: tiny models on a CPU, few steps. ``besides``: whether what is no case of the table
    (domains, a scan, the old ways, a second replica) is measured too, with the first format."""

    places: tuple[int, ...]
    batches: tuple[int, ...]
    routings: tuple[str, ...]
    settings: Mapping[str, object]
    memory_rate: float
    scan_tokens: int = 32768
    on_gpu: bool = True
    besides: bool = True

    def timed(self, batch: int) -> int:
        """Steps of a case that are timed."""
        return TIMED_STEPS.get(batch, 8) if self.on_gpu else 10

    def warm(self, routing: str, batch: int) -> int:
        """Steps ahead of them."""
        return 2 if routing == RANDOM else WARM_STEPS.get(batch, 8) if self.on_gpu else 10


@cache
def trace_of(routing: str, model: RoutingModel, batch: int) -> Trace:
    """The trace of a case, the same at every K and for the resident engine."""
    return make_trace(routing, model, batch, TRACE_LENGTHS.get(batch, 48), seed=batch)


def cases(plan: Plan) -> Iterator[tuple[str, int]]:
    """(routing, batch) of every case of a K."""
    return ((routing, batch) for routing in plan.routings for batch in plan.batches)


@dataclass
class Measured:
    """What one format's engines were found to do."""

    format: str
    plan: Plan
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resident_s: dict[tuple[str, int], float] = field(default_factory=dict)
    summary: Row = field(default_factory=dict)

    def value(self, case: str, column: str = "tokens_per_s") -> float | None:
        """A figure of a case of this format, tokens per second if no other; None where it was not measured."""
        for row in self.rows:
            if row["case"] == f"{self.format}.{case}":
                value = row[column]
                return float(value) if isinstance(value, float) else None
        return None

    def ratio(self, left: str, right: str) -> float | None:
        """Between two cases' tokens per second."""
        above, below = self.value(left), self.value(right)
        return above / below if above and below else None


def all_hit_ratio(rows: Sequence[Row]) -> float | None:
    """The worst of the cases in which nothing was missed: its step over the resident engine's; None without any."""
    ratios = [
        float(row["step_ms"] or 0) / float(row["resident_ms"] or 1) for row in rows if row["hit_rate"] == 1.0
    ]
    return max(ratios, default=None)


def case_row(
    label: str, streams: int, step_s: float, counts: torch.Tensor, size: int, resident_s: float, curve: LinkCurve,
    memory_rate: float,
) -> Row:  # fmt: skip
    """One row of the table; ``counts`` [lanes, layers] a step, ``size`` of a block."""
    hits = counts[Lane.HIT]
    misses = counts[Lane.TEE] + counts[Lane.IN_PLACE]
    miss_bytes = float(misses.sum()) * size
    per_layer = [(float(n), float(h) * size / memory_rate) for n, h in zip(misses, hits, strict=True)]
    limit_s = in_layer_step_s(resident_s, per_layer, curve)
    rate = best_rate(curve, size)
    values = (
        label, streams / step_s, float(hits.sum() / (hits + misses).sum().clamp_min(1e-9)), miss_bytes,
        miss_bytes / rate / step_s, share_of_limit(limit_s, step_s),
        share_of_limit(foresight_step_s(resident_s, miss_bytes, rate), step_s), 1e3 * step_s, 1e3 * limit_s,
        1e3 * resident_s, float(counts[Lane.EVICTED].sum()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def best_rate(curve: LinkCurve, size: int) -> float:
    """Bytes per second at which the most experts of ``size`` bytes come."""
    most = max(count for count, _ in curve.points)
    return most * size / curve.seconds(most)


def say(row: Row) -> None:
    """A row as soon as it is known."""
    shown = {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
    print(f"{time.perf_counter():.1f} {row['case']} {shown}", flush=True)
