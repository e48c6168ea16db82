"""The product of a few rows with a weight matrix in Triton: reads the weights once, at the rate of the memory.

Weights are the left operand, so that few tokens fill a matrix instruction. Where a weight has few rows the contraction
is cut into parts, one program each; the last one of a tile to arrive adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

MOST_ROWS = 64


@triton.jit
def _prefetch(at):
    """Asks for the line of each address in [n] pointers to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["tokens"])
def _few_rows(
    x, weight, bias, out, partial, arrived, tokens, columns, x_row, w_row, o_row,
    DEPTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    # Rows and tokens past the end read the last one again, and are not stored.
    w_at = (
        weight + tl.minimum(row, columns - 1).to(tl.int64)[:, None] * w_row + tl.arange(0, BLOCK_K)[None, :]
    )
    x_at = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_row + tl.arange(0, BLOCK_K)[None, :]
    first = part * PART
    last = tl.minimum(first + PART, DEPTH)
    if OVERLAP:
        gdc_launch_dependents()
        # The first weights come while the kernel before is still at work on x.
        ahead = weight + tl.minimum(row, columns - 1).to(tl.int64) * w_row + first
        for line in tl.static_range(STAGES):
            _prefetch(ahead + line * 64)
        gdc_wait()
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + start, eviction_policy="evict_first")
        v = tl.load(x_at + start, eviction_policy="evict_last")
        acc = tl.dot(w, tl.trans(v), acc)
    kept = (row < columns)[:, None] & (token < tokens)[None, :]
    if PARTS > 1:
        place = (tile * ROWS + tl.arange(0, ROWS))[:, None] + token[None, :] * (tl.num_programs(0) * ROWS)
        size = tl.num_programs(0) * ROWS * TOKENS
        tl.store(partial + part * size + place, acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < PARTS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for other in tl.static_range(PARTS):
            acc += tl.load(partial + other * size + place, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < columns, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + token.to(tl.int64)[None, :] * o_row + row[:, None], acc.to(out.dtype.element_ty), mask=kept
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: weight rows of a tile, parts of the contraction, its steps, stages and warps."""

    rows: int
    parts: int
    block_k: int
    stages: int
    warps: int


def tiles_for(columns: int, depth: int) -> Tiles:
    """For a weight of so many rows and columns: as many programs as a card holds at once, and no more."""
    tiles = triton.cdiv(columns, 64)
    parts = max(1, min(8, 264 // tiles, depth // 512))
    return Tiles(64, parts, 64, 4, 4)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear_few_rows` takes them."""
    return (
        1 <= x.shape[0] <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == weight.stride(1) == 1
        and x.stride(0) % 8 == weight.stride(0) % 8 == 0
        and weight.shape[1] % 128 == 0
    )


@cache
def _arrivals(device: torch.device, tiles: int) -> torch.Tensor:
    """Counters that are zero between products."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def linear_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for x [rows, K] of at most :data:`MOST_ROWS` rows, summed in float32: [rows, N] in x's
    dtype.

    Args:
        weight: [N, K], rows contiguous, bfloat16 or float16 as x, K a multiple of 128; bias: [N] or None.
        tiles: how it is cut; None: as suits the weight.
    """
    tokens, depth = x.shape
    columns = weight.shape[0]
    cut = tiles or tiles_for(columns, depth)
    num_tiles = triton.cdiv(columns, cut.rows)
    width = max(16, triton.next_power_of_2(tokens))
    part = triton.cdiv(depth // cut.block_k, cut.parts) * cut.block_k
    parts = triton.cdiv(depth, part)
    overlap = overlaps(x)
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    partial, arrived = x, x
    if parts > 1:
        partial = torch.empty(parts * num_tiles * cut.rows * width, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device, 4096)
    _few_rows[(num_tiles, parts)](
        x, weight, x if bias is None else bias, out, partial, arrived, tokens, columns,
        x.stride(0), weight.stride(0), out.stride(0),
        DEPTH=depth, PART=part, PARTS=parts, ROWS=cut.rows, TOKENS=width, BLOCK_K=cut.block_k, STAGES=cut.stages,
        HAS_BIAS=bias is not None, OVERLAP=overlap, num_warps=cut.warps, launch_pdl=overlap,
    )  # fmt: skip
    return out
