"""Says where the time of a decode step goes, by the engine's own functions."""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import run_prompts
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import LaunchedStep, ModelRunner
from worker.scheduling.step import StepPlan

PARTS = (
    ("memory commands", "arena.py", ("apply",)),
    ("batch tensors and attention plans", "batch.py", ("build",)),
    ("attention layers", "attention.py", ("__call__",)),
    ("- of these: attention itself", "torch_backend.py", ("run",)),
    ("DeltaNet layers", "delta_net.py", ("__call__",)),
    ("MoE layers", "mlp.py", ("__call__",)),
    ("residuals and norms", "pointwise.py", ("add_norm",)),
    ("head", "decoder.py", ("logits",)),
    ("sampling", "sampler.py", ("prepare", "draw")),
)
"""Name, file and functions whose cumulated time is shown."""


@dataclass(frozen=True)
class Share:
    """Milliseconds of one part per step, and its share of the step."""

    name: str
    milliseconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.name:42} {self.milliseconds:8.3f} ms  {self.share:6.1%}"


class _ProfiledRunner(ModelRunner):
    """A runner that profiles the decode steps it is given."""

    def __init__(self, config: WorkerConfig, num_rows: int) -> None:
        super().__init__(config)
        self._num_rows = num_rows
        self.profile = cProfile.Profile()
        self.steps = 0
        self.last_end_s = 0.0
        self.host_s = 0.0
        self.run_s = 0.0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if plan.num_decode_rows != self._num_rows or plan.num_rows != self._num_rows:
            self.last_end_s = 0.0
            return super().launch(plan)
        start_s = time.perf_counter()
        self.host_s += start_s - self.last_end_s if self.last_end_s else 0.0
        self.steps += bool(self.last_end_s)
        self.profile.enable()
        launched = super().launch(plan)
        self.profile.disable()
        self.last_end_s = time.perf_counter()
        self.run_s += self.last_end_s - start_s
        return launched


def profile_decode(folder: Path, prompts: Sequence[Sequence[int]], threads: int) -> list[Share]:
    """Parts of a decode step with all prompts running. The profiler's own cost is in the figures: it makes many small
    calls look dearer than they are."""
    config = WorkerConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_running=len(prompts),
        prefix_cache=False,
        num_threads=threads,
    )
    made: list[_ProfiledRunner] = []

    def make_runner(settings: WorkerConfig) -> _ProfiledRunner:
        made.append(_ProfiledRunner(settings, len(prompts)))
        return made[0]

    engine = NativeEngine(config, make_runner)
    try:
        run_prompts(engine, prompts, 48)
        asyncio.run(engine.drain(1.0))
    finally:
        engine.close()
    return _shares(made[0])


def _shares(runner: _ProfiledRunner) -> list[Share]:
    stats: Any = pstats.Stats(runner.profile)
    steps = runner.steps + 1
    total_s = runner.run_s + runner.host_s
    found = [Share("scheduler, ledger, events", runner.host_s / steps * 1e3, runner.host_s / total_s)]
    for name, file, functions in PARTS:
        seconds = sum(
            entry[3]
            for (path, _, called), entry in stats.stats.items()
            if called in functions and Path(path).name == file and "_reference" not in path
        )
        found.append(Share(name, seconds / steps * 1e3, seconds / total_s))
    found.append(Share("whole step", total_s / steps * 1e3, 1.0))
    return found
