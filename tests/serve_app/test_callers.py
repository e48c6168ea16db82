"""What a worker does for a Router that is gone: nothing more; and how sure it must be of that."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

from serve_app.deployments.callers import MISSING_S, Callers
from serve_app.deployments.engine_server import EngineServer
from serve_app.deployments.trunk import Moved, SeatPlace, new_trunk_id
from serve_app.policies.coalescing import CoalescingConfig
from tests.helpers.eventually import ends, soon
from tests.helpers.tokenizers import scripted, write_model_folder
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine
from worker.errors import EngineDead


def test_a_router_is_suspected_once_it_was_missing_for_some_time() -> None:
    callers = Callers()
    callers.took("r1", "a")
    callers.took("r2", "b")
    assert callers.missing(["r2"], [], 0.0) == set()
    assert callers.missing(["r2"], [], MISSING_S - 0.1) == set()
    assert callers.missing(["r2"], [], MISSING_S) == {"r1"}
    assert callers.requests_of("r1") == ["a"]
    callers.ended("a")
    assert callers.missing(["r2"], [], 2 * MISSING_S) == set()


def test_a_router_that_answers_again_starts_anew() -> None:
    callers = Callers()
    callers.took("r1", "a")
    assert callers.missing([], [], 0.0) == set()
    assert callers.missing(["r1"], [], MISSING_S / 2) == set()
    assert callers.missing([], [], MISSING_S) == set()
    assert callers.missing([], [], 2 * MISSING_S) == {"r1"}


def test_what_a_dead_router_asked_for_ends_on_its_trunk_and_beside_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("x" * 4000, tokens_per_s=100.0))
    dead, alive = new_trunk_id("dead"), new_trunk_id("alive")

    async def run() -> None:
        with closing(FakeEngine(WorkerConfig(model=str(folder), engine="fake"))) as engine:
            server = EngineServer(engine, CoalescingConfig(messages_per_s=1e9))
            trunk: Any = server.trunk(dead)
            await anext(trunk)  # the worker knows it; nobody reads on
            calls = []
            for number, trunk_id in enumerate((dead, dead, alive)):
                sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
                request = GenerateRequest(f"r{number}", (1,), sampling)
                calls.append(asyncio.create_task(_last(server, request, SeatPlace(trunk_id, number))))
            await soon(lambda: engine.snapshot().num_running == 3)
            assert server.missing_routers(["alive"], 0.0) == set()
            assert server.missing_routers(["alive"], MISSING_S) == {"dead"}
            assert engine.snapshot().num_running == 3, "a suspicion ends nothing"
            assert server.give_up_for(["dead"]) == 2
            ended = await ends(asyncio.gather(*calls[:2], return_exceptions=True))
            assert all(isinstance(end, EngineDead) for end in ended), ended
            assert [message async for message in trunk] == [], "the trunk's call ends, too"
            await soon(lambda: engine.snapshot().num_running == 1)
            calls[2].cancel()
            await soon(lambda: (engine.snapshot().num_running, server.num_streams) == (0, 0))

    asyncio.run(run())


async def _last(server: EngineServer, request: GenerateRequest, place: SeatPlace) -> Any:
    moved = False
    async for item in server.generate(request, place):
        moved = moved or isinstance(item, Moved)
        last = item
    return last, moved
