"""Mixture of experts: which experts a token takes, and their weighted sum where all of them are resident."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kernels._native import ops as native
from kernels._native.library import Bank
from kernels._reference import moe as reference
from kernels.experts import DENSE, BlockFormat
from kernels.experts import run_experts as run_from_table
from kernels.pointwise import GatedActivation


@dataclass(frozen=True)
class ExpertBank:
    """All experts of one layer, resident, both projections transposed, so that a token's row times a weight row adds
    up in registers.

    Attributes:
        gate_up: [experts, H, 2 * I], gate before up; down: [experts, I, H]. For float32 activations on a CPU they
            may be bfloat16 (see :meth:`compacted`).
        gate_up_bias: [experts, 2 * I] or None; down_bias: [experts, H] or None.
        activation: what stands between the projections.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: GatedActivation

    def compacted(self) -> ExpertBank:
        """The same bank with weights in bfloat16, where float32 weights on a CPU are all of them bfloat16 values and
        the compiled kernels serve; else this bank."""
        if not native.serves(self.down):
            return self
        gate_up, down = native.compact(self.gate_up), native.compact(self.down)
        if gate_up.dtype is not down.dtype:
            return self
        return replace(self, gate_up=gate_up, down=down)

    @cached_property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, BlockFormat]:
        """The bank's experts as blocks, copied once, for the kernel that reads through addresses: the blocks, their
        addresses, and where a block's parts lie."""
        parts = [self.gate_up.transpose(1, 2), self.down.transpose(1, 2), self.gate_up_bias, self.down_bias]
        offsets, size = [], 0
        for part in parts:
            offsets.append(-1 if part is None else size)
            size += 0 if part is None else -(-part[0].numel() * self.down.element_size() // 128) * 128
        blocks = torch.zeros(len(self.down), size, dtype=torch.uint8, device=self.down.device)
        for part, offset in zip(parts, offsets, strict=True):
            if part is not None:
                held = part.to(self.down.dtype).flatten(1).contiguous().view(torch.uint8)
                blocks[:, offset : offset + held.shape[1]] = held
        where = BlockFormat(
            DENSE, offsets[0], offsets[1], gate_up_bias=offsets[2], down_bias=offsets[3], num_bytes=size
        )
        return blocks, torch.arange(len(blocks), device=blocks.device) * size + blocks.data_ptr(), where

    @cached_property
    def native(self) -> Bank:
        """The bank as the compiled kernels read it."""
        act = self.activation
        return native.make_bank(
            self.gate_up, self.down, self.gate_up_bias, self.down_bias, act.limit, act.alpha
        )


def route(
    logits: torch.Tensor, experts_per_token: int, renormalise: bool, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each token under a softmax over all, in float32.

    Args:
        logits: [tokens, experts].
        renormalise: whether the chosen weights are divided by their sum.
        live: [tokens] bool, None for all: tokens that are not take no experts.

    Returns:
        weights [tokens, experts_per_token] float32 and experts [tokens, experts_per_token] int64, best first; -1 for
        tokens that are not live.
    """
    if live is None and native.serves(logits) and logits.stride(1) == 1:
        return native.route(logits, experts_per_token, renormalise)
    if logits.is_cuda:
        from kernels._triton import moe as on_gpu

        return on_gpu.route(logits, experts_per_token, renormalise, live)
    return reference.route(logits, experts_per_token, renormalise, live)


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank
) -> torch.Tensor:
    """``sum over a token's experts of weight * (down @ activation(gate @ x, up @ x) + bias)``.

    Args:
        x: [tokens, H].
        weights, experts: as :func:`route` answers them.
        bank: the layer's experts.

    Returns:
        [tokens, H] in x's dtype.
    """
    if native.serves_tokens(x):
        return native.run_experts(x.contiguous(), weights.contiguous(), experts.contiguous(), bank.native)
    if x.is_cuda:
        _, table, where = bank.table
        inner = bank.down.shape[1]
        return run_from_table(x.contiguous(), weights, experts, table, where, inner, bank.activation)
    return reference.run_experts(x, weights, experts, bank)
