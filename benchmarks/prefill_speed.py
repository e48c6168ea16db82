"""Measures the prefill of one prompt on a GPU: tokens per second and the share of the matrix units' measured rate.

    python -m benchmarks.prefill_speed --models qwen3.5-4b.bf16 --tokens 1024 8192 [--folder FOLDER]

The whole prompt is one step. Operations are two per weight that a token uses and four per pair of positions that
attention compares, per head and dimension; the rate is that of an 8,192-cubed bf16 product measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cpu_engine import run_prompts
from benchmarks.decode_speed import add_options
from benchmarks.gpu_engine import GpuBench, arena_for, random_prompts
from benchmarks.model_tables import EngineOptions, Needs, Rates, Run
from benchmarks.report import Conditions, Value
from benchmarks.shapes import shape_config
from benchmarks.step_profile import PARTS, breakdown, heaviest, record_kernels
from memory.api import PageKind
from worker.advise.geometry import ModelGeometry
from worker.advise.limits import share_of_limit

TOKENS = (1024, 8192, 32768)
PROFILED_TOKENS = 8192
REPEATS = 4


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
    bench.runner.claims = False
    times = []
    for _ in range(REPEATS):
        bench.log.steps.clear()
        run_prompts(bench.engine, prompts, 1)
        times.append(sum(step.device_s for step in bench.log.steps if step.num_prompt))
    seconds = statistics.median(times[1:])
    flops = prefill_flops(bench.geometry, facts["num_attention_heads"], facts["head_dim"], tokens)
    row: dict[str, Value] = {
        "case": label,
        "tokens_per_s": tokens / seconds,
        "share": share_of_limit(flops / rate, seconds),
        "ms": 1e3 * seconds,
        "limit_ms": 1e3 * flops / rate,
    }
    kernels = record_kernels(lambda: run_prompts(bench.engine, prompts, 1)) if profiles else []
    parts = breakdown(kernels, 1)
    row.update({f"{name}_ms": parts.get(name) for name in (*PARTS, "rest", "launch_gaps", "host_gaps")})
    row["kernels"] = parts.get("kernels")
    return row, heaviest(kernels, 20)


@dataclass
class PrefillTable:
    """Prompts of several models; the one of :data:`PROFILED_TOKENS` is broken down."""

    tokens: Sequence[int] = TOKENS
    name: str = "prefill_speed"
    rows: list[Mapping[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def needs(self, geometry: ModelGeometry, available: int) -> Needs:
        """See :class:`benchmarks.model_tables.Table`."""
        most = max(self.tokens)
        return Needs(arena_for(geometry, 2, most + 2), 4, most + 64, most, (1,), tuple(self.tokens))

    def fill(self, bench: GpuBench, model: str, rates: Rates) -> None:
        """See :class:`benchmarks.model_tables.Table`."""
        name, _, format = model.rpartition(".")
        facts = shape_config(name, format)
        for tokens in self.tokens:
            label = f"{model}.t{tokens}"
            row, lines = measure(bench, label, facts, tokens, rates.matrix, tokens == PROFILED_TOKENS)
            self.rows.append(row)
            print({k: v if isinstance(v, str) else v and round(v, 4) for k, v in row.items()})
            print("\n".join(lines), flush=True)

    def conditions(self, models: Sequence[str]) -> Conditions:
        """See :class:`benchmarks.model_tables.Table`."""
        return Conditions(
            model=", ".join(models) + " (shapes)",
            weights="random",
            prompts="random ids; experts drawn for each token and layer, uniform",
            cache="warm kernels; no prefix cache",
            batch="1",
            context=", ".join(map(str, self.tokens)),
            resident="all",
        )


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    engine = EngineOptions(options.attention_backend, options.deterministic)
    Run([PrefillTable(options.tokens)], Rates.measured(), options.folder, engine).measure(options.models)


if __name__ == "__main__":
    main()
