"""A runner whose steps, passes and commands a :class:`StepWatch` is told of."""

from __future__ import annotations

from benchmarks.elasticity.watch import StepWatch
from worker.config import WorkerConfig
from worker.execution.runner import LaunchedPass, ModelRunner
from worker.models.base import ExpertFactory
from worker.scheduling.step import StepPlan


class WatchedRunner(ModelRunner):
    """Where experts are paged there is a watch, until the runner is closed. Who inherits tells it of launched steps."""

    def __init__(self, config: WorkerConfig, experts: ExpertFactory | None = None) -> None:
        super().__init__(config, experts)
        self.watch = None if self.pager is None else StepWatch(self.pager.host.place_bytes)

    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """See :class:`ModelRunner`."""
        begun = super().begin_pass(plan)
        if self.watch is not None:
            self.watch.begin_pass(plan)
        return begun

    def _apply(self, plan: StepPlan) -> None:
        if self.watch is None:
            super()._apply(plan)
            return
        with self.watch.commanding():
            super()._apply(plan)

    def close(self) -> None:
        """See :class:`ModelRunner`."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        super().close()
