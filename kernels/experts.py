"""Routed experts through the address table: weights are read from wherever each expert's block is now."""

from __future__ import annotations

import torch

from kernels._reference import experts as reference
from kernels._reference.experts import (
    DENSE,
    FP8_BLOCK,
    FP8_BLOCK_SIZE,
    INT4,
    MXFP4,
    Ahead,
    BlockFormat,
    DenseExpert,
    bytes_at,
    read_expert,
)
from kernels.pointwise import GatedActivation

__all__ = [
    "DENSE",
    "FP8_BLOCK",
    "FP8_BLOCK_SIZE",
    "INT4",
    "MXFP4",
    "Ahead",
    "BlockFormat",
    "DenseExpert",
    "bytes_at",
    "copy_blocks",
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
    activation: GatedActivation,
    tee: torch.Tensor | None = None,
    deterministic: bool = False,
    ahead: Ahead | None = None,
) -> torch.Tensor:
    """``sum over a token's experts of weight * (down @ activation(gate @ x, up @ x) + bias)``, in the choices' order.

    Args:
        x: [tokens, H] contiguous.
        weights: [tokens, experts_per_token] float32; experts: the same shape, int64, -1 in padding rows.
        table: [num_experts] int64, the address of each expert's block: device memory, or mapped host memory.
        where: the parts of a block. inner: I.
        activation: what stands between the projections.
        tee: [num_experts] int64 or None: where a chosen expert's block is also stored, 0 for nowhere. The bytes are
            there when the step's later kernels run; the table is the caller's to change.
        deterministic: a token's bits do not depend on the tokens beside it.
        ahead: missing experts that launches just ahead bring to their places, let go as soon as x, weights and experts
            were complete; ``table`` is as it was before them. Without ``tee``.

    Returns:
        [tokens, H] in x's dtype; padding rows are zero.
    """
    if not x.is_cuda:
        table = table if ahead is None else ahead.table
        return reference.run_experts(x, weights, experts, table, where, inner, activation, tee, deterministic)
    from kernels._triton import experts as triton_experts

    kind = triton_experts.CLAMPED_SWIGLU if activation.limit else triton_experts.SILU
    return triton_experts.run_experts(
        x, weights, experts, table, where, inner, kind, activation.limit, activation.alpha, tee, deterministic,
        ahead=ahead,
    )  # fmt: skip


def copy_blocks(table: torch.Tensor, targets: torch.Tensor, num_bytes: int) -> None:
    """Copies the block at address ``table[expert]`` to ``targets[expert]`` for every expert whose target is not 0.

    Args:
        table, targets: [num_experts] int64 addresses, 128-byte aligned: device memory, or mapped host memory.
        num_bytes: of a block, a multiple of 128.
    """
    if not table.is_cuda:
        reference.copy_blocks(table, targets, num_bytes)
        return
    from kernels._triton import experts_group

    experts_group.copy_blocks(table, targets, num_bytes)
