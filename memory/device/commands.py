"""What the host says to the device about expert places: a block of fixed size, applied ahead of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from memory.api import PlaceRange

MAX_RANGES = 16
"""Ranges to ban and ranges to allow that one block holds; more go in further blocks."""
_WORDS = 4 * MAX_RANGES


def encode_places(ban: Sequence[PlaceRange], allow: Sequence[PlaceRange]) -> Iterator[torch.Tensor]:
    """[64] int64 blocks on the host: up to 16 ranges to ban, then up to 16 to allow, empty ones behind. None when
    nothing is said. Bans of all blocks come before allows that later blocks hold only where the caller's ranges do not
    overlap, as the ledger's never do."""
    for start in range(0, max(len(ban), len(allow)), MAX_RANGES):
        block = torch.zeros(_WORDS, dtype=torch.int64)
        for half, ranges in enumerate((ban, allow)):
            for n, entry in enumerate(ranges[start : start + MAX_RANGES]):
                at = 2 * (half * MAX_RANGES + n)
                block[at], block[at + 1] = entry.first, entry.last
        yield block


def decode_places(block: torch.Tensor, num_places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_places] bool masks of the places to ban and to allow, where the block lies."""
    place = torch.arange(num_places, device=block.device)
    ranges = block.view(2, MAX_RANGES, 2)
    inside = (place >= ranges[..., :1]) & (place < ranges[..., 1:])
    masks = inside.any(1)
    return masks[0], masks[1]
