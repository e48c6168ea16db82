"""Whole pages and token rows of the arena in Triton: one launch for any number of pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._reference.pages import FP8_LARGEST

COPY_BLOCK_BYTES = 16_384
LAUNCH_PAGES = 65_535
"""The second dimension of a launch ends there; more pages take another launch."""


@triton.jit
def _move_pages(
    source, target, sources, targets, page_words, source_stride, target_stride,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Page ``sources[i]`` of one grid to page ``targets[i]`` of another; without a list, page i itself."""
    pair = tl.program_id(1)  # a launch's second dimension is the short one, and a page may have many blocks
    first = pair.to(tl.int64)
    second = first
    if HAS_SOURCES:
        first = tl.load(sources + pair)
    if HAS_TARGETS:
        second = tl.load(targets + pair)
    if (first < 0) | (second < 0):
        return
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    value = tl.load(source + first * source_stride + word, mask=inside, other=0)
    tl.store(target + second * target_stride + word, value, mask=inside)


def copy_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid, all sources being read before the first target is written; -1 skips a pair.

    Args:
        grid: [pages, page_bytes] uint8; page_bytes and the stride are multiples of 8.
        sources, targets: [n] int64 physical pages; targets are distinct.
    """
    count = sources.numel()
    if count == 0:
        return
    words = grid.view(torch.int64)
    size, block = words.shape[1], COPY_BLOCK_BYTES // 8
    held = torch.empty(count, size, dtype=torch.int64, device=grid.device)
    # A source of -1 leaves its row of `held` unwritten: the target is skipped with it.
    targets = torch.where(sources < 0, sources, targets)
    parts = [tensor.split(LAUNCH_PAGES) for tensor in (held, sources, targets)]
    for rows, part, _ in zip(*parts, strict=True):
        _move_pages[(triton.cdiv(size, block), len(part))](
            words, rows, part, part, size, words.stride(0), size,
            HAS_SOURCES=True, HAS_TARGETS=False, BLOCK=block, num_warps=8,
        )  # fmt: skip
    for rows, part, to in zip(*parts, strict=True):
        _move_pages[(triton.cdiv(size, block), len(part))](
            rows, words, part, to, size, size, words.stride(0),
            HAS_SOURCES=False, HAS_TARGETS=True, BLOCK=block, num_warps=8,
        )  # fmt: skip


def move_pages(grid: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies pages inside one grid, in one launch for each :data:`LAUNCH_PAGES`; -1 skips a pair.

    Args:
        grid: [pages, page_bytes] uint8; page_bytes and the stride are multiples of 8.
        sources, targets: [n] int64 physical pages; targets are distinct, and none is a source.
    """
    if sources.numel() == 0:
        return
    words = grid.view(torch.int64)
    size, block = words.shape[1], COPY_BLOCK_BYTES // 8
    for part, to in zip(sources.split(LAUNCH_PAGES), targets.split(LAUNCH_PAGES), strict=True):
        count = len(part)
        _move_pages[(triton.cdiv(size, block), count)](
            words, words, part, to, size, words.stride(0), words.stride(0),
            HAS_SOURCES=True, HAS_TARGETS=True, BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def _zero_pages(grid, pages, page_words, stride, BLOCK: tl.constexpr):
    page = tl.load(pages + tl.program_id(1))
    if page < 0:
        return
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(grid + page * stride + word, tl.zeros([BLOCK], tl.int64), mask=word < page_words)


def zero_pages(grid: torch.Tensor, pages: torch.Tensor) -> None:
    """Zeroes ``pages`` [n] int64 of a grid [pages, page_bytes] uint8; -1 is skipped."""
    if pages.numel() == 0:
        return
    words = grid.view(torch.int64)
    block = COPY_BLOCK_BYTES // 8
    for part in pages.split(LAUNCH_PAGES):
        _zero_pages[(triton.cdiv(words.shape[1], block), len(part))](
            words, part, words.shape[1], words.stride(0), BLOCK=block, num_warps=8
        )


@triton.jit
def _write_kv(
    key, value, key_pages, value_pages, key_scales, value_scales, page, offset,
    k_row, k_in, v_row, v_in, k_page, k_token, k_head, v_page, v_token, v_head, s_page, s_token, s_head,
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
    k = tl.load(key + token * k_row + head * k_in + column, mask=real, other=0.0)
    v = tl.load(value + token * v_row + head * v_in + column, mask=real, other=0.0)
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
        key, value: [tokens, kv_heads, head_dim], contiguous in the last dim.
        key_pages, value_pages: [pages, page_tokens, kv_heads, head_dim] strided views.
        page, offset: [tokens] int64.
        key_scales, value_scales: [pages, page_tokens, kv_heads] float32 views of equal strides: rows are divided by
            their largest magnitude over :data:`FP8_LARGEST`, which is stored there. None: plain cast.
    """
    tokens, heads, dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("key and value rows must be contiguous in the head dimension")
    quantize = key_scales is not None
    scales = (0, 0, 0) if key_scales is None else key_scales.stride()
    _write_kv[(tokens, heads)](
        key, value, key_pages, value_pages, key_scales if quantize else key, value_scales if quantize else key,
        page, offset, *key.stride()[:2], *value.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3],
        *scales,
        QUANTIZE=quantize, LARGEST=FP8_LARGEST, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
