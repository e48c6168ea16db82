"""MXFP4 to float in plain torch."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """See the face."""
    table = torch.tensor(E2M1, device=blocks.device)
    low = table[(blocks & 0x0F).long()]
    high = table[(blocks >> 4).long()]
    values = torch.stack([low, high], -1).flatten(-2)
    values = torch.ldexp(values, (scales.int() - 127).unsqueeze(-1))
    return values.flatten(-2)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the face."""
    cells = weight.float().unflatten(-1, (-1, 32))
    largest = cells.abs().amax(-1)
    _, exponent = torch.frexp(largest)  # largest = m * 2^exponent, m in [0.5, 1)
    shared = torch.where(largest > 0, exponent - 3, 0).clamp(-127, 127)
    scaled = torch.ldexp(cells, -shared.unsqueeze(-1))
    table = torch.tensor(E2M1[:8], device=weight.device)
    bounds = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), bounds) + torch.where(scaled < 0, 8, 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (shared + 127).to(torch.uint8)
