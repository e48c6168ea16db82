"""How every engine fills, drains, closes and dies: each test has engines of its own, of every kind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tests.helpers.asking import ENDLESS, PROMPT, ask
from tests.helpers.engines import EngineKind
from tests.helpers.eventually import PATIENCE_S, eventually, soon
from worker.api import Engine, FinishReason, GenerateRequest
from worker.errors import EngineDead, Overloaded


def test_a_full_queue_answers_overloaded_and_waiting_requests_can_be_aborted(kind: EngineKind) -> None:
    async def fill(engine: Engine) -> None:
        accepted = []
        with pytest.raises(Overloaded) as caught:
            for number in range(20):
                engine.submit(GenerateRequest(f"r{number}", PROMPT, ENDLESS))
                accepted.append(f"r{number}")
                await soon(lambda: engine.snapshot().num_running == 1)
        assert caught.value.retry_after_s > 0
        assert accepted == ["r0", "r1", "r2"], "one runs, two wait"
        snapshot = engine.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.waiting_tokens) == (
            1,
            2,
            2 * len(PROMPT),
        )
        engine.abort("r1")
        assert [event async for event in engine.stream("r1")][-1].finish_reason is FinishReason.ABORT
        engine.abort("r0")  # r2 moves up
        events = engine.stream("r2")
        assert (await anext(events)).token_ids
        await events.aclose()  # type: ignore[attr-defined]
        await soon(lambda: engine.snapshot().num_running == 0)

    with kind.opened(max_running=1, max_waiting=2) as engine:
        asyncio.run(fill(engine))


def test_draining_finishes_what_runs_and_refuses_what_comes(kind: EngineKind) -> None:
    async def drain(engine: Engine) -> None:
        engine.submit(ask("a", max_tokens=20, ignore_eos=True))
        reader = asyncio.create_task(_tokens(engine, "a"))
        assert await engine.drain(PATIENCE_S) == 0
        assert len(await reader) == 20
        with pytest.raises(Overloaded, match="drain"):
            engine.submit(ask("b"))
        assert engine.snapshot().draining

    with kind.opened() as engine:
        assert not engine.snapshot().draining
        asyncio.run(drain(engine))


async def _tokens(engine: Engine, request_id: str) -> list[int]:
    return [token async for event in engine.stream(request_id) for token in event.token_ids]


def test_a_drain_that_runs_out_of_time_aborts_the_rest_and_counts_it(kind: EngineKind) -> None:
    async def drain(engine: Engine) -> None:
        for name in ("a", "b"):
            engine.submit(GenerateRequest(name, PROMPT, ENDLESS))
        assert await engine.drain(0.05) == 2
        for name in ("a", "b"):
            assert [event async for event in engine.stream(name)][-1].finish_reason is FinishReason.ABORT

    with kind.opened() as engine:
        asyncio.run(drain(engine))


def test_closing_ends_open_streams_and_may_be_repeated(kind: EngineKind) -> None:
    async def close(engine: Engine) -> None:
        for name in ("a", "b"):
            engine.submit(GenerateRequest(name, PROMPT, ENDLESS))
        streams = [engine.stream(name) for name in ("a", "b")]
        await anext(streams[0])
        await asyncio.to_thread(engine.close)
        for stream in streams:
            assert [event async for event in stream][-1].finish_reason is FinishReason.ABORT
        engine.close()
        with pytest.raises(EngineDead):
            engine.submit(ask("c"))

    with kind.opened() as engine:
        asyncio.run(close(engine))


def test_a_dead_engine_ends_every_stream_with_its_error(kind: EngineKind) -> None:
    async def die(engine: Engine) -> None:
        for number in range(3):
            engine.submit(GenerateRequest(f"r{number}", PROMPT, ENDLESS))
        async with asyncio.timeout(PATIENCE_S):
            lasts = [[event async for event in engine.stream(f"r{number}")][-1] for number in range(3)]
        assert {event.finish_reason for event in lasts} == {FinishReason.ERROR}
        assert all("RuntimeError" in event.error for event in lasts)
        with pytest.raises(EngineDead, match="RuntimeError"):
            engine.check_health()
        with pytest.raises(EngineDead, match="RuntimeError"):
            engine.submit(ask("d"))
        snapshot = engine.snapshot()
        assert snapshot.num_running == 0
        assert snapshot.draining, "it takes no more, and Routers must not think it idle"

    engine = kind.make_failing(4)
    try:
        engine.check_health()
        asyncio.run(die(engine))
    finally:
        engine.close()


def test_nothing_is_left_after_readers_of_every_sort(kind: EngineKind) -> None:
    async def one(engine: Engine, number: int) -> None:
        name = f"r{number}"
        engine.submit(ask(name, prompt=PROMPT[: 5 + number % 20], max_tokens=6 + number % 5, ignore_eos=True))
        async with aclosing(engine.stream(name)) as stream:  # type: ignore[type-var]
            async for event in stream:
                if number % 3 == 0 and event.num_generated > 2:
                    break
                if number % 3 == 1 and event.num_generated > 2:
                    engine.abort(name)

    async def all_of_them(engine: Engine) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(32)))
        await soon(lambda: engine.snapshot().num_running + engine.snapshot().num_waiting == 0)

    with kind.opened() as engine:
        free = engine.snapshot().headroom.available_bytes
        for _ in range(2):  # the second time under the same ids
            asyncio.run(all_of_them(engine))
        snapshot = engine.snapshot()
        assert snapshot.num_submitted == 64 == snapshot.num_finished + snapshot.num_aborted
        eventually(lambda: engine.snapshot().headroom.available_bytes == free)
