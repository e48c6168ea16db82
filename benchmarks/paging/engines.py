"""Engines whose decode rows take imposed experts, paged or resident, and what times and counts their steps."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine import generate, random_prompts
from benchmarks.paging.offload import LayerStream, OffloadedExperts
from benchmarks.paging.routing import ImposedFactory, Routing, Trace
from benchmarks.routing_traces import RoutingModel
from benchmarks.shapes import shape_folder
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

PROMPT_TOKENS = 24
SPARE_ARENA_BYTES = 2 << 30


@dataclass
class StepTimes:
    """When decode steps of a given number of rows were applied."""

    rows: int = 0
    at_s: list[float] | None = None

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """For the engine."""
        if self.at_s is not None and plan.num_rows == plan.num_decode_rows == self.rows:
            self.at_s.append(time.perf_counter())


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

    def counts(self) -> torch.Tensor:
        """[lanes, layers], waits for the device; zeros where experts are resident."""
        if self.runner.pager is None:
            return torch.zeros(len(Lane), self.num_layers, dtype=torch.int64)
        return self.pager.residency.counts.cpu().clone()

    def run(self, trace: Trace | None, num_steps: int, warm_steps: int = 0) -> tuple[float, torch.Tensor]:
        """(seconds a step, counts a step [lanes, layers]) of decode steps under ``trace``, which has one stream for
        each row; None: one stream goes on in the last one. Steps that warm the places come first and are not
        counted."""
        streams = 1 if trace is None else trace.shape[2]
        if trace is not None:
            self.routing.impose(trace)
        if warm_steps:
            self._decode(streams, warm_steps)
        before = self.counts()
        at_s = self._decode(streams, num_steps)
        counted = (self.counts() - before).double() / max(1, len(at_s))
        # The first steps of a generation run beside what is left of the prompts.
        timed = at_s[1 + len(at_s) // 8 :]
        return (timed[-1] - timed[0]) / (len(timed) - 1), counted

    def _decode(self, streams: int, num_steps: int) -> list[float]:
        """When each decode step of all streams was applied."""
        prompts = random_prompts(streams, PROMPT_TOKENS, self.engine.model.vocab_size)
        self.times.rows, self.times.at_s = streams, []
        generate(self.engine, prompts, num_steps + 2)
        at_s, self.times.at_s = self.times.at_s, None
        return at_s

    def eager_steps(self) -> float:
        """Decode steps that ran without a graph so far."""
        return float(self.runner.figures.get("graph.eager_decode_steps", 0.0))

    def close(self) -> None:
        """Lets the engine's memory go."""
        self.engine.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def cut_folder(model: str, format: str, num_layers: int) -> Path:
    """The shape's folder, of its first ``num_layers`` layers where that is above 0."""
    folder = shape_folder(model, format)
    if num_layers:
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = num_layers
        (folder / "config.json").write_text(json.dumps(config))
    return folder


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
