"""Turns a run's records into the figures that routers are compared by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.placement.simulation import Record, RunResult

SHARE_WINDOW_S = 2.0
MIN_WINDOW_PER_WORKER = 5
"""A window with fewer placements than this per worker says nothing about a stampede."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What counts as served well: the first token within ``ttft_s`` plus ``ttft_s_per_token`` for each prompt token,
    and the later ones at ``itl_s`` or less on average."""

    ttft_s: float = 2.0
    ttft_s_per_token: float = 3e-4
    itl_s: float = 0.15

    def met(self, record: Record) -> bool:
        """Whether a request was served well; a lost one never is."""
        if record.finished_s < 0 or record.lost:
            return False
        request = record.request
        if (
            record.first_token_s - request.arrival_s
            > self.ttft_s + self.ttft_s_per_token * request.prompt_tokens
        ):
            return False
        gaps = max(1, request.output_tokens - 1)
        return (record.finished_s - record.first_token_s) / gaps <= self.itl_s


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers. ``goodput``: requests a second that met the objective; ``imbalance``: requests of the
    busiest worker over the mean; ``max_share_2s``: the busiest worker's share of any two seconds over the fair one."""

    goodput: float
    met_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    bytes_paged: float
    retractions: int
    hit_tokens: int
    imbalance: float
    max_share_2s: float
    lost: int
    retried: int

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def figures_of(result: RunResult, num_workers: int, objective: Objective) -> Figures:
    """The figures of a run of ``num_workers``."""
    ended = [record for record in result.records if record.finished_s >= 0]
    ttft = sorted(r.first_token_s - r.request.arrival_s for r in ended)
    itl = sorted((r.finished_s - r.first_token_s) / max(1, r.request.output_tokens - 1) for r in ended)
    # Every router is measured over the same span: that of the arrivals.
    span_s = max(record.request.arrival_s for record in result.records)
    met = sum(objective.met(record) for record in result.records)
    counts: dict[str, int] = {}
    for _, name in result.placements:
        counts[name] = counts.get(name, 0) + 1
    return Figures(
        goodput=met / span_s,
        met_share=met / len(result.records),
        ttft_p50_ms=1e3 * quantile(ttft, 0.5),
        ttft_p99_ms=1e3 * quantile(ttft, 0.99),
        itl_p99_ms=1e3 * quantile(itl, 0.99),
        bytes_paged=result.bytes_paged,
        retractions=result.retractions,
        hit_tokens=result.hit_tokens,
        imbalance=max(counts.values()) * num_workers / len(result.placements),
        max_share_2s=max_share(result.placements, num_workers),
        lost=sum(record.lost for record in result.records),
        retried=sum(record.num_retries for record in result.records),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``ordered`` (ascending) lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def max_share(placements: Sequence[tuple[float, str]], num_workers: int) -> float:
    """The largest share of one worker in any two seconds, as a multiple of the fair share; 0 where no two seconds
    saw enough placements."""
    window: deque[tuple[float, str]] = deque()
    counts: dict[str, int] = {}
    worst = 0.0
    for time_s, name in placements:
        window.append((time_s, name))
        counts[name] = counts.get(name, 0) + 1
        while window[0][0] < time_s - SHARE_WINDOW_S:
            counts[window.popleft()[1]] -= 1
        if len(window) >= MIN_WINDOW_PER_WORKER * num_workers:
            worst = max(worst, counts[name] / len(window) * num_workers)
    return worst
