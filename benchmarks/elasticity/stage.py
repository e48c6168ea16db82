"""One engine for all settings of the elastic benchmark: elastic places first, then fewer and fewer, fixed in place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.elasticity.link import LinkedRunner
from benchmarks.elasticity.phases import Clock, Driver, Phase, PhaseLog, Progress, Prompt
from benchmarks.elasticity.prefill import NUM_STREAMS, PrefillTimes, time_prefill
from benchmarks.elasticity.routing import ImposedRouting, Routing, impose
from benchmarks.elasticity.stalls import StepFacts
from memory.device.residency import Lane
from memory.ledger.ledger import ArenaLedger
from memory.ledger.market import MarketDecision
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import LaunchedPass, LaunchedStep, ModelRunner
from worker.execution.staging import fetch
from worker.experts.pager import ExpertPager
from worker.models.paged import table_experts
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepPlan, StepResult

FLUSHED_S = 0.2
WARM_TOKENS = 300


@dataclass(frozen=True)
class Setup:
    """What all runs share. ``link_bytes_per_s`` 0: the machine's own link. ``routing``: None for the model's own."""

    config: WorkerConfig
    phases: tuple[Phase, ...]
    prompt: Prompt
    link_bytes_per_s: float = 0.0
    routing: ImposedRouting | None = None


class CountingRunner(ModelRunner):
    """Counts what each step read over the link in the order of the stream, and tells imposed routing of passes."""

    def __init__(
        self, config: WorkerConfig, imposed: ImposedRouting | None, routing: Routing | None = None
    ) -> None:
        factory = None if imposed is None else impose(config, imposed, routing)
        if factory is None and config.experts == "resident":
            super().__init__(config, lambda e, source: table_experts(e, source, config.deterministic))
        else:
            super().__init__(config, factory)
        self.routing: Routing | None = None if factory is None else factory.routing
        self.reads: dict[int, torch.Tensor] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See :class:`ModelRunner`."""
        launched = super().launch(plan)
        if self.pager is not None and plan.num_rows:
            counts = self.pager.residency.counts
            # Behind the step and ahead of the next one; the copy is whole when the step's result is.
            self.reads[plan.step] = fetch(counts[Lane.TEE : Lane.IN_PLACE + 1].sum())
        return launched

    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """See :class:`ModelRunner`."""
        begun = super().begin_pass(plan)
        return begun if self.routing is None else _RoutedPass(begun, self.routing)


class _RoutedPass(LaunchedPass):
    def __init__(self, inner: LaunchedPass, routing: Routing) -> None:
        self._inner, self._routing = inner, routing

    def advance(self, seconds: float | None) -> bool:
        self._routing.passing = True
        try:
            return self._inner.advance(seconds)
        finally:
            self._routing.passing = False

    def collect(self) -> StepResult:
        return self._inner.collect()


class Recorder:
    """Told of each step: keeps what stalls and goodput are judged by, and the steps themselves where they are to be
    replayed."""

    def __init__(self, keep: bool) -> None:
        self.steps: list[RecordedStep] = []
        self.runner: ModelRunner | None = None
        self.clock: Clock = time.monotonic
        self.progress = Progress()
        self._keep = keep
        self._banned = 0
        self._decoded: list[tuple[int, float, int, torch.Tensor]] = []

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """One step."""
        if self._keep:
            self.steps.append(RecordedStep(plan, result))
        now = self.clock()
        for row in np.flatnonzero(plan.query_len > 1).tolist():
            computed, length = int(plan.num_computed[row]), int(plan.query_len[row])
            self.progress.note(int(plan.requests[row]), now - result.seconds, now, computed, length)
        self._banned += sum(entry.last - entry.first for entry in plan.commands.ban)
        if plan.num_rows and not plan.staged and plan.num_rows == plan.num_decode_rows:
            self._note_decode(plan, result)

    def _note_decode(self, plan: StepPlan, result: StepResult) -> None:
        """What was banned since the last decode step, a pass's ring too, is this one's."""
        seconds, runner = result.seconds, self.runner
        if isinstance(runner, LinkedRunner):
            # The model of computing knows nothing of places that change hands; the machine does.
            seconds, read = runner.processor_s, torch.tensor(runner.count(Lane.TEE, Lane.IN_PLACE))
        elif isinstance(runner, CountingRunner) and plan.step in runner.reads:
            read = runner.reads.pop(plan.step)
        else:
            return
        self._decoded.append((plan.num_rows, seconds, self._banned, read))
        self._banned = 0

    def facts(self, place_bytes: int) -> list[StepFacts]:
        """The decode steps so far. A simulated link takes none of a step's processor time."""
        found, before = [], 0
        simulated = isinstance(self.runner, LinkedRunner)
        for rows, seconds, banned, total in self._decoded:
            read = int(total)
            link_bytes = 0 if simulated else (read - before) * place_bytes
            found.append(StepFacts(rows, seconds, link_bytes, banned * place_bytes))
            before = read
        return found


@dataclass
class Run:
    """One setting's run over all phases. ``places``: (seconds, usable expert places)."""

    logs: list[PhaseLog]
    rates: list[float]
    places: list[tuple[float, float]]


class Stage:
    """The engine. Settings come in the order of falling places: a cap is never raised."""

    def __init__(self, setup: Setup, keep: bool) -> None:
        """``keep``: keep the steps of the elastic run."""
        self.setup = setup
        self.recorder = Recorder(keep)
        began_s = time.perf_counter()
        self.engine = NativeEngine(setup.config, self._make, record=self.recorder)
        self.started_s = time.perf_counter() - began_s
        runner, experts = self.recorder.runner, self.engine.experts
        assert runner is not None
        assert runner.pager is not None
        assert experts is not None
        self.pager: ExpertPager = runner.pager
        self._experts = experts
        if isinstance(runner, LinkedRunner):
            self.recorder.clock = experts.clock = runner.clock
        if self.routing is not None:
            self.routing.rewind()
        self._number = 0

    @property
    def routing(self) -> Routing | None:
        """What is imposed."""
        return self.recorder.runner.routing if isinstance(self.recorder.runner, CountingRunner) else None

    def _make(self, config: WorkerConfig) -> ModelRunner:
        setup = self.setup
        if setup.link_bytes_per_s:
            self.recorder.runner = LinkedRunner(config, setup.link_bytes_per_s)
        else:
            self.recorder.runner = CountingRunner(config, setup.routing)
        return self.recorder.runner

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.pager.host.layers)

    @property
    def place_bytes(self) -> int:
        """Of a place."""
        return self.pager.host.place_bytes

    @property
    def link_bytes_per_s(self) -> float:
        """At which missing experts come: measured at start, or simulated."""
        assert self.pager.link is not None
        return self.pager.link.bytes_per_s

    def fix_places(self, per_layer: int) -> None:
        """From here on so many experts a layer have places, no more, and pages leave them. Nothing may run; prefixes
        are forgotten."""
        self.engine.flush_prefix_cache()
        time.sleep(FLUSHED_S)
        ledger = self.engine._ledger
        assert isinstance(ledger, ArenaLedger)
        self.pager.limit_places(per_layer * self.num_layers)
        ledger._layout.floor_places = per_layer * self.num_layers
        ledger.follow(MarketDecision())  # what the market thought last holds no longer
        self._experts._trades = False
        self.recorder._keep = False

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits beside the places."""
        if num_tokens > self.engine.model.max_model_len:
            return False
        return self.engine._ledger.can_ever_grant(num_tokens) is None

    def run(self) -> Run:
        """All phases behind a short untimed one; a phase whose longest request has no room brings nothing."""
        driver = Driver(self.engine, self.setup.prompt, self.recorder.clock, self._number)
        logs: list[PhaseLog] = []

        async def every() -> None:
            fitting = [phase for phase in self.setup.phases if self.holds(phase.longest)]
            await driver.run([self._warm_phase(), *fitting])

        asyncio.run(every())
        self._number = driver.num_requests
        found = {log.name: log for log in driver.logs}
        rates = []
        for phase in self.setup.phases:
            log = found.get(phase.name) or PhaseLog(phase.name, 0.0, phase.seconds)
            logs.append(log)
            rates.append(log.tokens_per_s(self.recorder.progress) if phase.name in found else 0.0)
        return Run(logs, rates, driver.places)

    def _warm_phase(self) -> Phase:
        """Chats and a prompt or two of some length: experts come, and what is compiled is compiled."""
        first = self.setup.phases[0]
        return replace(
            first, name="warm", seconds=first.seconds / 4, longs=1, long_tokens=(WARM_TOKENS, WARM_TOKENS)
        )

    def time_prefills(self, lengths: Sequence[int]) -> list[PrefillTimes | None]:
        """Prompts of these lengths beside streams; None where one has no room."""

        def read_so_far() -> tuple[int, int]:
            lanes = self.pager.residency.counts.sum(1).tolist()
            prompts = lanes[Lane.PREFILL_IN_PLACE] + lanes[Lane.STAGED]
            return prompts, lanes[Lane.TEE] + lanes[Lane.IN_PLACE]

        async def every() -> list[PrefillTimes | None]:
            found: list[PrefillTimes | None] = []
            for length in lengths:
                if not self.holds(length + 1):
                    found.append(None)
                    continue
                clock, seed = self.recorder.clock, self._number
                found.append(
                    await time_prefill(self.engine, self.setup.prompt, clock, length, read_so_far, seed)
                )
                self._number += 1 + NUM_STREAMS
            return found

        return asyncio.run(every())

    def close(self) -> None:
        """Stops the engine."""
        self.engine.close()


def count_wrong(setup: Setup, steps: Sequence[RecordedStep], routing: Routing | None = None) -> int:
    """Tokens of recorded steps that differ when all experts are resident, the kernel being the same. ``routing``: what
    was imposed."""
    config = replace(setup.config, experts="resident", expert_bytes=0, pass_tokens=0)
    runner = CountingRunner(config, setup.routing, routing)
    if routing is not None:
        routing.rewind()
    runner.attach_memory(runner.page_specs, config.arena_bytes)
    wrong = 0
    for step in sorted(steps, key=lambda step: step.plan.step):
        wrong += int((runner.run(step.plan).token_ids != step.result.token_ids).sum())
    runner.close()
    return wrong
