"""Paged attention against a dense softmax in float64, over shuffled pages whose unused entries are NaN."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.attention import DecodePages, paged_decode, paged_prefill_row

SHAPES = [(4, 2, 16), (6, 2, 24), (8, 1, 64), (3, 3, 8)]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[q, heads, dim] queries that end where [k, kv_heads, dim] keys end; one query and head at a time."""
    query, key, value = query.double(), key.double(), value.double()
    num_queries, num_heads, _ = query.shape
    share = num_heads // key.shape[1]
    out = torch.zeros_like(query)
    for q in range(num_queries):
        last = key.shape[0] - num_queries + q
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(num_heads):
            scores = key[first : last + 1, head // share] @ query[q, head] * scale
            most = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head].double())
            weights = (scores - most).exp()
            total = weights.sum() + (0.0 if sinks is None else (sinks[head].double() - most).exp())
            out[q, head] = weights @ value[first : last + 1, head // share] / total
    return out


class PagedRows:
    """Rows of random keys and values in shuffled pages of one NaN-filled buffer."""

    def __init__(
        self, lengths: list[int], kv_heads: int, dim: int, page_tokens: int, window: int | None
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        counts = [-(-length // page_tokens) for length in lengths]
        # A page is wider than this layer's rows: the views are strided, as in the arena.
        buffer = torch.full((sum(counts) + 3, 3, page_tokens, kv_heads, dim), math.nan)
        self.key_pages, self.value_pages = buffer[:, 1], buffer[:, 2]
        pages = torch.randperm(buffer.shape[0], generator=generator).tolist()
        self.key = [torch.randn(n, kv_heads, dim, generator=generator) for n in lengths]
        self.value = [torch.randn(n, kv_heads, dim, generator=generator) for n in lengths]
        self.kv_len = torch.tensor(lengths, dtype=torch.int32)
        first = [0 if window is None else max(0, n - window) // page_tokens for n in lengths]
        self.first_page = torch.tensor(first, dtype=torch.int32)
        self.tables = torch.full((len(lengths), max(counts) + 1), -1)
        for row, length in enumerate(lengths):
            for logical in range(first[row], counts[row]):
                page = pages.pop()
                self.tables[row, logical - first[row]] = page
                start, stop = logical * page_tokens, min((logical + 1) * page_tokens, length)
                self.key_pages[page, : stop - start] = self.key[row][start:stop]
                self.value_pages[page, : stop - start] = self.value[row][start:stop]

    def decode_pages(self, window: int | None) -> DecodePages:
        most = int(self.kv_len.max())
        return DecodePages(self.tables, self.first_page, self.kv_len, most, self.key_pages.shape[1], window)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("lengths", [[1], [77], [33, 33], [5, 64, 1, 130, 65]])
def test_decode_reads_exactly_the_visible_tokens(
    heads: int, kv_heads: int, dim: int, window: int | None, with_sinks: bool, lengths: list[int]
) -> None:
    rows = PagedRows(lengths, kv_heads, dim, 16, window)
    query = torch.randn(len(lengths), heads, dim)
    sinks = torch.randn(heads) if with_sinks else None
    out = torch.full_like(query, math.nan)
    pages = rows.decode_pages(window)
    paged_decode(query, rows.key_pages, rows.value_pages, pages, dim**-0.5, sinks, out)
    for i in range(len(lengths)):
        expected = dense_attention(query[i : i + 1], rows.key[i], rows.value[i], window, dim**-0.5, sinks)
        torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES[:2])
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("computed", "chunk"), [(0, 70), (37, 5), (64, 64), (3, 290), (19, 1)])
def test_a_chunk_sees_its_own_past_and_nothing_else(
    heads: int, kv_heads: int, dim: int, window: int | None, with_sinks: bool, computed: int, chunk: int
) -> None:
    length = computed + chunk
    rows = PagedRows([length], kv_heads, dim, 16, None)
    first = 0
    if window is not None:
        # Pages that the chunk's first query cannot see may be gone.
        first = max(0, computed - window + 1) // 16
        rows.tables = torch.cat([rows.tables[:, first:], torch.full((1, 2), -1)], 1)
    query = torch.randn(chunk, heads, dim)
    sinks = torch.randn(heads) if with_sinks else None
    out = torch.full_like(query, math.nan)
    paged_prefill_row(
        query,
        rows.key_pages,
        rows.value_pages,
        rows.tables[0],
        first,
        length,
        window,
        dim**-0.5,
        sinks,
        out,
    )
    expected = dense_attention(query, rows.key[0], rows.value[0], window, dim**-0.5, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_in_bfloat16_serve_float32_queries() -> None:
    rows = PagedRows([40, 21], 2, 16, 16, None)
    pages = rows.decode_pages(None)
    query, out = torch.randn(2, 4, 16), torch.full((2, 4, 16), math.nan)
    paged_decode(query, rows.key_pages.bfloat16(), rows.value_pages.bfloat16(), pages, 0.25, None, out)
    for i in range(2):
        key, value = rows.key[i].bfloat16(), rows.value[i].bfloat16()
        expected = dense_attention(query[i : i + 1], key, value, None, 0.25, None)
        torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-5, atol=1e-5)
