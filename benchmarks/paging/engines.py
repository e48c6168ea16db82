"""Engines whose decode rows take imposed experts, paged or resident, and what times and counts their steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine import generate, random_prompts
from benchmarks.paging.offload import LayerStream, OffloadedExperts
from benchmarks.paging.routing import ImposedFactory, Routing, Trace
from benchmarks.routing_traces import RoutingModel
from memory.device.residency import Lane
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.mixed import MixedKey
from worker.execution.runner import ModelRunner
from worker.execution.weights import WeightSource
from worker.experts.pager import ExpertPager
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertFactory, ExpertLayer
from worker.models.paged import PagedFactory, paged_factory
from worker.models.resident import resident_experts
from worker.scheduling.step import StepPlan, StepResult

PROMPT_TOKENS = 2
SPARE_ARENA_BYTES = 2 << 30


class StepTimes:
    """When decode steps of a given number of rows were applied, and what stood in the counters behind the first few."""

    def __init__(self) -> None:
        self._rows = self._warm = 0
        self._read: Callable[[], torch.Tensor] | None = None
        self.at_s: list[float] = []
        self.before: torch.Tensor | None = None

    def start(self, rows: int, warm: int, read: Callable[[], torch.Tensor]) -> None:
        """From now on; ``read`` answers the counters' copy, and is asked when ``warm`` steps have been applied."""
        self._rows, self._warm, self._read = rows, warm, read
        self.at_s, self.before = [], None

    def stop(self) -> list[float]:
        """The moments so far."""
        self._read = None
        return self.at_s

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """For the engine."""
        if self._read is None or not plan.num_rows == plan.num_decode_rows == self._rows:
            return
        self.at_s.append(time.perf_counter())
        if len(self.at_s) == self._warm:
            self.before = self._read()


class ChosenSizes(ModelRunner):
    """A runner that captures decode steps of chosen numbers of rows only, and no steps with prompts."""

    def __init__(self, config: WorkerConfig, experts: ExpertFactory, batches: Sequence[int]) -> None:
        self._batches = frozenset(batches)
        super().__init__(config, experts)

    def capture_graphs(
        self, keys: list[tuple[int, int]] | None = None, mixed_keys: list[MixedKey] | None = None
    ) -> None:
        """See :meth:`ModelRunner.capture_graphs`."""
        if self.graphs is not None and keys is None:
            keys = [key for key in self.graphs.keys if key[0] in self._batches]
            mixed_keys = []
        super().capture_graphs(keys, mixed_keys)


class OffloadingFactory:
    """Paged experts that can also be run the old ways: see :mod:`benchmarks.paging.offload`."""

    def __init__(self, factory: PagedFactory) -> None:
        self._factory = factory
        self.stream = LayerStream()

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """See :class:`worker.models.base.ExpertFactory`."""
        layer = self._factory(experts, source)
        return layer if source.rehearsing else OffloadedExperts(layer, experts, self.stream)

    def finish(self, device: torch.device) -> ExpertPager:
        """See :class:`worker.models.paged.PagingFactory`."""
        pager = self._factory.finish(device)
        self.stream.host = pager.host
        return pager


class PagedImposed(ImposedFactory):
    """Paged experts under imposed routing."""

    def __init__(self, factory: OffloadingFactory, most_rows: int) -> None:
        super().__init__(factory, most_rows)
        self.offloading = factory

    def finish(self, device: torch.device) -> ExpertPager:
        """See :class:`worker.models.paged.PagingFactory`."""
        return self.offloading.finish(device)


@dataclass(frozen=True, slots=True)
class Bench:
    """A started engine with imposed routing."""

    engine: NativeEngine
    runner: ModelRunner
    routing: Routing
    times: StepTimes
    started_s: float
    num_layers: int
    stream: LayerStream | None = None

    @property
    def pager(self) -> ExpertPager:
        """Of an engine with paged experts; RuntimeError for another."""
        if self.runner.pager is None:
            raise RuntimeError("the experts of this engine are resident")
        return self.runner.pager

    @property
    def model(self) -> RoutingModel:
        """The generator's settings for this model."""
        info = self.engine.model
        return RoutingModel(self.num_layers, info.num_experts, info.experts_per_token)

    def set_places(self, per_layer: int) -> None:
        """Lowers K, from the next step on."""
        self.pager.limit_places(per_layer * self.num_layers)

    def _counts(self) -> torch.Tensor:
        """[lanes, layers], a copy behind what was launched; zeros where experts are resident."""
        if self.runner.pager is None:
            return torch.zeros(len(Lane), self.num_layers, dtype=torch.int64)
        return self.pager.residency.counts.clone()

    def run(self, trace: Trace | None, num_steps: int, warm_steps: int = 1) -> tuple[float, torch.Tensor]:
        """(seconds a step, counts a step [lanes, layers]) of decode steps under ``trace``, which has one stream for
        each row; None: one stream goes on in the last one. ``warm_steps`` come first, at least one, and are neither
        timed nor counted."""
        streams = 1 if trace is None else trace.shape[2]
        if trace is not None:
            self.routing.impose(trace)
        prompts = random_prompts(streams, PROMPT_TOKENS, self.engine.model.vocab_size)
        self.times.start(streams, warm_steps, self._counts)
        generate(self.engine, prompts, warm_steps + num_steps + 2)
        at_s, before = self.times.stop(), self.times.before
        assert before is not None
        # With a step in flight the counters are read behind the step after the one applied.
        first = warm_steps + (self.engine.model.device != "cpu")
        counted = (self._counts() - before).double().cpu() / (len(at_s) - first)
        return (at_s[-1] - at_s[warm_steps - 1]) / (len(at_s) - warm_steps), counted

    def eager_steps(self) -> float:
        """Decode steps that ran without a graph so far."""
        return float(self.runner.figures.get("graph.eager_decode_steps", 0.0))

    def close(self) -> None:
        """Lets the engine's memory go."""
        self.engine.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_bench(folder: Path, experts: str, batches: Sequence[int], settings: Mapping[str, object]) -> Bench:
    """Starts an engine with ``experts`` paged or resident; decode steps of ``batches`` rows are captured. ``settings``
    are those of :class:`WorkerConfig`."""
    made: list[tuple[ModelRunner, ImposedFactory]] = []
    times = StepTimes()

    def make_runner(config: WorkerConfig) -> ModelRunner:
        factory = (
            PagedImposed(OffloadingFactory(paged_factory(config)), config.max_running)
            if experts == "paged"
            else ImposedFactory(resident_experts, config.max_running)
        )
        made.append((ChosenSizes(config, factory, batches), factory))
        return made[0][0]

    started_s = time.perf_counter()
    config = WorkerConfig(model=str(folder), served_name=folder.name, experts=experts,
                          prefix_cache=False, **settings)  # type: ignore[arg-type]  # fmt: skip
    engine = NativeEngine(config, make_runner, record=times.record)
    runner, factory = made[0]
    stream = factory.offloading.stream if isinstance(factory, PagedImposed) else None
    took_s = time.perf_counter() - started_s
    return Bench(engine, runner, factory.routing, times, took_s, len(factory.rows), stream)
