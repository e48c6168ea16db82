"""Triton's paged attention against plain softmax attention in float64: shuffled pages, stale tails of NaN, odd lengths.

Without a GPU the kernels run in Triton's interpreter (float32 and float16; its product of bfloat16 is not to be
trusted), with one they are compiled and run in bfloat16 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernels._reference import pages as reference
from kernels._triton import attention
from kernels._triton import pages as on_gpu
from kernels.attention import plain_paged_attention

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


def rows_of(
    pages: Pages, chunks: list[int], decode: int, lengths: list[int], window: int | None
) -> attention.PagedRows:
    """Rows of ``chunks`` new tokens each, the first ``decode`` of them of one."""
    return attention.PagedRows(
        tables=pages.tables,
        first_page=pages.first,
        kv_len=ints(lengths),
        query_start=ints([sum(chunks[:row]) for row in range(len(chunks) + 1)]),
        num_decode_rows=decode,
        max_kv_len=2 * max(lengths),
        window=window,
    )


def run(
    pages: Pages, shape: Shape, query: torch.Tensor, rows: attention.PagedRows, split: int = 64
) -> torch.Tensor:
    out = torch.full_like(query, math.nan)
    attention.paged_attention(
        query, pages.key_pages, pages.value_pages, rows, shape.dim**-0.5, pages.sinks, out, split_tokens=split
    )
    return out


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_decode_reads_each_rows_own_pages(shape: Shape, dtype: torch.dtype) -> None:
    pages = Pages(shape, dtype, [length - 1 for length in LENGTHS])
    query = torch.randn(len(LENGTHS) + 1, shape.heads, shape.dim).to(DEVICE, dtype)
    ones = [1] * (len(LENGTHS) + 1)
    # Windows of at most a split are walked by one program; here some are longer, and some are not.
    out = run(pages, shape, query, rows_of(pages, ones, len(ones), [*LENGTHS, 0], shape.window), split=16)
    assert out[-1].isnan().all(), "a padding row was written"
    for row, length in enumerate(LENGTHS):
        want = plain_attention(
            query[row : row + 1], pages.keys[row], pages.values[row], length - 1, shape, pages.sinks
        )
        torch.testing.assert_close(out[row].double(), want[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_a_step_of_decode_rows_and_chunks(shape: Shape, dtype: torch.dtype) -> None:
    first_queries = [length - chunk for length, chunk in zip(LENGTHS, CHUNKS, strict=True)]
    pages = Pages(shape, dtype, first_queries)
    query = torch.randn(sum(CHUNKS) + 3, shape.heads, shape.dim).to(DEVICE, dtype)
    out = run(pages, shape, query, rows_of(pages, [*CHUNKS, 0], 1, [*LENGTHS, 0], shape.window))
    assert out[sum(CHUNKS) :].isnan().all(), "padding behind the last row was written"
    start = 0
    for row, chunk in enumerate(CHUNKS):
        part = slice(start, start + chunk)
        start += chunk
        want = plain_attention(
            query[part], pages.keys[row], pages.values[row], first_queries[row], shape, pages.sinks
        )
        torch.testing.assert_close(out[part].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "dtype"), CASES if DEVICE == "cuda" else CASES[:2], ids=str)
def test_a_querys_bits_do_not_depend_on_company_or_chunks(shape: Shape, dtype: torch.dtype) -> None:
    row, length = 3, LENGTHS[3]
    chunk = 40 if DEVICE == "cuda" else 9
    pages = Pages(shape, dtype, [length - chunk for length in [40, 40, 70, 129]])
    query = torch.randn(chunk, shape.heads, shape.dim).to(DEVICE, dtype)
    whole = attention.PagedRows(
        pages.tables[row : row + 1],
        pages.first[row : row + 1],
        ints([length]),
        ints([0, chunk]),
        0,
        length,
        shape.window,
    )
    expected = run(pages, shape, query, whole, split=32)
    # The same queries in two chunks, and each alone as a decode row of one batch.
    cut = attention.PagedRows(
        pages.tables[row].expand(2, -1), pages.first[row].repeat(2), ints([length - chunk + 5, length]),
        ints([0, 5, chunk]),
        0, length, shape.window,
    )  # fmt: skip
    assert torch.equal(run(pages, shape, query, cut, split=32), expected)
    alone = attention.PagedRows(
        pages.tables[row].expand(chunk, -1), pages.first[row].repeat(chunk),
        torch.arange(length - chunk + 1, length + 1, dtype=torch.int32, device=DEVICE),
        torch.arange(chunk + 1, dtype=torch.int32, device=DEVICE), chunk, 3 * length, shape.window,
    )  # fmt: skip
    assert torch.equal(run(pages, shape, query, alone, split=32), expected)


def test_fp8_pages_stay_within_their_error() -> None:
    torch.manual_seed(5)
    heads, kv_heads, dim, page_tokens, length = 4, 2, 32, 8, 45
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    key, value = (torch.randn(length, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    store = torch.zeros(9, 2, page_tokens, kv_heads, dim, dtype=torch.uint8, device=DEVICE)
    store.fill_(0x7F)  # NaN in e4m3: what was not written must not be read
    packed = store.view(torch.float8_e4m3fn)
    scales = torch.full((9, 2, page_tokens, kv_heads), math.nan, device=DEVICE)
    number = torch.tensor([4, 0, 7, 2, 8, 1], device=DEVICE)
    token = torch.arange(length, device=DEVICE)
    page, offset = number[token // page_tokens], token % page_tokens
    twin = store.clone().view(torch.float8_e4m3fn), scales.clone()
    on_gpu.write_kv(key, value, packed[:, 0], packed[:, 1], page, offset, scales[:, 0], scales[:, 1])
    for rows, which in ((key, 0), (value, 1)):
        reference.write_scaled(rows, twin[0][:, which], twin[1][:, which], page, offset)
        # The interpreter's casts to FP8 are not a GPU's: there the twin alone keeps the bound.
        written = (packed if DEVICE == "cuda" else twin[0])[:, which].view(torch.uint8)[page, offset]
        kept = written.view(packed.dtype).float() * scales[page, which, offset].unsqueeze(-1)
        allowed = rows.float().abs() * reference.FP8_RELATIVE_ERROR
        allowed += scales[page, which, offset].unsqueeze(-1) * 2.0**-10
        assert (kept - rows.float()).abs().le(allowed * 1.001).all()
    torch.testing.assert_close(scales, twin[1], equal_nan=True)
    if DEVICE == "cuda":
        steps = packed.view(torch.int8).int() - twin[0].view(torch.int8).int()
        assert steps.abs().max() <= 1, "twins differ by more than a rounding"

    query = torch.randn(5, heads, dim, device=DEVICE, dtype=dtype)
    rows = attention.PagedRows(number.view(1, -1), ints([0]), ints([length]), ints([0, 5]), 0, length, None)
    arguments = (query, packed[:, 0], packed[:, 1], rows, dim**-0.5, None)
    out, want = torch.full_like(query, math.nan), torch.full_like(query, math.nan)
    attention.paged_attention(*arguments, out, scales[:, 0], scales[:, 1])
    plain_paged_attention(*arguments, want, scales[:, 0], scales[:, 1])
    torch.testing.assert_close(out, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    exact = plain_attention(query, key, value, length - 5, Shape(heads, kv_heads, dim, 8, None, False), None)
    # Scores err by at most a 16th of |q||k| / sqrt(dim), values by a 16th: well inside a fifth here.
    assert (out.double() - exact).abs().max() < 0.2


@pytest.mark.parametrize(
    ("max_kv_len", "window", "splits"),
    [(1, None, 1), (512, None, 1), (513, None, 2), (5000, 128, 2), (100, 128, 1)],
)
def test_splits_are_cut_by_position(max_kv_len: int, window: int | None, splits: int) -> None:
    assert attention.num_decode_splits(max_kv_len, window, 512) == splits
