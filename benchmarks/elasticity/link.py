"""A runner on a CPU with a clock of its own: what a step computes costs modelled seconds, what it misses a link's.

On a CPU host memory is read at no price, and other work on the machine makes its time worthless. So here time is what
the tokens of a step or pass cost by :class:`ComputeModel`, plus what a link of a given rate needs for the experts that
were not resident. Decode steps wait for what they miss; a pass is brought its layers' experts by what they leave of the
link. Where clients only wait for answers nothing else takes time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from benchmarks.elasticity.watched_runner import WatchedRunner
from memory.device.residency import Lane
from worker.config import WorkerConfig
from worker.execution.runner import LaunchedPass, LaunchedStep
from worker.experts.link import ExpertLink
from worker.scheduling.step import StepPlan, StepResult

OVER_THE_LINK = (Lane.TEE, Lane.IN_PLACE, Lane.PREFILL_IN_PLACE)


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Seconds of a step: so many, and so many for each token. The demonstration model's on one core of an AMD EPYC, by
    least squares over steps of 1 to 256 tokens."""

    step_s: float = 12.4e-3
    token_s: float = 0.21e-3

    def seconds(self, num_tokens: int) -> float:
        """Of a step; none where nothing is computed."""
        return self.step_s + self.token_s * num_tokens if num_tokens else 0.0


class LinkedRunner(WatchedRunner):
    """Counters of a step are complete when ``launch`` has returned, so ``collect`` knows what the link had to bring.

    Attributes:
        processor_s: of the last step's launch, as this machine took it.
    """

    def __init__(
        self, config: WorkerConfig, link_bytes_per_s: float, compute: ComputeModel = ComputeModel()
    ) -> None:
        super().__init__(config)
        if self.pager is not None:
            self.pager.link = ExpertLink(link_bytes_per_s, 1, self.pager.host.place_bytes)
        self.compute = compute
        self.processor_s = 0.0
        self._link_bytes_per_s = link_bytes_per_s
        self._read_before = 0
        self._now_s = 0.0
        self._step_began_s = 0.0
        self._pass: LinkedPass | None = None

    def clock(self) -> float:
        """Seconds so far, as of the last step; from any thread."""
        return self._now_s

    def spend(self, seconds: float) -> None:
        """The clock goes on by so much."""
        self._now_s += seconds

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See :class:`ModelRunner`."""
        self._step_began_s = self._now_s
        began_s, host_s = time.thread_time(), time.perf_counter()
        launched = super().launch(plan)
        self.processor_s = time.thread_time() - began_s
        if self.watch is not None and self.pager is not None:
            self.watch.launched(plan, self.pager.residency.counts, host_s, captured=False)
        self.spend(self.compute.seconds(plan.num_tokens))
        return launched

    def collect(self, launched: LaunchedStep) -> StepResult:
        """The result, when the link would have brought the bytes."""
        result = super().collect(launched)
        read = self.count(*OVER_THE_LINK)
        link_s, self._read_before = self.link_s(read - self._read_before), read
        self.spend(link_s)
        if self._pass is not None:
            self._pass.postpone(link_s)
        return result if launched.plan.staged else replace(result, seconds=self._now_s - self._step_began_s)

    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """See :class:`ModelRunner`."""
        staged = self.staged_by_layer()
        layer_s = self.compute.seconds(plan.num_tokens) / self._model.decoder.num_layers
        self._pass = LinkedPass(super().begin_pass(plan), self, staged, layer_s)
        return self._pass

    def staged_by_layer(self) -> list[int]:
        """Experts that rings have brought so far."""
        assert self.pager is not None
        found: list[int] = self.pager.residency.counts[Lane.STAGED].tolist()
        return found

    def end_linked(self) -> None:
        """The pass has the link no longer."""
        self._pass = None
        if self.watch is not None:
            self.watch.end_pass()

    def count(self, *lanes: Lane) -> int:
        """Experts had in these ways so far."""
        return 0 if self.pager is None else int(self.pager.residency.counts[list(lanes)].sum())

    def link_s(self, num_experts: int) -> float:
        """The link's time for so many experts."""
        return (
            0.0 if self.pager is None else num_experts * self.pager.host.place_bytes / self._link_bytes_per_s
        )


class LinkedPass(LaunchedPass):
    """A pass whose layers are computed when their experts have come; decode steps do not wait for it, and it waits for
    what they read over the link."""

    def __init__(self, inner: LaunchedPass, runner: LinkedRunner, staged: list[int], layer_s: float) -> None:
        """``staged``: experts per layer that rings had brought before the pass; ``layer_s``: what a layer computes."""
        self._inner = inner
        self._linked = runner
        self._staged = staged
        self._layer_s = layer_s
        self._began_s = self._free_s = runner.clock()
        self._ready_s: list[float] = []
        self._next = 0
        self._left_s = 0.0
        for _ in range(2):
            self._fill()

    def _fill(self) -> None:
        """The next layer's half of the ring is being filled from now on."""
        row = len(self._ready_s)
        if row < len(self._staged):
            missing = self._linked.staged_by_layer()[row] - self._staged[row]
            self._free_s = max(self._free_s, self._linked.clock()) + self._linked.link_s(missing)
            self._ready_s.append(self._free_s)

    def postpone(self, seconds: float) -> None:
        """Others had the link for so long."""
        now = self._linked.clock() - seconds
        self._ready_s = [at + seconds if at > now else at for at in self._ready_s]
        self._free_s = max(self._ready_s, default=self._free_s)

    def advance(self, seconds: float | None) -> bool:
        """A layer at a time, each behind the link; with ``seconds`` none where it is still at work. What a slice
        has more or less than its time is made up for by the next one."""
        runner = self._linked
        until_s = None if seconds is None else runner.clock() + seconds + self._left_s
        while True:
            ready_s = self._ready_s[min(self._next, len(self._ready_s) - 1)]
            if ready_s > runner.clock():
                if seconds is not None:
                    return False
                runner.spend(ready_s - runner.clock())
            ended = self._inner.advance(0.0)
            runner.spend(self._layer_s)
            self._next += 1
            self._fill()
            if ended:
                runner.end_linked()
            if ended or (until_s is not None and runner.clock() + self._layer_s > until_s):
                if until_s is not None:
                    self._left_s = max(-self._layer_s, until_s - runner.clock())
                return ended

    def collect(self) -> StepResult:
        """See :class:`LaunchedPass`."""
        return replace(self._inner.collect(), seconds=self._linked.clock() - self._began_s)
