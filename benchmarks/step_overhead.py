"""Measures on a GPU the rates that step times are predicted from: launches, prefill, attention, weights.

    python -m benchmarks.step_overhead --json benchmarks/results/h200/step_overhead.json

All on the Qwen3.5-4B shape, random weights: the time of a captured step at batch 1 beyond what it reads at the copy
bandwidth, by its layers; a prefill of 2,048 tokens as a share of 790 TFLOP/s; the KV that decode attention reads in 64
contexts of 8,192 tokens, and the dense weights that products read at batch 1, as shares of the copy bandwidth; and the
time of captured steps of 16 to 64 rows beyond what they read at those two rates, as a straight line over the rows.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping

from benchmarks.cpu_engine import run_prompts
from benchmarks.gpu_engine import (
    GpuBench,
    arena_for,
    copy_bytes_per_s,
    generate,
    generating,
    num_claiming,
    open_bench,
    random_prompts,
)
from benchmarks.prefill_speed import prefill_flops
from benchmarks.replay.rates import DENSE_FLOPS_PER_S
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_config, shape_folder, shape_geometry
from benchmarks.step_profile import Kernel, part_of, record_kernels
from worker.advise.formats import find_format

MODEL, FORMAT = "qwen3.5-4b", "bf16"
CONTEXT, LONG, ROWS = 1024, 8192, 64
FITTED_ROWS = (16, 32, 64)
PREFILL_TOKENS = 2048
STEPS, SKIPPED = 48, 8
PROFILER_START_S = 0.6
PRODUCTS = r"nvjet|gemm|_one_row|splitKreduce|cutlass_80|gemv"


def decode_step_s(bench: GpuBench, rows: int, context: int) -> float:
    """Seconds between decode steps."""
    bench.runner.claims = True
    bench.log.steps.clear()
    num_new = STEPS + SKIPPED + num_claiming(bench, rows, context)
    generate(bench.engine, random_prompts(rows, context, bench.vocab_size), num_new)
    steps = bench.log.decode_steps(rows, SKIPPED)
    return (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)


def decode_kernels(bench: GpuBench, rows: int, context: int, step_s: float) -> list[Kernel]:
    """What ran in some decode steps."""
    bench.runner.claims = True
    prompts = random_prompts(rows, context, bench.vocab_size)
    num_new = int(PROFILER_START_S / step_s) + 4 * SKIPPED + num_claiming(bench, rows, context)
    with generating(bench, prompts, num_new):
        return record_kernels(lambda: time.sleep(2 * SKIPPED * step_s))


def seconds_of(kernels: list[Kernel], step_s: float, pattern: str = "", part: str = "") -> float:
    """Of one step: the kernels of a name or of a part."""
    num_steps = (kernels[-1].end_us - kernels[0].start_us) / 1e6 / step_s
    chosen = [k for k in kernels if (part_of(k.name) == part if part else re.search(pattern, k.name))]
    return sum(k.end_us - k.start_us for k in chosen) / 1e6 / num_steps


def row_line(beyond_s: Mapping[int, float]) -> dict[str, Value]:
    """``step_base_us`` and ``step_row_us``: the straight line (least squares) through what steps take beyond what they
    read, by rows. Empty where the line is none that a step could have: a part of it not above 0."""
    row_s, base_s = statistics.linear_regression(list(beyond_s), list(beyond_s.values()))
    if not (row_s > 0 and base_s > 0):
        return {}
    return {"step_base_us": 1e6 * base_s, "step_row_us": 1e6 * row_s}


def beyond_reading_s(bench: GpuBench, rows: int, weights_rate: float, kv_rate: float) -> float:
    """Seconds of a decode step of so many rows of :data:`CONTEXT` tokens less what it reads at these bytes a second."""
    read_s = bench.geometry.dense_read_bytes(find_format(FORMAT)) / weights_rate
    read_s += bench.held_bytes(CONTEXT + STEPS / 2, rows) / kv_rate
    return decode_step_s(bench, rows, CONTEXT) - read_s


def measure(bench: GpuBench, copy_rate: float) -> dict[str, Value]:
    """The figures; the engine holds :data:`ROWS` contexts of :data:`LONG` tokens and has captured steps of 1 and of
    :data:`FITTED_ROWS` rows."""
    facts, geometry = shape_config(MODEL, FORMAT), bench.geometry
    bench.runner.claims = False
    bench.log.steps.clear()
    for _ in range(6):
        run_prompts(bench.engine, random_prompts(1, PREFILL_TOKENS, bench.vocab_size), 1)
    prefill_s = statistics.median([step.device_s for step in bench.log.steps if step.num_prompt][1:])
    flops = prefill_flops(geometry, facts["num_attention_heads"], facts["head_dim"], PREFILL_TOKENS)
    one_s = decode_step_s(bench, 1, CONTEXT)
    read_s = bench.read_bytes(0.0, CONTEXT + STEPS / 2, 1) / copy_rate
    weights_s = seconds_of(decode_kernels(bench, 1, CONTEXT, one_s), one_s, PRODUCTS)
    many_s = decode_step_s(bench, ROWS, LONG)
    attention_s = seconds_of(decode_kernels(bench, ROWS, LONG, many_s), many_s, part="attention")
    kv_rate = ROWS * LONG * geometry.full_kv_bytes() / attention_s
    weights_rate = geometry.dense_read_bytes(find_format(FORMAT)) / weights_s
    beyond_s = {rows: beyond_reading_s(bench, rows, weights_rate, kv_rate) for rows in FITTED_ROWS}
    return {
        "launch_us_per_layer": 1e6 * (one_s - read_s) / len(geometry.layers),
        "prefill_flops_share": flops / prefill_s / DENSE_FLOPS_PER_S,
        "attention_bandwidth_share": kv_rate / copy_rate,
        "weight_bandwidth_share": weights_rate / copy_rate,
        **row_line(beyond_s),
        **{f"beyond_reading_ms_b{rows}": 1e3 * found_s for rows, found_s in beyond_s.items()},
        "step_ms_b1": 1e3 * one_s,
        "step_ms_b64_c8k": 1e3 * many_s,
        "attention_ms_b64_c8k": 1e3 * attention_s,
        "prefill_ms_t2048": 1e3 * prefill_s,
    }


def report(row: dict[str, Value], copy_rate: float) -> Report:
    """The figures with their conditions."""
    conditions = Conditions(
        model="Qwen3.5-4B shape",
        weights="random",
        prompts="random ids; decode contexts claimed, not computed",
        cache="warm kernels; no prefix cache",
        batch=f"1 and {', '.join(map(str, FITTED_ROWS))}; prefill 1",
        context=f"{CONTEXT} and {LONG}; prefill {PREFILL_TOKENS}",
        resident="dense",
    )
    return Report("step_overhead", conditions, (row,), (f"copy bandwidth {copy_rate / 1e12:.2f} TB/s",))


def main() -> None:
    """Measures and publishes."""
    options = report_parser(__doc__).parse_args()
    copy_rate = copy_bytes_per_s()
    geometry = shape_geometry(shape_folder(MODEL, FORMAT))
    bench = open_bench(
        MODEL,
        FORMAT,
        [1, *FITTED_ROWS],
        arena_bytes=arena_for(geometry, ROWS, LONG + 1024),
        max_running=ROWS,
        max_model_len=2 * LONG,
        max_step_tokens=PREFILL_TOKENS,
    )
    row = measure(bench, copy_rate)
    bench.engine.close()
    publish(report(row, copy_rate), options.json)


if __name__ == "__main__":
    main()
