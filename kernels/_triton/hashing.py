"""Compares one place's content with its owner's hash in one launch: programs share the bytes, the last one compares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._reference.hashing import STEP

MAX_PROGRAMS, WORDS = 128, 1024


@triton.jit
def _check(
    grid, owner, hashes, sizes, cursor, progress, found, num_places, place_bytes, num_experts,
    MULTIPLIER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """``progress``: [2] int64, the sum so far and how many programs are done; zero between launches."""
    place = tl.load(cursor)
    holder = tl.load(owner + place)
    words = tl.load(sizes + tl.maximum(holder, 0) // num_experts) // 8
    words = tl.where(holder < 0, 0, words)
    first = (grid + place * place_bytes).to(tl.pointer_type(tl.int64))
    total = tl.zeros([WORDS], tl.int64)
    for start in range(tl.program_id(0) * WORDS, words, tl.num_programs(0) * WORDS):
        number = start + tl.arange(0, WORDS).to(tl.int64)
        word = tl.load(first + number, mask=number < words, other=0)
        total += word * (2 * ((number + 1) * MULTIPLIER) + 1)
    tl.atomic_add(progress, tl.sum(total, 0))
    if tl.atomic_add(progress + 1, 1) == tl.num_programs(0) - 1:
        # All others are done: the sum is whole, and nobody reads the cursor any more.
        sum_found = tl.atomic_xchg(progress, 0)
        tl.store(progress + 1, 0)
        tl.store(cursor, (place + 1) % num_places)
        expected = tl.load(hashes + tl.maximum(holder, 0))
        if (holder >= 0) & (sum_found != expected):
            count = tl.load(found)
            tl.store(found, count + 1)
            if count == 0:
                tl.store(found + 1, holder // num_experts)
                tl.store(found + 2, holder % num_experts)


def check_next(
    grid: torch.Tensor, owner: torch.Tensor, hashes: torch.Tensor, sizes: torch.Tensor, cursor: torch.Tensor,
    progress: torch.Tensor, found: torch.Tensor,
) -> None:  # fmt: skip
    """See :func:`kernels.hashing.check_next`."""
    programs = min(MAX_PROGRAMS, triton.cdiv(grid.shape[1], 8 * WORDS))
    _check[(programs,)](
        grid, owner, hashes, sizes, cursor, progress, found, grid.shape[0], grid.stride(0), hashes.shape[1],
        MULTIPLIER=STEP, WORDS=WORDS,
    )  # fmt: skip
