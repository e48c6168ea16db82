"""One engine as Routers use it: accepts or refuses, streams in gathered messages, aborts what is left. No Ray here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from serve_app.deployments.callers import Callers
from serve_app.deployments.engine_trace import EngineTrace
from serve_app.deployments.protocol import Accepted, Refused, StreamItem
from serve_app.deployments.trunk import Moved, OutgoingTrunk, PolledEvents, SeatPlace, router_of
from serve_app.policies.coalescing import CoalescingConfig, interval_s
from serve_app.telemetry.tracing import Tracing
from worker.api import Engine, FinishReason, GenerateRequest, TokenEvent, WorkerSnapshot
from worker.errors import EngineDead, InvalidRequest, Overloaded

REPORTS = {"experts": "expert_report", "arena": "arena_report"}
"""Reports by name, and the method of an engine that makes each; an engine need not have it."""


class EngineServer:
    """Serves one engine's streams on one event loop."""

    def __init__(self, engine: Engine, coalescing: CoalescingConfig, tracing: Tracing | None = None) -> None:
        self.engine = engine
        self._tracing = tracing or Tracing()
        self._coalescing = coalescing
        self.num_streams = 0
        self._flowing: set[str] = set()
        self._leaving: set[asyncio.Future[None]] = set()
        self._trunks: dict[str, OutgoingTrunk] = {}
        self._draining: asyncio.Future[int] | None = None
        self._callers = Callers()

    async def generate(
        self, request: GenerateRequest, place: SeatPlace | None = None
    ) -> AsyncIterator[StreamItem | Moved]:
        """Starts a request: an :class:`Accepted` and its events, or one :class:`Refused`. Leaving early aborts it.

        ``place``: once that trunk is known here, an event comes as :class:`Moved` and all further ones by the trunk.
        """
        try:
            await self._submit(request)
            events = self.engine.stream(request.request_id)
        except (InvalidRequest, Overloaded, EngineDead) as error:
            yield Refused(error, self._snapshot_if_alive())
            return
        self.num_streams += 1
        if place is not None:
            self._callers.took(router_of(place.trunk_id), request.request_id)
        accepted = Accepted(self.engine.snapshot())
        trace = EngineTrace(self._tracing.worker(request), self.engine, accepted.snapshot)
        try:
            yield accepted
            async for event in events:
                self._flowing.add(request.request_id)
                trace.came(event)
                if event.finish_reason is not None:
                    yield self._last_item(request, event)
                    return
                trunk = self._trunks.get(place.trunk_id) if place is not None else None
                if trunk is not None and place is not None and isinstance(events, PolledEvents):
                    seat = trunk.take_seat(place.number, events, partial(self._last_of_trunk, request, trace))
                    try:
                        yield Moved(event)
                        await seat.wait()
                    finally:
                        seat.leave()
                    return
                yield event
                # What comes meanwhile is gathered in the engine's mailbox and leaves as one message.
                await asyncio.sleep(self._interval_s())
        finally:
            self.num_streams -= 1
            self._flowing.discard(request.request_id)
            self._callers.ended(request.request_id)
            trace.left()
            # Aborts the request if its end has not been read.
            await cast("Any", events).aclose()

    async def trunk(self, trunk_id: str) -> AsyncIterator[bytes]:
        """The messages of a Router's trunk, see :mod:`serve_app.deployments.trunk`, until they are no longer read."""
        trunk = self._trunks[trunk_id] = OutgoingTrunk(self._interval_s)
        try:
            async with aclosing(cast("Any", trunk.messages())) as messages:
                async for message in messages:
                    yield message
        finally:
            del self._trunks[trunk_id]
            trunk.close()

    def missing_routers(self, living: Collection[str], now_s: float) -> set[str]:
        """Routers that have something here and may be gone, see :class:`Callers`. ``living``: all that took a push."""
        return self._callers.missing(living, map(router_of, self._trunks), now_s)

    def give_up_for(self, gone: Collection[str]) -> int:
        """Ends what Routers asked for that are gone: Ray does not tell a worker. Answers the number of requests."""
        for trunk_id, trunk in list(self._trunks.items()):
            if router_of(trunk_id) in gone:
                trunk.close()
        requests = [request for router in gone for request in self._callers.requests_of(router)]
        for request_id in requests:
            self.engine.abort(request_id)
        return len(requests)

    def _interval_s(self) -> float:
        # Those that wait for their first token send nothing.
        return interval_s(len(self._flowing), self._coalescing)

    def _last_of_trunk(self, request: GenerateRequest, trace: EngineTrace, last: TokenEvent) -> StreamItem:
        trace.came(last)
        return self._last_item(request, last)

    def _last_item(self, request: GenerateRequest, last: TokenEvent) -> StreamItem:
        """A request's last event, or the refusal that it stands for."""
        if last.finish_reason is FinishReason.ERROR and self._is_at_fault(request):
            return Refused(InvalidRequest("response_format", last.error), None)
        return last

    async def _submit(self, request: GenerateRequest) -> None:
        """Hands the request to the engine. Compiling a large grammar takes long: other streams go on meanwhile."""
        if request.grammar is None:
            self.engine.submit(request)
            return
        submitting = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, request))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: self._leave(request.request_id, done))
            raise

    def _leave(self, request_id: str, submitted: asyncio.Future[None]) -> None:
        """The client left while its request was being handed over: if the engine has it now, it has it for nobody."""
        if not submitted.cancelled() and submitted.exception() is None:
            events = cast("Any", self.engine.stream(request_id))
            self._leaving.add(task := asyncio.ensure_future(events.aclose()))
            task.add_done_callback(self._leaving.discard)

    def _is_at_fault(self, request: GenerateRequest) -> bool:
        """Whether a request that ended in error did so by itself: its grammar gave up, and the engine lives on."""
        if request.grammar is None:
            return False
        try:
            self.engine.check_health()
        except EngineDead:
            return False
        return True

    # -- operations -----------------------------------------------------------------------------------------------

    async def report(self, name: str) -> Any:
        """The engine's report of that name as plain JSON values; None where this engine has none to give. Raises
        KeyError for a name that no engine has."""
        read = getattr(self.engine, REPORTS[name], None)
        return await asyncio.to_thread(read) if read is not None else None

    async def flush_prefixes(self) -> int | None:
        """Empties the prefix cache; the bytes that came free, None where the engine has no such cache."""
        flush = getattr(self.engine, "flush_prefix_cache", None)
        return await asyncio.to_thread(flush) if flush is not None else None

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for the streams; how many were left and aborted. Also when the caller leaves,
        it goes on. Afterwards :meth:`check_health` asks for the replica to be replaced."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self.engine.drain(timeout_s))
        return await asyncio.shield(self._draining)

    def check_health(self) -> None:
        """Raises EngineDead where the engine is dead, or drained and read to the end."""
        if self._draining is not None and self._draining.done() and not self.num_streams:
            raise EngineDead("The worker is drained.")
        self.engine.check_health()

    def _snapshot_if_alive(self) -> WorkerSnapshot | None:
        try:
            return self.engine.snapshot()
        except EngineDead:
            return None
