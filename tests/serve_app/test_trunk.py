"""Trunks: many requests' events in few messages, each where it belongs, and nothing left when either end goes."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve_app.deployments import trunk_reader
from serve_app.deployments.engine_server import EngineServer
from serve_app.deployments.protocol import Accepted, StreamItem
from serve_app.deployments.trunk import Moved, SeatPlace
from serve_app.deployments.trunk_reader import SeatedStream, Trunks
from serve_app.http.errors import WorkerLost
from serve_app.policies.coalescing import CoalescingConfig
from tests.helpers.eventually import ends, some_turns, soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served, sse_chunks
from worker.api import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine
from worker.engines.fake_script import FakeScript
from worker.errors import EngineDead

PACE = CoalescingConfig(messages_per_s=1000.0, reserve=0.0)


@dataclass
class Ends:
    """Both ends over one engine, and every message that crossed."""

    server: EngineServer
    trunks: Trunks
    messages: list[bytes] = field(default_factory=list)
    num_trunks: int = 0

    def start(self, request: GenerateRequest) -> SeatedStream:
        seat = self.trunks.seat("w", request.request_id)
        return SeatedStream(self.server.generate(request, seat.place), seat)  # type: ignore[arg-type]

    async def trunk(self, trunk_id: str) -> AsyncIterator[bytes]:
        self.num_trunks += 1
        async for message in self.server.trunk(trunk_id):
            self.messages.append(message)
            yield message


@asynccontextmanager
async def both_ends(pace: CoalescingConfig = PACE, **script: Any) -> AsyncIterator[Ends]:
    engine = FakeEngine(WorkerConfig(model="", engine="fake", max_running=300), FakeScript(**script))
    server = EngineServer(engine, pace)
    both = Ends(server, Trunks(lambda replica_id, trunk_id: both.trunk(trunk_id)))  # type: ignore[arg-type, return-value]
    try:
        yield both
    finally:
        engine.close()


def request(name: str, num_tokens: int, first: int = 1, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, (first,), SamplingParams(max_tokens=num_tokens, **sampling))


async def read(stream: SeatedStream) -> list[TokenEvent]:
    events = []
    async for item in stream:
        if isinstance(item, TokenEvent):
            events.append(item)
    await stream.aclose()
    return events


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_many_streams_share_few_messages_and_each_gets_its_own_tokens() -> None:
    async def num_events() -> int:
        async with both_ends(output="count", tokens_per_s=200.0) as both:
            asked = [request(f"r{number}", 100, first=number) for number in range(50)]
            streams = await asyncio.gather(*(read(both.start(one)) for one in asked))
            for number, events in enumerate(streams):
                assert tokens(events) == [(number + 1 + step) % 256 for step in range(100)]
                assert {event.request_id for event in events} == {f"r{number}"}
                assert [event.num_generated for event in events] == sorted({e.num_generated for e in events})
                assert events[-1].finish_reason is FinishReason.LENGTH
                assert events[-1].timeline is not None
            found = sum(len(events) for events in streams)
            assert len(both.messages) < found / 3
            assert both.num_trunks == 1
            return found

    # 50 streams at an interval of 50 ms for half a second: some ten events each, some ten messages a second; fewer
    # where the machine stands still for a part of it.
    assert any(asyncio.run(num_events()) > 5 * 50 for _ in range(5))


def test_the_first_tokens_do_not_wait_for_the_trunk() -> None:
    async def run() -> None:
        async with both_ends(output="count") as both:
            never = Trunks(lambda replica_id, trunk_id: hanging())  # type: ignore[arg-type, return-value]
            seat = never.seat("w", "r")
            stream = SeatedStream(both.server.generate(request("r", 40), seat.place), seat)  # type: ignore[arg-type]
            assert tokens(await ends(read(stream))) == list(range(2, 42))

    async def hanging() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_request_and_no_other() -> None:
    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=200.0) as both:
            stays = asyncio.create_task(read(both.start(request("stays", 100))))
            leaves = both.start(request("leaves", 4000))
            seen = 0
            async for item in leaves:
                seen += isinstance(item, TokenEvent)
                if seen == 5:
                    break
            await leaves.aclose()
            await leaves.aclose()
            await soon(lambda: both.server.engine.snapshot().num_aborted == 1)
            assert tokens(await ends(stays)) == [(2 + step) % 256 for step in range(100)]
            assert both.server.num_streams == 0

    asyncio.run(run())


def test_a_broken_trunk_ends_its_streams_and_the_next_request_has_another_one() -> None:
    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=100.0) as both:
            streams = [both.start(request(f"r{number}", 2000)) for number in range(3)]
            for stream in streams:
                for _ in range(4):
                    await anext(stream)
            [broken] = both.server._trunks.values()
            broken.close()  # as when its call is cancelled
            both.trunks._newest["w"].reading.cancel()  # type: ignore[union-attr]
            for stream in streams:
                with pytest.raises(WorkerLost):
                    await ends(read(stream))
                await stream.aclose()
            await soon(lambda: both.server.engine.snapshot().num_aborted == 3)
            assert len(tokens(await ends(read(both.start(request("after", 20)))))) == 20
            assert both.num_trunks == 2

    asyncio.run(run())


def test_a_router_that_is_gone_frees_its_requests() -> None:
    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=100.0) as both:
            reader = both.server.trunk("t")
            assert await anext(reader) == b""
            calls = [both.server.generate(request(f"r{n}", 2000), SeatPlace("t", n)) for n in range(3)]
            for call in calls:
                assert isinstance(await anext(call), Accepted)
                assert isinstance(await anext(call), Moved)
            waiting = [asyncio.ensure_future(anext(call)) for call in calls]
            await some_turns()
            assert not any(task.done() for task in waiting)
            await reader.aclose()
            for task in waiting:
                with pytest.raises(EngineDead):
                    await ends(task)
            await soon(lambda: both.server.engine.snapshot().num_aborted == 3)
            assert not both.server._trunks

    asyncio.run(run())


def test_an_idle_trunk_is_closed_and_a_used_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_reader, "IDLE_S", 0.1)

    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=100.0) as both:
            for number in range(3):
                await read(both.start(request(f"r{number}", 10)))
            # Idle for no time at all; then in use for longer than an idle one lives.
            await read(both.start(request("long", 30)))
            assert (both.num_trunks, len(both.server._trunks)) == (1, 1)
            await soon(lambda: len(both.trunks) == len(both.server._trunks) == 0)
            assert len(tokens(await read(both.start(request("after", 10))))) == 10
            assert both.num_trunks == 2

    asyncio.run(run())


def test_an_old_trunk_carries_its_streams_to_their_end_and_takes_no_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trunk_reader, "IDLE_S", 0.1)

    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=100.0) as both:
            first = asyncio.create_task(read(both.start(request("first", 3000))))
            await soon(lambda: both.server._trunks)
            both.trunks._newest["w"].opened_s -= trunk_reader.LONGEST_LIFE_S
            second = asyncio.create_task(read(both.start(request("second", 3000))))
            await soon(lambda: (both.num_trunks, len(both.trunks), len(both.server._trunks)) == (2, 2, 2))
            await soon(lambda: both.server.engine.snapshot().generated_tokens > 100)
            for index, name in enumerate(("first", "second")):
                both.server.engine.abort(name)
                events = await ends(first if name == "first" else second)
                assert len(events) > 2
                assert events[-1].finish_reason is FinishReason.ABORT
                assert tokens(events) == [(2 + step) % 256 for step in range(events[-1].num_generated)]
                await soon(lambda left=1 - index: len(both.trunks) == len(both.server._trunks) == left)

    asyncio.run(run())


def test_a_trunk_that_cannot_be_opened_is_tried_again_with_the_next_request() -> None:
    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=200.0) as both:
            tries = []

            def refuse(replica_id: str, trunk_id: str) -> Any:
                tries.append(trunk_id)
                raise RuntimeError("there is no such deployment")

            trunks = Trunks(refuse)
            for number in range(2):
                seat = trunks.seat("w", f"r{number}")
                call = both.server.generate(request(f"r{number}", 10), seat.place)
                assert len(tokens(await read(SeatedStream(call, seat)))) == 10  # type: ignore[arg-type]
            assert len(set(tries)) == 2

    asyncio.run(run())


def test_a_router_that_ends_closes_its_trunks_at_once() -> None:
    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=100.0) as both:
            stream = both.start(request("r", 2000))
            for _ in range(4):
                await anext(stream)
            both.trunks.close()
            with pytest.raises(WorkerLost):
                await ends(read(stream))
            await stream.aclose()
            await soon(lambda: len(both.trunks) == len(both.server._trunks) == 0)

    asyncio.run(run())


def test_the_call_of_an_ended_stream_is_read_to_its_end_and_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trunk_reader, "END_S", 60.0)

    class Watched:
        """A call that remembers how it ended."""

        def __init__(self, items: AsyncIterator[StreamItem | Moved]) -> None:
            self.items, self.ended, self.cancelled = items, False, False

        def __aiter__(self) -> Watched:
            return self

        async def __anext__(self) -> StreamItem | Moved:
            try:
                return await anext(self.items)
            except StopAsyncIteration:
                self.ended = True
                raise

        async def aclose(self) -> None:
            self.cancelled = not self.ended

    async def run() -> None:
        async with both_ends(output="count", tokens_per_s=200.0) as both:
            for num_tokens in (1, 20):  # by the call alone, and by the trunk
                seat = both.trunks.seat("w", "r")
                call = Watched(both.server.generate(request("r", num_tokens), seat.place))
                assert len(tokens(await read(SeatedStream(call, seat)))) == num_tokens
                await soon(lambda call=call: call.ended)
                await some_turns()
                assert not call.cancelled

    asyncio.run(run())


def test_requests_that_wait_for_their_first_token_slow_nobody_down() -> None:
    pace = CoalescingConfig(messages_per_s=100.0, reserve=0.0)

    async def run() -> None:
        config = WorkerConfig(model="", engine="fake", max_running=2)
        engine = FakeEngine(config, FakeScript(output="count", tokens_per_s=100.0))
        server = EngineServer(engine, pace)
        calls = [server.generate(request(f"r{number}", 500)) for number in range(10)]
        reading = [asyncio.create_task(read_call(call)) for call in calls]
        await soon(lambda: server.num_streams == 10 and len(server._flowing) == 2)
        assert server._interval_s() == pytest.approx(2 / 100)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        assert server._interval_s() == 0.0
        engine.close()

    async def read_call(call: AsyncIterator[Any]) -> None:
        async with aclosing(call):  # type: ignore[type-var]
            async for _ in call:
                pass

    asyncio.run(run())


def test_a_slow_reader_finds_one_event_and_little_is_kept_for_it() -> None:
    async def num_messages() -> int:
        async with both_ends(
            CoalescingConfig(messages_per_s=1e9), output="count", tokens_per_s=1000.0
        ) as both:
            stream = both.start(request("slow", 500))
            seen = [await anext(stream), await anext(stream)]
            seat = stream._seat
            await soon(lambda: seat._items and seat._items[-1].finish_reason)
            assert len(seat._items) <= trunk_reader.MERGED_ITEMS
            rest = await read(stream)
            assert len(rest) == 1
            assert tokens([*seen[1:], *rest]) == [(2 + step) % 256 for step in range(500)]  # type: ignore[list-item]
            return len(both.messages)

    # Fewer where the machine stands still for a part of the half second.
    assert any(asyncio.run(num_messages()) > 2 * trunk_reader.MERGED_ITEMS for _ in range(5))


def test_a_trunk_is_no_part_of_the_request_that_opened_it() -> None:
    mark = contextvars.ContextVar("mark", default="home")
    seen = []

    async def call() -> AsyncIterator[bytes]:
        seen.append(mark.get())
        yield b""

    async def run() -> None:
        trunks = Trunks(lambda replica_id, trunk_id: call())  # type: ignore[arg-type, return-value]
        mark.set("request")
        trunks.seat("w", "r")
        await soon(lambda: seen)

    asyncio.run(run())
    assert seen == ["home"]


def test_streams_of_several_workers_arrive_whole_over_http(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. Größe: 漢字. "
    folder = write_model_folder(tmp_path / "m", script=scripted(text * 3, tokens_per_s=400.0))

    async def use(cluster: Cluster) -> None:
        async def one(index: int) -> str:
            body = {"messages": [{"role": "user", "content": f"hello {index}"}], "stream": True}
            answer = await cluster.client.post("/v1/chat/completions", json=body)
            chunks = [json.loads(chunk) for chunk in sse_chunks(answer.text)[:-1]]
            return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

        assert await asyncio.gather(*(one(index) for index in range(24))) == [text * 3] * 24
        assert len(cluster.transport.trunks) == 3

    served(folder, use, num_replicas=3, max_running=16, coalescing=PACE)
