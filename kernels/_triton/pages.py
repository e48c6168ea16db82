"""Whole pages and token rows of the arena in Triton: one launch for any number of pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COPY_BLOCK_BYTES = 16_384


@triton.jit
def _copy_pages(grid, sources, targets, page_words, stride, BLOCK: tl.constexpr):
    source = tl.load(sources + tl.program_id(0))
    target = tl.load(targets + tl.program_id(0))
    if (source < 0) | (target < 0):
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    tl.store(grid + target * stride + word, tl.load(grid + source * stride + word, mask=inside), mask=inside)


def copy_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid in a single launch; -1 on either side skips the pair.

    Args:
        grid: [pages, page_bytes] uint8; page_bytes and the stride are multiples of 8.
        sources, targets: [n] int64 physical pages. No page may be in both: pairs are copied in no order.
    """
    if sources.numel() == 0:
        return
    words = grid.view(torch.int64)
    block = COPY_BLOCK_BYTES // 8
    _copy_pages[(sources.numel(), triton.cdiv(words.shape[1], block))](
        words, sources, targets, words.shape[1], words.stride(0), BLOCK=block, num_warps=8
    )


@triton.jit
def _write_kv(
    key, value, key_pages, value_pages, key_scales, value_scales, page, offset,
    row, head_in, k_page, k_token, k_head, v_page, v_token, v_head, s_page, s_token, s_head,
    QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.load(page + token)
    if number < 0:
        return
    entry = tl.load(offset + token)
    column = tl.arange(0, DIM_PAD)
    real = column < DIM
    k = tl.load(key + token * row + head * head_in + column, mask=real, other=0.0)
    v = tl.load(value + token * row + head * head_in + column, mask=real, other=0.0)
    if QUANTIZE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        k_scale = tl.maximum(tl.max(tl.abs(k), 0) / LARGEST, 1e-12)
        v_scale = tl.maximum(tl.max(tl.abs(v), 0) / LARGEST, 1e-12)
        at = number * s_page + entry * s_token + head * s_head
        tl.store(key_scales + at, k_scale)
        tl.store(value_scales + at, v_scale)
        k = k / k_scale
        v = v / v_scale
    tl.store(
        key_pages + number * k_page + entry * k_token + head * k_head + column,
        k.to(key_pages.dtype.element_ty),
        mask=real,
    )
    tl.store(
        value_pages + number * v_page + entry * v_token + head * v_head + column,
        v.to(value_pages.dtype.element_ty),
        mask=real,
    )


FP8_LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Stores token t's rows at ``[page[t], offset[t]]``; tokens with page -1 are padding.

    Args:
        key, value: [tokens, kv_heads, head_dim] of equal strides.
        key_pages, value_pages: [pages, page_tokens, kv_heads, head_dim] strided views.
        page, offset: [tokens] int64.
        key_scales, value_scales: [pages, page_tokens, kv_heads] float32 views of equal strides: rows are divided by
            their largest magnitude over :data:`FP8_LARGEST`, which is stored there. None: plain cast.
    """
    tokens, heads, dim = key.shape
    if key.stride() != value.stride() or key.stride(2) != 1:
        raise ValueError("key and value rows must have equal strides and a contiguous head dimension")
    quantize = key_scales is not None
    scales = (0, 0, 0) if key_scales is None else key_scales.stride()
    _write_kv[(tokens, heads)](
        key, value, key_pages, value_pages, key_scales if quantize else key, value_scales if quantize else key,
        page, offset, key.stride(0), key.stride(1), *key_pages.stride()[:3], *value_pages.stride()[:3], *scales,
        QUANTIZE=quantize, LARGEST=FP8_LARGEST, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
