"""A request's way through the Router: it waits in the queue, is placed, started, and moved elsewhere while it can be.

No Ray here: workers are reached through a :class:`Transport`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from serve_app.deployments.notes import UNNOTED, RequestNotes
from serve_app.deployments.placed_stream import PlacedStream
from serve_app.deployments.protocol import (
    Accepted,
    Refused,
    ReplicaGone,
    Transport,
    WorkerReport,
)
from serve_app.deployments.watching import StreamWatch, Watchers
from serve_app.http.errors import WorkerLost
from serve_app.policies.admission import AdmissionConfig, AdmissionQueue
from serve_app.policies.expert_affinity import affinity_keys
from serve_app.policies.placement import VETOED, Busy, Choice, Outcome, Placement, RequestFacts
from serve_app.policies.prefix_affinity import block_hashes
from serve_app.text.output import TokenStream
from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenEvent
from worker.errors import EngineDead, Overloaded

BAN_S = 1.0
"""A replica that Serve no longer routes to may still report while it drains; for so long that is not believed. No
longer, as a new replica may also report before Serve routes to it."""
DEAD_S = 5.0
ASK_AFTER_S = 1.5
"""Workers report every half second at least; one that has not for so long is asked."""
TICK_S = 0.25
MOST_LOST = 3
"""Workers that one request may be lost with before its first token: it may be what kills them."""


class _NotRouted(Exception):
    """Serve does not route to the chosen replica: it is going away, or too new."""


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """``accept_timeout_s``: a worker that has not taken a request in by then is passed over. ``request_timeout_s``: a
    request that has not ended by then ends with an error. ``from_zero``: it is in order that there is no worker; the
    first request makes Serve start one."""

    max_queue: int
    queue_timeout_s: float
    accept_timeout_s: float
    request_timeout_s: float = 600.0
    from_zero: bool = False


@dataclass
class _Waiting:
    facts: RequestFacts
    exclude: Collection[str]
    placed: asyncio.Future[Choice]


@dataclass
class DispatchCounts:
    """What happened so far: requests sent elsewhere and refused, by why; placements, and the prompt tokens that were
    believed to be cached where they went."""

    retries: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    placements: int = 0
    placement_prefix_tokens: int = 0

    def placed(self, choice: Choice) -> None:
        """Counts a placement."""
        self.placements += 1
        self.placement_prefix_tokens += choice.hit_tokens


class Dispatcher:
    """Queue, placement and retries of one Router; lives on its event loop."""

    def __init__(self, config: DispatchConfig, placement: Placement, transport: Transport) -> None:
        self._config = config
        self._placement = placement
        self._transport = transport
        self._queue = AdmissionQueue(
            AdmissionConfig(max_waiting=config.max_queue, default_wait_s=config.queue_timeout_s)
        )
        self._waiting: dict[str, _Waiting] = {}
        self._banned_until_s: dict[str, float] = {}
        self._reports: dict[str, tuple[float, WorkerReport]] = {}
        self._watchers = Watchers(DEAD_S)
        self._model_known = asyncio.Event()
        self._num_asking = 0
        self._waking: asyncio.Task[None] | None = None
        self._asked: dict[str, asyncio.Task[None]] = {}
        self.model: ModelInfo | None = None
        self.counts = DispatchCounts()

    # -- what workers say ---------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Takes a worker's report in, and places what waits for room."""
        now_s = time.monotonic()
        self._watchers.heard(report.replica_id, now_s)
        if self._banned_until_s.get(report.replica_id, 0.0) > now_s:
            return
        self._banned_until_s.pop(report.replica_id, None)
        if self._placement.report(report.replica_id, report.snapshot, now_s):
            self._reports[report.replica_id] = (now_s, report)
        self.model = report.model
        self._model_known.set()
        self._place_waiting()

    def live_reports(self) -> list[WorkerReport]:
        """The last report of each worker that has reported lately."""
        return [report for _, report in self.timed_reports()]

    def timed_reports(self) -> list[tuple[float, WorkerReport]]:
        """The same, each with the time at which it came (monotonic clock). A push asks from a thread of its own."""
        now_s = time.monotonic()
        return [entry for entry in list(self._reports.values()) if now_s - entry[0] < DEAD_S]

    def is_ready(self) -> bool:
        """Whether requests can be served: a worker lives, or the first request would start one."""
        return self._config.from_zero or bool(self.live_reports())

    async def known_model(self) -> ModelInfo:
        """Facts of the model; waits for the first report, Overloaded after ``queue_timeout_s``."""
        if self.model is None:
            self._num_asking += 1
            try:
                async with asyncio.timeout(self._config.queue_timeout_s):
                    await self._model_known.wait()
            except TimeoutError:
                self.counts.refusals["no_worker"] += 1
                raise Overloaded("No worker has started yet.", 5.0) from None
            finally:
                self._num_asking -= 1
        assert self.model is not None
        return self.model

    async def run(self) -> None:
        """Housekeeping, for as long as the Router lives: deadlines, lost tickets, workers that fell silent."""
        now_s = time.monotonic()
        while True:
            due_s = now_s + TICK_S
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            if now_s - due_s > TICK_S:
                self._pardon(now_s - due_s)
            self._placement.expire(now_s)
            self._forget_the_gone(now_s)
            self._ask_the_silent(now_s)
            await self._watchers.look(now_s)
            self._place_waiting()
            self._wake_if_needed()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_open(self) -> int:
        """Requests at workers."""
        return self._placement.num_open

    # -- requests -----------------------------------------------------------------------------------------------

    async def open(self, request: GenerateRequest, notes: RequestNotes = UNNOTED) -> TokenStream:
        """See :meth:`serve_app.http.backend.Backend.open`; answers with the first tokens at hand. ``notes`` is told of
        the way there."""
        facts = RequestFacts(
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            prefix=block_hashes(request.prompt_token_ids, request.cache_salt),
            affinity_keys=affinity_keys(request.affinity_key),
        )
        arrived_s = time.monotonic()
        placed_by_s = arrived_s + min(self._config.queue_timeout_s, self._config.request_timeout_s)
        ended_by_s = arrived_s + self._config.request_timeout_s
        refused_by: set[str] = set()
        num_lost = 0
        choice = await self._queue_for(request.request_id, facts, placed_by_s, refused_by, notes)
        while True:
            try:
                with notes.placed(choice, len(self._placement.views)):
                    return await self._start(choice, request, ended_by_s)
            except _NotRouted:
                # Nobody was asked. It may be a new worker that Serve does not route to yet: it is banned for a moment.
                self.counts.retries["gone"] += 1
            except (Overloaded, EngineDead, WorkerLost) as error:
                refused_by.add(choice.replica_id)
                num_lost += not isinstance(error, Overloaded)
                if num_lost == MOST_LOST or not self._others_than(refused_by):
                    if isinstance(error, Overloaded):
                        self.counts.refusals["worker"] += 1
                    raise
                self.counts.retries["refused" if isinstance(error, Overloaded) else "lost"] += 1
            choice = await self._queue_for(request.request_id, facts, placed_by_s, refused_by, notes)

    async def _queue_for(
        self,
        key: str,
        facts: RequestFacts,
        deadline_s: float,
        exclude: Collection[str],
        notes: RequestNotes,
    ) -> Choice:
        with notes.queued():
            choice = await self._wait_for_place(key, facts, deadline_s, exclude)
        self.counts.placed(choice)
        return choice

    async def _wait_for_place(
        self, key: str, facts: RequestFacts, deadline_s: float, exclude: Collection[str]
    ) -> Choice:
        refused = self._queue.offer(key, time.monotonic(), deadline_s)
        if refused is not None:
            self.counts.refusals[refused.reason.name.lower()] += 1
            raise Overloaded(
                f"{len(self._queue)} requests wait already ({refused.reason.value}).", refused.retry_after_s
            )
        waiting = _Waiting(facts, exclude, asyncio.get_running_loop().create_future())
        self._waiting[key] = waiting
        try:
            self._place_waiting()
            return await waiting.placed
        except asyncio.CancelledError:
            if (
                waiting.placed.done()
                and not waiting.placed.cancelled()
                and waiting.placed.exception() is None
            ):
                self._end(waiting.placed.result(), VETOED)
            raise
        finally:
            self._queue.leave(key)
            self._waiting.pop(key, None)

    def _others_than(self, replica_ids: Collection[str]) -> set[str]:
        return set(self._placement.views) - set(replica_ids)

    def _place_waiting(self) -> None:
        now_s = time.monotonic()
        for late in self._queue.expire(now_s):
            placed = self._waiting[late].placed
            if not placed.done():
                self.counts.refusals["waited"] += 1
                retry_s = self._queue.retry_after_s()
                placed.set_exception(
                    Overloaded(f"No worker had room within {self._config.queue_timeout_s:g} s.", retry_s)
                )
        passed_over = []
        while (key := self._queue.take(now_s)) is not None:
            waiting = self._waiting[key]
            if waiting.placed.done():  # its client left, and its task has not run since
                self._queue.leave(key)
                continue
            choice = self._placement.choose(waiting.facts, now_s, waiting.exclude)
            if isinstance(choice, Busy) and waiting.exclude and not self._others_than(waiting.exclude):
                # The one it waited for is gone: it must not stand in everybody's way.
                self._queue.leave(key)
                waiting.placed.set_exception(WorkerLost("no other worker is left to try"))
                continue
            if isinstance(choice, Busy):
                passed_over.append(key)
                if waiting.exclude:
                    continue  # those behind may go where it was refused
                break
            self._queue.served(key, now_s)
            waiting.placed.set_result(choice)
        for key in reversed(passed_over):
            self._queue.put_back(key)

    async def _start(self, choice: Choice, request: GenerateRequest, ended_by_s: float) -> TokenStream:
        """One try at one replica, up to its first tokens. Raises what the worker answers, WorkerLost, EngineDead, or
        DeadlinePassed."""
        try:
            stream = self._transport.start(choice.replica_id, request)
        except BaseException:  # not even called
            self._end(choice, VETOED)
            raise
        watch = self._watchers.watch(choice.replica_id, stream, ended_by_s)
        try:
            first = await self._first_tokens(choice, watch)
        except BaseException:
            self._end(choice, VETOED)
            self._watchers.unwatch(watch)
            await stream.aclose()
            raise
        self._placement.started(choice.ticket, time.monotonic())
        return PlacedStream(watch, first, lambda last: self._ended(choice, watch, last))

    async def _first_tokens(self, choice: Choice, stream: StreamWatch) -> TokenEvent:
        try:
            # Not wait_for: before Python 3.12 that can swallow the cancellation of a client that leaves.
            async with asyncio.timeout(self._config.accept_timeout_s):
                item = await stream.next()
        except TimeoutError:
            raise WorkerLost(f"no answer within {self._config.accept_timeout_s:g} s") from None
        except ReplicaGone as error:
            self._forget(choice.replica_id)
            self._banned_until_s[choice.replica_id] = time.monotonic() + BAN_S
            raise _NotRouted from error
        except StopAsyncIteration:
            raise WorkerLost("the worker ended the call without an answer") from None
        if isinstance(item, Refused):
            if item.snapshot is not None:
                self._placement.report(choice.replica_id, item.snapshot, time.monotonic())
            raise item.error
        if isinstance(item, Accepted):
            self._placement.report(choice.replica_id, item.snapshot, time.monotonic())
            item = await stream.next()
        if isinstance(item, Refused):
            raise item.error  # taken in, and found impossible before its first token
        assert isinstance(item, TokenEvent)
        if item.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            # Tokens may have come with it, but the client has seen none: it can start anew elsewhere.
            raise EngineDead(item.error or "the worker gave the request up")
        return item

    def _end(self, choice: Choice, outcome: Outcome) -> None:
        self._placement.done(choice.ticket, time.monotonic(), outcome)
        self._place_waiting()

    def _pardon(self, stood_s: float) -> None:
        """This process stood still (a busy machine, a suspended one): what workers said meanwhile waits to be read."""
        self._watchers.pardon(stood_s)
        for replica_id, (at_s, report) in self._reports.items():
            self._reports[replica_id] = (at_s + stood_s, report)

    def _wake_if_needed(self) -> None:
        """Where no worker is known to live and somebody waits, Serve is asked for any: it starts one where there is
        none, and a Router that is being taken away hears of new ones in no other way."""
        if not (self.num_waiting or self._num_asking) or self.live_reports():
            return
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        report = await self._transport.wake()
        if report is not None:
            self.report(report)

    def _ask_the_silent(self, now_s: float) -> None:
        """A worker whose pushes stopped may be well: the way of its reports is not the way of its streams."""
        for replica_id, (at_s, _) in self._reports.items():
            if now_s - at_s > ASK_AFTER_S and replica_id not in self._asked:
                self._asked[replica_id] = asyncio.create_task(self._ask_for_report(replica_id))

    async def _ask_for_report(self, replica_id: str) -> None:
        try:
            async with asyncio.timeout(ASK_AFTER_S):
                report = await self._transport.report_of(replica_id)
        except (WorkerLost, ReplicaGone, TimeoutError):
            return
        finally:
            self._asked.pop(replica_id, None)
        self.report(report)

    async def ask_all(
        self, question: str, *given: Any, only: str = "", timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Asks every live worker (or ``only`` one), all at once; by replica id the answer, or the exception in its
        place. ``question`` is a method of Worker."""

        async def one(replica_id: str) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._transport.ask(replica_id, question, *given)
            except (WorkerLost, ReplicaGone, TimeoutError) as error:
                return error

        asked = [report.replica_id for report in self.live_reports() if only in ("", report.replica_id)]
        return dict(zip(asked, await asyncio.gather(*map(one, asked)), strict=True))

    def _forget_the_gone(self, now_s: float) -> None:
        for replica_id, (at_s, _) in list(self._reports.items()):
            if now_s - at_s > DEAD_S:
                self._forget(replica_id)
        for replica_id, view in list(self._placement.views.items()):
            # Its last snapshot came with an answer, behind its last report.
            if replica_id not in self._reports and view.is_dead(now_s):
                self._forget(replica_id)
        for replica_id, until_s in list(self._banned_until_s.items()):
            if until_s <= now_s:
                del self._banned_until_s[replica_id]

    def _forget(self, replica_id: str) -> None:
        self._placement.remove(replica_id)
        self._reports.pop(replica_id, None)

    def _ended(self, choice: Choice, watch: StreamWatch, last: TokenEvent) -> None:
        """A placed stream is over: ``last`` is its last event so far."""
        self._watchers.unwatch(watch)
        timeline = last.timeline
        completed = last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        cached = timeline.num_cached_tokens if timeline is not None else None
        generated = last.num_generated if completed else None
        # A stream that was read to any point did compute its prompt: only a refusal withdraws that.
        self._end(choice, Outcome(True, cached, generated, last.used_expert_bits))
