"""The product of a single row with a weight matrix in Triton: reads the weights once, at the rate of the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

_LARGEST_DEPTH = 16384


@triton.jit
def _tile(weight, row, column, real, weight_row, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    at = weight + row[:, None] * weight_row + column[None, :]
    if DEPTH % BLOCK_K == 0:
        found = tl.load(at, mask=real[:, None], other=0.0)
    else:
        found = tl.load(at, mask=real[:, None] & (column < DEPTH)[None, :], other=0.0)
    return found


@triton.jit
def _one_row(
    x, weight, bias, out, columns, weight_row,
    DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    real = row < columns
    first = tl.arange(0, BLOCK_K)
    # The first weights come while the kernel before is still at work on x.
    tile = _tile(weight, row, first, real, weight_row, DEPTH, BLOCK_K)
    if OVERLAP:
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Unrolled: loads of later steps are issued before the first are used.
    for step in tl.static_range((DEPTH + BLOCK_K - 1) // BLOCK_K):
        column = step * BLOCK_K + first
        if step > 0:
            tile = _tile(weight, row, column, real, weight_row, DEPTH, BLOCK_K)
        value = tl.load(x + column, mask=column < DEPTH, other=0.0).to(tl.float32)
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


def _tile_size(columns: int, depth: int) -> tuple[int, int]:
    """Rows and inputs of a program's tile, as measured on an H200 (2.6 to 4.1 TB/s): with few rows to share out, thin
    tiles, so that all multiprocessors have several."""
    if columns >= 8192:
        block_n, block_k = 8, 512
    elif columns >= 1024:
        block_n, block_k = 2, 2048 if depth >= 4096 else 1024
    else:
        block_n, block_k = 1, 2048
    return block_n, min(block_k, triton.next_power_of_2(depth))


def linear_one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` for x [1, K], summed in float32: [1, N] in x's dtype.

    Args:
        weight: [N, K], rows contiguous, bfloat16 or float16 as x; bias: [N] or None.
    """
    columns, depth = weight.shape
    block_n, block_k = _tile_size(columns, depth)
    overlap = overlaps(x)
    out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    _one_row[(triton.cdiv(columns, block_n),)](
        x, weight, x if bias is None else bias, out, columns, weight.stride(0),
        DEPTH=depth, BLOCK_N=block_n, BLOCK_K=block_k, HAS_BIAS=bias is not None, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out
