"""Captures decode steps as CUDA graphs, a few sizes for all steps, and replays the one that a step fits."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from typing import Any

import torch

from worker.execution.decode import DecodeSteps
from worker.execution.staging import Uploads
from worker.scheduling.step import StepPlan

log = logging.getLogger(__name__)

WARM_UPS = 2


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

    def capture(self, keys: list[tuple[int, int]] | None = None) -> None:
        """Captures ``keys`` (None: all) into one pool of memory. Nothing may be in flight."""
        started_s = time.perf_counter()
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        for key in self.keys if keys is None else keys:
            self._graphs[key] = self._capture(key, stream, pool)
        torch.cuda.synchronize()
        log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - started_s)

    def _capture(self, key: tuple[int, int], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # kernels are compiled and loaded, libraries take their workspaces
                self._steps.forward(*key)
            stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._steps.forward(*key)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def _key(self, num_rows: int, longest: int) -> tuple[int, int]:
        """Padded sizes for so many rows, the longest context among them being so long."""
        rows = self._sizes[bisect_left(self._sizes, num_rows)]
        return rows, self._bounds[bisect_left(self._bounds, longest)]

    def replay(self, num_rows: int, longest: int) -> None:
        """Replays the graph of such a step over the inputs of the last one (measurements). KeyError where none was
        captured."""
        self._graphs[self._key(num_rows, longest)].replay()

    def run(self, plan: StepPlan, uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor]:
        """Carries out a plan whose rows have one token each; answers logits [plan rows, vocabulary] float32, valid
        until the next step, and slots [plan rows]."""
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
