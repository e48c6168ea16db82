"""Paged attention in Triton: decode split over the sequence, prefill in query tiles; FULL and WINDOW pages, sinks, FP8.

Token positions, not batch or launch shape, decide how work is cut: split ``s`` of a decode row is always the tokens
[s * SPLIT, (s + 1) * SPLIT), so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SPLIT_TOKENS = 512
"""Tokens of one decode split: long enough to hide the launch of a program, short enough to fill the card at batch 1."""


@triton.jit
def _load_rows(
    base,
    scales,
    page,
    offset,
    seen,
    columns,
    stride_page,
    stride_token,
    scale_page,
    scale_token,
    has_scale: tl.constexpr,
):
    """[tokens, dim] rows of one KV head; rows not seen are zero, whatever lies there."""
    rows = base + page[:, None] * stride_page + offset[:, None] * stride_token + columns[None, :]
    loaded = tl.load(rows, mask=seen[:, None], other=0.0)
    if has_scale:
        scale = tl.load(scales + page * scale_page + offset * scale_token, mask=seen, other=0.0)
        loaded = (loaded.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    return loaded


@triton.jit
def _decode_split(
    query, key, value, key_scale, value_scale, tables, first_page, kv_len, partial, stats,
    num_splits, max_pages, scale, window,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head,
    HAS_WINDOW: tl.constexpr, HAS_SCALE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.program_id(2)
    length = tl.load(kv_len + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    split = first // SPLIT + slot
    low = tl.maximum(split * SPLIT, first)
    high = tl.minimum((split + 1) * SPLIT, length)
    heads = tl.arange(0, GROUP_PAD)
    columns = tl.arange(0, DIM)
    real = heads < GROUP
    q = tl.load(
        query + row.to(tl.int64) * q_row + (kv_head * GROUP + heads)[:, None] * q_head + columns[None, :],
        mask=real[:, None],
        other=0.0,
    )
    logical0 = tl.load(first_page + row)
    most = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for start in range((low // BLOCK) * BLOCK, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = (token >= low) & (token < high)
        column = token // PAGE - logical0
        page = tl.load(tables + row.to(tl.int64) * max_pages + column, mask=seen, other=0)
        offset = token % PAGE
        k = _load_rows(
            key + kv_head * k_head,
            key_scale + kv_head * ks_head,
            page,
            offset,
            seen,
            columns,
            k_page,
            k_token,
            ks_page,
            ks_token,
            HAS_SCALE,
        )
        v = _load_rows(
            value + kv_head * v_head,
            value_scale + kv_head * vs_head,
            page,
            offset,
            seen,
            columns,
            v_page,
            v_token,
            vs_page,
            vs_token,
            HAS_SCALE,
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # A tile may hold no visible token at all: exp2(-inf - -inf) must not make a NaN.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(most - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = higher
    at = ((row * tl.num_programs(1) + kv_head) * num_splits + slot).to(tl.int64) * GROUP + heads
    tl.store(partial + at[:, None] * DIM + columns[None, :], acc, mask=real[:, None])
    tl.store(stats + at * 2, most, mask=real)
    tl.store(stats + at * 2 + 1, total, mask=real)


@triton.jit
def _decode_combine(
    partial, stats, sinks, out, kv_len, num_splits, window, o_row, o_head,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    columns = tl.arange(0, DIM)
    length = tl.load(kv_len + row)
    if length == 0:
        return
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    used = tl.cdiv(length, SPLIT) - first // SPLIT
    most = -float("inf")
    total = 0.0
    if HAS_SINKS:
        most = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = 1.0
    acc = tl.zeros([DIM], tl.float32)
    base = (row * (tl.num_programs(1) // GROUP) + kv_head).to(tl.int64) * num_splits
    for slot in range(0, used):
        at = (base + slot) * GROUP + head % GROUP
        theirs = tl.load(stats + at * 2)
        share = tl.load(stats + at * 2 + 1)
        higher = tl.maximum(most, theirs)
        fade = tl.exp2(most - higher)
        grow = tl.exp2(theirs - higher)
        acc = acc * fade + tl.load(partial + at * DIM + columns) * grow
        total = total * fade + share * grow
        most = higher
    result = acc / total
    tl.store(out + row.to(tl.int64) * o_row + head * o_head + columns, result.to(out.dtype.element_ty))


@triton.jit
def _prefill_tile(
    query, key, value, key_scale, value_scale, sinks, out, tables, first_page, kv_len, query_start,
    tile_row, tile_first, max_pages, scale, window,
    q_row, q_head, o_row, o_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    kv_head = head // GROUP
    row = tl.load(tile_row + tl.program_id(0))
    if row < 0:
        return
    tile = tl.load(tile_first + tl.program_id(0))
    start_query = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - start_query
    length = tl.load(kv_len + row)
    local = tile + tl.arange(0, TILE)
    real = local < num_queries
    position = length - num_queries + local
    columns = tl.arange(0, DIM)
    q = tl.load(
        query + (start_query + local).to(tl.int64)[:, None] * q_row + head * q_head + columns[None, :],
        mask=real[:, None],
        other=0.0,
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - num_queries + tile - window + 1, 0)
    high = tl.minimum(length - num_queries + tile + TILE, length)
    logical0 = tl.load(first_page + row)
    most = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:
        most = tl.zeros([TILE], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([TILE, DIM], tl.float32)
    for start in range((first // BLOCK) * BLOCK, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        stored = (token >= first) & (token < high)
        page = tl.load(tables + row.to(tl.int64) * max_pages + token // PAGE - logical0, mask=stored, other=0)
        offset = token % PAGE
        k = _load_rows(
            key + kv_head * k_head,
            key_scale + kv_head * ks_head,
            page,
            offset,
            stored,
            columns,
            k_page,
            k_token,
            ks_page,
            ks_token,
            HAS_SCALE,
        )
        v = _load_rows(
            value + kv_head * v_head,
            value_scale + kv_head * vs_head,
            page,
            offset,
            stored,
            columns,
            v_page,
            v_token,
            vs_page,
            vs_token,
            HAS_SCALE,
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (scale * LOG2E)
        seen = stored[None, :] & (token[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen &= token[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(most - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = higher
    result = acc / total[:, None]
    tl.store(
        out + (start_query + local).to(tl.int64)[:, None] * o_row + head * o_head + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None],
    )


def num_decode_splits(max_kv_len: int, window: int | None, split_tokens: int = SPLIT_TOKENS) -> int:
    """Most splits that a row of at most ``max_kv_len`` visible tokens touches."""
    reach = max_kv_len if window is None else min(max_kv_len, window)
    return max(1, -(-reach // split_tokens) + (window is not None and max_kv_len > window))


def _strides(pages: torch.Tensor) -> tuple[int, int, int]:
    if pages.stride(3) != 1:
        raise ValueError("key and value rows must be contiguous in the head dimension")
    return pages.stride(0), pages.stride(1), pages.stride(2)


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if scales is None else (scales.stride(0), scales.stride(1), scales.stride(2))


def paged_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    first_page: torch.Tensor,
    kv_len: torch.Tensor,
    max_kv_len: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Attention of one query per row over the row's pages.

    Args:
        query: [rows, heads, dim], dim a power of two; a row with ``kv_len`` 0 is padding and stays unwritten.
        key_pages, value_pages: [pages, page_tokens, kv_heads, dim] strided views of one layer.
        tables: [rows, max_pages] int64 physical pages; column j is logical page ``first_page[row] + j``.
        kv_len: [rows] int32 tokens up to and with the row's query; ``max_kv_len`` bounds them.
        sinks: [heads] logits that join the softmax denominator only, or None.
        out: [rows, heads, dim], filled.
        key_scale, value_scale: [pages, page_tokens, kv_heads] float32 views for FP8 pages, or None.
    """
    rows, heads, dim = query.shape
    page_tokens, kv_heads = key_pages.shape[1], key_pages.shape[2]
    group = heads // kv_heads
    splits = num_decode_splits(max_kv_len, window, split_tokens)
    partial = torch.empty(rows * heads * splits, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(rows * heads * splits, 2, dtype=torch.float32, device=query.device)
    has_scale = key_scale is not None
    _decode_split[(rows, kv_heads, splits)](
        query, key_pages, value_pages, key_scale if has_scale else stats, value_scale if has_scale else stats,
        tables, first_page, kv_len, partial, stats,
        splits, tables.stride(0), scale, window or 0,
        query.stride(0), query.stride(1), *_strides(key_pages), *_strides(value_pages),
        *_scale_strides(key_scale), *_scale_strides(value_scale),
        HAS_WINDOW=window is not None, HAS_SCALE=has_scale, PAGE=page_tokens, SPLIT=split_tokens,
        BLOCK=min(64, split_tokens), GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _decode_combine[(rows, heads)](
        partial, stats, sinks if sinks is not None else stats, out, kv_len, splits, window or 0,
        out.stride(0), out.stride(1),
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, SPLIT=split_tokens, GROUP=group, DIM=dim,
        num_warps=2,
    )  # fmt: skip


def prefill_tiles(query_len: list[int], first_row: int, tile: int) -> tuple[list[int], list[int]]:
    """The query tiles of rows ``first_row``..: (row of each tile, its first query inside the row)."""
    rows, firsts = [], []
    for row, length in enumerate(query_len):
        if row < first_row:
            continue
        for first in range(0, length, tile):
            rows.append(row)
            firsts.append(first)
    return rows, firsts


def paged_prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    first_page: torch.Tensor,
    kv_len: torch.Tensor,
    query_start: torch.Tensor,
    tile_row: torch.Tensor,
    tile_first: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    tile: int = 64,
) -> None:
    """Causal attention of rows' chunks, tile by tile of queries; the chunk's own rows are in the pages already.

    Args:
        query: [tokens, heads, dim] of all rows of the step.
        query_start: [rows + 1] int32 first token of each row.
        tile_row, tile_first: [tiles] int32 as :func:`prefill_tiles` lists them; row -1 is padding.
        Others as in :func:`paged_decode`.
    """
    heads, dim = query.shape[1:]
    page_tokens, kv_heads = key_pages.shape[1], key_pages.shape[2]
    has_scale = key_scale is not None
    _prefill_tile[(tile_row.shape[0], heads)](
        query, key_pages, value_pages, key_scale if has_scale else query, value_scale if has_scale else query,
        sinks if sinks is not None else query, out, tables, first_page, kv_len, query_start, tile_row, tile_first,
        tables.stride(0), scale, window or 0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), *_strides(key_pages), *_strides(value_pages),
        *_scale_strides(key_scale), *_scale_strides(value_scale),
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, HAS_SCALE=has_scale, PAGE=page_tokens, TILE=tile,
        BLOCK=64, GROUP=heads // kv_heads, DIM=dim,
        num_warps=4 if dim <= 128 else 8, num_stages=2,
    )  # fmt: skip
