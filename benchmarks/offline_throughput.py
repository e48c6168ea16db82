"""Measures an engine on a GPU under a closed loop: so many requests at once, each ended one followed by the next.

    python -m benchmarks.offline_throughput --models qwen3.5-4b.bf16 --concurrency 64 [--json FILE]

Prompts of random ids are computed, outputs are greedy and of one length. The bounds printed beside the rate are
those of the measured copy bandwidth and matrix rate: prompts computed in the steps that decode, and in their own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks import step_overhead
from benchmarks.gpu_engine import GpuBench, LoggedStep, arena_for, open_bench, quantile, random_prompts
from benchmarks.model_tables import Rates
from benchmarks.prefill_speed import prefill_flops
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_config, shape_folder, shape_geometry
from benchmarks.step_profile import breakdown, heaviest, record_kernels
from worker.advise.limits import distinct_experts, mixed_steps_tokens_per_s, resident_step_s
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


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of each prompt and output, requests at once and in all, and whether outputs are greedy."""

    prompt: int
    output: int
    concurrency: int
    requests: int
    greedy: bool


def bounds(bench: GpuBench, facts: Mapping[str, int], load: Load, rates: Rates) -> dict[str, Value]:
    """Output tokens per second at the limits: prompts in the same steps as decode rows, and in steps of their own."""
    shape = bench.geometry
    distinct = 0.0
    if shape.num_experts:
        distinct = distinct_experts(shape.num_experts, shape.experts_per_token, load.concurrency)
    context = load.prompt + load.output / 2
    step_s = resident_step_s(bench.read_bytes(distinct, context, load.concurrency), rates.copy)
    state_s = resident_step_s(bench.held_bytes(context, load.concurrency), rates.copy)
    prompt_s = (
        prefill_flops(shape, facts["num_attention_heads"], facts["head_dim"], load.prompt) / rates.matrix
    )
    mixed = mixed_steps_tokens_per_s(step_s - state_s, state_s, prompt_s, load.concurrency, load.output)
    apart = 1.0 / (step_s / load.concurrency + prompt_s / load.output)
    return {"bound_tokens_per_s": mixed, "bound_apart_tokens_per_s": apart}


def kinds(steps: Sequence[LoggedStep], concurrency: int) -> dict[str, Value]:
    """Median device milliseconds of steps with prompts, and of full steps without."""
    mixed = [step.device_s for step in steps if step.num_prompt]
    plain = [step.device_s for step in steps if not step.num_prompt and step.num_rows == concurrency]
    return {
        "mixed_steps": len(mixed),
        "mixed_ms": 1e3 * statistics.median(mixed) if mixed else None,
        "decode_ms": 1e3 * statistics.median(plain) if plain else None,
    }


def measure(
    bench: GpuBench,
    name: str,
    facts: Mapping[str, int],
    load: Load,
    rates: Rates,
    profiles: bool,
) -> tuple[dict[str, Value], list[str]]:
    """One row of the table, and the heaviest kernels."""
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
        **bounds(bench, facts, load, rates),
        "ttft_p50_ms": 1e3 * quantile(first, 0.5),
        "ttft_p99_ms": 1e3 * quantile(first, 0.99),
        "itl_p50_ms": 1e3 * quantile(gaps, 0.5),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "device_busy": sum(step.device_s for step in bench.log.steps) / seconds,
        "steps": len(bench.log.steps),
        **kinds(bench.log.steps, load.concurrency),
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
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.7 instead of greedy")
    parser.add_argument(
        "--overhead", type=Path, help="also measure benchmarks.step_overhead, and write it there"
    )
    options = parser.parse_args()
    rates = Rates.measured()
    rows: list[Mapping[str, Value]] = []
    load = Load(options.prompt, options.output, options.concurrency, options.requests, not options.sampled)
    for name in options.models:
        model, _, format = name.rpartition(".")
        facts = shape_config(model, format)
        geometry = shape_geometry(shape_folder(model, format))
        needed = arena_for(geometry, 2 * options.concurrency, options.prompt + options.output)
        most = options.prompt + options.output
        if options.overhead is not None:
            needed = max(needed, arena_for(geometry, step_overhead.ROWS, step_overhead.LONG + 1024))
            most = max(most, step_overhead.LONG)
        bench = open_bench(
            model,
            format,
            arena_bytes=needed,
            max_running=options.concurrency,
            max_model_len=2 * most,
            max_step_tokens=options.step_tokens,
        )
        print(f"{name}: started in {bench.started_s:.1f} s", flush=True)
        row, lines = measure(bench, name, facts, load, rates, options.profile)
        rows.append(row)
        print(row, "\n".join(lines), sep="\n", flush=True)
        publish(report(rows, options, load, rates), options.json)
        if options.overhead is not None and name == f"{step_overhead.MODEL}.{step_overhead.FORMAT}":
            found = step_overhead.measure(bench, rates.copy)
            publish(step_overhead.report(found, rates.copy), options.overhead)
        bench.engine.close()


def report(
    rows: Sequence[Mapping[str, Value]], options: argparse.Namespace, load: Load, rates: Rates
) -> Report:
    """What was measured so far."""
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="random",
        prompts=f"random ids, {load.requests} requests",
        cache="warm kernels; no prefix cache",
        batch=f"closed loop of {load.concurrency}",
        context=f"{load.prompt} in, {load.output} out",
        resident="all",
    )
    notes = [rates.note]
    for row in rows:
        mixed, apart = row["bound_tokens_per_s"], row["bound_apart_tokens_per_s"]
        notes.append(
            f"{row['case']}: mixed steps allow about {mixed:,.0f} output tokens/s, prompts in steps of their own"
            f" {apart:,.0f}"
        )
    return Report("offline_throughput", conditions, tuple(rows), tuple(notes), named=True)


if __name__ == "__main__":
    main()
