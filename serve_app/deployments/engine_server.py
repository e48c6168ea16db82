"""One engine as Routers use it: accepts or refuses, streams in gathered messages, aborts what is left. No Ray here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from serve_app.deployments.protocol import Accepted, Refused, StreamItem
from serve_app.policies.coalescing import CoalescingConfig, interval_s
from worker.api import Engine, GenerateRequest, WorkerSnapshot
from worker.errors import EngineDead, InvalidRequest, Overloaded


class EngineServer:
    """Serves one engine's streams on one event loop."""

    def __init__(self, engine: Engine, coalescing: CoalescingConfig) -> None:
        self.engine = engine
        self._coalescing = coalescing
        self.num_streams = 0
        self._leaving: set[asyncio.Future[None]] = set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[StreamItem]:
        """Starts a request: an :class:`Accepted` and its events, or one :class:`Refused`. Leaving early aborts it."""
        try:
            await self._submit(request)
            events = self.engine.stream(request.request_id)
        except (InvalidRequest, Overloaded, EngineDead) as error:
            yield Refused(error, self._snapshot_if_alive())
            return
        self.num_streams += 1
        try:
            yield Accepted(self.engine.snapshot())
            async for event in events:
                yield event
                if event.finish_reason is None:
                    # What comes meanwhile is gathered in the engine's mailbox and leaves as one message.
                    await asyncio.sleep(interval_s(self.num_streams, self._coalescing))
        finally:
            self.num_streams -= 1
            # Aborts the request if its end has not been read.
            await cast("Any", events).aclose()

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

    def _snapshot_if_alive(self) -> WorkerSnapshot | None:
        try:
            return self.engine.snapshot()
        except EngineDead:
            return None
