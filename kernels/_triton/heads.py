"""What stands between a layer's projections and its attention, in one launch: head norms, rotation, keys and values to
their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.pages import FP8_LARGEST
from kernels._triton.overlap import overlaps


@triton.jit
def _place(
    pages, scales, row, number, entry, head, column, real, p_page, p_token, p_head, s_page, s_token, s_head,
    QUANTIZE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.where(real, tl.abs(row), 0.0), 0) / LARGEST, 1e-12)
        tl.store(scales + number * s_page + entry * s_token + head * s_head, scale)
        row = row / scale
    at = pages + number * p_page + entry * p_token + head * p_head + column
    tl.store(at, row.to(pages.dtype.element_ty), mask=real)


@triton.jit
def _store_heads(
    heads, weight, cos, sin, query, key_pages, value_pages, key_scales, value_scales, page, offset,
    num_heads, num_kv_heads, row_stride, w_head, c_row, s_row,
    k_page, k_token, k_head, v_page, v_token, v_head, ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, eps,
    NORMED: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_PAD)
    real = column < DIM
    at = heads + token * row_stride + head * DIM
    value = tl.load(at + column, mask=real, other=0.0).to(tl.float32)
    number = tl.load(page + token)
    entry = tl.load(offset + token)
    turned = num_heads + num_kv_heads
    if head >= turned:
        if number >= 0:
            _place(
                value_pages, value_scales, value, number, entry, head - turned, column, real,
                v_page, v_token, v_head, vs_page, vs_token, vs_head, QUANTIZE, LARGEST,
            )  # fmt: skip
        return
    # A dim's partner in its plane of rotation is loaded beside it: the same row again, from the cache.
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    other = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
        scale = weight + head * w_head
        value *= factor * tl.load(scale + column, mask=real, other=0.0).to(tl.float32)
        other *= factor * tl.load(scale + partner, mask=real, other=0.0).to(tl.float32)
        value = value.to(heads.dtype.element_ty).to(tl.float32)  # as a norm that stands alone would answer
        other = other.to(heads.dtype.element_ty).to(tl.float32)
    angle = column % HALF
    moved = column < 2 * HALF
    c = tl.load(cos + token * c_row + angle, mask=moved, other=1.0).to(tl.float32)
    s = tl.load(sin + token * s_row + angle, mask=moved, other=0.0).to(tl.float32)
    result = (value * c + tl.where(column < HALF, -other, other) * s).to(heads.dtype.element_ty)
    if head < num_heads:
        tl.store(query + (token * num_heads + head) * DIM + column, result, mask=real)
    elif number >= 0:
        _place(
            key_pages, key_scales, result.to(tl.float32), number, entry, head - num_heads, column, real,
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
    _store_heads[(tokens, total)](
        heads, heads if weight is None else weight, cos, sin, query, key_pages, value_pages, key_scales, value_scales,
        page, offset, num_heads, (total - num_heads) // 2, heads.stride(0), per_head, cos.stride(0), sin.stride(0),
        *key_pages.stride()[:3], *value_pages.stride()[:3],
        *(none if scales is None else key_scales.stride()), *(none if scales is None else value_scales.stride()), eps,
        NORMED=weight is not None, QUANTIZE=scales is not None, LARGEST=FP8_LARGEST, DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), HALF=cos.shape[1], OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
    return query
