"""Measures decode and prefill of several models on a GPU, starting each once, and what deterministic mode costs.

    python -m benchmarks.speed_tables --models qwen3-30b-a3b.bf16 qwen3.5-4b.bf16 --folder benchmarks/results/h200

Writes ``decode_speed.json`` and ``prefill_speed.json`` after every model. With ``--deterministic-models``, those come
first and are started again with ``deterministic=true``, and the table says how much slower 64 rows decode
(``<case>.deterministic.deterministic_cost``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.decode_speed import (
    BATCHES,
    CONTEXTS,
    PROFILED_BATCHES,
    Case,
    DecodeTable,
    add_options,
    measure,
)
from benchmarks.gpu_engine import GpuBench
from benchmarks.model_tables import EngineOptions, Needs, Rates, Run, Table
from benchmarks.prefill_speed import TOKENS, PrefillTable
from benchmarks.report import Conditions, Value
from worker.advise.geometry import ModelGeometry

COMPARED = Case(64, "1k")


@dataclass
class CostTable:
    """Adds to a decode table what deterministic mode costs. ``models``: all that the table is about."""

    plain: DecodeTable
    models: Sequence[str]
    name: str = "decode_speed"

    def needs(self, geometry: ModelGeometry, available: int) -> Needs:
        """See :class:`benchmarks.model_tables.Table`."""
        return DecodeTable((COMPARED.batch,), (COMPARED.context,)).needs(geometry, available)

    def fill(self, bench: GpuBench, model: str, rates: Rates) -> None:
        """See :class:`benchmarks.model_tables.Table`."""
        case = f"{model}.b{COMPARED.batch}.c{COMPARED.context}"
        row, lines = measure(bench, f"{case}.deterministic", COMPARED, rates.copy, profiles=True)
        self.plain.rows.append({**row, "deterministic_cost": self.cost(case, row)})
        print(self.plain.rows[-1], *lines, sep="\n", flush=True)

    def cost(self, case: str, row: Mapping[str, Value]) -> float | None:
        """Share of the plain row's tokens per second that is lost; None where there is no such row."""
        plain = [float(other["tokens_per_s"] or 0.0) for other in self.plain.rows if other["case"] == case]
        return 1.0 - float(row["tokens_per_s"] or 0.0) / plain[0] if plain else None

    def conditions(self, models: Sequence[str]) -> Conditions:
        """See :class:`benchmarks.model_tables.Table`."""
        return self.plain.conditions(self.models)

    @property
    def rows(self) -> Sequence[Mapping[str, Value]]:
        """The whole table."""
        return self.plain.rows

    @property
    def notes(self) -> Sequence[str]:
        """The whole table's."""
        return self.plain.notes


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", nargs="+", default=list(CONTEXTS), choices=sorted(CONTEXTS))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of prompts; none: no prefill")
    parser.add_argument(
        "--profiled", type=int, nargs="*", default=PROFILED_BATCHES, help="batches broken down"
    )
    parser.add_argument("--deterministic-models", nargs="*", default=[], help="some of the models")
    options = parser.parse_args()
    rates = Rates.measured()
    decode = DecodeTable(options.batches, options.contexts, options.profiled)
    tables: list[Table] = [decode]
    if options.tokens:
        tables.append(PrefillTable(options.tokens))
    compared = [model for model in options.models if model in options.deterministic_models]
    others = [model for model in options.models if model not in compared]
    plain = Run(tables, rates, options.folder, EngineOptions(options.attention_backend))
    plain.measure(compared)
    costs = [CostTable(decode, compared)]
    Run(costs, rates, options.folder, EngineOptions(deterministic=True)).measure(compared)
    plain.measure(others, compared)


if __name__ == "__main__":
    main()
