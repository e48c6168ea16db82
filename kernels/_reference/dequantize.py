"""Block FP8 and grouped int4 to float in plain torch."""

from __future__ import annotations

import torch


def dequantize_fp8_block(values: torch.Tensor, scales: torch.Tensor, side: int) -> torch.Tensor:
    """See the face."""
    rows, columns = values.shape
    spread = scales.float().repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
    return values.float() * spread


def dequantize_int4(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, zero_offset: int, group: int
) -> torch.Tensor:
    """See the face."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    values = torch.stack([packed & 0x0F, packed >> 4], -1).view(rows, columns).to(torch.int32)
    if zeros is None:
        zero: torch.Tensor | int = 8
    else:
        flat = torch.stack([zeros & 0x0F, zeros >> 4], -1).flatten()[: scales.numel()]
        zero = flat.view(scales.shape).to(torch.int32) + zero_offset
        zero = zero.repeat_interleave(group, 1)[:, :columns]
    return (values - zero).float() * scales.float().repeat_interleave(group, 1)[:, :columns]
