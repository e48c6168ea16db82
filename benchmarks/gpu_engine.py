"""An engine on the GPU with random weights of a named shape, contexts that cost no prefill, and a log of its steps."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.shapes import shape_folder, shape_geometry
from worker.advise.formats import WeightFormat, find_format
from worker.advise.geometry import ModelGeometry
from worker.advise.limits import step_read_bytes
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.mixed import MixedKey
from worker.execution.runner import LaunchedStep, ModelRunner
from worker.execution.sampler import SampledRows
from worker.execution.timing import StepTimer
from worker.execution.weights import WeightSource
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.paged import table_experts
from worker.scheduling.limits import Limits
from worker.scheduling.step import StepPlan, StepResult

COPY_BYTES = 4 << 30
STEP_BYTES = 8 << 30
ARENA_SHARE = 0.92
"""Of what weights and steps leave of a GPU, an arena may take so much."""
FIRST_TOKEN_ID = 1000
MOST_DECODED = 256
"""Rows of the largest decode step that is measured."""
MOST_COMPUTED = 32768
"""Tokens of a step beyond which prompts are only claimed."""
CHUNK_TOKENS = Limits(1, 1, 1).chunk_tokens
"""Prompt tokens of a step in which rows decode, at most."""
COALESCE_S = 0.02


def independent_choices(layer: int, experts: ExpertLayer, tokens: int, device: torch.device) -> torch.Tensor:
    """[tokens, experts_per_token] int64: experts drawn for every token of a layer by itself, none twice."""
    chance = torch.Generator(device).manual_seed(layer)
    scores = torch.rand(tokens, experts.num_experts, device=device, generator=chance)
    return scores.topk(experts.experts_per_token, dim=-1).indices


class RoutedAlike:
    """A layer's experts under routing of independent tokens: each token takes experts drawn for its place in the step.

    Random routers on the hidden states of random weights agree far more than trained ones do.
    """

    def __init__(self, experts: RoutedExperts, choices: torch.Tensor) -> None:
        """``choices`` by token of a step."""
        self._experts, self._choices = experts, choices

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As the experts that it wraps, with other choices."""
        chosen = self._choices[: len(x)]
        if len(x) > MOST_DECODED:  # steps with chunks are padded, and padding takes no experts
            chosen = torch.where(experts < 0, experts, chosen)
        return self._experts(x, weights, chosen)

    def distinct(self, rows: int) -> int:
        """Distinct experts that a step of so many rows takes."""
        return len(self._choices[:rows].unique())


class BenchmarkRunner(ModelRunner):
    """A runner that can claim a prompt instead of computing it: its pages keep what they held, its next token is
    random. Decode steps behind it read as many bytes as after a real prefill.

    Attributes:
        claims: whether steps with prompts are claimed.
    """

    def __init__(self, config: WorkerConfig, batches: Sequence[int] = (), chunks: Sequence[int] = ()) -> None:
        """``batches``: decode steps of so many rows are captured; none: steps of all sizes. ``chunks``: beside them,
        prompts alone of up to so many tokens."""
        self._batches, self._chunks = frozenset(batches), tuple(chunks)
        self._routed: list[RoutedAlike] = []
        self.claims = False
        self._noise = np.random.default_rng(0)
        super().__init__(config, self._alike_experts if config.experts == "resident" else None)

    def _alike_experts(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        layer = table_experts(experts, source, self.config.deterministic)
        if source.rehearsing:
            return layer
        computed = min(self.config.max_step_tokens, MOST_COMPUTED)
        most = 2 * (computed + self.config.max_running)  # steps are padded
        layer = RoutedAlike(layer, independent_choices(experts.layer, experts, most, source.device))
        self._routed.append(layer)
        return layer

    def distinct_experts(self, rows: int) -> float:
        """Distinct experts per layer that decode steps of so many rows take, counted; 0 without experts."""
        return statistics.fmean(layer.distinct(rows) for layer in self._routed) if self._routed else 0.0

    def capture_graphs(
        self, keys: list[tuple[int, int]] | None = None, mixed_keys: list[MixedKey] | None = None
    ) -> None:
        """Captures the sizes that are measured."""
        if keys is None and self._batches and self.graphs is not None and self.mixed is not None:
            keys = [key for key in self.graphs.keys if key[0] in self._batches]
            tokens = {_padded(chunk, [key[1] for key in self.mixed.keys]) for chunk in self._chunks}
            mixed_keys = [key for key in self.mixed.keys if key[0] == 0 and key[1] in tokens]
        super().capture_graphs(keys, mixed_keys)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See :meth:`ModelRunner.launch`."""
        if not self.claims or plan.num_rows == plan.num_decode_rows:
            return super().launch(plan)
        timer = StepTimer(self._device)
        self._apply(plan)
        self._sampler.start(plan.started)
        rows = int(plan.samples.sum())
        if rows == 0:
            return self._launched(plan, None, timer)
        drawn = self._noise.integers(1, self.model_info.vocab_size, rows)
        tokens, slots = self._uploads.put(drawn), self._uploads.put(plan.slots[plan.samples])
        self._uploads.flush()
        self._last_tokens.index_copy_(0, slots, tokens)
        return self._launched(plan, SampledRows(tokens, None), timer)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One applied step: when the host had its tokens, rows, new tokens, prompt tokens, the device's seconds."""

    at_s: float
    num_rows: int
    num_new: int
    num_prompt: int
    device_s: float


class StepLog:
    """Pass :meth:`record` to an engine."""

    def __init__(self) -> None:
        self.steps: list[LoggedStep] = []

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Notes a step that computed something."""
        if plan.num_rows:
            prompt = int(plan.query_len[plan.num_decode_rows :].sum())
            self.steps.append(
                LoggedStep(
                    time.perf_counter(), plan.num_rows, int(result.num_new.sum()), prompt, result.seconds
                )
            )

    def decode_steps(self, rows: int, skipped: int) -> list[LoggedStep]:
        """The last unbroken run of steps in which ``rows`` rows decoded and nothing else, without its first
        ``skipped`` ones."""
        last = len(self.steps)
        while last and (self.steps[last - 1].num_rows != rows or self.steps[last - 1].num_prompt):
            last -= 1
        first = last
        while first and self.steps[first - 1].num_rows == rows and not self.steps[first - 1].num_prompt:
            first -= 1
        return self.steps[first + skipped : last]


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A started engine and what measures it."""

    engine: NativeEngine
    runner: BenchmarkRunner
    log: StepLog
    geometry: ModelGeometry
    format: WeightFormat
    started_s: float
    arena_bytes: int

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.engine.model.vocab_size

    def replay_s(self, rows: int, context: int) -> float:
        """Seconds of the captured graph of such a decode step alone, replayed over what the last step left; nothing may
        be running."""
        graphs = self.runner.graphs
        return 0.0 if graphs is None else median_s(lambda: graphs.replay(rows, context), 20)

    def read_bytes(self, distinct: float, context: float, batch: int) -> float:
        """Bytes that one decode step reads at least: dense weights, ``distinct`` experts of each layer, KV; states are
        read and written."""
        shape = self.geometry
        dense = shape.dense_read_bytes(find_format("bf16"))
        experts = shape.expert_bytes(self.format)
        held = self.held_bytes(context, batch)
        return step_read_bytes(dense, shape.num_moe_layers, distinct, experts, held)

    def held_bytes(self, context: float, batch: int) -> float:
        """The part of it that requests hold: KV and states."""
        shape = self.geometry
        kv = context * shape.full_kv_bytes() + shape.window_kv_bytes(context=int(context))
        return batch * (kv + 2 * shape.state_bytes)


def num_claiming(bench: GpuBench, rows: int, context: int) -> int:
    """Steps in which the prompts are claimed; rows that were claimed early have decoded as many tokens then."""
    step_tokens = bench.runner.config.max_step_tokens
    beside = max(1, min(step_tokens - rows, CHUNK_TOKENS))
    return 2 + -(-max(0, rows * context - step_tokens) // beside)


def arena_for(geometry: ModelGeometry, requests: int, tokens: int) -> int:
    """Arena bytes of so many requests of so many tokens at once, with some to spare."""
    return int(1.05 * requests * geometry.request_bytes(tokens)) + (1 << 28)


def free_beside(geometry: ModelGeometry, format: WeightFormat) -> int:
    """Bytes of the GPU that are left for an arena beside a model's weights and its steps."""
    weights = geometry.dense_held_bytes(find_format("bf16")) + geometry.all_experts_bytes(format)
    left = torch.cuda.get_device_properties(0).total_memory - weights - STEP_BYTES
    return int(ARENA_SHARE * left)


def open_bench(
    model: str, format: str, batches: Sequence[int] = (), chunks: Sequence[int] = (), **settings: object
) -> GpuBench:
    """Starts an engine on the GPU; ``settings`` are those of :class:`WorkerConfig`, ``batches`` and ``chunks`` the
    steps that are captured (none: all sizes), see :class:`BenchmarkRunner`."""
    folder = shape_folder(model, format)
    log, made = StepLog(), []

    def make_runner(config: WorkerConfig) -> BenchmarkRunner:
        made.append(BenchmarkRunner(config, batches, chunks))
        return made[0]

    started_s = time.perf_counter()
    load = "checkpoint" if model == "demo" else "random"
    config = WorkerConfig(
        model=str(folder),
        served_name=model,
        device="cuda",
        load=load,
        beyond_trained_len=True,
        prefix_cache=False,
        **settings,  # type: ignore[arg-type]
    )
    engine = NativeEngine(config, make_runner, record=log.record)
    took_s = time.perf_counter() - started_s
    return GpuBench(
        engine, made[0], log, shape_geometry(folder), find_format(format), took_s, config.arena_bytes
    )


async def _follow(engine: NativeEngine, name: str) -> None:
    async for event in engine.stream(name):
        if event.error:
            raise RuntimeError(event.error)
        await asyncio.sleep(COALESCE_S)  # as the service reads: in batches


async def _generate(engine: NativeEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    names = [f"{time.perf_counter()}-{number}" for number in range(len(prompts))]
    # The step loop takes requests under this lock: its first step finds all of them. Beside rows that decode already,
    # prompts would join a few at a time.
    with engine._changed:
        for name, prompt in zip(names, prompts, strict=True):
            engine.submit(GenerateRequest(name, tuple(prompt), sampling))
    await asyncio.gather(*(_follow(engine, name) for name in names))


def generate(engine: NativeEngine, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    """``num_new`` tokens for each prompt, all at once, greedily."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    asyncio.run(_generate(engine, prompts, sampling))


@contextmanager
def generating(bench: GpuBench, prompts: Sequence[Sequence[int]], num_new: int) -> Iterator[None]:
    """The same beside what is done within, which begins when all rows decode."""
    bench.log.steps.clear()
    thread = threading.Thread(target=generate, args=(bench.engine, prompts, num_new))
    thread.start()
    while len(bench.log.decode_steps(len(prompts), 0)) < 3 and thread.is_alive():
        time.sleep(1e-3)
    try:
        yield
    finally:
        thread.join()


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of random ids."""
    least = min(FIRST_TOKEN_ID, (vocab_size - 1) // 2)
    drawn = np.random.default_rng(seed).integers(least, vocab_size, (count, length))
    return [tuple(prompt) for prompt in drawn.tolist()]


def median_s(run: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of ``run`` between CUDA events, after three calls to warm up."""
    times = []
    for attempt in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if attempt >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source))


def matrix_flops(size: int = 8192) -> float:
    """Rate of a bf16 matrix product on random data, operations per second."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_s(lambda: left @ right)


def _padded(chunk: int, sizes: Sequence[int]) -> int:
    """The least of the sizes that holds a chunk; 0: none does."""
    return min((size for size in sizes if size >= chunk), default=0)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
