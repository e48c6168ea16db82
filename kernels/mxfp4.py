"""MXFP4: four-bit floats (e2m1) in groups of 32 that share a power of two."""

from __future__ import annotations

import torch

from kernels._reference import mxfp4 as reference


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values of packed MXFP4 (OCP microscaling formats 1.0).

    Args:
        blocks: [..., groups, 16] uint8, the low nibble is the even element.
        scales: [..., groups] uint8, exponents biased by 127.

    Returns:
        [..., groups * 32] float32, ``e2m1 * 2^(scale - 127)``.
    """
    return reference.dequantize_mxfp4(blocks, scales)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats to packed MXFP4, rounded to the nearest e2m1 (OCP microscaling formats 1.0, section 6.3: the shared
    exponent is that of the group's largest value, less 2).

    Args:
        weight: [rows, groups * 32].

    Returns:
        blocks [rows, groups, 16] and scales [rows, groups], uint8, as :func:`dequantize_mxfp4` reads them.
    """
    return reference.quantize_mxfp4(weight)
