"""Paged attention: queries of many rows over keys and values that lie in pages."""

from __future__ import annotations

import torch

from kernels._reference import attention as reference
from kernels._reference.attention import DecodePages

__all__ = ["DecodePages", "decode_pages", "paged_decode", "paged_prefill_row"]


def decode_pages(
    tables: torch.Tensor, first_page: torch.Tensor, kv_len: torch.Tensor, page_tokens: int, window: int | None
) -> DecodePages:
    """The pages that decode rows read, prepared once per step for all layers of a group.

    Args:
        tables: [rows, max_pages] int64 physical pages, -1 beyond a row's pages.
        first_page: [rows] logical page of column 0.
        kv_len: [rows] tokens visible to the row's query, itself included, before the window cuts.
        window: how many of the last tokens a query sees, or None.
    """
    num_rows = tables.shape[0]
    first_token = torch.zeros_like(kv_len) if window is None else (kv_len - window).clamp_(min=0)
    low, high = first_token // page_tokens - first_page, (kv_len - 1) // page_tokens - first_page
    column = torch.arange(tables.shape[1], device=tables.device)
    used = (column >= low.unsqueeze(1)) & (column <= high.unsqueeze(1))
    row, table_column = used.nonzero(as_tuple=True)
    start = (first_page.index_select(0, row) + table_column) * page_tokens
    position = start.unsqueeze(1) + torch.arange(page_tokens, device=tables.device)
    hidden = (position >= kv_len[row].unsqueeze(1)) | (position < first_token[row].unsqueeze(1))
    num_pages = high - low + 1
    most = int(num_pages.max())
    return DecodePages(
        page=tables[row, table_column],
        row=row,
        column=table_column - low.index_select(0, row),
        hidden=hidden.view(-1, 1, 1, page_tokens),
        edge=hidden.any(1).nonzero().squeeze(1),
        num_rows=num_rows,
        num_columns=most,
        even=row.numel() == most * num_rows,
    )


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
    reference.paged_decode(query, key_pages, value_pages, pages, scale, sinks, out)


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
