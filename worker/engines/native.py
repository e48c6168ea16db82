"""Headroom's own engine: wires configuration, runner, ledger, scheduler and the loop's thread to event streams."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memory.api import PAGE_ALIGN_BYTES, PageSpec
from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenEvent, WorkerSnapshot
from worker.config import CPU_ARENA_BYTES, WorkerConfig
from worker.engines.checks import check_token_ids
from worker.engines.figures import arena_figures
from worker.engines.paged import EngineExperts, report_json, with_experts
from worker.engines.process import favour_step_loop
from worker.engines.streams import EventReader, EventStreams
from worker.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from worker.grammar import GrammarMatchers
from worker.loop import EngineLoop
from worker.scheduling.admission import tokens_that_fit
from worker.scheduling.grammars import Grammars
from worker.scheduling.ledgers import make_ledger
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.snapshots import take_snapshot
from worker.scheduling.step import StepPlan, StepResult

if TYPE_CHECKING:
    from worker.experts.pager import ExpertPager
    from worker.experts.passes import PassSize
    from worker.experts.report import ExpertReport

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.01
FLUSH_TIMEOUT_S = 20.0
SNAPSHOT_AGE_S = 0.02
"""While steps run, a snapshot is made at most so often; at once when a request came, ended or was sent back."""
REPORT_AGE_S = 0.2
"""The same for the arena's report."""
IDLE_AUDIT_S = 1.0
"""An engine that is idle for so long proves its ledger sound, once."""
AUDIT_SHARE = 0.01
"""Of all time, at most: a request that comes meanwhile waits for the end of it."""
BLOCKED_SLEEP_S = 0.001
"""A loop that has work but could not run any (memory is pinned by a transfer) turns so often."""


class Runner(Protocol):
    """What the engine needs of the device's side; ``worker.execution.runner.ModelRunner`` is the real one."""

    @property
    def model_info(self) -> ModelInfo: ...
    @property
    def page_specs(self) -> tuple[PageSpec, ...]: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def pager(self) -> ExpertPager | None: ...
    @property
    def passes(self) -> PassSize | None: ...
    def measure_arena_bytes(self) -> int: ...
    def attach_memory(self, specs: Sequence[PageSpec], arena_bytes: int) -> None: ...
    def capture_graphs(self) -> None: ...
    def launch(self, plan: StepPlan) -> Any: ...
    def collect(self, handle: Any) -> StepResult: ...
    def close(self) -> None: ...


def _model_runner(config: WorkerConfig) -> Runner:
    from worker.engines.advice import log_advice  # loads torch
    from worker.execution.runner import ModelRunner

    log_advice(config)
    runner: Runner = ModelRunner(config)
    return runner


class NativeEngine:
    """The engine. The constructor loads the model and starts the loop.

    Args:
        config: the worker's settings.
        make_runner: another device side, for tests.
        grammars: matchers for requests with a grammar; None makes them for the folder's tokenizer, and where that
            cannot be, such requests are refused.
        audit: prove ledger and expert tables sound after every step (tests); when the engine turns idle they are
            always proven.
        record: told of each plan and its result.

    Raises ConfigError or ModelLoadError when it cannot start.
    """

    def __init__(
        self,
        config: WorkerConfig,
        make_runner: Callable[[WorkerConfig], Runner] = _model_runner,
        grammars: Grammars | None = None,
        audit: bool = False,
        record: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        self._config = config
        self._runner = make_runner(config)
        info, specs = self._runner.model_info, self._runner.page_specs
        arena_bytes = _arena_bytes(config, self._runner)
        pager, passes = self._runner.pager, self._runner.passes
        self._experts = EngineExperts(pager, config, info, specs, arena_bytes) if pager is not None else None
        floor_places = self._experts.floor_places if self._experts is not None else 0
        chunk_tokens = 0
        if passes is not None:
            log.info("prefill: %s", passes.line)
            chunk_tokens = passes.tokens
        self._ledger = make_ledger(config, specs, arena_bytes, floor_places, chunk_tokens)
        fitting = tokens_that_fit(self._ledger, info.max_model_len)
        if fitting < 2:
            self._runner.close()
            beside = f" beside {floor_places} expert places" if floor_places else ""
            raise ConfigError([f"arena_bytes={arena_bytes} does not hold one request of two tokens{beside}"])
        if fitting < info.max_model_len:
            log.warning("arena_bytes=%d holds requests of at most %d tokens", arena_bytes, fitting)
        self._runner.attach_memory(specs, arena_bytes)
        self._runner.capture_graphs()
        self._model = replace(info, max_model_len=fitting)
        limits = _limits(config, info, passes)
        if grammars is None and info.folder:
            grammars = GrammarMatchers.for_folder(Path(info.folder), info.vocab_size, info.eos_token_ids)
        self._scheduler = Scheduler(self._ledger, limits, grammars=grammars)
        overlap = info.device != "cpu"
        self._loop = EngineLoop(self._scheduler, self._ledger, self._runner, overlap, audit, record)
        self._streams = EventStreams()
        self._changed = threading.Condition()
        self._submitted: deque[GenerateRequest] = deque()
        self._aborted: deque[str] = deque()
        self._flushes: deque[Future[int]] = deque()
        self._draining = False
        self._closed = False
        self._error = ""
        self._sequence = 0
        self._audited = False
        self._next_audit_s = 0.0
        self._audits = audit
        self._advanced_s = time.monotonic()
        self._expert_report: ExpertReport | None = None
        self._arena_report = self._ledger.report()
        self._arena_figures = arena_figures(self._arena_report)
        self._snapshot = self._with_arena(self._take_snapshot())
        if info.device != "cpu":
            favour_step_loop()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    @property
    def model(self) -> ModelInfo:
        """The loaded model's facts; ``max_model_len`` is what the arena can hold, if that is less."""
        return self._model

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; see :meth:`worker.api.Engine.submit`."""
        check_token_ids(request, self._model.vocab_size)
        self._scheduler.check(request)
        with self._changed:
            if self._error or self._closed:
                raise EngineDead(self._error or "The engine is closed.")
            if self._draining:
                raise Overloaded("The worker is draining.")
            num_waiting = len(self._scheduler.waiting) + len(self._submitted)
            if num_waiting >= self._config.max_waiting:
                raise Overloaded(f"{num_waiting} requests are waiting already (max_waiting).")
            if self._in_use(request.request_id):
                raise InvalidRequest("request_id", f"Request id {request.request_id!r} is in use.")
            self._streams.open(request.request_id)
            if not self._scheduler.has_work and not self._submitted:
                self._advanced_s = time.monotonic()
            self._submitted.append(request)
            self._changed.notify()

    def _in_use(self, request_id: str) -> bool:
        """Also while its reader has left and the loop has not ended it: an abort on its way would meet the new one."""
        return (
            request_id in self._streams
            or self._scheduler.is_live(request_id)
            or request_id in self._aborted
            or any(request.request_id == request_id for request in self._submitted)
        )

    def stream(self, request_id: str) -> EventReader:
        """The request's events; see :meth:`worker.api.Engine.stream`."""
        return self._streams.stream(request_id, self.abort)

    def abort(self, request_id: str) -> None:
        """Ends a request after the step in flight; unknown and finished ids are ignored."""
        with self._changed:
            # An id that nobody holds is not kept: a new request may take it at once.
            if self._in_use(request_id):
                self._aborted.append(request_id)
                self._changed.notify()

    def snapshot(self) -> WorkerSnapshot:
        """The state after the last step, with the requests that came since."""
        with self._changed:
            self._sequence += 1
            fresh = list(self._submitted)
            known = self._snapshot
            return replace(
                known,
                sequence=self._sequence,
                time_s=time.time(),
                num_submitted=known.num_submitted + len(fresh),
                num_waiting=known.num_waiting + len(fresh),
                waiting_tokens=known.waiting_tokens + sum(len(r.prompt_token_ids) for r in fresh),
                draining=self._draining or bool(self._error),
            )

    @property
    def experts(self) -> EngineExperts | None:
        """The paged experts; None where they are resident."""
        return self._experts

    def expert_report(self) -> dict[str, Any] | None:
        """Experts by layer, hit rate and bytes as of the last snapshot; None where experts are resident."""
        return report_json(self._expert_report)

    def arena_report(self) -> dict[str, Any]:
        """Bands, holes, gap, moves, prefix tree, host tier and headroom, a moment ago; see
        :func:`memory.ledger.report.report_arena`."""
        with self._changed:
            return self._arena_report

    def flush_prefix_cache(self) -> int:
        """Lets every cached prefix go that no request uses, in the arena and in the host tier; answers the bytes of
        both. Waits for the loop to turn: EngineDead where it does not."""
        flushed: Future[int] = Future()
        with self._changed:
            if self._error or self._closed:
                raise EngineDead(self._error or "The engine is closed.")
            self._flushes.append(flushed)
            self._changed.notify()
        try:
            return flushed.result(FLUSH_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineDead(f"The step loop has not turned for {FLUSH_TIMEOUT_S:g} s.") from error

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits for the others, and aborts what is left after ``timeout_s``."""
        with self._changed:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._num_live() and time.monotonic() < deadline:  # noqa: ASYNC110 (another thread ends requests)
            await asyncio.sleep(DRAIN_POLL_S)
        left = self._live_ids()
        for request_id in left:
            self.abort(request_id)
        return len(left)

    def _num_live(self) -> int:
        with self._changed:
            return self._scheduler.num_live + len(self._submitted)

    def _live_ids(self) -> list[str]:
        with self._changed:
            return [*self._scheduler.live_ids(), *(request.request_id for request in self._submitted)]

    def check_health(self) -> None:
        """Raises EngineDead after a death, or when there is work and no step has ended for ``stall_timeout_s``."""
        with self._changed:
            if self._error:
                raise EngineDead(self._error)
            idle_s = time.monotonic() - self._advanced_s
            working = self._scheduler.has_work or bool(self._submitted)
        if working and idle_s > self._config.stall_timeout_s:
            raise EngineDead(f"The step loop has not advanced for {idle_s:.1f} s.")

    def close(self) -> None:
        """Stops the thread, lets weights and arena go, even while somebody holds the engine; open streams end with
        ABORT."""
        with self._changed:
            already, self._closed = self._closed, True
            self._changed.notify()
        self._thread.join()
        if not already:
            self._fail_flushes("The engine is closed.")
            self._streams.finish_all(FinishReason.ABORT)
            self._experts = None
            self._runner.close()

    # ---- the loop's thread

    def _run(self) -> None:
        try:
            while self._take_requests():
                self._turn()
        except Exception as error:
            log.exception("the step loop failed")
            self._die(f"{type(error).__name__}: {error}")

    def _turn(self) -> None:
        steps = self._loop.num_steps
        events = self._loop.step()
        if self._audits and self._experts is not None:
            self._experts.audit()
        if not self._loop.has_work:
            self._loop.settle()
        now = time.monotonic()
        if self._loop.num_steps > steps:
            self._advanced_s = now
        elif self._loop.has_work and not self._loop.is_flying:
            time.sleep(BLOCKED_SLEEP_S)
        counts = self._scheduler.statistics
        seen = self._snapshot
        moved = (
            counts.retractions.num_finished != seen.num_finished
            or counts.retractions.num_retractions != seen.num_retractions
            or self._scheduler.rows.num_running != seen.num_running
        )
        if moved or time.time() - seen.time_s > SNAPSHOT_AGE_S:
            self._publish(moved or now - self._reported_s > REPORT_AGE_S)
        # Behind the snapshot: whoever has read a request's end finds it in the counters.
        self._streams.put_all(events)

    def _take_requests(self) -> bool:
        """Hands what came to the scheduler; waits where there is nothing to do. False: the engine is closed."""
        while self._stood_idle():
            # Without the lock: many pages take long, and nobody else must wait for it.
            began_s = time.monotonic()
            self._ledger.audit()
            if self._experts is not None:
                self._experts.audit()
            ended_s = time.monotonic()
            self._audited, self._next_audit_s = True, ended_s + (ended_s - began_s) / AUDIT_SHARE
        self._audited = False
        with self._changed:
            if self._closed:
                return False
            changed = self._has_orders()
            while self._flushes:
                self._flushes[0].set_result(self._ledger.flush())
                self._flushes.popleft()
            while self._submitted:
                self._scheduler.submit(self._submitted.popleft())
            events: list[TokenEvent] = []
            while self._aborted:
                events.extend(self._scheduler.abort(self._aborted.popleft()))
            if changed:
                self._publish(True)  # under the lock: no snapshot may miss what it counted a moment ago
        self._streams.put_all(events)
        return True

    def _stood_idle(self) -> bool:
        """Waits until there is something to do; True when there was nothing for so long that an audit is due."""
        with self._changed:
            while not (self._closed or self._has_orders() or self._loop.has_work):
                wait_s = max(IDLE_AUDIT_S, self._next_audit_s - time.monotonic())
                if not self._changed.wait(None if self._audited else wait_s):
                    return True
        return False

    def _has_orders(self) -> bool:
        return bool(self._submitted or self._aborted or self._flushes)

    def _publish(self, with_report: bool) -> None:
        snapshot = self._take_snapshot()
        if self._experts is not None:
            prompts = self._scheduler.statistics.prompt_cost
            self._experts.trade(self._ledger, snapshot.num_running, prompts)
        report = self._arena_report
        if with_report:
            report, self._reported_s = self._ledger.report(), time.monotonic()
            self._arena_figures = arena_figures(report)
        snapshot = self._with_arena(snapshot)
        with self._changed:
            self._snapshot, self._arena_report = snapshot, report

    def _take_snapshot(self) -> WorkerSnapshot:
        found = take_snapshot(
            self._scheduler, self._ledger, 0, self._loop.num_steps, time.time(), self._draining
        )
        found = replace(found, extra={**found.extra, **self._runner.figures})
        if self._experts is None:
            return found
        self._expert_report = self._experts.read()
        self._scheduler.note_resident(sum(self._expert_report.resident))
        return with_experts(found, self._expert_report)

    def _with_arena(self, snapshot: WorkerSnapshot) -> WorkerSnapshot:
        return replace(snapshot, extra={**snapshot.extra, **self._arena_figures})

    def _die(self, error: str) -> None:
        with self._changed:
            self._error = error
            self._submitted.clear()
            self._scheduler.forget_all()
            self._snapshot = replace(self._snapshot, num_running=0, num_waiting=0, waiting_tokens=0)
        self._fail_flushes(error)
        self._streams.finish_all(FinishReason.ERROR, error)

    def _fail_flushes(self, error: str) -> None:
        """Nobody will turn for those who wait: they need not find out by waiting on."""
        with self._changed:
            while self._flushes:
                self._flushes.popleft().set_exception(EngineDead(error))


def _arena_bytes(config: WorkerConfig, runner: Runner) -> int:
    if config.arena_bytes:
        # The device's buffer is whole lines; the grids of ledger and device must end at the same byte.
        return config.arena_bytes // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
    if runner.model_info.device == "cpu":
        return CPU_ARENA_BYTES
    return runner.measure_arena_bytes()


def _limits(config: WorkerConfig, info: ModelInfo, passes: PassSize | None) -> Limits:
    return Limits(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_model_len=info.max_model_len,
        end_token_ids=info.eos_token_ids,
        deterministic=config.deterministic,
        prefix_cache=config.prefix_cache,
        seed=config.seed,
        pass_tokens=passes.tokens if passes is not None else 0,
        ring=passes.ring if passes is not None else None,
        price=passes.price if passes is not None else None,
    )
