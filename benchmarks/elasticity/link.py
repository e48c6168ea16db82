"""A runner on a CPU with a clock of its own: what a step computes costs its thread's seconds, what it misses a link's.

On a CPU host memory is read at no price, and other work on the machine makes wall time worthless. So here time is the
loop thread's processor time plus what a link of a given rate would need for the experts that were not resident. Where
clients only wait for answers nothing else takes time.
"""

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
    """Counters of a step are complete when ``launch`` has returned, so ``collect`` knows what the link had to bring."""

    def __init__(self, config: WorkerConfig, link_bytes_per_s: float) -> None:
        super().__init__(config)
        if self.pager is not None:
            self.pager.link = ExpertLink(link_bytes_per_s, 1, self.pager.host.place_bytes)
        self._link_bytes_per_s = link_bytes_per_s
        self._read_before = 0
        self._now_s = 0.0
        self._thread_s: float | None = None
        self._step_began_s = 0.0

    def clock(self) -> float:
        """Seconds so far, as of the last step; from any thread."""
        return self._now_s

    def tick(self) -> float:
        """Takes in what the loop's thread has computed since the last call; from that thread."""
        now = time.thread_time()
        if self._thread_s is not None:
            self._now_s += now - self._thread_s
        self._thread_s = now
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """The clock goes on to ``at_s``."""
        self._now_s = max(self._now_s, at_s)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See :class:`ModelRunner`."""
        self._step_began_s = self.tick()
        return super().launch(plan)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """The result, when the link would have brought the bytes."""
        result = super().collect(launched)
        read = self.count(*OVER_THE_LINK)
        self.wait_until(self.tick() + self.link_s(read - self._read_before))
        self._read_before = read
        return result if launched.plan.staged else replace(result, seconds=self._now_s - self._step_began_s)

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
            0.0 if self.pager is None else num_experts * self.pager.host.place_bytes / self._link_bytes_per_s
        )


class LinkedPass(LaunchedPass):
    """A pass whose layers are computed when their experts have come; decode steps do not wait for it."""

    def __init__(self, inner: LaunchedPass, runner: LinkedRunner, staged: int) -> None:
        """``staged``: experts that rings had brought before the pass."""
        self._inner = inner
        self._linked = runner
        self._staged = staged
        self._ready_s = self._began_s = runner.tick()

    def advance(self, seconds: float | None) -> bool:
        """A layer at a time, each behind the link; with ``seconds`` none where it is still at work."""
        runner = self._linked
        began_s = runner.tick()
        while True:
            staged = runner.count(Lane.STAGED)
            if staged > self._staged:
                self._ready_s = max(self._ready_s, runner.tick()) + runner.link_s(staged - self._staged)
                self._staged = staged
            if self._ready_s > runner.tick():
                if seconds is not None:
                    return False
                runner.wait_until(self._ready_s)
            if self._inner.advance(0.0):
                return True
            if seconds is not None and runner.tick() >= began_s + seconds:
                return False

    def collect(self) -> StepResult:
        """See :class:`LaunchedPass`."""
        return replace(self._inner.collect(), seconds=self._linked.tick() - self._began_s)
