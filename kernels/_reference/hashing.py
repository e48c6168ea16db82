"""A hash per block in plain torch."""

from __future__ import annotations

import torch

STEP = 0x1E3779B97F4A7C15


def hash_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """See the face. int64 arithmetic wraps, as intended."""
    words = blocks.view(torch.int64)
    multipliers = 2 * (torch.arange(1, words.shape[-1] + 1, device=words.device) * STEP) + 1
    return (words * multipliers).sum(-1)
