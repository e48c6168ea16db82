"""One engine for all settings of the elastic benchmark: elastic places first, then fewer and fewer, fixed in place."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.elasticity.link import LinkedRunner
from benchmarks.elasticity.phases import Clock, Driver, Phase, PhaseLog, Progress, Prompt
from benchmarks.elasticity.prefill import NUM_STREAMS, PrefillTimes, time_prefill
from benchmarks.elasticity.routing import ImposedRouting, Routing, impose
from benchmarks.elasticity.stalls import Machine, StepFacts
from benchmarks.elasticity.watch import StepWatch
from benchmarks.elasticity.watched_runner import WatchedRunner
from benchmarks.gpu_engine import copy_bytes_per_s
from benchmarks.limits import LinkCurve
from benchmarks.paging.link import link_curve
from kernels.experts import copy_blocks
from memory.api import PageKind
from memory.device.residency import FREE, Lane
from memory.ledger.ledger import ArenaLedger
from memory.ledger.market import MarketDecision
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import LaunchedPass, LaunchedStep, ModelRunner
from worker.experts.pager import ExpertPager
from worker.models.paged import table_experts
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepPlan, StepResult

FLUSHED_S = 0.2
SETTLING_TOKENS = 4
WARM_TOKENS, WARM_S = 300, 3.0


@dataclass(frozen=True)
class Setup:
    """What all runs share. ``link_bytes_per_s`` 0: the machine's own link. ``routing``: None for the model's own."""

    config: WorkerConfig
    phases: tuple[Phase, ...]
    prompt: Prompt
    link_bytes_per_s: float = 0.0
    routing: ImposedRouting | None = None


class CountingRunner(WatchedRunner):
    """Has its steps watched in the order of the stream, and tells imposed routing of passes."""

    def __init__(
        self, config: WorkerConfig, imposed: ImposedRouting | None, routing: Routing | None = None
    ) -> None:
        factory = None if imposed is None else impose(config, imposed, routing)
        if factory is None and config.experts == "resident":
            super().__init__(config, lambda e, source: table_experts(e, source, config.deterministic))
        else:
            super().__init__(config, factory)
        self.routing: Routing | None = None if factory is None else factory.routing

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See :class:`ModelRunner`."""
        began_s, replayed = time.perf_counter(), self._replays()
        launched = super().launch(plan)
        if self.watch is not None and self.pager is not None:
            captured = self._replays() > replayed
            self.watch.launched(plan, self.pager.residency.counts, began_s, captured)
        return launched

    def _replays(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_replays

    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """See :class:`ModelRunner`."""
        return WatchedPass(super().begin_pass(plan), self.watch, self.routing)


class WatchedPass(LaunchedPass):
    """Tells imposed routing that what is launched belongs to a pass, and the watch when its last layer was."""

    def __init__(self, inner: LaunchedPass, watch: StepWatch | None, routing: Routing | None) -> None:
        self._inner, self._watch, self._routing = inner, watch, routing

    def advance(self, seconds: float | None) -> bool:
        if self._routing is not None:
            self._routing.passing = True
        try:
            ended = self._inner.advance(seconds)
        finally:
            if self._routing is not None:
                self._routing.passing = False
        if ended and self._watch is not None:
            self._watch.end_pass()
        return ended

    def collect(self) -> StepResult:
        return self._inner.collect()


class Recorder:
    """Told of each step: keeps what stalls and goodput are judged by, and the steps themselves where they are to be
    replayed."""

    def __init__(self, keep: bool) -> None:
        self.steps: list[RecordedStep] = []
        self.facts: list[StepFacts] = []
        """of decode steps"""
        self.runner: CountingRunner | LinkedRunner | None = None
        self.clock: Clock = time.monotonic
        self.progress = Progress()
        self.keep = keep

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        """One step."""
        if self.keep:
            self.steps.append(RecordedStep(plan, result))
        now = self.clock()
        for row in np.flatnonzero(plan.query_len > 1).tolist():
            computed, length = int(plan.num_computed[row]), int(plan.query_len[row])
            self.progress.note(int(plan.requests[row]), now - result.seconds, now, computed, length)
        runner = self.runner
        if runner is None or runner.watch is None or plan.staged or not plan.num_rows:
            return
        # The model of computing knows nothing of places that change hands; the machine does.
        seconds = runner.processor_s if isinstance(runner, LinkedRunner) else result.seconds
        facts = runner.watch.facts(plan, seconds)
        if facts is not None and plan.num_rows == plan.num_decode_rows:
            self.facts.append(facts)


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
        self.machine = self._measure()
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

    def _measure(self) -> Machine:
        """What limits of steps are counted by. A simulated link takes none of a step's processor time."""
        device = self.pager.residency.address.device
        if self.setup.link_bytes_per_s or device.type != "cuda":
            return Machine()
        specs = self.engine._ledger.specs.values()
        token_bytes = sum(spec.page_bytes / spec.page_tokens for spec in specs if spec.kind is PageKind.FULL)
        curve: LinkCurve = link_curve(self.pager.host, device)
        return Machine(curve, self.place_bytes, copy_bytes_per_s(), token_bytes)

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
        """From here on so many experts a layer have places, no more, and pages leave them; places that are free are
        filled. Nothing may run; prefixes are forgotten."""
        self.recorder.keep = False
        self.engine.flush_prefix_cache()
        time.sleep(FLUSHED_S)
        ledger = self.engine._ledger
        assert isinstance(ledger, ArenaLedger)
        self.pager.limit_places(per_layer * self.num_layers)
        ledger._layout.floor_places = per_layer * self.num_layers
        ledger.follow(MarketDecision())  # what the market thought last holds no longer
        self._experts._trades = False

        if self.holds(SETTLING_TOKENS + 1):
            self._settle()
            # An idle engine proves its tables sound: not those that are half written.
            with self.engine._changed:
                fill_places(self.pager, per_layer)

    def _settle(self) -> None:
        """A request or two: the new number of places holds from its first step on."""
        driver = Driver(self.engine, self.setup.prompt, self.recorder.clock, self._number)
        prompt = self.setup.prompt(random.Random(self._number), SETTLING_TOKENS)
        asyncio.run(driver.ask(prompt, 1, PhaseLog("settling", self.recorder.clock())))
        self._number = driver.num_requests
        time.sleep(FLUSHED_S)

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits beside the places."""
        if num_tokens > self.engine.model.max_model_len:
            return False
        return self.engine._ledger.can_ever_grant(num_tokens) is None

    def run(self) -> Run:
        """All phases behind a short untimed one; a phase whose longest request has no room brings nothing."""
        driver = Driver(self.engine, self.setup.prompt, self.recorder.clock, self._number)
        logs: list[PhaseLog] = []

        fitting = [phase for phase in self.setup.phases if self.holds(phase.longest)]

        async def every() -> None:
            await driver.run([self._warm_phase()])
            self.recorder.facts.clear()
            await driver.run(fitting)

        if fitting:
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
        seconds = min(WARM_S, first.seconds / 4)
        return replace(first, name="warm", seconds=seconds, longs=1, long_tokens=(WARM_TOKENS, WARM_TOKENS))

    def rehearse(self, seconds: float) -> None:
        """All phases, each for so long, ahead of everything else; their steps are kept to be replayed, no others."""
        driver = Driver(self.engine, self.setup.prompt, self.recorder.clock, self._number)
        asyncio.run(driver.run([replace(phase, seconds=seconds) for phase in self.setup.phases]))
        self._number = driver.num_requests
        self.recorder.keep = False
        self.engine.flush_prefix_cache()

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


@torch.inference_mode()
def fill_places(pager: ExpertPager, per_layer: int) -> None:
    """Brings experts until ``per_layer`` of each layer are resident, as far as places are free; between steps. Whoever
    is used more takes their places soon."""
    residency, host = pager.residency, pager.host
    device = residency.owner.device
    free = (residency.owner == FREE).nonzero().flatten().tolist()
    resident = residency.resident.cpu()
    for row, block_bytes in enumerate(host.block_bytes):
        lacking = (~resident[row]).nonzero().flatten().tolist()
        lacking = lacking[: min(len(free), max(0, per_layer - int(resident[row].sum())))]
        if not lacking:
            continue
        places = torch.tensor(free[: len(lacking)], device=device)
        experts = torch.tensor(lacking, device=device)
        free = free[len(lacking) :]
        targets = torch.zeros(residency.address.shape[1], dtype=torch.int64, device=device)
        targets[experts] = residency.address_of(places)
        residency.vacate(places)
        copy_blocks(residency.host_address[row], targets, block_bytes)
        residency.settle(places, experts + row * residency.address.shape[1])


def count_wrong(setup: Setup, steps: Sequence[RecordedStep], routing: Routing | None = None) -> int:
    """Tokens of recorded steps that differ when all experts are resident, the kernel being the same. ``routing``: what
    was imposed."""
    config = replace(setup.config, experts="resident", expert_bytes=0, pass_tokens=0)
    runner = CountingRunner(config, setup.routing, routing)
    runner.attach_memory(runner.page_specs, config.arena_bytes)
    runner.capture_graphs(None, [])  # where there is a GPU: eager steps would wait for the host
    if routing is not None:
        routing.rewind()
    wrong = 0
    for step in sorted(steps, key=lambda step: step.plan.step):
        wrong += int((runner.run(step.plan).token_ids != step.result.token_ids).sum())
    runner.close()
    return wrong
