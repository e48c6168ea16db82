"""The reference experts of a verification: each dequantised by its format into a dense block of its own."""

from __future__ import annotations

import torch

from worker.execution.weights import WeightSource
from worker.experts.block_format import block_format
from worker.experts.pager import TableExperts
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.quantization.blocks import block_part
from worker.quantization.unquantized import Unquantized


def dequantized_experts(experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
    """A factory that shares with paging neither host store nor places, and neither the kernel's reading of scales nor
    that of zero points: only the product itself, so that on a CPU the outputs of sound experts are equal."""
    dtype = str(source.dtype).removeprefix("torch.")
    dense, shape = Unquantized(dtype), experts.shape
    layout, stored = dense.block_layout(shape), experts.format.block_layout(shape)
    size = 0 if source.rehearsing else layout.num_bytes
    blocks = torch.empty(experts.num_experts, size, dtype=torch.uint8, device=source.device)
    for expert in range(experts.num_experts):
        tensors = experts.read(expert)
        if source.rehearsing:
            continue
        block = torch.empty(stored.num_bytes, dtype=torch.uint8, device=source.device)
        experts.format.pack(tensors, shape, block)
        gate_up, down = experts.format.dequantize(block, shape)
        gate, up = gate_up.chunk(2)
        plain = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
        if shape.has_bias:
            gate_bias, up_bias = block_part(block, stored, "gate_up_bias").chunk(2)
            plain["gate_proj.bias"], plain["up_proj.bias"] = gate_bias, up_bias
            plain["down_proj.bias"] = block_part(block, stored, "down_bias")
        dense.pack(plain, shape, blocks[expert])
    return TableExperts(blocks, block_format(layout), shape.intermediate_size, experts.activation)
