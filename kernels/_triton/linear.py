"""A dense product whose rows do not depend on how many there are: the contraction is always cut and summed alike.

Weights are the left operand, so that tiles of few and of many tokens use the same matrix instruction; the contraction
is cut into parts by the weight's shape alone, each part is summed from its start, and the parts are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PART_COLUMNS = 512
"""A part of the contraction is at least so long."""
_PROGRAMS = 256
"""So many programs keep a card's memory busy."""
_FEW = 64
"""Up to so many tokens a product is bound by reading its weight."""


@triton.jit
def _part(
    x, weight, acc, row, row_ok, token, token_ok, first, last, x_row, w_row, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] += weight[rows, first:last] @ x[tokens, first:last]^T."""
    for start in range(first, last, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        column_ok = column < last
        w = tl.load(
            weight + row.to(tl.int64)[:, None] * w_row + column[None, :],
            mask=row_ok[:, None] & column_ok[None, :],
            other=0.0,
        )
        v = tl.load(
            x + token.to(tl.int64)[:, None] * x_row + column[None, :],
            mask=token_ok[:, None] & column_ok[None, :],
            other=0.0,
        )
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
    return acc


@triton.jit
def _linear(
    x, weight, bias, out, partial, tokens, rows, width, part_width, parts, x_row, w_row, o_row,
    HAS_BIAS: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row_ok = row < rows
    token_ok = token < tokens
    kept = row_ok[:, None] & token_ok[None, :]
    if SPREAD:
        part = tl.program_id(2)
        first = part * part_width
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        last = tl.minimum(first + part_width, width)
        acc = _part(x, weight, acc, row, row_ok, token, token_ok, first, last, x_row, w_row, BLOCK_K)
        at = (part * tokens + token).to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(partial + at, acc, mask=kept)
    else:
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for part in range(0, parts):
            first = part * part_width
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            last = tl.minimum(first + part_width, width)
            acc = _part(x, weight, acc, row, row_ok, token, token_ok, first, last, x_row, w_row, BLOCK_K)
            total = total + acc
        if HAS_BIAS:
            total = total + tl.load(bias + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        at = out + token.to(tl.int64)[None, :] * o_row + row[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _add_parts(partial, bias, out, tokens, rows, parts, o_row, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, parts):
        total = total + tl.load(partial + (part * tokens + token) * rows + row, mask=inside, other=0.0)
    if HAS_BIAS:
        total = total + tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * o_row + row, total.to(out.dtype.element_ty), mask=inside)


def num_parts(rows: int, width: int) -> int:
    """Into how many parts a contraction is cut: enough programs at one tile of tokens, parts not too short."""
    return max(1, min(_PROGRAMS // max(1, triton.cdiv(rows, 64)), width // _PART_COLUMNS))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, every row with the same bits whatever rows stand beside it.

    Args:
        x: [tokens, K], rows may lie apart; weight: [N, K]; bias: [N] or None.

    Returns:
        [tokens, N] in x's dtype.
    """
    tokens, width = x.shape
    rows = weight.shape[0]
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("rows of both operands must be contiguous")
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    parts = num_parts(rows, width)
    part_width = triton.cdiv(triton.cdiv(width, parts), 128) * 128
    parts = triton.cdiv(width, part_width)
    wide = x.dtype is torch.float32
    few = tokens <= _FEW
    spread = few and parts > 1
    block_rows, block_tokens, block_k, warps, stages = (
        (32, 32, 32, 4, 2) if wide
        else (64, max(16, triton.next_power_of_2(tokens)), 128, 4, 4) if few
        else (128, 128, 64, 8, 3)
    )  # fmt: skip
    partial = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x.device) if spread else out
    grid = (triton.cdiv(rows, block_rows), triton.cdiv(tokens, block_tokens), parts if spread else 1)
    _linear[grid](
        x, weight, x if bias is None else bias, out, partial, tokens, rows, width, part_width, parts,
        x.stride(0), weight.stride(0), out.stride(0), HAS_BIAS=bias is not None, SPREAD=spread,
        ROWS=block_rows, TOKENS=block_tokens, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if spread:
        _add_parts[(tokens, triton.cdiv(rows, 512))](
            partial, x if bias is None else bias, out, tokens, rows, parts, out.stride(0),
            HAS_BIAS=bias is not None, BLOCK=512, num_warps=4,
        )  # fmt: skip
    return out
