"""A fake device on which prefill passes take turns: pages are written and read when the last one is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memory.api import PageSpec
from tests.helpers.fake_runner import FakeRunner
from worker.scheduling.step import StepPlan, StepResult

RING_BYTE = 0xA5


class FakePass:
    """Physical pages are looked up when it begins, and used when it ends: what moves or is given away meanwhile shows
    in the tokens. Its ring must hold what was put there."""

    def __init__(self, runner: PassRunner, plan: StepPlan, num_slices: int) -> None:
        self._runner = runner
        self._plan = plan
        self.num_left = num_slices
        self._tables = {name: table.copy() for name, table in runner.tables.items()}
        self.budgets: list[float | None] = []
        self._result: StepResult | None = None
        self._ring = runner.places(plan.ring)
        self._ring[:] = RING_BYTE

    def advance(self, seconds: float | None) -> bool:
        """A slice; all of them without a budget."""
        self.budgets.append(seconds)
        self.num_left = 0 if seconds is None else self.num_left - 1
        if self.num_left > 0:
            return False
        assert (self._ring == RING_BYTE).all(), "somebody wrote into the ring of a pass under way"
        self._result = self._runner.compute(self._plan, self._tables)
        return True

    def collect(self) -> StepResult:
        """Its tokens."""
        assert self._result is not None, "collected too early"
        return self._result


class PassRunner(FakeRunner):
    """A :class:`FakeRunner` that knows passes of ``num_slices`` slices each.

    Attributes:
        begun: every pass.
        beside: for each pass, the decode rows of the steps that ran before it ended.
    """

    def __init__(self, specs: Sequence[PageSpec], num_slices: int = 3) -> None:
        super().__init__(specs)
        self.begun: list[FakePass] = []
        self.beside: list[list[int]] = []
        self._num_slices = num_slices

    def begin_pass(self, plan: StepPlan) -> FakePass:
        """Takes the plan's memory commands in; nothing is computed."""
        assert plan.staged
        assert plan.num_rows
        if self.keep_plans:
            self.plans.append(plan)
        self.obey(plan.commands)
        self.begun.append(FakePass(self, plan, self._num_slices))
        self.beside.append([])
        return self.begun[-1]

    def launch(self, plan: StepPlan) -> StepResult:
        """See :class:`FakeRunner`."""
        assert not plan.staged, "a pass was launched as a step"
        if self.beside:
            self.beside[-1].append(plan.num_rows)
        return super().launch(plan)

    def places(self, ring: object) -> np.ndarray:
        """The bytes of a ring."""
        first, last = (ring.first, ring.last) if ring is not None else (0, 0)  # type: ignore[attr-defined]
        return self.buffer[first * self.place_bytes : last * self.place_bytes]
