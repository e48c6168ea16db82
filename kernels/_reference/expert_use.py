"""Use counts of experts in plain torch."""

from __future__ import annotations

import numpy as np
import torch

MOST_COUNTED = 32_767


def count_use(counts: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.expert_use.count_use`; ``chosen`` has exactly the rows of ``slots``."""
    num_experts = counts.shape[-1]
    now = counts[slots]
    choice = chosen.clamp_min(0)
    counted = (chosen >= 0) & (now.gather(2, choice) < MOST_COUNTED)
    now.scatter_add_(2, choice, counted.to(torch.int16))
    counts[slots] = now
    total = now.sum(2, keepdim=True, dtype=torch.int32)
    least = (total + 2 * num_experts - 1).div_(2 * num_experts, rounding_mode="floor").clamp_min_(1)
    return _packed(now >= least.to(torch.int16))


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """[..., n] bool as [..., ceil(n / 8)] uint8, lowest bit first."""
    found = np.packbits(flags.cpu().numpy(), axis=-1, bitorder="little")
    return torch.from_numpy(found).to(flags.device)
