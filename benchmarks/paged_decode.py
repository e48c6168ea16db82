"""Measures decode steps of a model whose experts are paged, against what link and memory allow.

    python -m benchmarks.paged_decode --model qwen3-30b-a3b --formats fp8 int4 --places 24 40 92 [--json FILE]

Through the engine. Each token's experts are imposed, step by step: ``random`` draws them uniformly, ``calibrated``
comes from the generator whose LRU hits follow a published curve (``benchmarks.routing_traces``), one domain for all
streams. K is places per layer, one pool for all layers; it is lowered on the running engine. The in-layer limit uses
this run's misses, the measured time to bring n blocks, and the measured step with everything in place.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_engine import copy_bytes_per_s, generate, random_prompts
from benchmarks.limits import LinkCurve, foresight_step_s, in_layer_step_s, share_of_limit
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.routing_traces import RoutingModel, Stream
from benchmarks.shapes import shape_folder
from memory.device.residency import Lane
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import ModelRunner
from worker.execution.weights import WeightSource
from worker.experts.pager import ExpertPager
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.paged import paged_factory
from worker.probe import gather_rate
from worker.scheduling.step import StepPlan, StepResult

TRACE_STEPS = 192
PROMPT_TOKENS = 24
LINK_POINTS = (1, 2, 4, 8, 16, 32)
ROUTINGS = ("random", "calibrated")


def make_trace(
    routing: str, num_layers: int, num_experts: int, per_token: int, streams: int, num_steps: int, seed: int
) -> np.ndarray:
    """[steps, layers, streams, experts_per_token] int64, distinct within a token."""
    if routing == "random":
        scores = np.random.default_rng(seed).random((num_steps, num_layers, streams, num_experts))
        return np.argpartition(scores, per_token, axis=-1)[..., :per_token].astype(np.int64)
    model = RoutingModel(num_layers=num_layers, num_experts=num_experts, per_token=per_token)
    made = [Stream(model, 0, seed * 1000 + number) for number in range(streams)]
    steps = [[stream.token() for stream in made] for _ in range(num_steps)]
    return np.array(steps, dtype=np.int64).transpose(0, 2, 1, 3)


class Routing:
    """The experts that decode rows take, by step; a step's counter lies on the device, so that graphs may replay it."""

    def __init__(self, num_layers: int, most_rows: int, per_token: int, device: torch.device) -> None:
        self._trace = torch.zeros(
            TRACE_STEPS, num_layers, most_rows, per_token, dtype=torch.int64, device=device
        )
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self.most_rows = most_rows

    def impose(self, trace: np.ndarray) -> None:
        """Takes a trace of at most ``most_rows`` streams; nothing may be running."""
        self._trace[:, :, : trace.shape[2]] = torch.from_numpy(trace).to(self._trace.device)
        self._at.zero_()

    def choose(self, row: int, experts: torch.Tensor) -> torch.Tensor:
        """The trace's experts for the live rows of a decode step of layer ``row``."""
        if row == 0:
            self._at.add_(1).remainder_(TRACE_STEPS)
        chosen = self._trace[:, row].index_select(0, self._at)[0, : len(experts)]
        return torch.where(experts >= 0, chosen, -1)


class ImposedExperts:
    """A layer's experts under imposed routing; prompts keep their own."""

    def __init__(self, experts: RoutedExperts, routing: Routing, row: int) -> None:
        self._experts, self._routing, self._row = experts, routing, row

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As the experts that it wraps."""
        if len(x) <= self._routing.most_rows:
            experts = self._routing.choose(self._row, experts)
        return self._experts(x, weights, experts)


class ImposedFactory:
    """Paged experts under imposed routing."""

    def __init__(self, config: WorkerConfig) -> None:
        self._factory = paged_factory(config)
        self._most_rows = config.max_running
        self._layers: dict[int, int] = {}
        self.routing: Routing | None = None

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """See :class:`worker.models.base.ExpertFactory`."""
        layer = self._factory(experts, source)
        if source.rehearsing:
            self._layers[experts.layer] = len(self._layers)
            return layer
        if self.routing is None:
            self.routing = Routing(
                len(self._layers), self._most_rows, experts.experts_per_token, source.device
            )
        return ImposedExperts(layer, self.routing, self._layers[experts.layer])

    def finish(self, device: torch.device) -> ExpertPager:
        """See :class:`worker.models.paged.PagingFactory`."""
        return self._factory.finish(device)


@dataclass
class StepTimes:
    """When decode steps of a given number of rows were applied."""

    rows: int = 0
    at_s: list[float] | None = None

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """For the engine."""
        if self.at_s is not None and plan.num_rows == plan.num_decode_rows == self.rows:
            self.at_s.append(time.perf_counter())


@dataclass(frozen=True, slots=True)
class PagedBench:
    """A started engine with imposed routing."""

    engine: NativeEngine
    pager: ExpertPager
    routing: Routing
    times: StepTimes
    started_s: float

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.pager.host.layers)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.engine.model.num_experts

    def set_places(self, per_layer: int) -> None:
        """Lowers K, from the next step on."""
        self.pager.limit_places(per_layer * self.num_layers)

    def counts(self) -> torch.Tensor:
        """[lanes, layers], waits for the device."""
        return self.pager.residency.counts.cpu().clone()

    def run(self, trace: np.ndarray, num_steps: int, skipped: int) -> tuple[float, torch.Tensor]:
        """(seconds a step, counts a step [lanes, layers]) of decode steps under ``trace``, which has one stream for
        each row. The first ``skipped`` steps warm the places; the rest are timed, counts are of all."""
        streams = trace.shape[2]
        self.routing.impose(trace)
        self.times.rows, self.times.at_s = streams, []
        prompts = random_prompts(streams, PROMPT_TOKENS, self.engine.model.vocab_size)
        generate(self.engine, prompts, skipped + 2)
        before, warm = self.counts(), len(self.times.at_s)
        generate(self.engine, prompts, num_steps + 2)
        at_s = self.times.at_s[warm:]
        self.times.at_s = None
        counted = (self.counts() - before).double() / max(1, len(at_s))
        # The first steps of a generation run beside what is left of the prompts.
        timed = at_s[len(at_s) // 8 :]
        return (timed[-1] - timed[0]) / (len(timed) - 1), counted


def cut_folder(model: str, format: str, num_layers: int) -> Path:
    """The shape's folder, of its first ``num_layers`` layers where that is above 0."""
    folder = shape_folder(model, format)
    if num_layers:
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = num_layers
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_bench(folder: Path, settings: Mapping[str, object]) -> PagedBench:
    """Starts the engine; ``settings`` are those of :class:`WorkerConfig`."""
    made: list[tuple[ModelRunner, ImposedFactory]] = []
    times = StepTimes()

    def make_runner(config: WorkerConfig) -> ModelRunner:
        factory = ImposedFactory(config)
        made.append((ModelRunner(config, factory), factory))
        return made[0][0]

    started_s = time.perf_counter()
    config = WorkerConfig(model=str(folder), served_name=folder.name, experts="paged",
                          prefix_cache=False, **settings)  # type: ignore[arg-type]  # fmt: skip
    engine = NativeEngine(config, make_runner, record=times.record)
    runner, factory = made[0]
    assert runner.pager is not None
    assert factory.routing is not None
    return PagedBench(engine, runner.pager, factory.routing, times, time.perf_counter() - started_s)


def link_curve(pager: ExpertPager, device: torch.device) -> LinkCurve:
    """Seconds to bring n experts of one layer that are read in place, measured."""
    addresses, size = pager.host.addresses()[0].to(device), pager.host.block_bytes[0]
    points = []
    for count in LINK_POINTS:
        if count <= len(addresses):
            seconds = count * size / gather_rate(addresses[:count], size)
            points.append((float(count), seconds))
    return LinkCurve(tuple(points))


def measure(
    bench: PagedBench, label: str, trace: np.ndarray, resident_s: float, curve: LinkCurve, memory_rate: float,
    num_steps: int,
) -> dict[str, Value]:  # fmt: skip
    """One row of the table."""
    step_s, counts = bench.run(trace, num_steps, num_steps // 2)
    size = bench.pager.host.block_bytes[0]
    hits = counts[Lane.HIT]
    misses = counts[Lane.TEE] + counts[Lane.IN_PLACE]
    miss_bytes = float(misses.sum()) * size
    per_layer = [(float(n), float(h) * size / memory_rate) for n, h in zip(misses, hits, strict=True)]
    limit_s = in_layer_step_s(resident_s, per_layer, curve)
    most = max(count for count, _ in curve.points)
    rate = most * size / curve.seconds(most)
    streams = trace.shape[2]
    return {
        "case": label,
        "tokens_per_s": streams / step_s,
        "hit_rate": float(hits.sum() / (hits + misses).sum()),
        "bytes_per_step": miss_bytes,
        "link_busy": miss_bytes / rate / step_s,
        "share": share_of_limit(limit_s, step_s),
        "share_perfect": share_of_limit(foresight_step_s(resident_s, miss_bytes, rate), step_s),
        "step_ms": 1e3 * step_s,
        "limit_ms": 1e3 * limit_s,
        "evictions": float(counts[Lane.EVICTED].sum()),
    }


def measure_format(
    format: str, places: Sequence[int], batches: Sequence[int], routings: Sequence[str],
    settings: Mapping[str, object], folder: Path, num_steps: int, memory_rate: float, notes: list[str],
) -> list[dict[str, Value]]:  # fmt: skip
    """All rows of a weight format: K from all experts downwards on one engine."""
    bench = open_bench(folder, settings)
    device = bench.pager.residency.owner.device
    curve = link_curve(bench.pager, device)
    size = bench.pager.host.block_bytes[0]
    notes.append(
        f"{format}: started in {bench.started_s:.1f} s, {bench.num_layers} layers, "
        + ", ".join(f"{n:.0f} experts at {n * size / s / 1e9:.1f} GB/s" for n, s in curve.points)
    )
    per_token = bench.engine.model.experts_per_token
    rows: list[dict[str, Value]] = []
    resident_s: dict[tuple[str, int], float] = {}
    for count in (bench.num_experts, *sorted(places, reverse=True)):
        bench.set_places(count)
        for routing in routings:
            for batch in batches:
                trace = make_trace(
                    routing, bench.num_layers, bench.num_experts, per_token, batch, TRACE_STEPS, batch
                )
                label = f"{format}.k{count}.{routing}.b{batch}"
                if count == bench.num_experts:
                    bench.run(trace, TRACE_STEPS, 1)  # every expert that the trace takes finds a place
                    resident_s[routing, batch], _ = bench.run(trace, num_steps, 4)
                row = measure(bench, label, trace, resident_s[routing, batch], curve, memory_rate, num_steps)
                rows.append(row)
                print(label, {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}, flush=True)
    eager = bench.engine.snapshot().extra.get("graph.eager_decode_steps")
    notes.append(f"{format}: graph.eager_decode_steps = {eager}")
    bench.engine.close()
    del bench
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a named shape, or demo")
    parser.add_argument("--formats", nargs="+", default=["fp8", "int4"])
    parser.add_argument("--places", type=int, nargs="+", default=[24, 40, 92], help="K, places per layer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="so many of the shape's layers only")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    on_gpu = options.device != "cpu"
    memory_rate = copy_bytes_per_s() if on_gpu else 10e9
    settings: dict[str, object] = {
        "device": options.device,
        "load": "checkpoint" if options.model == "demo" else "random",
        "max_running": max(options.batches),
        "max_model_len": 512,
        "max_step_tokens": 2048,
    }
    notes = [f"memory: {memory_rate / 1e12:.2f} TB/s read and written"]
    rows: list[Mapping[str, Value]] = []
    for format in options.formats:
        rows += measure_format(
            format, options.places, options.batches, options.routings, settings,
            cut_folder(options.model, format, options.layers),
            options.steps, memory_rate, notes,
        )  # fmt: skip
    conditions = Conditions(
        model=f"{options.model} (shape{f', {options.layers} layers' if options.layers else ''})",
        weights="random" if options.model != "demo" else "trained",
        prompts=f"random ids, {PROMPT_TOKENS} tokens; experts imposed: {', '.join(options.routings)}",
        cache="experts warm; no prefix cache",
        batch=", ".join(map(str, options.batches)),
        context=f"{PROMPT_TOKENS} to {PROMPT_TOKENS + options.steps} tokens",
        resident=f"K = {', '.join(map(str, options.places))} places a layer",
    )
    publish(Report("paged_decode", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
