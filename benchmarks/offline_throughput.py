"""Measures an engine on a GPU under a closed loop: so many requests at once, each ended one followed by the next.

    python -m benchmarks.offline_throughput --models qwen3.5-4b.bf16 --concurrency 64 [--json FILE]

Prompts of random ids are computed, outputs are greedy and of one length. The bound printed beside the rate is that of
mixed steps: decode steps at the measured copy bandwidth, prefill at the measured matrix rate, one behind the other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.gpu_engine import (
    GpuBench,
    arena_for,
    copy_bytes_per_s,
    matrix_flops,
    open_bench,
    quantile,
    random_prompts,
)
from benchmarks.prefill_speed import prefill_flops
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_config, shape_folder, shape_geometry
from benchmarks.step_profile import breakdown, heaviest, record_kernels
from worker.advise.limits import distinct_experts, resident_step_s
from worker.api import GenerateRequest, SamplingParams

PROFILE_AFTER, PROFILED_S = 0.3, 0.25
"""The profile begins after this share of the run, and lasts so long."""


@dataclass
class Stream:
    """When one request was sent and when its tokens came: (time, number of tokens)."""

    sent_s: float
    came: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.came[0][0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens; tokens that came together count as evenly spaced."""
        return [
            (after[0] - before[0]) / after[1]
            for before, after in pairwise(self.came)
            for _ in range(after[1])
        ]


async def _one(bench: GpuBench, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Stream:
    stream = Stream(time.perf_counter())
    bench.engine.submit(GenerateRequest(name, prompt, sampling))
    async for event in bench.engine.stream(name):
        if event.error:
            raise RuntimeError(event.error)
        if event.token_ids:
            stream.came.append((time.perf_counter(), len(event.token_ids)))
    return stream


async def _closed_loop(
    bench: GpuBench, prompts: list[tuple[int, ...]], concurrency: int, sampling: SamplingParams
) -> list[Stream]:
    waiting = list(enumerate(prompts))
    found: list[Stream] = []

    async def client() -> None:
        while waiting:
            number, prompt = waiting.pop(0)
            found.append(await _one(bench, f"{id(prompts)}-{number}", prompt, sampling))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return found


def run_closed_loop(
    bench: GpuBench, prompts: list[tuple[int, ...]], concurrency: int, num_new: int, greedy: bool = True
) -> tuple[list[Stream], float]:
    """The streams and the seconds they took together."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0 if greedy else 0.7, ignore_eos=True)
    started_s = time.perf_counter()
    streams = asyncio.run(_closed_loop(bench, prompts, concurrency, sampling))
    return streams, time.perf_counter() - started_s


def bound_tokens_per_s(
    bench: GpuBench, facts: Mapping[str, int], sizes: tuple[int, int, int], copy_rate: float, rate: float
) -> float:
    """Output tokens per second at the limits, for ``sizes`` prompt, output and concurrency."""
    prompt, output, concurrency = sizes
    shape = bench.geometry
    distinct = (
        distinct_experts(shape.num_experts, shape.experts_per_token, concurrency)
        if shape.num_experts
        else 0.0
    )
    step_s = resident_step_s(bench.read_bytes(distinct, prompt + output / 2, concurrency), copy_rate)
    prefill_s = prefill_flops(shape, facts["num_attention_heads"], facts["head_dim"], prompt) / rate
    return 1.0 / (step_s / concurrency + prefill_s / output)


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of each prompt and output, requests at once and in all, and whether outputs are greedy."""

    prompt: int
    output: int
    concurrency: int
    requests: int
    greedy: bool


def measure(
    bench: GpuBench,
    name: str,
    facts: Mapping[str, int],
    load: Load,
    rates: tuple[float, float],
    profiles: bool,
) -> tuple[dict[str, Value], list[str]]:
    """One row of the table, and the heaviest kernels. ``rates``: copy bandwidth and matrix rate."""
    prompts = random_prompts(load.requests, load.prompt, bench.vocab_size)
    few = prompts[: load.concurrency]
    run_closed_loop(bench, few, load.concurrency, 8)
    bench.log.steps.clear()
    streams, seconds = run_closed_loop(bench, prompts, load.concurrency, load.output, load.greedy)
    first = [stream.first_s for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    row: dict[str, Value] = {
        "case": f"{name}.n{load.concurrency}",
        "output_tokens_per_s": load.requests * load.output / seconds,
        "bound_tokens_per_s": bound_tokens_per_s(
            bench, facts, (load.prompt, load.output, load.concurrency), *rates
        ),
        "ttft_p50_ms": 1e3 * quantile(first, 0.5),
        "ttft_p99_ms": 1e3 * quantile(first, 0.99),
        "itl_p50_ms": 1e3 * quantile(gaps, 0.5),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "device_busy": sum(step.device_s for step in bench.log.steps) / seconds,
        "steps": len(bench.log.steps),
    }
    if not profiles:
        return row, []
    print(row, flush=True)
    thread = threading.Thread(
        target=run_closed_loop, args=(bench, prompts, load.concurrency, load.output, load.greedy)
    )
    thread.start()
    time.sleep(PROFILE_AFTER * seconds)
    kernels = record_kernels(lambda: time.sleep(PROFILED_S))
    thread.join()
    parts = [f"{part} {value:.2f}" for part, value in breakdown(kernels, 1).items()]
    return row, [", ".join(parts), *heaviest(kernels, 40)]


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3.5-4b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7 instead of greedy")
    options = parser.parse_args()
    copy_rate, rate = copy_bytes_per_s(), matrix_flops()
    rows: list[Mapping[str, Value]] = []
    notes = [f"copy bandwidth {copy_rate / 1e12:.2f} TB/s, bf16 matrix rate {rate / 1e12:.0f} TFLOP/s"]
    for name in options.models:
        model, _, format = name.rpartition(".")
        facts = shape_config(model, format)
        geometry = shape_geometry(shape_folder(model, format))
        bench = open_bench(
            model,
            format,
            arena_bytes=arena_for(geometry, 2 * options.concurrency, options.prompt + options.output),
            max_running=options.concurrency,
            max_model_len=2 * (options.prompt + options.output),
            max_step_tokens=options.step_tokens,
        )
        load = Load(
            options.prompt, options.output, options.concurrency, options.requests, not options.sampled
        )
        row, lines = measure(bench, name, facts, load, (copy_rate, rate), options.profile)
        rows.append(row)
        print(row, "\n".join(lines), sep="\n", flush=True)
        bench.engine.close()
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="random",
        prompts=f"random ids, {options.requests} requests",
        cache="warm kernels; no prefix cache",
        batch=f"closed loop of {options.concurrency}",
        context=f"{options.prompt} in, {options.output} out",
        resident="all",
    )
    publish(Report("offline_throughput", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
