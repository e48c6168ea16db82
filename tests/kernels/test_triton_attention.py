"""Triton's paged attention against plain softmax attention in float64: shuffled pages, stale tails of NaN, odd lengths.

Without a GPU the kernels run in Triton's interpreter (float32 and float16; its product of bfloat16 is not to be
trusted), with one they are compiled and run in bfloat16 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernels._triton import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [1, 33, 70, 129]
CHUNKS = [1, 33, 19, 40]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int
    window: int | None
    sinks: bool


SHAPES = [Shape(8, 2, 16, 16, None, True), Shape(6, 2, 32, 4, 20, False), Shape(4, 4, 16, 1, 7, True)]
CASES = [(SHAPES[0], torch.float32), (SHAPES[1], torch.float16), (SHAPES[2], torch.float32)]
if DEVICE == "cuda":
    CASES += [(shape, torch.bfloat16) for shape in SHAPES]


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_query: int,
    shape: Shape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[q, heads, dim] queries at positions first_query.. over [k, kv_heads, dim] keys, in float64."""
    group = shape.heads // shape.kv_heads
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * shape.dim**-0.5
    position = first_query + torch.arange(query.shape[0], device=query.device)
    token = torch.arange(key.shape[0], device=query.device)
    seen = token[None] <= position[:, None]
    if shape.window is not None:
        seen &= token[None] > position[:, None] - shape.window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)


class Pages:
    """Rows of random keys and values in shuffled pages between poisoned ones."""

    def __init__(self, shape: Shape, dtype: torch.dtype, first_queries: list[int]) -> None:
        generator = torch.Generator().manual_seed(7)
        num_pages, page_tokens = 300, shape.page_tokens
        store = torch.full(
            (num_pages, 3, page_tokens, shape.kv_heads, shape.dim), math.nan, dtype=dtype, device=DEVICE
        )
        self.key_pages, self.value_pages = store[:, 0], store[:, 2]
        self.keys, self.values = [], []
        free = torch.randperm(num_pages, generator=generator).tolist()
        most = -(-max(LENGTHS) // page_tokens)
        tables = torch.full((len(LENGTHS) + 1, most), -1, dtype=torch.int64)
        first = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32)
        for row, length in enumerate(LENGTHS):
            key, value = (
                torch.randn(length, shape.kv_heads, shape.dim, generator=generator).to(DEVICE, dtype)
                for _ in range(2)
            )
            self.keys.append(key)
            self.values.append(value)
            lowest = (
                0 if shape.window is None else max(0, first_queries[row] - shape.window + 1) // page_tokens
            )
            first[row] = lowest
            for logical in range(lowest, -(-length // page_tokens)):
                page = free.pop()
                tables[row, logical - lowest] = page
                part = slice(logical * page_tokens, min(length, (logical + 1) * page_tokens))
                self.key_pages[page, : part.stop - part.start] = key[part]
                self.value_pages[page, : part.stop - part.start] = value[part]
        self.tables, self.first = tables.to(DEVICE), first.to(DEVICE)
        self.sinks = torch.randn(shape.heads, generator=generator).to(DEVICE, dtype) if shape.sinks else None


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_decode_reads_each_rows_own_pages(shape: Shape, dtype: torch.dtype) -> None:
    pages = Pages(shape, dtype, [length - 1 for length in LENGTHS])
    query = torch.randn(len(LENGTHS) + 1, shape.heads, shape.dim).to(DEVICE, dtype)
    out = torch.full_like(query, math.nan)
    attention.paged_decode(
        query, pages.key_pages, pages.value_pages, pages.tables, pages.first, ints([*LENGTHS, 0]), max(LENGTHS),
        shape.dim**-0.5, shape.window, pages.sinks, out, split_tokens=64,
    )  # fmt: skip
    assert out[-1].isnan().all(), "a padding row was written"
    for row, length in enumerate(LENGTHS):
        want = plain_attention(
            query[row : row + 1], pages.keys[row], pages.values[row], length - 1, shape, pages.sinks
        )
        torch.testing.assert_close(out[row].double(), want[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_prefill_of_chunks_behind_a_context(shape: Shape, dtype: torch.dtype) -> None:
    first_queries = [length - chunk for length, chunk in zip(LENGTHS, CHUNKS, strict=True)]
    pages = Pages(shape, dtype, first_queries)
    starts = [sum(CHUNKS[:row]) for row in range(len(CHUNKS) + 1)]
    query = torch.randn(starts[-1], shape.heads, shape.dim).to(DEVICE, dtype)
    out = torch.full_like(query, math.nan)
    rows, firsts = attention.prefill_tiles(CHUNKS, 1, 16)
    attention.paged_prefill(
        query, pages.key_pages, pages.value_pages, pages.tables, pages.first, ints(LENGTHS), ints(starts),
        ints([*rows, -1]), ints([*firsts, 0]), shape.dim**-0.5, shape.window, pages.sinks, out, tile=16,
    )  # fmt: skip
    assert out[: CHUNKS[0]].isnan().all(), "a row before the first prefill row was written"
    for row in range(1, len(CHUNKS)):
        part = slice(starts[row], starts[row + 1])
        want = plain_attention(
            query[part], pages.keys[row], pages.values[row], first_queries[row], shape, pages.sinks
        )
        torch.testing.assert_close(out[part].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_decode_row_does_not_depend_on_the_rows_beside_it() -> None:
    shape = SHAPES[0]
    pages = Pages(shape, torch.float32, [length - 1 for length in LENGTHS])
    query = torch.randn(len(LENGTHS), shape.heads, shape.dim, device=DEVICE)
    together, alone = torch.empty_like(query), torch.empty_like(query)
    arguments = (pages.key_pages, pages.value_pages)
    scale = shape.dim**-0.5
    attention.paged_decode(
        query, *arguments, pages.tables, pages.first, ints(LENGTHS), max(LENGTHS), scale, None, pages.sinks, together,
        split_tokens=32,
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        part = slice(row, row + 1)
        attention.paged_decode(
            query[part], *arguments, pages.tables[part], pages.first[part], ints([length]), length, scale, None,
            pages.sinks, alone[part], split_tokens=32,
        )  # fmt: skip
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("max_kv_len", "window", "splits"),
    [(1, None, 1), (512, None, 1), (513, None, 2), (5000, 128, 2), (100, 128, 1)],
)
def test_splits_are_cut_by_position(max_kv_len: int, window: int | None, splits: int) -> None:
    assert attention.num_decode_splits(max_kv_len, window, 512) == splits
