"""Block FP8: e4m3 weights with one float32 scale per square of 128 x 128; gate and up keep scale grids of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from kernels.dequantize import dequantize_fp8_block
from worker.errors import ModelLoadError
from worker.quantization.base import BlockLayout, ExpertShape, TensorSpec
from worker.quantization.blocks import block_part, layout_parts

SIDE = 128
E4M3_MAX = 448.0
SCALE_SUFFIX = "weight_scale_inv"


def fp8_grid(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a [rows, columns] matrix; squares at the edges are cut off."""
    return -(-rows // SIDE), -(-columns // SIDE)


def quantize_fp8_block(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[rows, columns] floats as a checkpoint's ``weight`` (e4m3) and ``weight_scale_inv`` (float32): the largest value
    of a square becomes 448."""
    rows, columns = weight.shape
    grid = fp8_grid(rows, columns)
    padded = torch.zeros(grid[0] * SIDE, grid[1] * SIDE, device=weight.device)
    padded[:rows, :columns] = weight.float()
    largest = padded.view(grid[0], SIDE, grid[1], SIDE).abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    spread = scales.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    values = (weight.float() / spread).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": values, SCALE_SUFFIX: scales}


class Fp8Block:
    """Blocks of e4m3 rows, gate above up [2I, H] and down [H, I], and three scale grids."""

    name = "fp8_block"

    def matches(self, quantization_config: Mapping[str, object] | None) -> bool:
        """``quant_method`` is fp8."""
        return quantization_config is not None and quantization_config.get("quant_method") == "fp8"

    def reading(self, quantization_config: Mapping[str, object] | None) -> Self:
        """This format; ModelLoadError for blocks other than 128 x 128."""
        sides = (quantization_config or {}).get("weight_block_size", [SIDE, SIDE])
        if sides != [SIDE, SIDE]:
            raise ModelLoadError(
                f"quantization_config: weight_block_size={sides!r}, but FP8 is read in [128, 128]"
            )
        return self

    def expert_tensors(self, shape: ExpertShape) -> tuple[TensorSpec, ...]:
        """Weights and scales of gate_proj, up_proj and down_proj, and their biases."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        found = []
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            found.append(TensorSpec(f"{name}.weight", (rows, columns), "float8_e4m3fn"))
            found.append(TensorSpec(f"{name}.{SCALE_SUFFIX}", fp8_grid(rows, columns), "float32"))
            if shape.has_bias:
                found.append(TensorSpec(f"{name}.bias", (rows,), "bfloat16"))
        return tuple(found)

    def block_layout(self, shape: ExpertShape) -> BlockLayout:
        """Values, then the scale grids, then biases."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        parts: list[tuple[str, tuple[int, ...], str]] = [
            ("gate_up", (2 * inner, hidden), "float8_e4m3fn"),
            ("down", (hidden, inner), "float8_e4m3fn"),
            ("gate_scales", fp8_grid(inner, hidden), "float32"),
            ("up_scales", fp8_grid(inner, hidden), "float32"),
            ("down_scales", fp8_grid(hidden, inner), "float32"),
        ]
        if shape.has_bias:
            parts += [("gate_up_bias", (2 * inner,), "bfloat16"), ("down_bias", (hidden,), "bfloat16")]
        return layout_parts(parts, kernel="fp8_block")

    def pack(self, tensors: Mapping[str, torch.Tensor], shape: ExpertShape, block: torch.Tensor) -> None:
        """Lays the tensors into the block; scales stored in bfloat16 become float32."""
        layout, inner = self.block_layout(shape), shape.intermediate_size
        gate_up = block_part(block, layout, "gate_up")
        for name, target in (
            ("gate_proj", gate_up[:inner]),
            ("up_proj", gate_up[inner:]),
            ("down_proj", block_part(block, layout, "down")),
        ):
            values = tensors[f"{name}.weight"]
            if values.dtype != torch.float8_e4m3fn:
                raise ModelLoadError(f"{name}.weight of an FP8 expert is {values.dtype}, not float8_e4m3fn")
            target.copy_(values)
            scales = block_part(block, layout, f"{name.removesuffix('_proj')}_scales")
            scales.copy_(tensors[f"{name}.{SCALE_SUFFIX}"])
        if shape.has_bias:
            bias = block_part(block, layout, "gate_up_bias")
            bias[:inner] = tensors["gate_proj.bias"]
            bias[inner:] = tensors["up_proj.bias"]
            block_part(block, layout, "down_bias").copy_(tensors["down_proj.bias"])

    def quantize(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A checkpoint's tensors for float matrices by linear name (gate_proj, up_proj, down_proj)."""
        return {
            f"{name}.{suffix}": tensor
            for name, weight in weights.items()
            for suffix, tensor in quantize_fp8_block(weight).items()
        }

    def linear_suffixes(self) -> tuple[str, ...]:
        """What a dense linear is made of; the scales say that it is quantised."""
        return SCALE_SUFFIX, "weight"

    def linear_shape(self, suffix: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The stored weight's shape."""
        return shape[0], shape[1]

    def dequantize_linear(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A dense linear's float32 weight."""
        return dequantize_fp8_block(tensors["weight"], tensors[SCALE_SUFFIX], SIDE)

    def dequantize(self, block: torch.Tensor, shape: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 rows."""
        layout = self.block_layout(shape)
        gate, up = block_part(block, layout, "gate_up").chunk(2)
        gate_up = torch.cat(
            [
                dequantize_fp8_block(gate, block_part(block, layout, "gate_scales"), SIDE),
                dequantize_fp8_block(up, block_part(block, layout, "up_scales"), SIDE),
            ]
        )
        down = block_part(block, layout, "down")
        return gate_up, dequantize_fp8_block(down, block_part(block, layout, "down_scales"), SIDE)
