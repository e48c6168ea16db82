"""Routed experts that are all resident, as one bank per layer."""

from __future__ import annotations

import torch

from kernels.moe import ExpertBank, run_experts


class ResidentExperts:
    """All experts of one layer on the device."""

    def __init__(self, bank: ExpertBank) -> None:
        self.bank = bank

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the chosen experts, [tokens, H]."""
        return run_experts(x, weights, experts, self.bank)
