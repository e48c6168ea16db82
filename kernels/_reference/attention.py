"""Paged attention in plain torch: decode rows by ragged pages, prefill rows one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

QUERY_TILE = 256
"""Queries of one prefill row that are computed together where a mask or sinks forbid the fused causal path."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of a step in one group of pages; all tensors may be buffers whose content changes between replays.

    Attributes:
        tables: [rows, max_pages] int64 physical pages; column j is logical page ``first_page[row] + j``.
        first_page, kv_len: [rows] int32; a row with ``kv_len`` 0 is padding and stays unwritten.
        query_start: [rows + 1] int32 first token of each row.
        num_decode_rows: the leading rows have one token each.
        max_kv_len: host int, bounds the decode rows' ``kv_len``.
        window: how many of the last tokens a query sees, or None.
    """

    tables: torch.Tensor
    first_page: torch.Tensor
    kv_len: torch.Tensor
    query_start: torch.Tensor
    num_decode_rows: int
    max_kv_len: int
    window: int | None


@dataclass(frozen=True, slots=True)
class ListedPages:
    """The pages that decode rows read, one behind the other: ``page`` [n] physical id, ``row`` [n] its row,
    ``column`` [n] its place among the row's pages, ``hidden`` [n, 1, 1, page_tokens] entries no query may see,
    ``edge`` the pages that have such entries. ``num_columns`` is the most pages of a row, ``even`` whether all rows
    have so many."""

    page: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    hidden: torch.Tensor
    edge: torch.Tensor
    num_rows: int
    num_columns: int
    even: bool


def list_pages(
    tables: torch.Tensor, first_page: torch.Tensor, kv_len: torch.Tensor, page_tokens: int, window: int | None
) -> ListedPages:
    """Lists the pages that queries see, row by row; arguments as in :class:`kernels.attention.DecodePages`."""
    first_token = torch.zeros_like(kv_len) if window is None else (kv_len - window).clamp_(min=0)
    low, high = first_token // page_tokens - first_page, (kv_len - 1) // page_tokens - first_page
    column = torch.arange(tables.shape[1], device=tables.device)
    used = (column >= low.unsqueeze(1)) & (column <= high.unsqueeze(1))
    row, table_column = used.nonzero(as_tuple=True)
    start = (first_page.index_select(0, row) + table_column) * page_tokens
    position = start.unsqueeze(1) + torch.arange(page_tokens, device=tables.device)
    hidden = (position >= kv_len[row].unsqueeze(1)) | (position < first_token[row].unsqueeze(1))
    most = int((high - low).max()) + 1
    return ListedPages(
        page=tables[row, table_column],
        row=row,
        column=table_column - low.index_select(0, row),
        hidden=hidden.view(-1, 1, 1, page_tokens),
        edge=hidden.any(1).nonzero().squeeze(1),
        num_rows=tables.shape[0],
        num_columns=most,
        even=row.numel() == most * tables.shape[0],
    )


def paged_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: ListedPages,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One query per row against its own pages; see the face."""
    num_rows, num_heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    group = num_heads // kv_heads
    # [n, kv_heads, page_tokens, dim] copies: only what is read, and free to be cleaned.
    key = key_pages.permute(0, 2, 1, 3).index_select(0, pages.page).to(query.dtype)
    value = value_pages.permute(0, 2, 1, 3).index_select(0, pages.page).to(query.dtype)
    _hide_stale_rows(value, pages)
    grouped = (query * scale).view(num_rows, kv_heads, group, dim).index_select(0, pages.row)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).float().masked_fill_(pages.hidden, -torch.inf)
    weights = _softmax_over_pages(scores, pages, sinks).to(query.dtype)
    partial = torch.matmul(weights, value)
    if pages.even:
        total = partial.view(num_rows, pages.num_columns, num_heads, dim).sum(1)
    else:
        # Not by index_add_, whose order is open on a GPU.
        padded = partial.new_zeros(num_rows, pages.num_columns, num_heads, dim)
        padded[pages.row, pages.column] = partial.view(-1, num_heads, dim)
        total = padded.sum(1)
    out.copy_(total)


def _hide_stale_rows(value: torch.Tensor, pages: ListedPages) -> None:
    # Weight zero times a stale NaN is NaN, so entries nobody may see must be zero and not only masked.
    hidden = pages.hidden.index_select(0, pages.edge).transpose(-1, -2)
    value.index_copy_(0, pages.edge, value.index_select(0, pages.edge).masked_fill_(hidden, 0.0))


def _softmax_over_pages(scores: torch.Tensor, pages: ListedPages, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of [n, kv_heads, group, page_tokens] over all pages of a row."""
    _, kv_heads, group, page_tokens = scores.shape
    shape = (pages.num_rows, pages.num_columns, kv_heads, group, page_tokens)
    if pages.even:
        padded = scores.view(shape)
    else:
        padded = scores.new_full(shape, -torch.inf)
        padded[pages.row, pages.column] = scores
    flat = padded.permute(0, 2, 3, 1, 4).reshape(pages.num_rows, kv_heads, group, -1)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, group, 1).expand(pages.num_rows, -1, -1, -1)
        flat = torch.softmax(torch.cat([flat, column], -1), -1)[..., :-1]
    else:
        flat = torch.softmax(flat, -1)
    back = flat.reshape(pages.num_rows, kv_heads, group, pages.num_columns, page_tokens).permute(
        0, 3, 1, 2, 4
    )
    return back.reshape(scores.shape) if pages.even else back[pages.row, pages.column]


def prefill_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_query: int,
    first_key: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of one row's queries [q, heads, dim] at positions first_query.. over keys [k, kv_heads, dim]
    at positions first_key.., all of them real; fills ``out`` [q, heads, dim]."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    last = first_query + num_queries - 1
    in_window = window is None or last - first_key < window
    if sinks is None and first_query == first_key and num_queries == num_keys and in_window:
        result = _fused(query, key, value, None, scale, causal=True)
        out.copy_(result)
        return
    for start in range(0, num_queries, QUERY_TILE):
        stop = min(start + QUERY_TILE, num_queries)
        low = first_key if window is None else max(first_key, first_query + start - window + 1)
        seen = slice(low - first_key, first_query + stop - first_key)
        visible = _visible(
            first_query + start, stop - start, low, seen.stop - seen.start, window, query.device
        )
        if sinks is None:
            result = _fused(query[start:stop], key[seen], value[seen], visible, scale, causal=False)
        else:
            result = _with_sinks(query[start:stop], key[seen], value[seen], visible, scale, sinks)
        out[start:stop] = result


def _visible(
    first_query: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    query = torch.arange(first_query, first_query + num_queries, device=device).unsqueeze(1)
    key = torch.arange(first_key, first_key + num_keys, device=device).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    result = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=visible,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0].transpose(0, 1)


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    num_queries, num_heads, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(num_queries, kv_heads, -1, dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, key.permute(1, 2, 0).unsqueeze(1)).float() * scale
    scores.masked_fill_(~visible, -torch.inf)
    column = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1].to(query.dtype)
    result = torch.matmul(weights, value.transpose(0, 1).unsqueeze(1))
    return result.permute(2, 0, 1, 3).reshape(num_queries, num_heads, dim)


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Row by row; see the face. Reads lengths on the host."""
    page_tokens, window = key_pages.shape[1], rows.window
    starts, lengths, firsts = rows.query_start.tolist(), rows.kv_len.tolist(), rows.first_page.tolist()
    for row, length in enumerate(lengths):
        span = slice(starts[row], starts[row + 1])
        if length == 0 or span.stop == span.start:
            continue
        first_query = length - (span.stop - span.start)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        low, high = first_key // page_tokens, (length - 1) // page_tokens
        pages = rows.tables[row, low - firsts[row] : high + 1 - firsts[row]]
        seen = slice(first_key - low * page_tokens, length - low * page_tokens)
        key = gather_rows(key_pages, key_scale, pages, seen, query.dtype)
        value = gather_rows(value_pages, value_scale, pages, seen, query.dtype)
        prefill_row(query[span], key, value, first_query, first_key, window, scale, sinks, out[span])


def gather_rows(
    pages: torch.Tensor, scales: torch.Tensor | None, numbers: torch.Tensor, seen: slice, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, kv_heads, dim] entries ``seen`` of the pages ``numbers``, one behind the other, in ``dtype``."""
    if scales is None:
        return pages.index_select(0, numbers).flatten(0, 1)[seen].to(dtype)
    # Not every device gathers FP8: its bytes will do.
    packed = pages.view(torch.uint8).index_select(0, numbers).flatten(0, 1)[seen].view(pages.dtype)
    factor = scales.index_select(0, numbers).flatten(0, 1)[seen]
    return (packed.float() * factor.unsqueeze(-1)).to(dtype)
