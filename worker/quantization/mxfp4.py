"""MXFP4 experts: four-bit floats in groups of 32 with one power of two each, biases in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from worker.quantization.base import BlockLayout, ExpertShape, TensorSpec
from worker.quantization.blocks import block_part, layout_parts

GROUP = 32


class Mxfp4:
    """Blocks of packed rows: gate above up, then down; the low nibble of a byte is the even element."""

    name = "mxfp4"

    def matches(self, quantization_config: Mapping[str, object] | None) -> bool:
        """``quant_method`` is mxfp4."""
        return quantization_config is not None and quantization_config.get("quant_method") == "mxfp4"

    def reading(self, quantization_config: Mapping[str, object] | None) -> Self:
        """This format: it has no variants."""
        return self

    def expert_tensors(self, shape: ExpertShape) -> tuple[TensorSpec, ...]:
        """Packed blocks and scales of gate_proj, up_proj and down_proj, and their biases."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        found = []
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            found.append(TensorSpec(f"{name}.weight_blocks", (rows, columns // GROUP, GROUP // 2), "uint8"))
            found.append(TensorSpec(f"{name}.weight_scales", (rows, columns // GROUP), "uint8"))
            if shape.has_bias:
                found.append(TensorSpec(f"{name}.bias", (rows,), "bfloat16"))
        return tuple(found)

    def block_layout(self, shape: ExpertShape) -> BlockLayout:
        """Nibbles, scales and biases of gate_up, then of down."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        parts: list[tuple[str, tuple[int, ...], str]] = []
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            parts.append((name, (rows, columns // GROUP, GROUP // 2), "uint8"))
            parts.append((f"{name}_scales", (rows, columns // GROUP), "uint8"))
            if shape.has_bias:
                parts.append((f"{name}_bias", (rows,), "bfloat16"))
        return layout_parts(parts, kernel="mxfp4", group=GROUP, down_group=GROUP)

    def pack(self, tensors: Mapping[str, torch.Tensor], shape: ExpertShape, block: torch.Tensor) -> None:
        """Lays the packed tensors into the block."""
        layout, inner = self.block_layout(shape), shape.intermediate_size
        pieces = [("", "weight_blocks"), ("_scales", "weight_scales")]
        if shape.has_bias:
            pieces.append(("_bias", "bias"))
        for suffix, tensor in pieces:
            gate_up = block_part(block, layout, f"gate_up{suffix}")
            gate_up[:inner] = tensors[f"gate_proj.{tensor}"]
            gate_up[inner:] = tensors[f"up_proj.{tensor}"]
            block_part(block, layout, f"down{suffix}").copy_(tensors[f"down_proj.{tensor}"])

    def quantize(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A checkpoint's tensors for float matrices by linear name (gate_proj, up_proj, down_proj)."""
        found = {}
        for name, weight in weights.items():
            found[f"{name}.weight_blocks"], found[f"{name}.weight_scales"] = quantize_mxfp4(weight)
        return found

    def dequantize(self, block: torch.Tensor, shape: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 rows."""
        layout = self.block_layout(shape)
        gate_up = dequantize_mxfp4(
            block_part(block, layout, "gate_up"), block_part(block, layout, "gate_up_scales")
        )
        down = dequantize_mxfp4(block_part(block, layout, "down"), block_part(block, layout, "down_scales"))
        return gate_up, down
