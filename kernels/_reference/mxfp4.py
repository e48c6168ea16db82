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
