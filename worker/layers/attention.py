"""Softmax attention over paged keys and values: projections, norms, rotary embedding, optional gate and sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.kv import store_heads
from kernels.linear import Linear
from kernels.pointwise import mul_sigmoid
from kernels.sublayers import AttentionStep, attention_step
from worker.attention.base import KvPages
from worker.execution.context import ForwardContext


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's tokens, [tokens, n], for :func:`kernels.pointwise.rotate`."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """Rotary frequencies of a model; asked once per step, shared by its layers."""

    def __init__(self, inverse_frequency: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        """``inverse_frequency`` [n] float32; ``factor`` multiplies cos and sin."""
        self._inverse_frequency = inverse_frequency
        self._factor = factor
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        angle = positions.float().unsqueeze(1) * self._inverse_frequency
        cos, sin = angle.cos(), angle.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


def plain_frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """``theta^(-2i / rotary_dim)`` for i < rotary_dim / 2."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (theta**exponent)


def yarn_frequencies(
    theta: float, rotary_dim: int, rope: Mapping[str, Any], device: torch.device
) -> tuple[torch.Tensor, float]:
    """Frequencies and cos/sin factor of YaRN (Peng et al., 2023): high frequencies stay, low ones are divided by
    ``factor``, with a linear ramp between the dims that turn ``beta_fast`` and ``beta_slow`` times over the original
    context."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(float(rope.get("beta_fast") or 32)), dim_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    plain = plain_frequencies(theta, rotary_dim, device)
    index = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    ramp = ((index - low) / max(high - low, 0.001)).clamp_(0, 1)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain / factor * ramp + plain * (1 - ramp), float(attention_factor)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of one attention layer, and its group of pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: str


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Tensors of one attention layer.

    Attributes:
        inner: [(heads + 2 kv_heads) * dim (+ heads * dim of gate), H]: rows of q, k, v, gate.
        inner_bias: for the same rows, or None.
        outer: [H, heads * dim]; outer_bias: [H] or None.
        head_norm: [heads + kv_heads, dim] norm weights of q and k heads, or None.
        sinks: [heads] or None.
        gated: whether ``inner`` ends with a gate that multiplies the output by its sigmoid.
    """

    inner: torch.Tensor
    inner_bias: torch.Tensor | None
    outer: torch.Tensor
    outer_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    gated: bool


class AttentionLayer:
    """One attention sublayer."""

    def __init__(
        self,
        layer: int,
        sizes: AttentionSizes,
        weights: AttentionWeights,
        eps: float,
        deterministic: bool = False,
    ) -> None:
        self._layer = layer
        self._sizes = sizes
        self._inner = Linear(weights.inner, weights.inner_bias, deterministic)
        self._outer = Linear(weights.outer, weights.outer_bias, deterministic)
        self._head_norm = weights.head_norm
        self._sinks = weights.sinks
        self._gated = weights.gated
        self._eps = eps
        heads = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
        self._step = attention_step(self._inner, self._outer, weights.head_norm, heads, weights.gated, eps)

    def __call__(self, x: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]."""
        if self._step is not None:
            pages = context.pages(self._layer)
            if pages.key_scale is None and self._step.takes(x, pages.key, pages.value):
                return self._in_three_calls(self._step, x, rotation, context, pages)
        sizes = self._sizes
        turned = sizes.num_heads + sizes.num_kv_heads
        dim = sizes.head_dim
        inner = self._inner(x)
        heads = inner[:, : (turned + sizes.num_kv_heads) * dim].view(x.shape[0], -1, dim)
        rows, pages = context.groups[sizes.group], context.pages(self._layer)
        query = store_heads(
            heads,
            sizes.num_heads,
            self._head_norm,
            self._eps,
            rotation.cos,
            rotation.sin,
            pages.key,
            pages.value,
            rows.page,
            rows.offset,
            pages.scales,
        )
        mixed = context.read(sizes.group, pages, query, self._sinks).flatten(1)
        if self._gated:
            mixed = mul_sigmoid(mixed, inner[:, (turned + sizes.num_kv_heads) * dim :])
        return self._outer(mixed)

    def _in_three_calls(
        self,
        step: AttentionStep,
        x: torch.Tensor,
        rotation: Rotation,
        context: ForwardContext,
        pages: KvPages,
    ) -> torch.Tensor:
        """The same: what stands before attention, attention, what stands behind it."""
        rows = context.groups[self._sizes.group]
        query, inner = step.front(
            x, rotation.cos, rotation.sin, pages.key, pages.value, rows.page, rows.offset
        )
        return step.back(context.read(self._sizes.group, pages, query, self._sinks), inner)
