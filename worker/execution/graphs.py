"""Captures steps as CUDA graphs, a few sizes for all steps, and replays the one that a step fits."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial

import torch

from worker.execution.decode import DecodeSteps
from worker.execution.mixed import MixedKey, MixedSteps
from worker.execution.staging import Uploads
from worker.scheduling.step import StepPlan

log = logging.getLogger(__name__)

WARM_UPS, MIXED_WARM_UPS = 2, 1


@contextmanager
def _told(what: str, graphs: Sized) -> Iterator[None]:
    """Says what capturing took."""
    torch.cuda.synchronize()
    started_s, reserved = time.perf_counter(), torch.cuda.memory_reserved()
    yield
    torch.cuda.synchronize()
    log.info(
        "captured %d graphs of %s in %.1f s, %.2f GB for their tensors",
        len(graphs),
        what,
        time.perf_counter() - started_s,
        (torch.cuda.memory_reserved() - reserved) / 1e9,
    )


class GraphPool:
    """Where graphs are captured: they share one stream and one pool of memory, since only one of them runs at a time.
    What a graph answers lies outside of the pool."""

    def __init__(self) -> None:
        # Above the streams that steps fork: a kernel with many programs beside would else keep all others waiting until
        # the last of them has begun. Captured kernels keep their stream's priority.
        self._stream = torch.cuda.Stream(priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], warm_ups: int) -> torch.cuda.CUDAGraph:
        """A graph of what ``run`` launches. Before, it runs ``warm_ups`` times: kernels are compiled and loaded,
        libraries take their workspaces. Nothing may be in flight."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                run()
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


class DecodeGraphs:
    """Runs decode steps: captured where a graph was captured, eagerly else.

    Attributes:
        replaying: whether captured graphs are used; off, every step runs eagerly (comparisons).
        num_eager_steps: decode steps that ran without a graph.
        num_replays: those that replayed one.
    """

    def __init__(self, steps: DecodeSteps, sizes: tuple[int, ...], bounds: tuple[int, ...]) -> None:
        """``sizes`` of padded batches and ``bounds`` of padded contexts, both ascending."""
        self.replaying = True
        self.num_eager_steps = 0
        self.num_replays = 0
        self._steps = steps
        self._sizes, self._bounds = sizes, bounds
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(rows, bound) of every graph there is to be, largest first: later ones fit in the memory of the first."""
        return [(rows, bound) for rows in reversed(self._sizes) for bound in reversed(self._bounds)]

    @property
    def roomiest_keys(self) -> list[tuple[int, int]]:
        """Keys whose tensors leave room for those of all others: the largest one, and of each way to compute attention
        the one with the most rows times context, for what its pieces of a row answer grows with both."""
        most: dict[tuple[str, ...], tuple[int, int]] = {}
        for rows, bound in self.keys:
            names = self._steps.attention_names(rows, bound)
            held = most.setdefault(names, (rows, bound))
            if rows * bound > held[0] * held[1]:
                most[names] = (rows, bound)
        return list(dict.fromkeys([*self.keys[:1], *most.values()]))

    def capture(self, pool: GraphPool, keys: list[tuple[int, int]] | None = None) -> None:
        """Captures ``keys`` (None: all). Nothing may be in flight."""
        with _told("decode steps", self._graphs):
            for key in self.keys if keys is None else keys:
                self._graphs[key] = pool.capture(partial(self._steps.forward, *key), WARM_UPS)

    def _key(self, num_rows: int, longest: int) -> tuple[int, int]:
        """Padded sizes for so many rows, the longest context among them being so long."""
        rows = self._sizes[bisect_left(self._sizes, num_rows)]
        return rows, self._bounds[bisect_left(self._bounds, longest)]

    def replay(self, num_rows: int, longest: int) -> None:
        """Replays the graph of such a step over the inputs of the last one (measurements). KeyError where none was
        captured."""
        self._graphs[self._key(num_rows, longest)].replay()

    def run(self, plan: StepPlan, uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor]:
        """Carries out a plan whose rows have one token each; answers logits [plan rows, vocabulary] in activations'
        dtype, valid until the next step, and slots [plan rows]."""
        rows, bound = key = self._key(plan.num_rows, int(plan.num_computed.max()) + 1)
        slots = self._steps.fill(plan, rows, bound, uploads)
        graph = self._graphs.get(key) if self.replaying else None
        if graph is None:
            self.num_eager_steps += 1
            self._steps.forward(rows, bound)
        else:
            self.num_replays += 1
            graph.replay()
        return self._steps.logits[: plan.num_rows], slots


class MixedGraphs:
    """Runs steps with chunks: captured where a graph was captured, eagerly else.

    Attributes:
        replaying: whether captured graphs are used; off, every step runs eagerly over the same padded inputs.
        num_eager_steps: steps with chunks that ran without a graph, those too large for any included.
        num_replays: those that replayed one.
    """

    def __init__(self, steps: MixedSteps) -> None:
        self.replaying = True
        self.num_eager_steps = 0
        self.num_replays = 0
        self._steps = steps
        self._graphs: dict[MixedKey, torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[MixedKey]:
        """The sizes of every graph there is to be, largest first."""
        return self._steps.sizes.keys

    def capture(self, pool: GraphPool, keys: list[MixedKey] | None = None) -> None:
        """Captures ``keys`` (None: all). Nothing may be in flight."""
        with _told("steps with chunks", self._graphs):
            for key in self.keys if keys is None else keys:
                self._steps.rehearse(key)
                # Of every size: a context's splits, as a multiple of 16 or not, make another kernel to be compiled.
                self._graphs[key] = pool.capture(partial(self._steps.forward, key), MIXED_WARM_UPS)

    def find(self, plan: StepPlan) -> MixedKey | None:
        """The padded sizes for a plan; None where it has none, which counts as an eager step."""
        key = self._steps.sizes.find(plan)
        if key is None:
            self.num_eager_steps += 1
        return key

    def run(self, plan: StepPlan, key: MixedKey, uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor]:
        """Carries out a plan that fits ``key``; of its rows that sample, answers the hidden states of their last tokens
        [rows, H], valid until the next step, and their slots [rows]."""
        slots = self._steps.fill(plan, key, uploads)
        graph = self._graphs.get(key) if self.replaying else None
        if graph is None:
            self.num_eager_steps += 1
            self._steps.forward(key)
        else:
            self.num_replays += 1
            graph.replay()
        return self._steps.hidden[: slots.shape[0]], slots
