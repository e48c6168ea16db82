"""Measures decode steps of whole models on a GPU: tokens per second, share of the limit, and where a step goes.

    python -m benchmarks.decode_speed --models qwen3-30b-a3b.bf16 --batches 1 64 --contexts 1k [--folder FOLDER]

Through the engine with its scheduler, greedily. Contexts are claimed, not computed, and experts drawn for every token
and layer (see ``benchmarks.gpu_engine``). The limit is what a step must read over the copy bandwidth measured in the
same run: dense weights, the distinct experts that its tokens took, KV and states.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.gpu_engine import (
    GpuBench,
    LoggedStep,
    arena_for,
    generate,
    generating,
    random_prompts,
)
from benchmarks.model_tables import EngineOptions, Needs, Rates, Run
from benchmarks.report import Conditions, Value
from benchmarks.step_profile import breakdown, heaviest, record_kernels
from worker.advise.geometry import ModelGeometry
from worker.advise.limits import resident_step_s, share_of_limit

CONTEXTS = {"1k": 1024, "8k": 8192}
BATCHES = (1, 4, 16, 64, 256)
PROFILED_BATCHES = (1, 64)
SKIPPED = 8
STEPS, STEPS_OF_MANY, MANY = 48, 24, 64
"""Steps that are timed: so many, or from ``MANY`` rows on fewer, longer ones."""
GENERATED = 640
"""Most tokens that a row generates, while it is profiled."""
PROFILED = 12
PROFILER_START_S = 0.5
PARTS = ("attention", "linear_attention", "experts", "rest", "launch_gaps", "host_gaps")


class NotTogetherError(RuntimeError):
    """Rows did not decode in one step: there is no such case to measure."""


def claimed_arena(geometry: ModelGeometry, batch: int, tokens: int) -> int:
    """Arena bytes of a case whose contexts are claimed in one step: each holds its whole prompt in windows, too."""
    windows = batch * tokens * geometry.window_kv_bytes(context=1)
    return arena_for(geometry, batch, tokens + GENERATED) + int(1.05 * windows)


@dataclass(frozen=True, slots=True)
class Case:
    """So many rows with contexts of so many tokens."""

    batch: int
    context: str

    @property
    def tokens(self) -> int:
        """Of a context."""
        return CONTEXTS[self.context]

    @property
    def num_steps(self) -> int:
        """That are timed."""
        return STEPS_OF_MANY if self.batch >= MANY else STEPS


def profile(bench: GpuBench, case: Case, step_s: float) -> tuple[Mapping[str, float], list[str]]:
    """Milliseconds of a step by part, and the heaviest kernels."""
    prompts = random_prompts(case.batch, case.tokens, bench.vocab_size)
    num_new = int(PROFILER_START_S / step_s) + 2 * PROFILED
    with generating(bench, prompts, num_new):
        kernels = record_kernels(lambda: time.sleep(PROFILED * step_s))
    if not kernels:
        return {}, ["the profiler began when all was over"]
    found = breakdown(kernels, (kernels[-1].end_us - kernels[0].start_us) / 1e6 / step_s)
    return found, heaviest(kernels)


def measure(
    bench: GpuBench, label: str, case: Case, copy_rate: float, profiles: bool
) -> tuple[dict[str, Value], list[str]]:
    """One row of the table, and the heaviest kernels."""
    prompts = random_prompts(case.batch, case.tokens, bench.vocab_size)
    bench.runner.claims = True
    bench.log.steps.clear()
    generate(bench.engine, prompts, case.num_steps + SKIPPED + 2)
    steps = bench.log.decode_steps(case.batch, SKIPPED)
    if len(steps) < 2:
        raise NotTogetherError(f"{label}: {case.batch} rows never decoded together")
    step_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    distinct = bench.runner.distinct_experts(case.batch)
    context = case.tokens + SKIPPED + case.num_steps / 2
    limit_s = resident_step_s(bench.read_bytes(distinct, context, case.batch), copy_rate)
    row: dict[str, Value] = {
        "case": label,
        "tokens_per_s": case.batch / step_s,
        "share": share_of_limit(limit_s, step_s),
        "step_ms": 1e3 * step_s,
        "device_ms": 1e3 * sum(step.device_s for step in steps) / len(steps),
        "graph_ms": 1e3 * bench.replay_s(case.batch, case.tokens + case.num_steps),
        "limit_ms": 1e3 * limit_s,
        "distinct_experts": distinct,
    }
    parts, lines = profile(bench, case, step_s) if profiles else ({}, [])
    lines = [step_times(steps), *lines]
    row.update({f"{name}_ms": parts.get(name) for name in PARTS})
    # Gaps longer than those between a step's kernels lie between steps.
    row["idle_share"] = parts["host_gaps"] / (1e3 * step_s) if parts else None
    row["kernels"] = parts.get("kernels")
    row["deterministic_cost"] = None  # see benchmarks.speed_tables
    return row, lines


def step_times(steps: Sequence[LoggedStep]) -> str:
    """A line that shows whether a mean hides a few late steps: what the host saw, then the device's own times."""
    gaps = [1e3 * (after.at_s - before.at_s) for before, after in pairwise(steps)]
    device = [1e3 * step.device_s for step in steps]
    shown = [" ".join(f"{value:.2f}" for value in values) for values in (gaps, device)]
    return f"steps ms: {shown[0]} | on the device: {shown[1]}"


@dataclass
class DecodeTable:
    """Decode steps of several models. ``suffix`` ends the rows' names; ``profiled`` batches at the shortest context are
    broken down."""

    batches: Sequence[int] = BATCHES
    contexts: Sequence[str] = tuple(CONTEXTS)
    profiled: Sequence[int] = PROFILED_BATCHES
    suffix: str = ""
    name: str = "decode_speed"
    rows: list[Mapping[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cases(self, geometry: ModelGeometry, available: int) -> list[Case]:
        """Those that fit."""
        return [
            Case(batch, context)
            for context in self.contexts
            for batch in self.batches
            if claimed_arena(geometry, batch, CONTEXTS[context]) < available
        ]

    def needs(self, geometry: ModelGeometry, available: int) -> Needs:
        """See :class:`benchmarks.model_tables.Table`."""
        cases = self.cases(geometry, available)
        return Needs(
            arena_bytes=max(claimed_arena(geometry, case.batch, case.tokens) for case in cases),
            max_running=max(case.batch for case in cases),
            max_model_len=2 * max(case.tokens for case in cases),
            # Claimed prompts cost nothing: all in one step, so that all rows begin and end together.
            max_step_tokens=max(case.batch * (case.tokens + 1) for case in cases),
            batches=tuple(sorted({case.batch for case in cases})),
        )

    def fill(self, bench: GpuBench, model: str, rates: Rates) -> None:
        """See :class:`benchmarks.model_tables.Table`."""
        room = bench.arena_bytes
        for context in self.contexts:
            for batch in self.batches:
                label = f"{model}.b{batch}.c{context}{self.suffix}"
                if claimed_arena(bench.geometry, batch, CONTEXTS[context]) > room:
                    self.notes.append(f"{label}: does not fit the GPU")
                    continue
                profiles = batch in self.profiled and context == self.contexts[0]
                try:
                    row, lines = measure(bench, label, Case(batch, context), rates.copy, profiles)
                except NotTogetherError as error:
                    self.notes.append(str(error))
                    continue
                self.rows.append(row)
                print({k: v if isinstance(v, str) else v and round(v, 4) for k, v in row.items()})
                print("\n".join(lines), flush=True)
        self.notes.append(f"{model}: started in {bench.started_s:.1f} s")

    def conditions(self, models: Sequence[str]) -> Conditions:
        """See :class:`benchmarks.model_tables.Table`."""
        return Conditions(
            model=", ".join(models) + " (shapes)",
            weights="random",
            prompts="random ids; contexts claimed, not computed; experts drawn for each token and layer, uniform",
            cache="warm; no prefix cache",
            batch=", ".join(map(str, self.batches)),
            context=", ".join(self.contexts),
            resident="all",
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of every program that starts models for tables."""
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--folder", type=Path, help="also write each table there, as its name with .json")
    parser.add_argument("--attention-backend", default="auto")


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", nargs="+", default=list(CONTEXTS), choices=sorted(CONTEXTS))
    parser.add_argument(
        "--profiled", type=int, nargs="*", default=PROFILED_BATCHES, help="batches broken down"
    )
    options = parser.parse_args()
    table = DecodeTable(
        options.batches, options.contexts, options.profiled, ".deterministic" if options.deterministic else ""
    )
    engine = EngineOptions(options.attention_backend, options.deterministic)
    Run([table], Rates.measured(), options.folder, engine).measure(options.models)


if __name__ == "__main__":
    main()
