"""Builds resident experts: blocks on a GPU; on a CPU every expert of a layer, dequantised and laid into one bank."""

from __future__ import annotations

import torch

from kernels.moe import ExpertBank
from worker.execution.weights import WeightSource
from worker.layers.experts import ResidentExperts
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.paged import table_experts
from worker.quantization.blocks import block_part


def resident_experts(experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
    """The factory for ``experts=resident``: blocks as they are for the GPU's kernel, elsewhere a bank of floats."""
    if source.device.type == "cuda":
        return table_experts(experts, source)
    shape, count = experts.shape, experts.num_experts
    hidden, inner = shape.hidden_size, shape.intermediate_size
    gate_up = _empty(source, count, hidden, 2 * inner)
    down = _empty(source, count, inner, hidden)
    gate_up_bias = _empty(source, count, 2 * inner) if shape.has_bias else None
    down_bias = _empty(source, count, hidden) if shape.has_bias else None
    layout = experts.format.block_layout(shape)
    for expert in range(count):
        tensors = experts.read(expert)
        if source.rehearsing:
            continue
        block = torch.empty(layout.num_bytes, dtype=torch.uint8, device=source.device)
        experts.format.pack(tensors, shape, block)
        both, back = experts.format.dequantize(block, shape)
        gate_up[expert] = both.to(source.dtype).t()
        down[expert] = back.to(source.dtype).t()
        if gate_up_bias is not None and down_bias is not None:
            # From the block: a format may have sorted the rows that the checkpoint's biases belong to.
            gate_up_bias[expert] = block_part(block, layout, "gate_up_bias")
            down_bias[expert] = block_part(block, layout, "down_bias")
    bank = ExpertBank(gate_up, down, gate_up_bias, down_bias, experts.activation)
    return ResidentExperts(bank.compacted())


def _empty(source: WeightSource, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=source.dtype, device=source.device)
