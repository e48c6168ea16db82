"""Counts which experts the rows of decode steps choose, and marks those that a row leans on."""

from __future__ import annotations

import torch

from kernels._reference import expert_use as reference

__all__ = ["MOST_COUNTED", "count_use"]

MOST_COUNTED = reference.MOST_COUNTED


def count_use(counts: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Adds one token per row to the counts of its slot.

    Args:
        counts: [slots, layers, experts] int16, changed in place; they stop at :data:`MOST_COUNTED`.
        chosen: [at least rows, layers, experts_per_token] int64, contiguous; -1 is no choice.
        slots: [rows] int64, each slot at most once.

    Returns:
        [rows, layers, ceil(experts / 8)] uint8, lowest bit first: the experts that were chosen at least half as often
        as the layer's experts were on average, and at all.
    """
    if not counts.is_cuda:
        return reference.count_use(counts, chosen[: len(slots)], slots)
    from kernels._triton import expert_use

    return expert_use.count_use(counts, chosen, slots)
