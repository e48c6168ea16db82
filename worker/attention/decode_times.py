"""Times attention backends over decode steps of given sizes: a step's layers in a graph, as they are served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch

from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape, KvPages, PagedGeometry
from worker.attention.decode_choice import DecodeTimes

log = logging.getLogger(__name__)

SCRATCH_BYTES, LEAST_BYTES = 1 << 30, 1 << 27
"""Keys and values that a size reads at most, and what must be free for a measurement that says anything."""
REPLAY_BYTES = 4 << 30
"""A replay reads so many at most, of at least ``LEAST_LAYERS`` layers: about a millisecond."""
LEAST_LAYERS = 4
FLUSH_BYTES = 1 << 27
"""Read between replays: a step's weights leave nothing of its keys in the cache."""
REPEATS = 3


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One group of token-paged layers as its decode steps see it; ``dtype`` is that of queries."""

    shape: AttentionShape
    num_layers: int
    page_tokens: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Of one layer."""
        item = getattr(torch, self.shape.kv_dtype).itemsize
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * int(item)


@cache
def measure_decode(
    device: torch.device, group: DecodeGroup, names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[DecodeTimes, ...]:
    """Times of the backends ``names``, the first of which must run, over steps of ``sizes`` (rows, bound); without the
    sizes that too little memory is free for. The same question has one answer as long as the process lives, so that
    engines in it choose alike."""
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(SCRATCH_BYTES, free // 4)
    fitting = [
        (rows, bound) for rows, bound in sizes if rows * group.page_tokens * group.token_bytes <= num_bytes
    ]
    if num_bytes < LEAST_BYTES or not fitting:
        return ()
    with torch.inference_mode(), torch.cuda.device(device):
        scratch = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
        flushed = torch.zeros(min(FLUSH_BYTES, num_bytes) // 4, dtype=torch.int32, device=device)
        found = []
        for rows, bound in fitting:
            try:
                found.append(_times(group, names, rows, bound, scratch, flushed))
            except torch.OutOfMemoryError as error:  # no reason to serve nobody
                log.warning("decode steps of %d rows up to %d were not measured: %s", rows, bound, error)
            torch.cuda.empty_cache()  # what a graph leaves is of no use to another one
        torch.cuda.synchronize()
        del scratch, flushed
        torch.cuda.empty_cache()
    return tuple(found)


def _geometry(
    group: DecodeGroup, rows: int, bound: int, most_tokens: int, device: torch.device
) -> tuple[PagedGeometry, int, int]:
    """Rows whose contexts are a quarter of ``bound``, shorter where ``most_tokens``, a page a row at least, would not
    hold what they read; how long, and how many pages they read in all."""
    page, window = group.page_tokens, group.shape.window
    length, fitting = max(1, bound // 4), most_tokens // rows // page
    low = 0 if window is None else max(0, length - window) // page
    used = -(-length // page) - low
    if used > fitting:
        length, low, used = fitting * page, 0, fitting
    tables = torch.full((rows, -(-bound // page) + 1), -1, device=device)
    tables[:, :used] = torch.randperm(rows * used, device=device).view(rows, used)
    geometry = PagedGeometry(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_len=torch.full((rows,), length, dtype=torch.int32, device=device),
        tables=tables,
        first_page=torch.full((rows,), low, dtype=torch.int32, device=device),
        page_tokens=page,
        max_query_len=1,
        max_kv_len=bound,
        num_decode_rows=rows,
    )
    return geometry, length, rows * used


def _layers(group: DecodeGroup, scratch: torch.Tensor, num_pages: int) -> list[KvPages]:
    """Pages of so many layers as a replay reads, in ``scratch`` as in an arena: a page holds all of its layers."""
    shape, page = group.shape, group.page_tokens
    layer_bytes = num_pages * page * group.token_bytes
    fitting = scratch.nbytes // layer_bytes
    count = min(group.num_layers, max(LEAST_LAYERS, REPLAY_BYTES // layer_bytes))
    distinct = max(1, min(count, fitting))
    values = scratch.view(getattr(torch, shape.kv_dtype))
    values = values[: distinct * layer_bytes // values.itemsize]
    held = values.view(num_pages, 2 * distinct, page, shape.num_kv_heads, shape.head_dim)
    scales = (
        torch.ones(held.shape[0], *held.shape[2:4], device=scratch.device) if values.itemsize == 1 else None
    )
    known = [
        KvPages(held[:, layer], held[:, layer + 1], scales, scales) for layer in range(0, 2 * distinct, 2)
    ]
    return [known[number % distinct] for number in range(count)]


def _times(
    group: DecodeGroup,
    names: tuple[str, ...],
    rows: int,
    bound: int,
    scratch: torch.Tensor,
    flushed: torch.Tensor,
) -> DecodeTimes:
    device, shape = scratch.device, group.shape
    geometry, length, num_pages = _geometry(group, rows, bound, scratch.nbytes // group.token_bytes, device)
    layers = _layers(group, scratch, num_pages)
    dtype = getattr(torch, group.dtype)
    query = torch.randn(rows, shape.num_heads, shape.head_dim, device=device).to(dtype)
    out = torch.empty_like(query)
    sinks = torch.zeros(shape.num_heads, dtype=dtype, device=device) if shape.has_sinks else None

    def steps(backend: AttentionBackend, count: int) -> None:
        plan = backend.plan(geometry, shape)
        for pages in layers[:count]:
            backend.run(plan, query, pages, sinks, out)

    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name in names:
        backend: AttentionBackend = BACKENDS.load(name)()
        try:
            steps(backend, 1)  # compiled and loaded
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # while a graph is captured nothing that is kept can be given back
            graphs[name] = _captured(partial(steps, backend, len(layers)))
        except Exception as error:
            # Kernels may not fit the device, nor what many rows of long contexts leave between two of them.
            if name == names[0]:
                raise
            log.warning("%s cannot serve decode steps of %d rows up to %d: %s", name, rows, bound, error)
    seconds = _replayed(graphs, flushed)
    whole = group.num_layers / len(layers)
    return DecodeTimes(rows, bound, length, {name: whole * found for name, found in seconds.items()})


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    # As steps are captured. Torch hands the same few streams out again: those of other priorities may be at work.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


def _replayed(graphs: dict[str, torch.cuda.CUDAGraph], flushed: torch.Tensor) -> dict[str, float]:
    """Median seconds of each graph's replays, taken in turns, so that a clock that changes does so for all."""
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(1 + REPEATS):
        for name, graph in graphs.items():
            flushed.max()  # also keeps the device busy until the replay is launched
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: median(start.elapsed_time(end) for start, end in found[1:]) / 1e3
        for name, found in marks.items()
    }
