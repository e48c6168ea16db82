"""Use counts of experts in plain torch."""

from __future__ import annotations

import torch

MOST_COUNTED = 32_767


def count_use(counts: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.expert_use.count_use`; ``chosen`` has exactly the rows of ``slots``."""
    num_experts = counts.shape[-1]
    now = counts[slots].to(torch.int32)
    now.scatter_add_(2, chosen.clamp_min(0), (chosen >= 0).to(torch.int32))
    now.clamp_(max=MOST_COUNTED)
    counts[slots] = now.to(torch.int16)
    leans = (now > 0) & (2 * num_experts * now >= now.sum(2, keepdim=True))
    padded = torch.nn.functional.pad(leans, (0, -num_experts % 8)).unflatten(2, (-1, 8)).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=counts.device)).sum(3, dtype=torch.uint8)
