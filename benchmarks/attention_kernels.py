"""Measures attention backends on a GPU: decode steps of three models' shapes, prefill in TFLOP/s.

    python -m benchmarks.attention_kernels [--json FILE]

Random keys and values over shuffled pages. Decode: what an engine measures at start to choose by, the attention of a
step's layers in one graph behind a flushed cache; microseconds of a layer, and bytes of the keys and values read over
time as a share of copy bandwidth. Prefill: one chunk of the Qwen3-30B-A3B shape at the end of its context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.gpu_engine import copy_bytes_per_s, median_s
from benchmarks.report import NOT_APPLICABLE, Conditions, Report, Value, publish, report_parser
from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape, KvPages, PagedGeometry
from worker.attention.decode_choice import choose_decode
from worker.attention.decode_times import DecodeGroup, measure_decode

GROUPS = {
    "qwen3-30b-a3b": DecodeGroup(AttentionShape(32, 4, 128, 128**-0.5), 48, 64, "bfloat16"),
    "qwen3.5-4b": DecodeGroup(AttentionShape(16, 4, 256, 256**-0.5), 8, 64, "bfloat16"),
    "gpt-oss-20b.full": DecodeGroup(AttentionShape(64, 8, 64, 64**-0.5, has_sinks=True), 12, 64, "bfloat16"),
    "gpt-oss-20b.window": DecodeGroup(
        AttentionShape(64, 8, 64, 64**-0.5, window=128, has_sinks=True), 12, 32, "bfloat16"
    ),
}
ROWS = (1, 2, 4, 8, 16, 64)
BOUNDS = (4096, 32768)
"""Contexts are a quarter of them."""
SHAPE = GROUPS["qwen3-30b-a3b"].shape
PAGE_TOKENS = 64
LAYERS = 8
PREFILL = ((2048, 2048), (2048, 16384))


def decode_table(
    name: str, group: DecodeGroup, backends: Sequence[str], copy: float
) -> tuple[list[Mapping[str, Value]], str]:
    """Rows of one group, and which backends an engine would take. ``backends`` serve its shape."""
    sizes = tuple((rows, bound) for bound in BOUNDS for rows in ROWS)
    times = measure_decode(torch.device("cuda"), group, tuple(backends), sizes)
    found: list[Mapping[str, Value]] = []
    for entry in times:
        seen = min(entry.context, group.shape.window or entry.context)
        read = entry.rows * seen * group.token_bytes
        for backend, seconds in entry.seconds.items():
            case = f"{name}.decode.b{entry.rows}.{entry.context}.{backend}"
            layer_s = seconds / group.num_layers
            found.append({"case": case, "us": 1e6 * layer_s, "share": read / layer_s / copy})
    return found, f"{name}: {choose_decode(times, backends[0]).line()}"


def measure_prefill(backend: AttentionBackend, count: int, length: int) -> float:
    """Seconds of one layer with a chunk of ``count`` tokens at the end of ``length``."""
    used = -(-length // PAGE_TOKENS)
    geometry = PagedGeometry(
        query_start=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
        kv_len=torch.tensor([length], dtype=torch.int32, device="cuda"),
        tables=torch.randperm(used, device="cuda").view(1, used),
        first_page=torch.zeros(1, dtype=torch.int32, device="cuda"),
        page_tokens=PAGE_TOKENS,
        max_query_len=count,
        max_kv_len=length,
        num_decode_rows=0,
    )
    store = torch.randn(used, 2 * LAYERS, PAGE_TOKENS, 4, 128, device="cuda", dtype=torch.bfloat16)
    held = [KvPages(store[:, first], store[:, first + 1]) for first in range(0, 2 * LAYERS, 2)]
    query = torch.randn(count, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def layers() -> None:
        plan = backend.plan(geometry, SHAPE)
        for pages in held:
            backend.run(plan, query, pages, None, out)

    return median_s(layers, 5) / LAYERS


def prefill_table(name: str, backend: AttentionBackend) -> list[Mapping[str, Value]]:
    """Rows of one backend."""
    found: list[Mapping[str, Value]] = []
    for count, length in PREFILL:
        seconds = measure_prefill(backend, count, length)
        pairs = count * (length - count) + count * (count + 1) / 2
        case = f"{name}.prefill.{count}_of_{length}"
        found.append({"case": case, "us": 1e6 * seconds, "tflops": 4 * pairs * 32 * 128 / seconds / 1e12})
    return found


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--backends", nargs="+", default=["flash", "triton", "triton_few"])
    parser.add_argument("--no-prefill", action="store_true")
    options = parser.parse_args()
    copy = copy_bytes_per_s()
    rows: list[Mapping[str, Value]] = []
    device = torch.device("cuda")
    notes = [f"copy bandwidth {copy / 1e12:.2f} TB/s"]
    backends: dict[str, AttentionBackend] = {name: BACKENDS.load(name)() for name in options.backends}
    for name, group in GROUPS.items():
        reasons = {known: backend.unusable_reason(group.shape, device) for known, backend in backends.items()}
        notes += [f"{name}: {known} is not usable: {why}" for known, why in reasons.items() if why]
        usable = [known for known, why in reasons.items() if not why]
        if usable:
            found, line = decode_table(name, group, usable, copy)
            rows += found
            notes.append(line)
    for name, backend in backends.items():
        # For few rows of one token: its chunks are nobody's.
        if name != "triton_few" and not options.no_prefill and not backend.unusable_reason(SHAPE, device):
            rows += prefill_table(name, backend)
    conditions = Conditions(
        model="one attention layer each of four groups of Qwen3-30B-A3B, Qwen3.5-4B and GPT-OSS-20B, bfloat16 pages",
        weights="random",
        prompts="random keys and values, shuffled pages",
        cache="flushed ahead of a step's layers",
        batch=", ".join(map(str, ROWS)),
        context=", ".join(str(bound // 4) for bound in BOUNDS),
        resident=NOT_APPLICABLE,
    )
    publish(Report("attention_kernels", conditions, tuple(rows), tuple(notes)), options.json)


if __name__ == "__main__":
    main()
