"""Paged attention in Triton: FULL and WINDOW pages, sinks, FP8; decode rows and chunks by the same arithmetic.

A program owns a tile of (query, head) pairs that share a key head, and walks through keys in blocks. Keys are cut at
absolute multiples of a split's length; every split is summed from its start, and the splits are added in order. A
chunk's program walks all its splits; a decode row's splits are programs of their own, added by a second launch. Tiles
have one height, and nothing is contracted to fused multiply-adds, so a query's bits depend neither on its company nor
on whether it came in a chunk or alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.attention import PagedRows
from kernels._triton.overlap import overlaps

LOG2E = tl.constexpr(1.4426950408889634)
SIZES = ("max_pages", "first_row", "num_rows", "num_splits")
"""Of a step: no variants for those that are 1 or multiples of 16, each to be compiled when it first comes."""
SPLIT_TOKENS = 256
"""Keys of one split: few, so that one long row fills the card; its partial result is 3 % of what it read."""
DECODE_PAIRS = 64
CHUNK_PAIRS = 64
"""(query, head) pairs of a tile."""


@triton.jit
def _load_rows(
    base, scales, page, offset, seen, columns, stride_page, stride_token, scale_page, scale_token,
    HAS_SCALE: tl.constexpr, like,
):  # fmt: skip
    """[tokens, dim] rows of one key head; rows not seen are zero, whatever lies there."""
    rows = base + page[:, None] * stride_page + offset[:, None] * stride_token + columns[None, :]
    loaded = tl.load(rows, mask=seen[:, None], other=0.0)
    if HAS_SCALE:
        scale = tl.load(scales + page * scale_page + offset * scale_token, mask=seen, other=0.0)
        loaded = loaded.to(tl.float32) * scale[:, None]
    return loaded.to(like.dtype.element_ty)


@triton.jit
def _split(
    q, position, pair_ok, key, value, key_scale, value_scale, table, logical0, first, low, high, scale, window, like,
    k_page, k_token, v_page, v_token, ks_page, ks_token, vs_page, vs_token,
    HAS_WINDOW: tl.constexpr, HAS_SCALE: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values over the keys low .. high, low a multiple of BLOCK."""
    columns = tl.arange(0, DIM)
    most = tl.full([PAIRS], -float("inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = tl.zeros([PAIRS, DIM], tl.float32)
    for start in range(low, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        stored = (token >= first) & (token < high)
        page = tl.load(table + token // PAGE - logical0, mask=stored, other=0)
        offset = token % PAGE
        k = _load_rows(
            key, key_scale, page, offset, stored, columns, k_page, k_token, ks_page, ks_token, HAS_SCALE, like
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        seen = stored[None, :] & (token[None, :] <= position[:, None]) & pair_ok[:, None]
        if HAS_WINDOW:
            seen &= token[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # A block may hold no visible key at all: exp2(-inf - -inf) must not make a NaN.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(most - shift)
        v = _load_rows(
            value,
            value_scale,
            page,
            offset,
            stored,
            columns,
            v_page,
            v_token,
            vs_page,
            vs_token,
            HAS_SCALE,
            like,
        )
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = higher
    return most, total, acc


@triton.jit
def _join(most, total, theirs, share):
    """(largest score, sum of weights, factor of ours, factor of theirs) of two splits together."""
    higher = tl.maximum(most, theirs)
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(most - shift)
    grow = tl.exp2(theirs - shift)
    return higher, total * fade + share * grow, fade, grow


@triton.jit
def _find_row(query_start, first_row, num_rows, number, QUERIES: tl.constexpr):
    """The row that tile ``number`` belongs to: rows own ceil(length / QUERIES) tiles, and up to one is left unused."""
    base = tl.load(query_start + first_row)
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(query_start + middle) - base) // QUERIES + (middle - first_row)
        low = tl.where(begins <= number, middle, low)
        high = tl.where(begins <= number, high, middle)
    begins = (tl.load(query_start + low) - base) // QUERIES + (low - first_row)
    return low, number - begins


@triton.jit(do_not_specialize=SIZES)
def _attend(
    query, key, value, key_scale, value_scale, sinks, out, partial, stats, tables, first_page, kv_len, query_start,
    max_pages, scale, window,
    q_row, q_head, o_row, o_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, first_row, num_rows, num_splits,
    SPREAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALE: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    QUERIES: tl.constexpr = PAIRS // GROUP_PAD
    kv_head = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    head = pair % GROUP_PAD
    columns = tl.arange(0, DIM)
    if SPREAD:
        row = tl.program_id(0)
        tile = 0
        start_query = row
        num_queries = 1
    else:
        row, tile = _find_row(query_start, first_row, num_rows, tl.program_id(0), QUERIES)
        start_query = tl.load(query_start + row)
        num_queries = tl.load(query_start + row + 1) - start_query
    length = tl.load(kv_len + row)
    if (tile * QUERIES >= num_queries) | (length == 0):
        return
    local = tile * QUERIES + pair // GROUP_PAD
    pair_ok = (local < num_queries) & (head < GROUP)
    position = length - num_queries + local
    token = (start_query + local).to(tl.int64)
    heads = kv_head * GROUP + head
    q = tl.load(
        query + token[:, None] * q_row + heads[:, None] * q_head + columns[None, :],
        mask=pair_ok[:, None],
        other=0.0,
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - num_queries + tile * QUERIES - window + 1, 0)
    high = tl.minimum(length - num_queries + (tile + 1) * QUERIES, length)
    logical0 = tl.load(first_page + row)
    table = tables + row.to(tl.int64) * max_pages
    key += kv_head * k_head
    value += kv_head * v_head
    key_scale += kv_head * ks_head
    value_scale += kv_head * vs_head
    if SPREAD:
        slot = tl.program_id(2)
        split = first // SPLIT + slot
        if split * SPLIT >= high:
            return
        low = tl.maximum(split * SPLIT, first // BLOCK * BLOCK)
        most, total, acc = _split(
            q, position, pair_ok, key, value, key_scale, value_scale, table, logical0, first, low,
            tl.minimum((split + 1) * SPLIT, high), scale, window, query,
            k_page, k_token, v_page, v_token, ks_page, ks_token, vs_page, vs_token,
            HAS_WINDOW, HAS_SCALE, PAGE, PAIRS, BLOCK, DIM,
        )  # fmt: skip
        at = ((row * tl.num_programs(1) + kv_head) * num_splits + slot).to(tl.int64) * GROUP + head
        tl.store(partial + at[:, None] * DIM + columns[None, :], acc, mask=pair_ok[:, None])
        tl.store(stats + at * 2, most, mask=pair_ok)
        tl.store(stats + at * 2 + 1, total, mask=pair_ok)
    else:
        most = tl.full([PAIRS], -float("inf"), tl.float32)
        total = tl.zeros([PAIRS], tl.float32)
        if HAS_SINKS:
            most = tl.load(sinks + heads, mask=head < GROUP, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
        acc = tl.zeros([PAIRS, DIM], tl.float32)
        for split in range(first // SPLIT, tl.cdiv(high, SPLIT)):
            low = tl.maximum(split * SPLIT, first // BLOCK * BLOCK)
            theirs, share, add = _split(
                q, position, pair_ok, key, value, key_scale, value_scale, table, logical0, first, low,
                tl.minimum((split + 1) * SPLIT, high), scale, window, query,
                k_page, k_token, v_page, v_token, ks_page, ks_token, vs_page, vs_token,
                HAS_WINDOW, HAS_SCALE, PAGE, PAIRS, BLOCK, DIM,
            )  # fmt: skip
            most, total, fade, grow = _join(most, total, theirs, share)
            acc = acc * fade[:, None] + add * grow[:, None]
        result = acc / total[:, None]
        tl.store(
            out + token[:, None] * o_row + heads[:, None] * o_head + columns[None, :],
            result.to(out.dtype.element_ty),
            mask=pair_ok[:, None],
        )


@triton.jit(do_not_specialize=SIZES)
def _add_splits(
    partial, stats, sinks, out, kv_len, num_splits, window, o_row, o_head,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    columns = tl.arange(0, DIM)
    length = tl.load(kv_len + row)
    if length == 0:
        return
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    used = tl.cdiv(length, SPLIT) - first // SPLIT
    most = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        most = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([DIM], tl.float32)
    base = (row * (tl.num_programs(1) // GROUP) + head // GROUP).to(tl.int64) * num_splits
    for slot in tl.range(0, used, num_stages=6):  # the next splits are on their way meanwhile
        at = (base + slot) * GROUP + head % GROUP
        theirs = tl.load(stats + at * 2)
        share = tl.load(stats + at * 2 + 1)
        most, total, fade, grow = _join(most, total, theirs, share)
        acc = acc * fade + tl.load(partial + at * DIM + columns) * grow
    result = acc / total
    tl.store(out + row.to(tl.int64) * o_row + head * o_head + columns, result.to(out.dtype.element_ty))


def num_decode_splits(max_kv_len: int, window: int | None, split_tokens: int = SPLIT_TOKENS) -> int:
    """Most splits that a row of at most ``max_kv_len`` visible tokens touches."""
    reach = max_kv_len if window is None else min(max_kv_len, window)
    return max(1, -(-reach // split_tokens) + (window is not None and max_kv_len > window))


@dataclass(frozen=True, slots=True)
class _Tile:
    pairs: int
    block: int
    num_warps: int
    num_stages: int

    def constants(self, split_tokens: int) -> dict[str, int]:
        """What a launch is told."""
        return {
            "PAIRS": self.pairs,
            "BLOCK": min(self.block, split_tokens),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def _tile(dtype: torch.dtype, dim: int, group_pad: int, chunk: bool) -> _Tile:
    """Chunks take taller tiles, made of the same matrix instructions: 64 pairs are the least that the widest takes."""
    if dtype is torch.float32:
        return _Tile(max(16, group_pad), 32, 4, 2)
    pairs = max(CHUNK_PAIRS if chunk else DECODE_PAIRS, group_pad)
    return _Tile(pairs, 64, max(4, pairs // 16), 3 if dim <= 128 else 2)


def _strides(pages: torch.Tensor) -> tuple[int, int, int]:
    if pages.stride(3) != 1:
        raise ValueError("key and value rows must be contiguous in the head dimension")
    return pages.stride(0), pages.stride(1), pages.stride(2)


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if scales is None else (scales.stride(0), scales.stride(1), scales.stride(2))


def _arguments(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    partial: torch.Tensor,
    stats: torch.Tensor,
) -> tuple[object, ...]:
    """What both launches are told, in the kernel's order."""
    key_scale, value_scale = (None, None) if scales is None else scales
    return (
        query, key_pages, value_pages, query if key_scale is None else key_scale,
        query if value_scale is None else value_scale, query if sinks is None else sinks, out, partial, stats,
        rows.tables, rows.first_page, rows.kv_len, rows.query_start, rows.tables.stride(0), scale, rows.window or 0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), *_strides(key_pages), *_strides(value_pages),
        *_scale_strides(key_scale), *_scale_strides(value_scale),
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Causal attention of all rows of a step over their pages, the step's own keys included; nothing is read back.

    Args:
        query: [tokens, heads, dim], dim a power of two of at least 16, contiguous in the last dim.
        key_pages, value_pages: [pages, page_tokens, kv_heads, dim] strided views of one layer. Entries past a row's
            end may hold anything, NaN included.
        sinks: [heads] logits that join the softmax denominator only, or None.
        out: [tokens, heads, dim], filled.
        key_scale, value_scale: [pages, page_tokens, kv_heads] float32 views for FP8 pages, or None.
    """
    _, heads, dim = query.shape
    page_tokens, kv_heads = key_pages.shape[1], key_pages.shape[2]
    group = heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    window, has_scale, overlap = rows.window, key_scale is not None, overlaps(query)
    reach = rows.max_kv_len if window is None else min(rows.max_kv_len, window)
    # Rows that see no more than a split's keys are not worth a second launch.
    decode = rows.num_decode_rows if reach > split_tokens else 0
    chunk_rows = rows.kv_len.shape[0] - decode
    splits = num_decode_splits(rows.max_kv_len, window, split_tokens)
    partial = torch.empty(decode * heads * splits, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(decode * heads * splits, 2, dtype=torch.float32, device=query.device)
    scales = None if key_scale is None or value_scale is None else (key_scale, value_scale)
    arguments = _arguments(query, key_pages, value_pages, rows, scale, sinks, out, scales, partial, stats)
    numbers = (decode, decode + chunk_rows, splits)
    constants = {
        "HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None, "HAS_SCALE": has_scale, "PAGE": page_tokens,
        "SPLIT": split_tokens, "GROUP": group, "GROUP_PAD": group_pad, "DIM": dim, "enable_fp_fusion": False,
        "OVERLAP": overlap, "launch_pdl": overlap,
    }  # fmt: skip
    tile = _tile(query.dtype, dim, group_pad, chunk=False)
    if decode:
        _attend[(decode, kv_heads, splits)](
            *arguments, *numbers, SPREAD=True, **tile.constants(split_tokens), **constants
        )
        _add_splits[(decode, heads)](
            partial, stats, query if sinks is None else sinks, out, rows.kv_len, splits, window or 0,
            out.stride(0), out.stride(1), HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
            SPLIT=split_tokens, GROUP=group, DIM=dim, OVERLAP=overlap, num_warps=2, enable_fp_fusion=False,
            launch_pdl=overlap,
        )  # fmt: skip
    if chunk_rows:
        tile = _tile(query.dtype, dim, group_pad, chunk=rows.num_decode_rows < rows.kv_len.shape[0])
        tiles = (query.shape[0] - decode) // (tile.pairs // group_pad) + chunk_rows
        _attend[(tiles, kv_heads)](
            *arguments, *numbers, SPREAD=False, **tile.constants(split_tokens), **constants
        )
