"""The whole engine step on one page: what is decided, what runs, and when memory is told.

A step's life, from the top:

    ledger.begin_step   pages whose last reader has finished are free again; moves may be planned
    scheduler.schedule  who computes how many tokens, who is admitted, who is sent back -> StepPlan
    ledger.commit_step  what memory must do ahead of the step; from here on the step reads the pages in its plan
    runner.launch       the device has its work; on a CPU this computes
    runner.collect      waits for the step's tokens -> StepResult
    scheduler.apply     tokens are appended, stops checked, ended requests released -> TokenEvents
    ledger.end_step     the result is in the books

Lock-step, a turn does all of it for one step. With overlap the host is one step ahead of the device: a turn launches
step n + 1 while step n runs, then collects and applies step n. A row whose last token is still on the device then has
-1 for it in the plan, and what only the host can see (an abort, a retraction, a stop) takes effect one step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from memory.api import Ledger, StepCommands
from worker.api import TokenEvent
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import StepPlan, StepResult

STREAMS_PACE = 2.75
"""While a prefill pass runs beside them, streams get their tokens so many times as far apart as without it: the rest of
the time is the pass's."""


class StepRunner(Protocol):
    """The device's side of a step: ``worker.execution.runner.ModelRunner``, or a test's."""

    def launch(self, plan: StepPlan) -> Any:
        """Starts a step behind the steps launched before; answers a handle."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Waits for a launched step, in the order of launches."""
        ...


class RunningPass(Protocol):
    """A prefill pass under way."""

    def advance(self, seconds: float | None) -> bool:
        """Launches about ``seconds`` of its layers, at least one; None: all that are left. True: that was the last."""
        ...

    def collect(self) -> StepResult:
        """Waits for its end."""
        ...


class EngineLoop:
    """Turns the wheel; belongs to one thread.

    Args:
        scheduler: decides.
        ledger: the same book of pages that the scheduler asks.
        runner: computes.
        overlap: plan one step ahead of the device.
        audit: prove the ledger sound after every step (tests).
        record: told of each plan and its result.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        runner: StepRunner,
        overlap: bool = False,
        audit: bool = False,
        record: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        self.num_steps = 0
        """steps that computed something"""
        self._scheduler = scheduler
        self._ledger = ledger
        self._runner = runner
        self._overlap = overlap
        self._audit = audit
        self._record = record
        self._next_step = 0
        self._collected = self._completed = -1
        self._finished_step: Callable[[int], int] | None = getattr(runner, "finished_step", None)
        self._flying: deque[tuple[StepPlan, Any]] = deque()
        self._carries = False  # whether the last step launched moved or copied pages
        self._begin_pass: Callable[[StepPlan], RunningPass] | None = getattr(runner, "begin_pass", None)
        self._pass: tuple[StepPlan, RunningPass] | None = None
        self._decode_s = 0.0
        self._calm_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a turn can bring anything."""
        return self._scheduler.has_work or bool(self._flying) or self._pass is not None

    @property
    def is_flying(self) -> bool:
        """Whether a launched step is still to be collected: the next turn waits for the device."""
        return bool(self._flying)

    def step(self) -> list[TokenEvent]:
        """One turn; answers what it brought."""
        launched = self._launch_next()
        keep = 1 if self._overlap and launched else 0
        events: list[TokenEvent] = []
        while len(self._flying) > keep:
            events.extend(self._collect_oldest())
        events.extend(self._advance_pass(launched))
        return events

    def _launch_next(self) -> bool:
        step = self._next_step
        self._next_step += 1
        self._retire()
        self._ledger.begin_step(step, self._completed)
        plan = self._scheduler.schedule(step)
        plan = replace(plan, commands=self._ledger.commit_step(step))
        if plan.staged:
            if self._begin_pass is None:
                raise RuntimeError(f"step {step} is a prefill pass, and the runner knows none")
            self._pass = (plan, self._begin_pass(plan))
            return self._launch_next()  # while its first experts come, those who run get their next token
        self._carries = bool(plan.commands.moves or plan.commands.copies)
        needed = plan.num_rows > 0 or not _is_empty(plan.commands)
        self._flying.append((plan, self._runner.launch(plan) if needed else None))
        return plan.num_rows > 0

    def _collect_oldest(self) -> list[TokenEvent]:
        plan, handle = self._flying.popleft()
        events: list[TokenEvent] = []
        if handle is not None:
            result = self._runner.collect(handle)
            if self._record is not None:
                self._record(plan, result)
            if plan.num_rows:
                events = self._scheduler.apply(plan, result)
                self.num_steps += 1
                self._decode_s = result.seconds
                if self._pass is None and plan.num_rows == plan.num_decode_rows:
                    self._calm_s = result.seconds
        self._collected = plan.step
        self._retire()
        if self._audit:
            self._ledger.audit()
        return events

    def _advance_pass(self, beside_steps: bool) -> list[TokenEvent]:
        """Some layers of the pass in flight: for as long as running streams' pace leaves beside a decode step, which a
        pass makes longer; where none runs, all."""
        if self._pass is None:
            return []
        plan, layers = self._pass
        if not layers.advance(self._slice_s() if beside_steps else None):
            return []
        self._pass = None
        result = layers.collect()
        if self._record is not None:
            self._record(plan, result)
        self.num_steps += 1
        events = self._scheduler.apply(plan, result)
        if self._audit:
            self._ledger.audit()
        return events

    def _slice_s(self) -> float:
        """What a pass may take until the next step. Undisturbed steps are known from before passes; where these follow
        each other rows come and experts go meanwhile, and no step beside a pass takes less than half as long without
        it: they share the link, and little else."""
        calm_s = min(self._calm_s or self._decode_s, self._decode_s)
        return max(0.0, STREAMS_PACE * max(calm_s, self._decode_s / 2) - self._decode_s)

    def _retire(self) -> None:
        """Tells the ledger of steps that are done on the device, what a runner copies beside them included."""
        done = self._collected if self._finished_step is None else self._finished_step(self._collected)
        if done > self._completed:
            self._completed = done
            self._ledger.end_step(done)

    def settle(self, most_steps: int = 16) -> None:
        """Nobody has work: lets memory finish what it was about (frees of the last step, moves, copies to the host)."""
        for _ in range(most_steps):
            before = self._ledger.headroom()
            self.step()
            if self._ledger.headroom() == before and not self._carries:
                break


def _is_empty(commands: StepCommands) -> bool:
    return not (commands.ban or commands.moves or commands.copies or commands.table or commands.allow)
