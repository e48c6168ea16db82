"""Measures attention backends on a GPU: decode as a share of copy bandwidth, prefill in TFLOP/s.

    python -m benchmarks.attention_kernels [--json FILE]

One layer of the Qwen3-30B-A3B shape (32 query heads, 4 key heads of 128) over shuffled pages of 64 tokens, random keys
and values. Decode: bytes of the keys and values read over time, replays of one captured graph of several layers' worth
of pages, so that no layer finds its keys in the cache. Prefill: one chunk at the end of its context.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu_engine import copy_bytes_per_s, median_s
from benchmarks.report import NOT_APPLICABLE, Conditions, Report, Value, publish, report_parser
from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape, KvPages, PagedGeometry

SHAPE = AttentionShape(32, 4, 128, 128**-0.5)
PAGE_TOKENS = 64
LAYERS = 8
DECODE = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (64, 4096))
PREFILL = ((2048, 2048), (2048, 16384))


def _geometry(counts: list[int], length: int) -> PagedGeometry:
    rows, used = len(counts), -(-length // PAGE_TOKENS)
    starts = [sum(counts[:row]) for row in range(rows + 1)]
    return PagedGeometry(
        query_start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        kv_len=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        tables=torch.randperm(rows * used, device="cuda").view(rows, used),
        first_page=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        page_tokens=PAGE_TOKENS,
        max_query_len=max(counts),
        max_kv_len=length,
        num_decode_rows=rows if max(counts) == 1 else 0,
    )


def _layers(num_pages: int, fp8: bool) -> list[KvPages]:
    """Pages of random keys and values, several layers in each."""
    store = torch.randn(num_pages, 2 * LAYERS, PAGE_TOKENS, 4, 128, device="cuda", dtype=torch.bfloat16)
    if not fp8:
        return [KvPages(store[:, 2 * layer], store[:, 2 * layer + 1]) for layer in range(LAYERS)]
    packed = store.mul_(50).to(torch.float8_e4m3fn)
    scales = torch.full(store.shape[:-1], 0.02, device="cuda")
    return [
        KvPages(packed[:, first], packed[:, first + 1], scales[:, first], scales[:, first + 1])
        for first in range(0, 2 * LAYERS, 2)
    ]


def measure(backend: AttentionBackend, counts: list[int], length: int, fp8: bool = False) -> float:
    """Seconds of one layer."""
    geometry = _geometry(counts, length)
    held = _layers(geometry.tables.numel(), fp8)
    query = torch.randn(sum(counts), 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def layers() -> None:
        plan = backend.plan(geometry, SHAPE)
        for pages in held:
            backend.run(plan, query, pages, None, out)

    if not backend.capturable:
        return median_s(layers, 5) / LAYERS
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return median_s(graph.replay) / LAYERS


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--backends", nargs="+", default=["flash", "triton"])
    options = parser.parse_args()
    copy = copy_bytes_per_s()
    rows: list[Mapping[str, Value]] = []
    device = torch.device("cuda")
    notes = [f"copy bandwidth {copy / 1e12:.2f} TB/s"]
    for name in options.backends:
        backend: AttentionBackend = BACKENDS.load(name)()
        if (reason := backend.unusable_reason(SHAPE, device)) is not None:
            notes.append(f"{name} is not usable: {reason}")
            continue
        for fp8 in (False, True) if name == "triton" else (False,):
            for batch, length in DECODE:
                seconds = measure(backend, [1] * batch, length, fp8)
                bytes_per_head = 128 + 4 if fp8 else 256
                rate = batch * length * 2 * 4 * bytes_per_head / seconds
                case = f"{name}{'.fp8' if fp8 else ''}.decode.b{batch}.{length}"
                rows.append({"case": case, "us": 1e6 * seconds, "share": rate / copy})
        for count, length in PREFILL:
            seconds = measure(backend, [count], length)
            pairs = count * (length - count) + count * (count + 1) / 2
            rows.append(
                {
                    "case": f"{name}.prefill.{count}_of_{length}",
                    "us": 1e6 * seconds,
                    "tflops": 4 * pairs * 32 * 128 / seconds / 1e12,
                }
            )
    conditions = Conditions(
        model="one attention layer of the Qwen3-30B-A3B shape, bfloat16 pages of 64 tokens",
        weights="random",
        prompts="random keys and values, shuffled pages",
        cache=f"{LAYERS} layers in turn",
        batch=", ".join(str(batch) for batch, _ in DECODE),
        context=", ".join(str(length) for _, length in DECODE),
        resident=NOT_APPLICABLE,
    )
    publish(Report("attention_kernels", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
