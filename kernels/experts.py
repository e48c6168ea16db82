"""Routed experts through the address table: weights are read from wherever each expert's block is now."""

from __future__ import annotations

from functools import partial

import torch

from kernels._reference import experts as reference
from kernels._reference.experts import (
    DENSE,
    FP8_BLOCK,
    FP8_BLOCK_SIZE,
    INT4,
    MXFP4,
    Activation,
    BlockFormat,
    DenseExpert,
    bytes_at,
    read_expert,
)
from kernels.pointwise import clamped_swiglu, silu_and_mul

__all__ = [
    "DENSE",
    "FP8_BLOCK",
    "FP8_BLOCK_SIZE",
    "INT4",
    "MXFP4",
    "Activation",
    "BlockFormat",
    "DenseExpert",
    "bytes_at",
    "read_expert",
    "run_experts",
]


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    where: BlockFormat,
    inner: int,
    activation: Activation,
    tee: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum over a token's experts of weight * (down @ activation(gate @ x, up @ x) + bias)``, in the choices' order.

    Args:
        x: [tokens, H] contiguous.
        weights: [tokens, experts_per_token] float32; experts: the same shape, int64, -1 in padding rows.
        table: [num_experts] int64, the address of each expert's block: device memory, or mapped host memory.
        where: the parts of a block. inner: I.
        activation: (gate, up) -> hidden; on a GPU ``silu_and_mul``, or a ``partial`` of ``clamped_swiglu``.
        tee: [num_experts] int64 or None: where a chosen expert's block is also stored, 0 for nowhere. The bytes are
            there when the step's later kernels run; the table is the caller's to change.

    Returns:
        [tokens, H] in x's dtype; padding rows are zero. ValueError for an activation that the GPU's kernel lacks.
    """
    if not x.is_cuda:
        return reference.run_experts(x, weights, experts, table, where, inner, activation, tee)
    from kernels._triton import experts as triton_experts

    kind, settings = _activation(activation, triton_experts.SILU, triton_experts.CLAMPED_SWIGLU)
    out = triton_experts.run_experts(
        x, weights, experts, table, where, inner, kind, settings["limit"], settings["alpha"]
    )
    if tee is not None:
        triton_experts.copy_blocks(table, tee, where.num_bytes)
    return out


def _activation(activation: Activation, silu: int, clamped: int) -> tuple[int, dict[str, float]]:
    if activation is silu_and_mul:
        return silu, {"limit": 0.0, "alpha": 0.0}
    if isinstance(activation, partial) and activation.func is clamped_swiglu:
        return clamped, {"limit": activation.keywords["limit"], "alpha": activation.keywords["alpha"]}
    raise ValueError(f"the expert kernel has no activation {activation!r}")
