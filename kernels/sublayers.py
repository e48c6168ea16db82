"""Whole sublayers of a decode step in one call, where a CPU's few rows make calling dearer than computing.

Each answers None where the compiled kernels do not serve the layer. Results are bit for bit those of the operations
one by one, so a layer may take either way from step to step.
"""

from __future__ import annotations

import torch

from kernels._native.sublayers import AttentionStep, DeltaNetStep, MoeStep
from kernels.linear import Linear
from kernels.moe import ExpertBank

__all__ = ["AttentionStep", "DeltaNetStep", "MoeStep", "attention_step", "delta_net_step", "moe_step"]


def moe_step(
    router: Linear,
    bank: ExpertBank,
    experts_per_token: int,
    renormalise: bool,
    shared_size: int = 0,
    shared_down: Linear | None = None,
) -> MoeStep | None:
    """Router, :func:`kernels.moe.route`, :func:`kernels.moe.run_experts`, a shared expert of ``shared_size`` (0: none).

    The router's columns are the experts' logits and, with a shared expert, its gate, its gate_proj and its up_proj.
    """
    down = None if shared_down is None else shared_down.packed
    if router.packed is None or (shared_down is not None and down is None):
        return None
    return MoeStep(router.packed, bank.native, experts_per_token, renormalise, shared_size, down, (bank,))


def delta_net_step(
    inner: Linear,
    outer: Linear,
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
    l2_eps: float,
) -> DeltaNetStep | None:
    """Projection, :func:`kernels.recurrent.delta_gates`, convolution, norms, delta rule, gated norm and projection.

    Args:
        inner: to q, k, v, z, b, a, side by side; outer: back.
        conv: [width, channels]; decay_rate, decay_bias: [value heads]; norm: [d_v]; all float32.
        heads: number of key heads and of value heads, d_k, d_v.
        eps: of the gated norm; l2_eps: of the norms of queries and keys.
    """
    if inner.packed is None or outer.packed is None:
        return None
    return DeltaNetStep(
        inner.packed,
        outer.packed,
        conv.contiguous(),
        decay_rate.contiguous(),
        decay_bias.contiguous(),
        norm.contiguous(),
        heads,
        eps,
        l2_eps,
    )


def attention_step(
    inner: Linear,
    outer: Linear,
    head_norm: torch.Tensor | None,
    heads: tuple[int, int, int],
    gated: bool,
    eps: float,
) -> AttentionStep | None:
    """What stands before and behind attention: projections, head norms, rotary embedding, the way of keys and values
    to their pages, gate.

    Args:
        inner: to queries, keys, values and, where ``gated``, the gate, side by side; outer: back.
        head_norm: [query and key heads, dim] float32, or None.
        heads: number of query heads and of key heads, dim.
    """
    if inner.packed is None or outer.packed is None:
        return None
    norm = None if head_norm is None else head_norm.contiguous()
    return AttentionStep(inner.packed, outer.packed, norm, heads, gated, eps)
