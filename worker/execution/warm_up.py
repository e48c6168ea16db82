"""Runs the largest steps over a small arena before the real one exists: compiles kernels and measures memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from memory.api import PAGE_ALIGN_BYTES, PageKind, PageSpec, StepCommands
from memory.device.arena import page_anchor
from worker.api import SamplingParams
from worker.errors import ConfigError
from worker.scheduling.step import GroupTables, IntArray, StartedRow, StepPlan

if TYPE_CHECKING:
    from worker.execution.mixed import MixedKey
    from worker.execution.runner import ModelRunner

log = logging.getLogger(__name__)

MARGIN_BYTES = 512 << 20
"""Left free beside what was measured: fragments of the allocator, and what other libraries take late."""
LEAST_BYTES = 1 << 22
SAMPLED = SamplingParams(
    max_tokens=4, temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.1, logprobs=20, seed=1
)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def measure_arena_bytes(runner: ModelRunner) -> int:
    """Bytes that are free when the largest prefill, the largest decode step with every sampling rule, and all captured
    graphs have their memory. ConfigError where nothing is left."""
    device = torch.device(runner.model_info.device)
    _collect_garbage()
    before, _ = torch.cuda.mem_get_info(device)
    pages = SmallArena(runner.page_specs, runner.largest_chunk)
    runner.attach_memory(runner.page_specs, pages.num_bytes, with_host_tier=False)
    run_largest_steps(runner, pages)
    torch.cuda.synchronize(device)
    _collect_garbage()  # what compiling and tuning kernels took is not needed again
    run_largest_steps(runner, pages)
    torch.cuda.synchronize(device)
    graphs_bytes = _capture_bytes(runner, device)
    after, _ = torch.cuda.mem_get_info(device)
    used = before - after - pages.num_bytes + graphs_bytes
    runner.detach_memory()
    _collect_garbage()
    free, total = torch.cuda.mem_get_info(device)
    arena_bytes = (free - used - MARGIN_BYTES) // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
    log.info(
        "device memory: %.2f GB in all, %.2f GB free behind the model, %.2f GB for the largest steps and graphs,"
        " %.2f GB for the arena",
        total / 1e9,
        before / 1e9,
        used / 1e9,
        arena_bytes / 1e9,
    )
    if arena_bytes < LEAST_BYTES:
        raise ConfigError(
            [
                f"the model and its largest step leave {free - used} bytes of the device for the arena; a smaller"
                " max_step_tokens or max_running, or experts=paged, would leave more"
            ]
        )
    return arena_bytes


def _collect_garbage() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _capture_bytes(runner: ModelRunner, device: torch.device) -> int:
    """Bytes of the graphs that are still to come, when those with the largest tensors and the smallest of each kind are
    captured: the smallest finds its tensors' room taken already, so what it costs is a graph itself."""
    if runner.graphs is None or runner.mixed is None:
        return 0
    decode, mixed = runner.graphs.keys, runner.mixed.keys
    roomiest = runner.graphs.roomiest_keys
    runner.capture_graphs(roomiest, mixed[:1])
    decode_bytes = _bytes_each(runner, device, decode[-1:], [])
    mixed_bytes = _bytes_each(runner, device, [], mixed[-1:])
    return decode_bytes * max(0, len(decode) - len(roomiest) - 1) + mixed_bytes * max(0, len(mixed) - 2)


def _bytes_each(
    runner: ModelRunner, device: torch.device, decode: list[tuple[int, int]], mixed: list[MixedKey]
) -> int:
    before, _ = torch.cuda.mem_get_info(device)
    runner.capture_graphs(decode, mixed)
    after, _ = torch.cuda.mem_get_info(device)
    return max(0, before - after)


class SmallArena:
    """An arena of a few pages, each group's in bytes of its own: a chunk's, and one page for all other rows."""

    def __init__(self, specs: Sequence[PageSpec], max_step_tokens: int) -> None:
        self._specs = [spec for spec in specs if spec.kind is not PageKind.EXPERT]
        self._counts = {spec.name: self._num_pages(spec, max_step_tokens) for spec in self._specs}
        sizes = [(self._counts[spec.name] + 1) * spec.page_bytes for spec in self._specs]
        places = sum(spec.page_bytes for spec in specs if spec.kind is PageKind.EXPERT)
        self.num_bytes = -(-(sum(sizes) + places) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        self._first: dict[str, int] = {}
        start = 0
        for spec, size in zip(self._specs, sizes, strict=True):
            anchor = page_anchor(spec, self.num_bytes)
            self._first[spec.name] = -(-(start - anchor) // spec.page_bytes) if start > anchor else 0
            start += size

    def _num_pages(self, spec: PageSpec, tokens: int) -> int:
        return 2 if spec.kind is PageKind.STATE else 1 + -(-tokens // spec.page_tokens)

    def tables(self, num_rows: int, has_chunk: bool) -> dict[str, GroupTables]:
        """Tables of rows that share one page, but for a last row with the chunk's pages."""
        found = {}
        for spec in self._specs:
            count, first = self._counts[spec.name], self._first[spec.name]
            table = np.full((num_rows, 1 if spec.kind is PageKind.STATE else count - 1), -1, dtype=np.int64)
            table[:, 0] = first
            if has_chunk:
                table[-1] = np.arange(first + 1, first + count)
            found[spec.name] = GroupTables(table, np.zeros(num_rows, dtype=np.int64))
        return found


def run_largest_steps(runner: ModelRunner, pages: SmallArena) -> None:
    """A chunk beside decode rows, a chunk alone, and decode rows alone, with every sampling rule and greedily."""
    most, rows = runner.largest_chunk, runner.config.max_running
    beside = min(rows, most) - 1
    vocab_size = runner.model_info.vocab_size
    lengths = [[1] * beside + [most - beside], [most], [1] * min(rows, most)]
    number = 0
    for sampling in (SAMPLED, GREEDY):
        for query_len in lengths:
            plan = _plan(number, np.array(query_len, dtype=np.int64), pages, sampling, vocab_size)
            runner.run(plan)
            number += 1


def _plan(
    step: int, query_len: IntArray, pages: SmallArena, sampling: SamplingParams, vocab_size: int
) -> StepPlan:
    rows = len(query_len)
    token_ids = np.arange(int(query_len.sum()), dtype=np.int64) % vocab_size
    starts = np.cumsum(query_len) - query_len
    started = [
        StartedRow(
            row,
            row,
            sampling,
            row,
            tuple(token_ids[starts[row] : starts[row] + query_len[row]].tolist()),
            int(query_len[row]),
        )
        for row in range(rows)
    ]
    return StepPlan(
        step=step,
        requests=np.arange(rows, dtype=np.int64),
        slots=np.arange(rows, dtype=np.int64),
        query_len=query_len,
        num_computed=np.zeros(rows, dtype=np.int64),
        token_ids=token_ids,
        samples=np.ones(rows, dtype=np.bool_),
        num_decode_rows=int((query_len == 1).sum()),
        groups=pages.tables(rows, bool(query_len[-1] > 1)),
        commands=StepCommands(step),
        started=tuple(started),
    )
