"""Which load runs on which model in how many bytes, and what was published about the four fixed loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.replay.loads import Load, fixed_clients, trace_beginning
from benchmarks.replay.rates import ASSUMED, Rates
from benchmarks.replay.shapes import GPT_OSS_20B, QWEN35_4B, SHAPES, ModelShape
from benchmarks.replay.simulator import Outcome

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
PUBLISHED_TOKENS_PER_S = 5880.0
"""Output tokens/s published for Qwen3.5-4B on one H200: 1,024 in, 256 out, 64 at once, memory ample."""
STATE_RATIO = 0.9 / 1.9
"""The published split of hybrids: 0.9 bytes of state for each byte of full KV."""
WINDOW_RATIO = 0.8 / 1.8
"""The published split of sliding-window models: 0.8 window tokens for each full token, at equal bytes a token."""


@dataclass(frozen=True, slots=True)
class Target:
    """A published figure of the split: the budget is where the replay shows it within ``tolerance``."""

    figure: str
    value: float
    tolerance: float = 0.1

    def of(self, outcome: Outcome) -> float:
        """The outcome's figure that the target speaks of."""
        return float(getattr(outcome, self.figure))

    def met_by(self, outcome: Outcome) -> bool:
        """Whether the outcome is as near as asked."""
        return abs(self.of(outcome) - self.value) <= self.tolerance * self.value


@dataclass(frozen=True)
class Case:
    """One load on one model.

    Attributes:
        arena_bytes: the budget; with a ``target`` only where the search for it begins.
        split_ratio: of the split that the arena is set against by name; the sweep takes all ratios.
        running: which figure counts as "running": ``mean_running`` or ``peak_running``.
    """

    shape: ModelShape
    load_name: str
    make_load: Callable[[], Load]
    arena_bytes: int
    split_ratio: float
    grain: int
    max_running: int
    step_tokens: int = 2048
    prefix_cache: bool = True
    target: Target | None = None
    running: str = "mean_running"
    rates: Rates = ASSUMED

    @property
    def name(self) -> str:
        """``<model>.<load>``."""
        return f"{self.shape.name}.{self.load_name}"


def published_cases() -> list[Case]:
    """The four fixed loads. Where a publication does not give lengths or the number of requests, they are chosen
    here: 2,048 in and 4,096 out for GPT-OSS; 1.5 to 6 requests per client."""
    return [
        Case(
            QWEN35_4B, "16k_4k", partial(fixed_clients, "16k_4k", 16384, (4096, 4096), 64, 128, 16),
            26_000_000_000, STATE_RATIO, 16, 64, target=Target("mean_running", 22),
        ),
        Case(
            QWEN35_4B, "512_16k", partial(fixed_clients, "512_16k", 512, (16384, 16384), 51, 76, 32),
            26_000_000_000, STATE_RATIO, 32, 64, target=Target("retractions", 294),
        ),
        Case(
            GPT_OSS_20B, "max_concurrency",
            partial(fixed_clients, "max_concurrency", 2048, (4096, 4096), 1000, 2500, 32),
            115_000_000_000, WINDOW_RATIO, 32, 1024, 2048, False, Target("peak_running", 618), "peak_running",
        ),
        Case(
            QWEN35_4B, "1k_256", partial(fixed_clients, "1k_256", 1024, (256, 256), 64, 384, 8),
            60_000_000_000, STATE_RATIO, 8, 64,
        ),
    ]  # fmt: skip


TRACE_BYTES = {
    "gpt_oss_20b": 5_000_000_000,
    "qwen35_4b": 12_000_000_000,
    "qwen35_35b_a3b": 12_000_000_000,
    "qwen3_30b_a3b": 20_000_000_000,
    "kimi_linear": 8_000_000_000,
}
"""Bytes left for pages, chosen so that memory is short on the traces. Of qwen3_30b_a3b's 29 GB of FP8 experts as many
share them as fit."""
TRACE_JOBS = {
    "azure_2023_conv": (200, 16.0),
    "azure_2023_code": (200, 16.0),
    "mooncake_conversation": (100, 3.0),
    "mooncake_synthetic": (80, 6.0),
}
"""How many requests from the trace's beginning, and how many times as fast they arrive: faster than they are served."""


def trace_cases(folder: Path, models: tuple[str, ...] = tuple(SHAPES)) -> list[Case]:
    """Every trace on every model."""
    cases = []
    for model in models:
        shape = SHAPES[model]
        for trace, (num_jobs, speed) in TRACE_JOBS.items():
            cases.append(
                Case(
                    shape,
                    trace,
                    partial(trace_beginning, folder, trace, num_jobs, 8, speed),
                    TRACE_BYTES[model],
                    0.5,
                    8,
                    256,
                    # A simulated chunk holds as many window pages as `grain` real ones at once: keep it small.
                    512 if shape.window else 2048,
                )
            )
    return cases
