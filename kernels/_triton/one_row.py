"""The product of a single row with a weight matrix in Triton: reads the weights once, at the rate of the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_VALUES = 4096
_LARGEST_DEPTH = 16384


@triton.jit
def _one_row(
    x, weight, bias, out, columns, weight_row,
    DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    real = row < columns
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Unrolled: loads of later steps are issued before the first are used.
    for step in tl.static_range((DEPTH + BLOCK_K - 1) // BLOCK_K):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if DEPTH % BLOCK_K == 0:
            value = tl.load(x + column).to(tl.float32)
            tile = tl.load(
                weight + row[:, None] * weight_row + column[None, :], mask=real[:, None], other=0.0
            )
        else:
            inside = column < DEPTH
            value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            tile = tl.load(
                weight + row[:, None] * weight_row + column[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
        total += tile.to(tl.float32) * value[None, :]
    found = tl.sum(total, 1)
    if HAS_BIAS:
        found += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row, found.to(out.dtype.element_ty), mask=real)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear_one_row` takes them."""
    return (
        x.shape[0] == 1
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == weight.stride(1) == 1
        and weight.shape[1] % 8 == 0
        and weight.shape[1] <= _LARGEST_DEPTH
    )


def linear_one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` for x [1, K], summed in float32: [1, N] in x's dtype.

    Args:
        weight: [N, K], rows contiguous, bfloat16 or float16 as x; bias: [N] or None.
    """
    columns, depth = weight.shape
    block_k = min(triton.next_power_of_2(depth), 512 if columns >= 1024 else 2048)
    block_n = max(1, min(_TILE_VALUES // block_k, triton.next_power_of_2(columns) // 128))
    out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    _one_row[(triton.cdiv(columns, block_n),)](
        x, weight, x if bias is None else bias, out, columns, weight.stride(0),
        DEPTH=depth, BLOCK_N=block_n, BLOCK_K=block_k, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
