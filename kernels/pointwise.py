"""Normalisation, rotary embedding and gated activations over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from kernels._native import ops as native
from kernels._reference import pointwise as reference


def _on_gpu() -> ModuleType:
    """The Triton kernels; loaded where there is a GPU, since Triton need not be installed elsewhere."""
    from kernels._triton import pointwise as on_gpu

    return on_gpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, computed in float32 and cast back to x's dtype.

    ``weight`` broadcasts against x ([dim], or [heads, dim] for one weight per head). A zero-centred norm passes
    ``1 + w``, kept in float32.
    """
    if native.serves(x) and native.can_normalise(x, weight):
        return native.rms_norm(x, weight, eps)
    if x.is_cuda:
        return _on_gpu().rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dim."""
    if native.serves(x) and native.can_normalise(x, None):
        return native.l2_norm(x, eps)
    if x.is_cuda:
        return _on_gpu().l2_norm(x, eps)
    return reference.l2_norm(x, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, NeoX halves, in place: with n = cos.shape[-1], dims (i, i + n) for i < n are a plane.

    Args:
        x: [tokens, heads, dim], dim >= 2 n; dims from 2 n on stay as they are.
        cos, sin: [tokens, n] in x's dtype or wider.
    """
    if native.serves(x) and native.serves(cos) and x.stride(1) == x.shape[2]:
        return native.rotate(x, cos.contiguous(), sin.contiguous())
    if x.is_cuda:
        return _on_gpu().rotate(x, cos, sin)
    return reference.rotate(x, cos, sin)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """:func:`rotate` of :func:`rms_norm`, in one launch on a GPU; without a ``weight`` only the rotation.

    Args:
        x: [tokens, heads, dim], heads may lie in a wider row; without a ``weight`` it may be changed in place.
        weight: [heads, dim] or [dim] float32, or None.

    Returns:
        [tokens, heads, dim].
    """
    if x.is_cuda:
        return _on_gpu().norm_rotate(x, weight, eps, cos, sin)
    return rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin)


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``y`` to ``x`` [rows, dim] in place and answers :func:`rms_norm` of the sum; weight [dim] float32."""
    if native.serves(x) and native.serves(y) and x.is_contiguous() and y.is_contiguous():
        return native.add_norm(x, y, weight, eps)
    if x.is_cuda:
        return _on_gpu().add_norm(x, y, weight, eps)
    return rms_norm(x.add_(y), weight, eps)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``rms_norm(x, weight) * silu(gate)``, computed in float32 and cast to gate's dtype; x may be overwritten.

    Args:
        x: [rows, heads, dim] float32; gate: [rows, heads * dim]; weight: [dim] float32.
        out: [rows, heads * dim] to be filled, or None.

    Returns:
        [rows, heads * dim].
    """
    if x.is_cuda:
        return _on_gpu().gated_norm(x, gate, weight, eps, out)
    if native.serves(x) and native.serves(gate) and x.is_contiguous() and gate.stride(1) == 1:
        found = native.gated_norm(x, gate, weight, eps)
    else:
        found = rms_norm(x, weight, eps).mul_(reference.silu(gate.float()).view(x.shape)).to(gate.dtype)
    return found.flatten(1) if out is None else out.copy_(found.flatten(1))


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``, [rows, n] both; x may be overwritten."""
    if native.serves(x) and native.serves(gate) and x.is_contiguous() and gate.stride(1) == 1:
        return native.mul_sigmoid(x, gate)
    if x.is_cuda:
        return _on_gpu().mul_sigmoid(x, gate)
    return x.mul_(torch.sigmoid(gate))


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, share: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``, same shapes; with ``share`` [rows, 1] times its sigmoid."""
    alike = gate.dim() == 2 and gate.stride(1) == 1 and gate.stride() == up.stride()
    alike = alike and (share is None or share.stride(0) == gate.stride(0))
    if native.serves(gate) and native.serves(up) and alike:
        return native.silu_and_mul(gate, up, share)
    if gate.is_cuda and gate.dim() == 2:
        return _on_gpu().silu_and_mul(gate, up, share)
    out = reference.silu_and_mul(gate, up)
    return out if share is None else out.mul_(torch.sigmoid(share))


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """What stands between an expert's projections: ``silu(gate) * up``; or with a ``limit`` above 0 that of GPT-OSS,
    ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``."""

    limit: float = 0.0
    alpha: float = 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Same shapes in and out; the inputs are left as they are."""
        if self.limit and gate.is_cuda and gate.dim() == 2:
            return _on_gpu().clamped_swiglu(gate, up, self.limit, self.alpha)
        if self.limit:
            return reference.clamped_swiglu(gate, up, self.limit, self.alpha)
        return silu_and_mul(gate, up)
