"""A runner whose missing experts cost what they would over a link: on a CPU host memory is read at no price."""

from __future__ import annotations

import time
from dataclasses import replace

from memory.device.residency import Lane
from worker.config import WorkerConfig
from worker.execution.runner import LaunchedPass, LaunchedStep, ModelRunner
from worker.experts.link import ExpertLink
from worker.scheduling.step import StepPlan, StepResult

OVER_THE_LINK = (Lane.TEE, Lane.IN_PLACE, Lane.PREFILL_IN_PLACE)


class LinkedRunner(ModelRunner):
    """Waits behind each step for the bytes that it read over a link of ``link_bytes_per_s``; layers of a pass wait for
    what its ring takes. A CPU's runner computes a step in ``launch``, so counters are the step's."""

    def __init__(self, config: WorkerConfig, link_bytes_per_s: float) -> None:
        super().__init__(config)
        self.link_bytes_per_s = link_bytes_per_s
        if self.pager is not None:
            self.pager.link = ExpertLink(link_bytes_per_s, 1, self.pager.host.place_bytes)
        self._read_before = 0

    def collect(self, launched: LaunchedStep) -> StepResult:
        """The result, when the link would have brought the bytes."""
        result = super().collect(launched)
        wait_s = self.link_s(self.count(*OVER_THE_LINK) - self._read_before)
        self._read_before = self.count(*OVER_THE_LINK)
        time.sleep(wait_s)
        return replace(result, seconds=result.seconds + wait_s)

    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """See :class:`ModelRunner`."""
        staged = self.count(Lane.STAGED)
        return LinkedPass(super().begin_pass(plan), self, staged)

    def count(self, *lanes: Lane) -> int:
        """Experts had in these ways so far."""
        return 0 if self.pager is None else int(self.pager.residency.counts[list(lanes)].sum())

    def link_s(self, num_experts: int) -> float:
        """The link's time for so many experts."""
        return (
            0.0 if self.pager is None else num_experts * self.pager.host.place_bytes / self.link_bytes_per_s
        )


class LinkedPass(LaunchedPass):
    """A pass whose layers are computed when their experts have come; decode steps do not wait for it."""

    def __init__(self, inner: LaunchedPass, runner: LinkedRunner, staged: int) -> None:
        """``staged``: experts that rings had brought before the pass."""
        self._inner = inner
        self._linked = runner
        self._staged = staged
        self._ready_s = time.perf_counter()

    def advance(self, seconds: float | None) -> bool:
        """A layer at a time, each behind the link; with ``seconds`` none where it is still at work."""
        deadline = None if seconds is None else time.perf_counter() + seconds
        while True:
            now_staged = self._linked.count(Lane.STAGED)
            began = max(self._ready_s, time.perf_counter() if now_staged > self._staged else 0.0)
            self._ready_s = began + self._linked.link_s(now_staged - self._staged)
            self._staged = now_staged
            left = self._ready_s - time.perf_counter()
            if left > 0 and deadline is not None:
                return False
            time.sleep(max(0.0, left))
            if self._inner.advance(0.0):
                return True
            if deadline is not None and time.perf_counter() >= deadline:
                return False

    def collect(self) -> StepResult:
        """See :class:`LaunchedPass`."""
        return self._inner.collect()
