"""Normalisation, rotary embedding and gated activations in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim; see the face."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = (length * length).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide * scale
    if weight is not None:
        normed = normed.mul_(weight) if weight.dtype == torch.float32 else normed * weight
    return normed.to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dim."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * length).add_(eps).rsqrt_()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first ``2 * cos.shape[-1]`` dims of ``x`` [tokens, heads, dim] in place; see the face."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    new_low = (low * cos).addcmul_(high, sin, value=-1.0)
    new_high = (high * cos).addcmul_(low, sin)
    low.copy_(new_low)
    high.copy_(new_high)
    return x


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return F.silu(x)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate).mul_(up)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit).add_(1.0)
    return up.mul_(gate).mul_(torch.sigmoid(gate * alpha))
