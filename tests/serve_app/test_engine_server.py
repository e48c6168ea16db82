"""A grammar that takes long to compile holds up nobody, and a client that leaves meanwhile leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from serve_app.deployments.engine_server import EngineServer
from serve_app.deployments.protocol import Accepted
from serve_app.policies.coalescing import CoalescingConfig
from tests.helpers.eventually import ends, some_turns, soon
from worker.api import GenerateRequest, Grammar, SamplingParams
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine

PLAIN = GenerateRequest("plain", (1, 2, 3), SamplingParams(max_tokens=3))


class SlowToSubmit(FakeEngine):
    """Takes requests with a grammar only when told to."""

    def __init__(self) -> None:
        super().__init__(WorkerConfig(model="", engine="fake"))
        self.may_go = threading.Event()

    def submit(self, request: GenerateRequest) -> None:
        if request.grammar is not None:
            assert self.may_go.wait(60.0)
            request = replace(request, grammar=None)
        super().submit(request)


async def first(server: EngineServer, request: GenerateRequest) -> object:
    async with aclosing(cast("Any", server.generate(request))) as items:
        return await anext(items)


async def others_go_on_and_nothing_stays() -> None:
    engine = SlowToSubmit()
    server = EngineServer(engine, CoalescingConfig())
    try:
        bound = replace(PLAIN, request_id="bound", grammar=Grammar("json_object"))
        waiting = asyncio.create_task(first(server, bound))
        await some_turns()
        assert isinstance(await ends(first(server, PLAIN)), Accepted)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.may_go.set()
        # A request without a client does not stay.
        await soon(engine.snapshot, lambda s: s.num_submitted == 2 and s.num_running + s.num_waiting == 0)
    finally:
        engine.may_go.set()
        engine.close()


def test_a_slow_grammar_holds_up_nobody_and_leaves_nothing() -> None:
    asyncio.run(others_go_on_and_nothing_stays())
