"""Mixture of experts: which experts a token takes, and their weighted sum where all of them are resident."""

from __future__ import annotations

import torch

from kernels._reference import moe as reference
from kernels._reference.moe import Activation, ExpertBank

__all__ = ["Activation", "ExpertBank", "route", "run_experts"]


def route(
    logits: torch.Tensor, experts_per_token: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each token under a softmax over all, in float32.

    Args:
        logits: [tokens, experts].
        renormalise: whether the chosen weights are divided by their sum.

    Returns:
        weights [tokens, experts_per_token] float32 and experts [tokens, experts_per_token] int64, best first.
    """
    return reference.route(logits, experts_per_token, renormalise)


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
    return reference.run_experts(x, weights, experts, bank)
