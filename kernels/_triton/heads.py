"""What stands between a layer's projections and its attention, in one launch: head norms, rotation, keys and values to
their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.pages import FP8_LARGEST
from kernels._triton.overlap import overlaps

_TOKENS = 4


@triton.jit
def _place(
    pages, scales, rows, number, entry, head, column, stored, p_page, p_token, p_head, s_page, s_token, s_head,
    QUANTIZE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.where(stored, tl.abs(rows), 0.0), 1) / LARGEST, 1e-12)
        tl.store(scales + number * s_page + entry * s_token + head * s_head, scale, mask=number >= 0)
        rows = rows / scale[:, None]
    at = pages + (number * p_page + entry * p_token)[:, None] + head * p_head + column[None, :]
    tl.store(at, rows.to(pages.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def _store_heads(
    heads, weight, cos, sin, query, key_pages, value_pages, key_scales, value_scales, page, offset,
    tokens, num_heads, num_kv_heads, row_stride, w_head, c_row, s_row,
    k_page, k_token, k_head, v_page, v_token, v_head, ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, eps,
    NORMED: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of a few tokens, each in a warp of its own: what a token becomes does not depend on its company."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_PAD)
    here = token < tokens
    real = here[:, None] & (column < DIM)[None, :]
    at = heads + token[:, None] * row_stride + head * DIM
    value = tl.load(at + column[None, :], mask=real, other=0.0).to(tl.float32)
    number = tl.load(page + token, mask=here, other=-1)
    entry = tl.load(offset + token, mask=here, other=0)
    stored = real & (number >= 0)[:, None]
    turned = num_heads + num_kv_heads
    if head >= turned:
        _place(
            value_pages, value_scales, value, number, entry, head - turned, column, stored,
            v_page, v_token, v_head, vs_page, vs_token, vs_head, QUANTIZE, LARGEST,
        )  # fmt: skip
        return
    # A dim's partner in its plane of rotation is loaded beside it: the same row again, from the cache.
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    other = tl.load(at + partner[None, :], mask=real, other=0.0).to(tl.float32)
    if NORMED:
        factor = (1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps))[:, None]
        scale = weight + head * w_head
        value *= factor * tl.load(scale + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        other *= factor * tl.load(scale + partner, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        value = value.to(heads.dtype.element_ty).to(tl.float32)  # as a norm that stands alone would answer
        other = other.to(heads.dtype.element_ty).to(tl.float32)
    angle = (column % HALF)[None, :]
    moved = here[:, None] & (column < 2 * HALF)[None, :]
    c = tl.load(cos + token[:, None] * c_row + angle, mask=moved, other=1.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * s_row + angle, mask=moved, other=0.0).to(tl.float32)
    result = (value * c + tl.where((column < HALF)[None, :], -other, other) * s).to(heads.dtype.element_ty)
    if head < num_heads:
        tl.store(query + (token[:, None] * num_heads + head) * DIM + column[None, :], result, mask=real)
    else:
        _place(
            key_pages, key_scales, result.to(tl.float32), number, entry, head - num_heads, column, stored,
            k_page, k_token, k_head, ks_page, ks_token, ks_head, QUANTIZE, LARGEST,
        )  # fmt: skip


def store_heads(
    heads: torch.Tensor,
    num_heads: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See :func:`kernels.kv.store_heads`."""
    tokens, total, dim = heads.shape
    if heads.stride(2) != 1 or heads.stride(1) != dim or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("a token's heads must lie one behind the other, and cos and sin contiguous")
    query = torch.empty(tokens, num_heads, dim, dtype=heads.dtype, device=heads.device)
    if tokens == 0:
        return query
    key_scales, value_scales = (query, query) if scales is None else scales
    none, overlap = (0, 0, 0), overlaps(heads)
    per_head = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    _store_heads[(triton.cdiv(tokens, _TOKENS), total)](
        heads, heads if weight is None else weight, cos, sin, query, key_pages, value_pages, key_scales, value_scales,
        page, offset, tokens, num_heads, (total - num_heads) // 2, heads.stride(0), per_head,
        cos.stride(0), sin.stride(0),
        *key_pages.stride()[:3], *value_pages.stride()[:3],
        *(none if scales is None else key_scales.stride()), *(none if scales is None else value_scales.stride()), eps,
        NORMED=weight is not None, QUANTIZE=scales is not None, LARGEST=FP8_LARGEST, DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), HALF=cos.shape[1], TOKENS=_TOKENS, OVERLAP=overlap, num_warps=_TOKENS,
        launch_pdl=overlap,
    )  # fmt: skip
    return query
