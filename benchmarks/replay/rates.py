"""The rates that step times are computed from: measured on the device where a results file says so, else assumed.

The file is :data:`MEASURED`, ``{"conditions": {...}, "figures": {...}}`` as every benchmark writes it; of its figures
these are read, each by itself, so a file may hold only some of them:

    launch_us_per_layer         time of a captured decode step of the Qwen3.5-4B shape at batch 1 beyond what it reads
                                at the copy bandwidth, by its layers. With weight_bandwidth_share, what the
                                weights' own rate explains of it is taken off: it is not paid twice
    step_base_us, step_row_us   time of captured decode steps of that shape at 16 to 64 rows beyond what they read at
                                the two rates below, as a straight line over the rows. Where both are there, they
                                take the place of launch_us_per_layer: batch 1 says little of what a row costs
    prefill_flops_share         of :data:`DENSE_FLOPS_PER_S`: FLOP/s of a prefill of 2,048 tokens, attention counted
    attention_bandwidth_share   of :data:`COPY_BYTES_PER_S`: bytes of KV a second that decode attention reads
    weight_bandwidth_share      of :data:`COPY_BYTES_PER_S`: bytes of dense weights a second that a decode step reads
    link_gb_per_s               bytes a second that a kernel reads from mapped host memory
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.replay.shapes import QWEN35_4B

MEASURED = Path(__file__).resolve().parents[1] / "results" / "h200" / "step_overhead.json"
DENSE_FLOPS_PER_S = 790e12
"""A large dense bf16 product on an H200, measured."""
COPY_BYTES_PER_S = 4.2e12
"""A copy within an H200's memory, measured: read and written bytes together."""
MOST_SHARE = 4.8e12 / COPY_BYTES_PER_S
"""Reading alone can be faster than a copy, but not than the memory's pins."""
FIELDS = {
    "launch_us_per_layer": ("layer_s", 1e-6),
    "step_base_us": ("layer_s", 1e-6 / QWEN35_4B.num_layers),
    "step_row_us": ("row_s", 1e-6),
    "prefill_flops_share": ("flops_per_s", DENSE_FLOPS_PER_S),
    "attention_bandwidth_share": ("kv_bytes_per_s", COPY_BYTES_PER_S),
    "weight_bandwidth_share": ("weight_bytes_per_s", COPY_BYTES_PER_S),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
}
"""Figure in the file -> the rate it sets, and by what it is multiplied."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second. ``sources`` says of each rate where it comes from.

    Attributes:
        layer_s: launches, gaps and small kernels of one layer in a captured graph.
        row_s: what a decode row adds to a step beside what it reads.
        link_bytes_per_s: from mapped host memory.
    """

    weight_bytes_per_s: float = 3.0e12
    kv_bytes_per_s: float = 3.0e12
    flops_per_s: float = 0.6 * DENSE_FLOPS_PER_S
    link_bytes_per_s: float = 50e9
    layer_s: float = 60e-6
    row_s: float = 0.0
    sources: tuple[tuple[str, str], ...] = (
        ("weight_bytes_per_s", "assumed: as fast as paged attention"),
        ("kv_bytes_per_s", "paged attention alone, measured"),
        ("flops_per_s", "assumed: 60 % of a large dense product"),
        ("link_bytes_per_s", "a gather alone, measured"),
        ("layer_s", "assumed"),
        ("row_s", "assumed: nothing"),
    )

    def described(self) -> dict[str, str]:
        """Each rate with its source, for reports."""
        return {name: f"{getattr(self, name):g} ({source})" for name, source in self.sources}


ASSUMED = Rates()


def read_rates(path: Path = MEASURED) -> Rates:
    """The measured rates of ``path`` over the assumed ones; the assumed ones where there is no such file.

    ValueError for a figure that cannot be: not above 0, or a share of more than there is.
    """
    if not path.is_file():
        return ASSUMED
    figures = json.loads(path.read_text())["figures"]
    rates = ASSUMED
    sources = dict(ASSUMED.sources)
    measured = {figure: figures[figure] for figure in FIELDS if figures.get(figure) is not None}
    rows_measured = {"step_base_us", "step_row_us"} <= set(measured)
    if rows_measured:
        measured.pop("launch_us_per_layer", None)
    for figure, value in measured.items():
        field, factor = FIELDS[figure]
        most = MOST_SHARE if figure.endswith("_bandwidth_share") else 1.0
        if not value > 0 or (figure.endswith("_share") and value > most):
            raise ValueError(f"{path}: {figure} = {value} cannot be")
        rates = replace(rates, **{field: value * factor})
        sources[field] = f"measured: {figure} of {path.name}"
    if {"launch_us_per_layer", "weight_bandwidth_share"} <= set(measured):
        slower_s = QWEN35_4B.dense_bytes * (1 / rates.weight_bytes_per_s - 1 / COPY_BYTES_PER_S)
        rates = replace(rates, layer_s=max(0.0, rates.layer_s - slower_s / QWEN35_4B.num_layers))
        sources["layer_s"] += ", less what the weights' rate explains"
    return replace(rates, sources=tuple(sources.items()))
