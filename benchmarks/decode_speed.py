"""Measures decode steps of a whole model on a GPU: tokens per second, share of the limit, and where a step goes.

    python -m benchmarks.decode_speed --models qwen3-30b-a3b.bf16 --batches 1 64 --contexts 1k [--json FILE]

Through the engine with its scheduler, greedily. Contexts are claimed, not computed, and experts drawn for every token
and layer (see ``benchmarks.gpu_engine``). The limit is what a step must read over the copy bandwidth measured in the
same run: dense weights, the distinct experts that its tokens took, KV and states.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

import torch

from benchmarks.gpu_engine import (
    GpuBench,
    arena_for,
    copy_bytes_per_s,
    free_beside,
    generate,
    generating,
    open_bench,
    random_prompts,
)
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_folder, shape_geometry
from benchmarks.step_profile import breakdown, heaviest, record_kernels
from worker.advise.formats import find_format
from worker.advise.limits import resident_step_s, share_of_limit

CONTEXTS = {"1k": 1024, "8k": 8192}
SKIPPED = 8
GENERATED = 640
"""Most tokens that a row generates, while it is profiled."""
PROFILED = 16
PROFILER_START_S = 0.6


def measure(
    bench: GpuBench, label: str, batch: int, context: int, copy_rate: float, num_steps: int, profiles: bool
) -> tuple[dict[str, Value], list[str]]:
    """One row of the table, and the heaviest kernels."""
    prompts = random_prompts(batch, context, bench.vocab_size)
    bench.runner.claims = True
    bench.log.steps.clear()
    generate(bench.engine, prompts, num_steps + SKIPPED + 2)
    steps = bench.log.decode_steps(batch, SKIPPED)
    step_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    distinct = bench.count_distinct(prompts)
    limit_s = resident_step_s(bench.read_bytes(distinct, context + SKIPPED + num_steps / 2, batch), copy_rate)
    row: dict[str, Value] = {
        "case": label,
        "tokens_per_s": batch / step_s,
        "share": share_of_limit(limit_s, step_s),
        "step_ms": 1e3 * step_s,
        "device_ms": 1e3 * sum(step.device_s for step in steps) / len(steps),
        "graph_ms": 1e3 * bench.replay_s(batch, context + num_steps),
        "limit_ms": 1e3 * limit_s,
        "distinct_experts": distinct,
    }
    lines: list[str] = []
    parts: Mapping[str, float] = {}
    if profiles:
        with generating(bench, prompts, int(PROFILER_START_S / step_s) + 2 * PROFILED):
            kernels = record_kernels(lambda: time.sleep(PROFILED * step_s))
        parts = breakdown(kernels, (kernels[-1].end_us - kernels[0].start_us) / 1e6 / step_s)
        lines = heaviest(kernels)
    names = ("attention", "linear_attention", "experts", "rest", "launch_gaps", "host_gaps")
    row.update({f"{name}_ms": parts.get(name) for name in names})
    row["kernels"] = parts.get("kernels")
    return row, lines


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--contexts", nargs="+", default=["1k", "8k"], choices=sorted(CONTEXTS))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="break each step down by torch's profiler")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--attention-backend", default="auto")
    options = parser.parse_args()
    copy_rate = copy_bytes_per_s()
    torch.cuda.empty_cache()
    rows: list[Mapping[str, Value]] = []
    notes = [f"copy bandwidth {copy_rate / 1e12:.2f} TB/s"]
    for name in options.models:
        model, _, format = name.rpartition(".")
        geometry = shape_geometry(shape_folder(model, format))
        available = free_beside(geometry, find_format(format))
        cases = [(context, batch) for context in options.contexts for batch in options.batches]
        needs = {(c, b): arena_for(geometry, b, CONTEXTS[c] + GENERATED) for c, b in cases}
        fitting = [case for case in cases if needs[case] < available]
        notes += [f"{name}.b{b}.c{c}: does not fit the GPU" for c, b in cases if (c, b) not in fitting]
        bench = open_bench(
            model,
            format,
            [batch for _, batch in fitting],
            arena_bytes=max(needs[case] for case in fitting),
            max_running=max(batch for _, batch in fitting),
            max_model_len=2 * max(CONTEXTS[name] for name in options.contexts),
            # Claimed prompts cost nothing: all in one step, so that all rows begin and end together.
            max_step_tokens=max(batch * (CONTEXTS[context] + 1) for context, batch in fitting),
            deterministic=options.deterministic,
            attention_backend=options.attention_backend,
        )
        notes.append(f"{name}: started in {bench.started_s:.1f} s")
        for context, batch in fitting:
            label = f"{name}.b{batch}.c{context}"
            row, lines = measure(
                bench, label, batch, CONTEXTS[context], copy_rate, options.steps, options.profile
            )
            rows.append(row)
            print({k: v if isinstance(v, str) else v and round(v, 4) for k, v in row.items()})
            print("\n".join(lines), flush=True)
        bench.engine.close()
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="random",
        prompts="random ids; contexts claimed, not computed; experts drawn for each token and layer, uniform",
        cache="warm; no prefix cache",
        batch=", ".join(map(str, options.batches)),
        context=", ".join(options.contexts),
        resident="all" + ("; deterministic" if options.deterministic else ""),
    )
    publish(Report("decode_speed", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
