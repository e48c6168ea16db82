"""Runs requests through a router and a fleet of simulated workers, event by event."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.placement.experts import Domain, ExpertModel
from benchmarks.placement.routers import SimRouter, make_router
from benchmarks.placement.traces import SimRequest
from benchmarks.placement.workers import Row, SimWorker, WorkerSpec
from worker.api import WorkerSnapshot

RETRY_DELAY_S = 0.05
RESTART_S = 30.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run. Snapshots are between half of ``staleness_s`` and all of it old when they are used
    (0: taken for every choice). At each of ``deaths_s`` one worker is killed, and is back, empty, 30 s later."""

    num_workers: int = 8
    staleness_s: float = 0.0
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    model: ExpertModel = field(default_factory=ExpertModel)
    num_domains: int = 8
    deaths_s: tuple[float, ...] = ()
    seed: int = 3


@dataclass(slots=True)
class Record:
    """What became of one request. Times are -1 where it never came so far; ``lost``: its worker died mid-stream."""

    request: SimRequest
    worker: str = ""
    placed_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    num_retractions: int = 0
    num_retries: int = 0
    lost: bool = False


@dataclass(slots=True)
class RunResult:
    """Everything that a run leaves for the figures."""

    records: list[Record]
    placements: list[tuple[float, str]] = field(default_factory=list)
    bytes_paged: float = 0.0
    hit_tokens: int = 0
    retractions: int = 0
    num_events: int = 0


class Simulation:
    """One run. Build it, then call :meth:`run` once."""

    def __init__(self, requests: Sequence[SimRequest], fleet: Fleet, rule: str) -> None:
        self._fleet = fleet
        self._rng = Random(fleet.seed)
        # The same domains for every router and seed of placement.
        domain_rng = Random(1_000)
        self._domains = [Domain(fleet.model, domain_rng) for _ in range(fleet.num_domains)]
        self._router: SimRouter = make_router(rule, fleet.worker, fleet.seed)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = 0
        self._workers: dict[str, SimWorker] = {}
        self._records = {request.number: Record(request) for request in requests}
        self._queued: deque[SimRequest] = deque()
        self._excluded: dict[int, set[str]] = {}
        self._open = len(requests)
        self.result = RunResult(list(self._records.values()))
        for index in range(fleet.num_workers):
            self._start_worker(f"w{index}", 0.0)
        for request in requests:
            self._at(request.arrival_s, "arrive", request)
        for time_s in fleet.deaths_s:
            self._at(time_s, "die", None)
        if fleet.staleness_s > 0:
            self._at(0.0, "push", None)

    def run(self) -> RunResult:
        """Handles events until every request has ended."""
        while self._open and self._events:
            now_s, _, kind, what = heapq.heappop(self._events)
            self.result.num_events += 1
            match kind, what:
                case "wake", (str() as name, float() as due_s):
                    self._wake(name, due_s, now_s)
                case (("arrive" | "retry"), SimRequest() as request):
                    self._arrive(request, now_s)
                case "push", _:
                    self._push(now_s)
                case "report", (str() as name, WorkerSnapshot() as snapshot):
                    self._router.report(name, snapshot, now_s)
                case "die", _:
                    self._die(now_s)
                case "restart", str() as name:
                    self._start_worker(name, now_s)
        for worker in self._workers.values():
            self._add_up(worker)
        return self.result

    # -- events -------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, kind: str, what: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, kind, what))

    def _start_worker(self, name: str, now_s: float) -> None:
        fleet = self._fleet
        rng = Random(self._rng.getrandbits(32))
        self._workers[name] = SimWorker(name, fleet.worker, fleet.model, self._domains, rng)
        self._router.add(name, now_s)

    def _arrive(self, request: SimRequest, now_s: float) -> None:
        self._queued.append(request)
        self._place_queued(now_s)

    def _place_queued(self, now_s: float) -> None:
        while self._queued:
            request = self._queued[0]
            if self._fleet.staleness_s == 0:
                for name, worker in self._workers.items():
                    self._router.report(name, worker.snapshot(now_s), now_s)
            answer = self._router.choose(request, now_s, self._excluded.get(request.number, ()))
            if answer is None:
                return
            self._queued.popleft()
            name, ticket = answer
            record = self._records[request.number]
            record.worker, record.placed_s = name, now_s
            self.result.placements.append((now_s, name))
            worker = self._workers[name]
            worker.submit(Row(request, ticket, now_s), now_s)
            self._schedule(worker)

    def _schedule(self, worker: SimWorker) -> None:
        if worker.next_wake_s is not None:
            self._at(worker.next_wake_s, "wake", (worker.name, worker.next_wake_s))

    def _wake(self, name: str, due_s: float, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.next_wake_s != due_s:
            return  # cut short, or dead
        outcome = worker.wake(now_s)
        self._schedule(worker)
        for row in outcome.first:
            self._records[row.request.number].first_token_s = now_s
            self._router.started(row, now_s)
        for row in outcome.finished:
            record = self._records[row.request.number]
            record.finished_s, record.num_retractions = now_s, row.num_retractions
            self._open -= 1
            self._router.done(row, now_s, completed=True)
        if outcome.finished:
            self._place_queued(now_s)

    def _push(self, now_s: float) -> None:
        half_s = self._fleet.staleness_s / 2
        for name, worker in self._workers.items():
            self._at(now_s + half_s, "report", (name, worker.snapshot(now_s)))
        self._at(now_s + half_s, "push", None)
        self._place_queued(now_s)

    def _die(self, now_s: float) -> None:
        name = self._rng.choice(sorted(self._workers))
        worker = self._workers.pop(name)
        self._add_up(worker)
        rows = worker.kill()
        self._router.remove(name)
        for row in rows:
            self._router.done(row, now_s, completed=False)
            record = self._records[row.request.number]
            if row.first_token_s >= 0:
                record.lost, self._open = True, self._open - 1
            else:
                record.num_retries += 1
                self._at(now_s + RETRY_DELAY_S, "retry", row.request)
        self._at(now_s + RESTART_S, "restart", name)

    def _add_up(self, worker: SimWorker) -> None:
        self.result.bytes_paged += worker.bytes_paged
        self.result.hit_tokens += worker.cached_tokens
        self.result.retractions += worker.retractions
