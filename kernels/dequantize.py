"""Block FP8 and grouped int4 to float."""

from __future__ import annotations

import torch

from kernels._reference import dequantize as reference


def dequantize_fp8_block(values: torch.Tensor, scales: torch.Tensor, side: int = 128) -> torch.Tensor:
    """float32 values of e4m3 weights with one scale per square of ``side``.

    Args:
        values: [rows, columns] float8_e4m3fn.
        scales: [ceil(rows / side), ceil(columns / side)]; squares at the edges are cut off.
    """
    return reference.dequantize_fp8_block(values, scales, side)


def dequantize_int4(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, zero_offset: int, group: int
) -> torch.Tensor:
    """float32 ``(q - zero) * scale`` of weights in groups along the row.

    Args:
        packed: [rows, columns / 2] uint8, the low nibble is the even column.
        scales: [rows, ceil(columns / group)]; the last group may be cut off.
        zeros: one nibble per scale in the order of ``scales``, two to a byte, low nibble first; None: zero is 8.
        zero_offset: added to every stored zero point.
    """
    return reference.dequantize_int4(packed, scales, zeros, zero_offset, group)
