"""Attention backends on a GPU agree with one another and with float64, and pages hold what a contiguous cache would."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.kv import write_kv
from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape, KvPages, PagedGeometry

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# (new tokens, tokens behind the step) of each row; the first rows decode.
DECODE = [(1, 1), (1, 77), (1, 640), (1, 1500)]
MIXED = [*DECODE, (5, 5), (64, 300), (129, 129), (200, 1025)]

SHAPES = {
    "qwen3": AttentionShape(32, 4, 128, 128**-0.5),
    "qwen3.5": AttentionShape(16, 4, 256, 256**-0.5),
    "gpt_oss_full": AttentionShape(64, 8, 64, 64**-0.5, has_sinks=True),
    "gpt_oss_window": AttentionShape(64, 8, 64, 64**-0.5, window=128, has_sinks=True),
    "window": AttentionShape(8, 2, 128, 128**-0.5, window=96),
    "seven_heads": AttentionShape(14, 2, 64, 0.1),
}


@dataclass(frozen=True)
class Step:
    """A step over shuffled pages between poisoned ones, and the same keys and values contiguous per row."""

    shape: AttentionShape
    geometry: PagedGeometry
    query: torch.Tensor
    pages: KvPages
    sinks: torch.Tensor | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rows: list[tuple[int, int]]

    def exact(self) -> torch.Tensor:
        """float64 attention over the contiguous rows."""
        found, start = [], 0
        for (count, length), key, value in zip(self.rows, self.keys, self.values, strict=True):
            query = self.query[start : start + count].double()
            start += count
            group = self.shape.num_heads // self.shape.num_kv_heads
            key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query, key) * self.shape.scale
            position = torch.arange(length - count, length, device=DEVICE)[:, None]
            token = torch.arange(length, device=DEVICE)[None]
            seen = token <= position
            if self.shape.window is not None:
                seen &= token > position - self.shape.window
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                column = self.sinks.double().view(-1, 1, 1).expand(-1, count, 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[..., :length]
            found.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(found)


def make_step(
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    page_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    in_order: bool = False,
) -> Step:
    """Rows of (new tokens, tokens behind the step), keys and values random; ``in_order``: pages in a row."""
    generator = torch.Generator(device="cuda").manual_seed(11)
    heads, dim = shape.num_kv_heads, shape.head_dim
    fp8 = shape.kv_dtype == "float8_e4m3fn"
    most = max(-(-length // page_tokens) for _, length in rows)
    total = sum(-(-length // page_tokens) for _, length in rows)
    num_pages = total + 5
    # As in the arena: a page holds several layers, and the layer's view has the page's bytes as stride.
    width = page_tokens * heads * dim
    item = 1 if fp8 else dtype.itemsize
    stride = -(-3 * width * item // 128) * 128
    store = torch.full((num_pages, stride), 0xFF, dtype=torch.uint8, device=DEVICE)
    held = torch.float8_e4m3fn if fp8 else dtype
    key_pages, value_pages = (
        store[:, part * width * item : (part + 1) * width * item]
        .view(held)
        .view(num_pages, page_tokens, heads, dim)
        for part in (0, 2)
    )
    scales = torch.full((2, num_pages, page_tokens, heads), math.nan, device=DEVICE) if fp8 else None
    numbers = torch.arange(num_pages) if in_order else torch.randperm(num_pages, generator=None)
    tables = torch.full((len(rows), most), -1, dtype=torch.int64)
    first_page = torch.zeros(len(rows), dtype=torch.int32)
    keys, values, taken = [], [], 0
    for row, (count, length) in enumerate(rows):
        key, value = (
            torch.randn(length, heads, dim, device=DEVICE, generator=generator).to(dtype) for _ in range(2)
        )
        keys.append(key)
        values.append(value)
        low = 0 if shape.window is None else max(0, length - count - shape.window + 1) // page_tokens
        first_page[row] = low
        used = -(-length // page_tokens) - low
        tables[row, :used] = numbers[taken : taken + used]
        taken += used
        token = torch.arange(low * page_tokens, length, device=DEVICE)
        page = tables[row].to(DEVICE)[token // page_tokens - low]
        write_kv(
            key[token],
            value[token],
            key_pages,
            value_pages,
            page,
            token % page_tokens,
            None if scales is None else scales[0],
            None if scales is None else scales[1],
        )
    counts = torch.tensor([count for count, _ in rows])
    geometry = PagedGeometry(
        query_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(DEVICE, torch.int32),
        kv_len=torch.tensor([length for _, length in rows], dtype=torch.int32, device=DEVICE),
        tables=tables.to(DEVICE),
        first_page=first_page.to(DEVICE),
        page_tokens=page_tokens,
        max_query_len=int(counts.max()),
        max_kv_len=max(length for _, length in rows) + 300,
        num_decode_rows=sum(1 for count, _ in rows if count == 1),
    )
    query = torch.randn(int(counts.sum()), shape.num_heads, dim, device=DEVICE, generator=generator).to(dtype)
    sinks = (
        torch.randn(shape.num_heads, device=DEVICE, generator=generator).to(dtype)
        if shape.has_sinks
        else None
    )
    pages = KvPages(
        key_pages,
        value_pages,
        None if scales is None else scales[0],
        None if scales is None else scales[1],
    )
    return Step(shape, geometry, query, pages, sinks, keys, values, rows)


def attend(name: str, step: Step) -> torch.Tensor:
    backend = backend_for(name, step.shape)
    out = torch.full_like(step.query, math.nan)
    return backend.run(backend.plan(step.geometry, step.shape), step.query, step.pages, step.sinks, out)


def backend_for(name: str, shape: AttentionShape) -> AttentionBackend:
    backend: AttentionBackend = BACKENDS.load(name)()
    if (reason := backend.unusable_reason(shape, DEVICE)) is not None:
        pytest.skip(f"{name} is not usable: {reason}")
    return backend


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["flash", "triton", "triton_few", "torch"])
def test_each_backend_is_as_exact_as_bfloat16(
    name: str,
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    record_property: Callable[[str, object], None],
) -> None:
    step = make_step(shape, rows, 32)
    found = error(attend(name, step), step.exact())
    sizes = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, window {shape.window}"
    record_property("figure", f"attention {name}, {sizes}, {len(rows)} rows: relative error {found:.1e}")
    assert found < 4e-3


@pytest.mark.parametrize("name", ["triton", "triton_few", "torch"])
def test_float32(name: str) -> None:
    shape = AttentionShape(6, 2, 64, 0.125, window=200, has_sinks=True, kv_dtype="float32")
    step = make_step(shape, MIXED, 16, torch.float32)
    assert error(attend(name, step), step.exact()) < 1e-5


@pytest.mark.parametrize("shape", [SHAPES["qwen3"], SHAPES["gpt_oss_window"]], ids=["full", "window"])
@pytest.mark.parametrize("name", ["flash", "triton", "triton_few", "torch"])
def test_shuffled_pages_equal_pages_in_order_bit_for_bit(
    name: str, shape: AttentionShape, record_property: Callable[[str, object], None]
) -> None:
    paged, contiguous = make_step(shape, MIXED, 16), make_step(shape, MIXED, 16, in_order=True)
    assert torch.equal(paged.query, contiguous.query)
    assert torch.equal(attend(name, paged), attend(name, contiguous))
    record_property("figure", f"attention {name}, window {shape.window}: paged equals contiguous bit for bit")


@pytest.mark.parametrize("name", ["triton", "triton_few", "torch"])
def test_fp8_pages_stay_within_their_error(name: str, record_property: Callable[[str, object], None]) -> None:
    shape = AttentionShape(32, 4, 128, 128**-0.5, kv_dtype="float8_e4m3fn")
    step = make_step(shape, MIXED, 32)
    exact = step.exact()
    # Keys and values are off by 2^-4 at most and by a third of that on average; softmax averages it further.
    found = error(attend(name, step), exact)
    record_property("figure", f"attention {name}, FP8 keys and values: relative error {found:.1e}")
    assert 1e-3 < found < 4e-2


@pytest.mark.parametrize("shape", [SHAPES["qwen3"], SHAPES["gpt_oss_window"]], ids=["full", "window"])
@pytest.mark.parametrize("name", ["flash", "triton", "triton_few"])
def test_a_graph_reads_its_tables_anew(name: str, shape: AttentionShape) -> None:
    backend = backend_for(name, shape)
    first = make_step(shape, DECODE, 32)
    second = make_step(shape, [(1, 900), (1, 3), (1, 130), (1, 64)], 32)
    width = max(first.geometry.tables.shape[1], second.geometry.tables.shape[1]) + 3
    rows = len(DECODE) + 2  # and padding
    tables = torch.full((rows, width), -1, dtype=torch.int64, device=DEVICE)
    kv_len, first_page = (torch.zeros(rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
    start = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    geometry = PagedGeometry(start, kv_len, tables, first_page, 32, 1, 4096, rows)
    query = torch.zeros(rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(query)

    def fill(step: Step) -> None:
        tables.fill_(-1)
        tables[: len(DECODE), : step.geometry.tables.shape[1]] = step.geometry.tables
        kv_len[: len(DECODE)] = step.geometry.kv_len
        first_page[: len(DECODE)] = step.geometry.first_page
        query[: len(DECODE)] = step.query
        out.fill_(math.nan)

    for step in (first, second):
        fill(step)

        def work(step: Step = step) -> None:
            backend.run(backend.plan(geometry, shape), query, step.pages, step.sinks, out)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captured over other contents than it is replayed with.
        fill(second if step is first else first)
        with torch.cuda.graph(graph):
            work()
        fill(step)
        graph.replay()
        assert error(out[: len(DECODE)], step.exact()) < 4e-3


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gpt_oss_window"])
def test_a_querys_bits_depend_on_nothing_beside_it(name: str) -> None:
    shape = SHAPES[name]
    step = make_step(shape, [(300, 700)], 16)
    expected = attend("triton", step)
    backend = backend_for("triton", shape)
    for cut in (1, 64, 299):
        rows = [(300 - cut, 700 - cut), (cut, 700)] if cut > 1 else [(1, 401 + i) for i in range(300)]
        counts = torch.tensor([count for count, _ in rows])
        geometry = PagedGeometry(
            query_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(
                DEVICE, torch.int32
            ),
            kv_len=torch.tensor([length for _, length in rows], dtype=torch.int32, device=DEVICE),
            tables=step.geometry.tables.repeat(len(rows), 1),
            first_page=step.geometry.first_page.repeat(len(rows)),
            page_tokens=16,
            max_query_len=int(counts.max()),
            max_kv_len=700 + cut,
            num_decode_rows=len(rows) if cut == 1 else 0,
        )
        out = torch.full_like(step.query, math.nan)
        backend.run(backend.plan(geometry, shape), step.query, step.pages, step.sinks, out)
        assert torch.equal(out, expected), cut


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_pages_past_two_billion_elements(name: str) -> None:
    shape, page_tokens = AttentionShape(4, 1, 128, 0.1), 64
    backend = backend_for(name, shape)
    num_pages = (1 << 31) // (page_tokens * 128) + 8
    pages = torch.full((num_pages, page_tokens, 1, 128), math.nan, dtype=torch.bfloat16, device=DEVICE)
    key = torch.randn(100, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    tables = torch.tensor([[num_pages - 2, 1]], device=DEVICE)
    token = torch.arange(100, device=DEVICE)
    write_kv(key, key, pages, pages, tables[0][token // page_tokens], token % page_tokens)
    geometry = PagedGeometry(
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([100], dtype=torch.int32, device=DEVICE),
        tables,
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        page_tokens,
        1,
        100,
        1,
    )
    query = torch.randn(1, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full_like(query, math.nan)
    backend.run(backend.plan(geometry, shape), query, KvPages(pages, pages), None, out)
    step = Step(shape, geometry, query, KvPages(pages, pages), None, [key], [key], [(1, 100)])
    assert error(out, step.exact()) < 4e-3
