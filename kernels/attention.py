"""Paged attention: queries of many rows over keys and values that lie in pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels._native import ops as native
from kernels._reference import attention as reference
from kernels._reference.attention import PagedRows

__all__ = [
    "DecodePages",
    "PagedRows",
    "paged_attention",
    "paged_decode",
    "paged_prefill_row",
    "plain_paged_attention",
    "row_by_row_problem",
]


@dataclass(frozen=True)
class DecodePages:
    """The pages that decode rows read: prepared once per step for all layers of a group.

    Attributes:
        tables: [rows, max_pages] int64 physical pages, -1 beyond a row's pages.
        first_page: [rows] int32 logical page of column 0.
        kv_len: [rows] int32 tokens visible to the row's query, itself included, before the window cuts.
        max_kv_len: host int, the largest of them.
        page_tokens: entries per page.
        window: how many of the last tokens a query sees, or None.
    """

    tables: torch.Tensor
    first_page: torch.Tensor
    kv_len: torch.Tensor
    max_kv_len: int
    page_tokens: int
    window: int | None

    @cached_property
    def listed(self) -> reference.ListedPages:
        """The pages one behind the other, as the plain torch twin reads them."""
        return reference.list_pages(self.tables, self.first_page, self.kv_len, self.page_tokens, self.window)


def row_by_row_problem(device: torch.device, kv_dtype: torch.dtype) -> str | None:
    """Why this process cannot compute every row alone, whatever stands beside it; None where it can."""
    if device.type != "cpu" or kv_dtype is not torch.float32:
        return "results that no batch changes are computed in float32 on a CPU"
    if not native.serves(torch.empty(0)):
        return "there are no compiled kernels here (a C compiler on the path would make them)"
    if torch.get_num_threads() > native.MANY_THREADS:
        return f"more than num_threads={native.MANY_THREADS} would share a row's work out by the batch's size"
    return None


def paged_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: DecodePages,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of one query per row over the row's pages.

    Args:
        query: [rows, heads, dim].
        key_pages, value_pages: [pages, page_tokens, kv_heads, dim] strided views of one layer. Entries past a row's
            end may hold anything, NaN included.
        sinks: [heads] logits that join the softmax denominator only, or None.
        out: [rows, heads, dim], filled.
    """
    side_by_side = query.stride(1) == query.shape[2] and key_pages.stride(3) == value_pages.stride(3) == 1
    if native.serves(query) and native.serves(key_pages) and side_by_side and out.is_contiguous():
        most = pages.max_kv_len if pages.window is None else min(pages.max_kv_len, pages.window)
        native.paged_decode(
            query,
            key_pages,
            value_pages,
            pages.tables,
            pages.first_page,
            pages.kv_len,
            most,
            pages.window,
            scale,
            sinks,
            out,
        )
        return
    reference.paged_decode(query, key_pages, value_pages, pages.listed, scale, sinks, out)


def paged_prefill_row(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    table: torch.Tensor,
    first_page: int,
    kv_len: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of one row's chunk, whose last query sees ``kv_len`` tokens before the window cuts.

    Args:
        query: [q, heads, dim], at positions kv_len - q ..
        table: [max_pages] int64 physical pages of the row; column j is logical page ``first_page + j``.
        out: [q, heads, dim], filled.
    """
    page_tokens = key_pages.shape[1]
    first_query = kv_len - query.shape[0]
    first_key = 0 if window is None else max(0, first_query - window + 1)
    low, high = first_key // page_tokens, (kv_len - 1) // page_tokens
    pages = table[low - first_page : high + 1 - first_page]
    # Cut to real tokens: what lies beyond them in their pages is never read.
    seen = slice(first_key - low * page_tokens, kv_len - low * page_tokens)
    key = key_pages.index_select(0, pages).flatten(0, 1)[seen].to(query.dtype)
    value = value_pages.index_select(0, pages).flatten(0, 1)[seen].to(query.dtype)
    reference.prefill_row(query, key, value, first_query, first_key, window, scale, sinks, out)


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
    split_tokens: int | None = None,
) -> None:
    """Causal attention of all rows of a step, those of one token and longer ones, over their pages.

    On a GPU nothing is read back and every query's bits are the same in any company, in a chunk or alone. Elsewhere
    rows are computed one by one.

    Args:
        query: [tokens, heads, dim]; on a GPU dim is a power of two.
        key_pages, value_pages: [pages, page_tokens, kv_heads, dim] strided views of one layer, the step's own keys and
            values included. Entries past a row's end may hold anything, NaN included.
        rows: where each row's tokens and pages are.
        sinks: [heads] logits that join the softmax denominator only, or None.
        out: [tokens, heads, dim], filled; padding stays as it is.
        key_scale, value_scale: [pages, page_tokens, kv_heads] float32 views that multiply FP8 pages, or None.
        split_tokens: keys of a row that a program reads on a GPU, a multiple of 64; None: as suits many rows. Other
            numbers give other bits.
    """
    if query.is_cuda:
        from kernels._triton import attention as on_gpu

        split = on_gpu.SPLIT_TOKENS if split_tokens is None else split_tokens
        on_gpu.paged_attention(
            query, key_pages, value_pages, rows, scale, sinks, out, key_scale, value_scale, split
        )
        return
    plain_paged_attention(query, key_pages, value_pages, rows, scale, sinks, out, key_scale, value_scale)


def plain_paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """:func:`paged_attention` in plain torch on any device, row by row, reading lengths on the host."""
    reference.paged_attention(query, key_pages, value_pages, rows, scale, sinks, out, key_scale, value_scale)
