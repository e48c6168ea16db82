"""Measures the prefill of one prompt on a GPU: tokens per second and the share of the matrix units' measured rate.

    python -m benchmarks.prefill_speed --models qwen3.5-4b.bf16 --tokens 2048 8192 [--json FILE]

The whole prompt is one step. Operations are two per weight that a token uses and four per pair of positions that
attention compares, per head and dimension; the rate is that of an 8,192-cubed bf16 product measured in the same run.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping

import torch

from benchmarks.cpu_engine import run_prompts
from benchmarks.gpu_engine import GpuBench, arena_for, matrix_flops, open_bench, random_prompts
from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import shape_config, shape_folder, shape_geometry
from benchmarks.step_profile import breakdown, heaviest, record_kernels
from memory.api import PageKind
from worker.advise.geometry import ModelGeometry
from worker.advise.limits import share_of_limit

REPEATS = 5


def prefill_flops(geometry: ModelGeometry, heads: int, head_dim: int, tokens: int) -> float:
    """Operations of one prompt of ``tokens``, its last token's logits included."""
    weights = 0.0
    pairs = 0.0
    for layer in geometry.layers:
        weights += layer.matrix_params
        if layer.num_experts and geometry.expert is not None:
            weights += geometry.experts_per_token * geometry.expert.num_params
        if layer.kind is PageKind.FULL:
            pairs += tokens * tokens / 2
        elif layer.kind is PageKind.WINDOW:
            pairs += tokens * min(tokens, layer.window)
    return 2 * weights * tokens + 2 * geometry.head_params + 4 * heads * head_dim * pairs


def measure(
    bench: GpuBench, label: str, facts: Mapping[str, int], tokens: int, rate: float, profiles: bool
) -> tuple[dict[str, Value], list[str]]:
    """One row of the table, and the heaviest kernels."""
    prompts = random_prompts(1, tokens, bench.vocab_size)
    bench.log.steps.clear()
    for _ in range(REPEATS + 1):
        run_prompts(bench.engine, prompts, 1)
    seconds = statistics.median([step.device_s for step in bench.log.steps if step.num_prompt][1:])
    flops = prefill_flops(bench.geometry, facts["num_attention_heads"], facts["head_dim"], tokens)
    row: dict[str, Value] = {
        "case": label,
        "tokens_per_s": tokens / seconds,
        "share": share_of_limit(flops / rate, seconds),
        "ms": 1e3 * seconds,
        "limit_ms": 1e3 * flops / rate,
    }
    if not profiles:
        return row, []
    kernels = record_kernels(lambda: run_prompts(bench.engine, prompts, 1))
    row.update({f"{part}_ms": value for part, value in breakdown(kernels, 1).items()})
    return row, heaviest(kernels, 20)


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3.5-4b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--attention-backend", default="auto")
    options = parser.parse_args()
    rate = matrix_flops()
    rows: list[Mapping[str, Value]] = []
    notes = [f"bf16 matrix rate {rate / 1e12:.0f} TFLOP/s"]
    for name in options.models:
        model, _, format = name.rpartition(".")
        facts = shape_config(model, format)
        most = max(options.tokens)
        geometry = shape_geometry(shape_folder(model, format))
        bench = open_bench(
            model,
            format,
            [1],
            arena_bytes=arena_for(geometry, 4, most),
            max_running=4,
            max_model_len=2 * most,
            max_step_tokens=most,
            attention_backend=options.attention_backend,
        )
        for tokens in options.tokens:
            row, lines = measure(bench, f"{name}.t{tokens}", facts, tokens, rate, options.profile)
            rows.append(row)
            print(row, "\n".join(lines), flush=True)
        bench.engine.close()
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="random",
        prompts="random ids; experts drawn for each token and layer, uniform",
        cache="warm kernels; no prefix cache",
        batch="1",
        context=", ".join(map(str, options.tokens)),
        resident="all",
    )
    publish(Report("prefill_speed", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
