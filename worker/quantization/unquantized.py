"""Weights as they are: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from worker.quantization.base import BlockLayout, ExpertShape, TensorSpec
from worker.quantization.blocks import block_part, layout_parts


class Unquantized:
    """Blocks of plain rows: gate above up [2I, H], down [H, I], and the biases where experts have them."""

    name = "unquantized"

    def __init__(self, dtype: str = "bfloat16") -> None:
        """``dtype`` of the blocks; checkpoint tensors are cast to it."""
        self.dtype = dtype

    def matches(self, quantization_config: Mapping[str, object] | None) -> bool:
        """Only checkpoints without a quantization_config."""
        return quantization_config is None

    def reading(self, quantization_config: Mapping[str, object] | None) -> Self:
        """This format: it has no variants."""
        return self

    def expert_tensors(self, shape: ExpertShape) -> tuple[TensorSpec, ...]:
        """gate_proj, up_proj, down_proj: weights, and biases where the shape has them."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        found = [
            TensorSpec("gate_proj.weight", (inner, hidden), self.dtype),
            TensorSpec("up_proj.weight", (inner, hidden), self.dtype),
            TensorSpec("down_proj.weight", (hidden, inner), self.dtype),
        ]
        if shape.has_bias:
            found += [
                TensorSpec("gate_proj.bias", (inner,), self.dtype),
                TensorSpec("up_proj.bias", (inner,), self.dtype),
                TensorSpec("down_proj.bias", (hidden,), self.dtype),
            ]
        return tuple(found)

    def block_layout(self, shape: ExpertShape) -> BlockLayout:
        """gate_up, down, then the biases."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        parts: list[tuple[str, tuple[int, ...], str]] = [
            ("gate_up", (2 * inner, hidden), self.dtype),
            ("down", (hidden, inner), self.dtype),
        ]
        if shape.has_bias:
            parts += [("gate_up_bias", (2 * inner,), self.dtype), ("down_bias", (hidden,), self.dtype)]
        return layout_parts(parts, kernel=f"dense_{self.dtype}")

    def pack(self, tensors: Mapping[str, torch.Tensor], shape: ExpertShape, block: torch.Tensor) -> None:
        """Lays the tensors into the block."""
        layout, inner = self.block_layout(shape), shape.intermediate_size
        gate_up = block_part(block, layout, "gate_up")
        gate_up[:inner] = tensors["gate_proj.weight"]
        gate_up[inner:] = tensors["up_proj.weight"]
        block_part(block, layout, "down").copy_(tensors["down_proj.weight"])
        if shape.has_bias:
            bias = block_part(block, layout, "gate_up_bias")
            bias[:inner] = tensors["gate_proj.bias"]
            bias[inner:] = tensors["up_proj.bias"]
            block_part(block, layout, "down_bias").copy_(tensors["down_proj.bias"])

    def quantize(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The matrices in this dtype under their checkpoint names."""
        dtype = getattr(torch, self.dtype)
        return {f"{name}.weight": weight.to(dtype) for name, weight in weights.items()}

    def dequantize(self, block: torch.Tensor, shape: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows in float32."""
        layout = self.block_layout(shape)
        return block_part(block, layout, "gate_up").float(), block_part(block, layout, "down").float()
