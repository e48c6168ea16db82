"""Replays a load through the real scheduler, engine loop and arena ledger; only the device is a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

import numpy as np

from benchmarks.replay.loads import Job, Load
from benchmarks.replay.rates import ASSUMED, Rates
from benchmarks.replay.shapes import ModelShape
from benchmarks.replay.step_time import StepTime
from memory.ledger.ledger import ArenaLedger
from memory.ledger.prefix_tree import GroupRule, PrefixTree
from memory.ledger.prices import RecomputeCost
from worker.api import GenerateRequest, SamplingParams
from worker.errors import PromptTooLong
from worker.loop import EngineLoop
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.snapshots import take_snapshot
from worker.scheduling.step import StepPlan, StepResult
from worker.scheduling.trading import ExpertTotals, ExpertTrader, PagedShape

STOP_TOKEN = 1
FILL_TOKEN = 2
COPY_BYTES_PER_S = 2.0e12
"""Bytes that a batch of page moves on the compute stream carries a second (read and written; 51.5 MB took 25 us)."""
MOVE_BUDGET_BYTES = 64 << 20
URGENT_BUDGET_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    """How one replay is run. ``ratio`` is the side share of ``split`` (STATE and WINDOW, or paged experts' places)."""

    shape: ModelShape
    arena_bytes: int
    mode: str = "arena"
    ratio: float = 0.5
    grain: int = 8
    max_running: int = 256
    step_tokens: int = 2048
    prefix_cache: bool = True
    floor_share: float = 0.1
    rates: Rates = ASSUMED


@dataclass(slots=True)
class Trail:
    """What was seen at each step, as columns."""

    time_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    kinds: list[dict[str, tuple[int, int, int]]] = field(default_factory=list)
    """per group: bytes used by requests, held by the prefix tree, empty inside the band"""
    gap: list[int] = field(default_factory=list)

    def thinned(self, most: int) -> Trail:
        """At most about ``most`` of the steps, evenly spaced."""
        every = max(1, len(self.time_s) // most)
        return Trail(*(getattr(self, column.name)[::every] for column in fields(self)))


@dataclass(frozen=True)
class Outcome:
    """The figures of one replay. Lengths and rates are in real tokens and simulated seconds."""

    setting: Setting
    num_jobs: int
    refused: int
    """requests that could never finish in this memory"""
    peak_running: int
    mean_running: float
    """over time, until the last request to wait was admitted"""
    retractions: float
    """per 1,000 requests"""
    ttft_p50_s: float
    ttft_p95_s: float
    tokens_per_s: float
    idle_share: float
    """of the arena's bytes, over the same time: neither used nor kept"""
    waiting_shares: dict[str, float]
    """of the arena's bytes, over the time in which somebody waited: ``gap``, and ``empty`` (free or pending, inside
    bands) and ``kept`` (prefix pages that can be evicted) of all groups: what a perfect policy could still use"""
    moves: int
    moved_bytes: int
    cached_share: float
    elapsed_s: float
    num_steps: int
    trail: Trail


class SimulatedDevice:
    """A :class:`worker.loop.StepRunner` that computes nothing: a step ends when its price has passed."""

    def __init__(
        self, step_time: StepTime, ledger: ArenaLedger, outputs: dict[int, int], clock: Clock
    ) -> None:
        self._step_time = step_time
        self._ledger = ledger
        self._outputs = outputs
        self._clock = clock
        self._free_at = 0.0
        self._generated: dict[int, int] = {}
        self.misses = 0.0
        self.staged = 0.0
        self.moves = 0
        self.moved_bytes = 0

    def expert_totals(self) -> ExpertTotals:
        """The counters that the market reads."""
        return ExpertTotals(int(self.misses), int(self.staged))

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float, float]:
        """Answers the plan, its price and when it ends."""
        seconds = 0.0
        if plan.num_rows:
            cost = self._step_time.price(plan, self._ledger.num_usable_places)
            seconds = cost.seconds
            self.misses += cost.misses
            self.staged += cost.staged
        specs = self._ledger.specs
        moved = sum(specs[move.group].page_bytes for move in plan.commands.moves)
        copied = sum(specs[copy.group].page_bytes for copy in plan.commands.copies)
        seconds += (moved + copied) / COPY_BYTES_PER_S
        self.moves += len(plan.commands.moves)
        self.moved_bytes += moved
        self._free_at = max(self._free_at, self._clock.now_s) + seconds
        return plan, seconds, self._free_at

    def collect(self, handle: tuple[StepPlan, float, float]) -> StepResult:
        """The step's tokens: a stop token where the job's output is complete."""
        plan, seconds, ends_at = handle
        self._clock.now_s = max(self._clock.now_s, ends_at)
        tokens = np.full((plan.num_rows, 1), FILL_TOKEN, dtype=np.int64)
        for row, request in enumerate(plan.requests.tolist()):
            if plan.samples[row]:
                # Known tokens behind the prompt, this one included: the same after a retraction.
                total = int(plan.num_computed[row] + plan.query_len[row]) + 1
                if total >= self._outputs[request]:
                    tokens[row] = STOP_TOKEN
        return StepResult(plan.step, tokens, plan.samples.astype(np.int64), (), seconds)


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now_s = 1.0  # above 0: a stamp of 0 means "not yet"

    def __call__(self) -> float:
        return self.now_s


def make_ledger(setting: Setting) -> ArenaLedger:
    """The arena, or a fixed split of the same bytes, with its prefix tree."""
    shape = setting.shape
    specs = shape.specs(setting.grain)
    tree = None
    if setting.prefix_cache:
        rules = {s.name: GroupRule(s.kind, s.page_tokens, s.page_bytes, s.window) for s in specs}
        per_token_ms = 1e3 * setting.grain * 2 * shape.token_params / setting.rates.flops_per_s
        tree = PrefixTree(rules, shape.name, RecomputeCost(per_token_ms))
    floor = 0
    if shape.paged:
        share = setting.ratio if setting.mode == "split" else setting.floor_share
        floor = int(setting.arena_bytes * share) // shape.expert_bytes
    ledger = ArenaLedger(
        specs,
        setting.arena_bytes,
        floor_places=floor,
        mode=setting.mode,
        split_ratio=setting.ratio,
        # A simulated step stands for `grain` real ones, each with a budget of its own.
        move_budget_bytes=MOVE_BUDGET_BYTES * setting.grain,
        urgent_budget_bytes=URGENT_BUDGET_BYTES * setting.grain,
        max_chunk_tokens=setting.step_tokens,
        prefix_tree=tree,
    )
    return ledger


def _paged_shape(shape: ModelShape, rates: Rates) -> PagedShape:
    return PagedShape(
        shape.num_moe_layers,
        shape.num_experts,
        shape.experts_per_token,
        shape.expert_bytes,
        rates.link_bytes_per_s,
    )


class Replay:
    """One load through one setting."""

    def __init__(self, setting: Setting, load: Load) -> None:
        self._setting = setting
        self._load = load
        self._clock = Clock()
        self._ledger = make_ledger(setting)
        most = max(len(job.prompt) + job.max_tokens for job in load.jobs)
        limits = Limits(
            setting.max_running,
            setting.step_tokens,
            most,
            end_token_ids=(STOP_TOKEN,),
            prefix_cache=setting.prefix_cache,
        )
        self._scheduler = Scheduler(self._ledger, limits, clock=self._clock)
        self._totals: dict[int, int] = {}
        self._device = SimulatedDevice(
            StepTime(setting.shape, setting.grain, setting.step_tokens, setting.rates),
            self._ledger,
            self._totals,
            self._clock,
        )
        self._loop = EngineLoop(self._scheduler, self._ledger, self._device, overlap=True)
        trades = setting.shape.paged and setting.mode == "arena"  # in a split nothing can flow
        self._trader = (
            ExpertTrader(self._ledger, _paged_shape(setting.shape, setting.rates)) if trades else None
        )
        self._jobs = deque(load.jobs)
        self.submitted: dict[str, float] = {}
        """when each request came, by id: ids number the jobs that were not refused"""
        self.finished: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._generated = 0
        self._live = 0
        self._refused = 0
        self._trail = Trail()

    def run(self, max_steps: int = 2_000_000) -> Outcome:
        """Runs the load to its end. RuntimeError where nothing comes forward any more."""
        idle_turns = 0
        for _ in range(max_steps):
            self._submit_due()
            if not self._loop.has_work:
                if not self._jobs:
                    return self._outcome()
                self._clock.now_s = max(self._clock.now_s, self._due(self._jobs[0]))
                continue
            before = self._clock.now_s
            events = self._loop.step()
            for event in events:
                self._first.setdefault(event.request_id, self._clock.now_s)
                self._generated += len(event.token_ids)
                if event.finish_reason is not None:
                    self.finished[event.request_id] = self._clock.now_s
                    self._live -= 1
            self._note(before, sum(len(event.token_ids) for event in events))
            idle_turns = 0 if events or self._clock.now_s > before else idle_turns + 1
            if idle_turns > 64:
                raise RuntimeError(f"nothing comes forward: {self._state()}")
        raise RuntimeError(f"not done after {max_steps} steps: {self._state()}")

    def first_tokens(self) -> list[str]:
        """Ids in the order in which their first tokens came."""
        return list(self._first)

    def _due(self, job: Job) -> float:
        return job.arrival_s + 1.0

    def _submit_due(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            if self._load.clients:
                if self._live >= self._load.clients:
                    return
            elif self._due(job) > self._clock.now_s:
                return
            self._jobs.popleft()
            number = len(self.submitted)
            sampling = SamplingParams(max_tokens=job.max_tokens, ignore_eos=self._load.certain)
            request = GenerateRequest(str(number), job.prompt, sampling)
            try:
                self._scheduler.check(request)
            except PromptTooLong:
                self._refused += 1
                continue
            self._totals[number] = len(job.prompt) + job.output_tokens
            self._scheduler.submit(request)
            self.submitted[request.request_id] = self._clock.now_s if self._load.clients else self._due(job)
            self._live += 1

    def _note(self, before_s: float, num_tokens: int) -> None:
        headroom = self._ledger.headroom()
        trail = self._trail
        trail.time_s.append(self._clock.now_s)
        trail.seconds.append(self._clock.now_s - before_s)
        trail.running.append(self._scheduler.rows.num_running)
        trail.waiting.append(len(self._scheduler.waiting))
        trail.tokens.append(num_tokens)
        trail.places.append(self._ledger.num_usable_places)
        trail.gap.append(headroom.gap_bytes)
        trail.kinds.append(
            {
                name: (
                    kind.used_bytes + kind.pinned_bytes,
                    kind.reclaimable_bytes,
                    kind.free_bytes + kind.pending_bytes,
                )
                for name, kind in headroom.kinds.items()
            }
        )
        if self._trader is not None:
            self._trader.trade(self._clock.now_s, self._device.expert_totals(), trail.running[-1])

    def _state(self) -> str:
        scheduler = self._scheduler
        return (
            f"{scheduler.rows.num_running} running, {len(scheduler.waiting)} waiting, "
            f"{len(self._jobs)} to come, {self._ledger.headroom()}"
        )

    def _outcome(self) -> Outcome:
        trail, setting = self._trail, self._setting
        seconds = np.array(trail.seconds)
        running = np.array(trail.running)
        crowded = np.flatnonzero(np.array(trail.waiting) > 0)
        weights = np.maximum(seconds, 1e-12)
        if len(crowded):
            weights[crowded[-1] + 1 :] = 0.0
        gap = np.array(trail.gap) if not setting.shape.paged else np.zeros(len(seconds))
        empty = gap + np.array([sum(kind[2] for kind in kinds.values()) for kinds in trail.kinds])
        waits = sorted(self._first[name] - at for name, at in self.submitted.items())
        counts = take_snapshot(self._scheduler, self._ledger, 0, 0, self._clock.now_s, False)
        elapsed = self._clock.now_s - 1.0
        return Outcome(
            setting,
            len(self.submitted),
            self._refused,
            int(running.max()),
            float(np.average(running, weights=weights)),
            1e3 * counts.num_retractions / len(self.submitted),
            waits[len(waits) // 2],
            waits[int(0.95 * (len(waits) - 1))],
            self._generated * setting.grain / elapsed,
            float(np.average(empty, weights=weights)) / setting.arena_bytes,
            _waiting_shares(trail, setting.arena_bytes),
            self._device.moves,
            self._device.moved_bytes,
            counts.cached_tokens / max(1, counts.prompt_tokens),
            elapsed,
            len(seconds),
            trail,
        )


def _waiting_shares(trail: Trail, arena_bytes: int) -> dict[str, float]:
    """Time-weighted shares of the arena that served no running request while somebody waited."""
    weights = np.array(trail.seconds) * (np.array(trail.waiting) > 0)
    if not weights.sum():
        return {"gap": 0.0, "empty": 0.0, "kept": 0.0}
    columns = {
        "gap": trail.gap,
        "empty": [sum(kind[2] for kind in kinds.values()) for kinds in trail.kinds],
        "kept": [sum(kind[1] for kind in kinds.values()) for kinds in trail.kinds],
    }
    return {
        name: float(np.average(np.array(column), weights=weights)) / arena_bytes
        for name, column in columns.items()
    }
