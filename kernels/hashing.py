"""A hash per block of bytes that a device computes in one pass, for checking copies against their source."""

from __future__ import annotations

import torch

from kernels._reference import hashing as reference


def hash_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """``sum over words of word * odd multiplier of its position`` modulo 2^64.

    Any change of one eight-byte word changes the hash, since odd multipliers are invertible; words that changed places
    do too, since no two multipliers are equal. Not against malice.

    Args:
        blocks: [..., num_bytes] uint8, num_bytes a multiple of 8, contiguous in the last dimension.

    Returns:
        [...] int64.
    """
    return reference.hash_blocks(blocks)


def check_next(
    grid: torch.Tensor,
    owner: torch.Tensor,
    hashes: torch.Tensor,
    sizes: torch.Tensor,
    cursor: torch.Tensor,
    progress: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """Compares the place that ``cursor`` names with its owner's hash, in one launch, and moves the cursor on. A place
    without an owner is right whatever it holds.

    Args:
        grid: [places, place_bytes] uint8. owner: [places] int64, row * experts + expert, negative for none.
        hashes: [rows, experts] int64; sizes: [rows] int64, bytes of a block.
        cursor: [] int64. progress: [2] int64, zero between calls.
        found: [3] int64: number of mismatches so far, row and expert of the first one.
    """
    from kernels._triton import hashing

    hashing.check_next(grid, owner, hashes, sizes, cursor, progress, found)
