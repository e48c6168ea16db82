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
