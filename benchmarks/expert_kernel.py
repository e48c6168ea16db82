"""Measures the expert products at decode: bytes of the chosen experts over time, as a share of copy bandwidth.

    python -m benchmarks.expert_kernel [--json FILE]

One layer of the Qwen3-30B-A3B shape (128 experts, 8 per token, hidden 2,048, 768 inside) with random weights, all
resident. Several routings are captured in one graph, so that launch gaps stay out and no step finds its experts in the
cache; the copy is measured in the same run, counting bytes read and written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_engine import copy_bytes_per_s, median_s
from benchmarks.report import NOT_APPLICABLE, Conditions, Report, Value, publish, report_parser
from kernels.experts import run_experts
from kernels.pointwise import GatedActivation
from worker.experts.block_format import block_format
from worker.quantization import FORMATS
from worker.quantization.base import ExpertShape
from worker.quantization.blocks import block_part

SHAPE = ExpertShape(hidden_size=2048, intermediate_size=768)
NUM_EXPERTS, PER_TOKEN = 128, 8
NAMES = {"bf16": "unquantized", "fp8": "fp8_block", "int4": "int4", "mxfp4": "mxfp4"}
ROUTINGS = 16


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's blocks in one format, ready for the kernel."""

    blocks: torch.Tensor
    table: torch.Tensor
    where: Any
    block_bytes: int


def random_layer(
    name: str, shape: ExpertShape = SHAPE, num_experts: int = NUM_EXPERTS, device: str = "cuda"
) -> Layer:
    """Random blocks: finite values of ordinary size in every part."""
    format = FORMATS.load(NAMES[name])()
    layout = format.block_layout(shape)
    blocks = torch.empty(num_experts, layout.num_bytes, dtype=torch.uint8, device=device)
    for block in blocks:
        for part in layout.parts:
            view = block_part(block, layout, part.name)
            if view.dtype == torch.uint8 and "scales" in part.name:
                view.random_(118, 122)
            elif view.dtype == torch.uint8:
                view.random_(0, 256)
            else:
                scale = 0.02 if view.dtype == torch.bfloat16 else 0.5 if view.dtype.itemsize == 1 else 0.01
                view.copy_(torch.randn(view.shape, device=device) * scale)
    table = torch.tensor([block.data_ptr() for block in blocks], device=device)
    return Layer(blocks, table, block_format(layout), layout.num_bytes)


def measure(layer: Layer, batch: int) -> tuple[float, float]:
    """(seconds, bytes of distinct experts) of one layer's expert products, means over the routings."""
    generator = torch.Generator(device="cuda").manual_seed(batch)
    scores = torch.rand(ROUTINGS, batch, NUM_EXPERTS, device="cuda", generator=generator)
    routings = scores.topk(PER_TOKEN).indices
    x = torch.randn(batch, SHAPE.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights = torch.full((batch, PER_TOKEN), 1.0 / PER_TOKEN, device="cuda")
    activation = GatedActivation()

    def all_routings() -> None:
        for experts in routings:
            run_experts(x, weights, experts, layer.table, layer.where, SHAPE.intermediate_size, activation)

    distinct = statistics.fmean(len(experts.unique()) for experts in routings)
    return graph_s(all_routings) / ROUTINGS, distinct * layer.block_bytes


def graph_s(run: Callable[[], object]) -> float:
    """Median seconds of what ``run`` launches, captured in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_s(graph.replay, 20)


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    copy = copy_bytes_per_s()
    rows: list[Mapping[str, Value]] = []
    for name in NAMES:
        layer = random_layer(name)
        for batch in options.batches:
            seconds, num_bytes = measure(layer, batch)
            rate = num_bytes / seconds
            rows.append(
                {
                    "case": f"experts.{name}.b{batch}",
                    "us": 1e6 * seconds,
                    "tb_per_s": rate / 1e12,
                    "share": rate / copy,
                }
            )
        del layer
    conditions = Conditions(
        model="one layer of the Qwen3-30B-A3B shape, 8 of 128 experts",
        weights="random",
        prompts=f"{ROUTINGS} random routings per batch, seed = batch",
        cache="warm, routings taken in turn",
        batch=", ".join(map(str, options.batches)),
        context=NOT_APPLICABLE,
        resident="128 of 128",
    )
    publish(
        Report("expert_kernel", conditions, tuple(rows), (f"copy bandwidth {copy / 1e12:.2f} TB/s",)),
        options.json,
    )


if __name__ == "__main__":
    main()
