"""What ends a wait that would never end: deadlines, silent workers, lost pushes, no worker at all, a stuck queue."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.deployments import dispatch
from serve_app.deployments.protocol import Accepted, Refused, StreamItem, WorkerReport
from serve_app.deployments.watching import StreamWatch, Watchers
from serve_app.http.errors import DeadlinePassed, WorkerLost
from tests.helpers.eventually import ends, some_turns, soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served, sse_chunks
from tests.serve_app.test_dispatch import ANSWER, ask, quick, slow
from worker.api import FinishReason, GenerateRequest, Grammar, TokenEvent
from worker.errors import EngineDead, InvalidRequest

__all__ = ["quick", "slow"]  # fixtures

ENDLESS = {"ignore_eos": True, "max_tokens": 3000}


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts as silent after half a second, and is asked after a fifth of one."""
    monkeypatch.setattr(dispatch, "DEAD_S", 0.5)
    monkeypatch.setattr(dispatch, "ASK_AFTER_S", 0.2)
    monkeypatch.setattr(dispatch, "TICK_S", 0.05)


def error_of(response: Any) -> dict[str, Any]:
    """The error that ends an event stream, with ``[DONE]`` behind it."""
    *chunks, end = sse_chunks(response.text)
    assert end == "[DONE]"
    found: dict[str, Any] = json.loads(chunks[-1])["error"]
    return found


def test_a_stream_past_its_deadline_ends_with_an_error_event(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        began_s = time.monotonic()
        response = await ask(cluster, stream=True, **ENDLESS)
        assert time.monotonic() - began_s >= 0.8, "it ran until then"
        assert error_of(response)["code"] == "deadline_passed"
        assert response.text.count("content") > 1
        assert cluster.replicas["replica0"].engine.snapshot().num_aborted == 1

    served(slow, use, request_timeout_s=0.8)


def test_an_answer_past_its_deadline_is_a_504(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        response = await ask(cluster, **ENDLESS)
        assert response.status_code == 504
        assert (await ask(cluster, max_tokens=2)).status_code == 200

    served(slow, use, request_timeout_s=0.8)


def test_a_request_that_never_gets_its_first_token_ends_at_its_deadline(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("x", first_token_s=60.0))

    async def use(cluster: Cluster) -> None:
        assert (await ask(cluster, stream=True)).status_code == 504

    served(folder, use, request_timeout_s=0.5)


def test_a_reader_that_does_not_read_loses_its_request_at_the_deadline() -> None:
    async def run() -> None:
        stream = _Items([])
        watchers = Watchers(silence_s=5.0)
        watch = watchers.watch("a", stream, 10.0)
        await watchers.look(9.9)
        assert not stream.closed
        await watchers.look(10.0)
        assert stream.closed, "the worker is told, although nobody waits for an item"
        with pytest.raises(DeadlinePassed):
            await watch.next()

    asyncio.run(run())


def test_a_client_that_leaves_at_the_deadline_has_left() -> None:
    async def run() -> None:
        watch = StreamWatch("a", _Items([]), 1.0)
        reading = asyncio.create_task(watch.next())
        await asyncio.sleep(0)
        reading.cancel()
        await watch.fail(DeadlinePassed("late"))
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())


def test_a_worker_that_falls_silent_ends_its_streams(slow: Path, short_silence: None) -> None:
    async def use(cluster: Cluster) -> None:
        stalled = cluster.replicas["replica0"]
        streams = [asyncio.create_task(ask(cluster, stream=True, **ENDLESS)) for _ in range(2)]
        await soon(lambda: stalled.engine.snapshot().num_running == 2)
        await cluster.flowing(10)
        cluster.reporting.discard("replica0")
        stalled.silent = stalled.stalled = True
        done = await ends(asyncio.gather(*streams))
        assert {error_of(response)["code"] for response in done} == {"worker_failed"}
        stalled.silent = stalled.stalled = False
        cluster.reporting.add("replica0")

    served(slow, use)


def test_a_request_at_a_silent_worker_goes_elsewhere_before_its_first_token(
    tmp_path: Path, short_silence: None
) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER, first_token_s=0.5))

    async def use(cluster: Cluster) -> None:
        asked = [asyncio.create_task(ask(cluster)) for _ in range(4)]
        stalled = cluster.replicas["replica0"]
        await soon(lambda: stalled.num_calls)  # some of them wait at the one that stalls
        cluster.reporting.discard("replica0")
        stalled.silent = stalled.stalled = True
        answers = await ends(asyncio.gather(*asked))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert cluster.dispatcher.counts.retries["lost"] >= 1
        stalled.stalled = False

    served(folder, use, num_replicas=2)


def test_a_worker_whose_pushes_stopped_is_asked_and_serves_on(slow: Path, short_silence: None) -> None:
    async def use(cluster: Cluster) -> None:
        await ask(cluster, max_tokens=1)
        cluster.reporting.clear()
        await asyncio.sleep(1.0)
        # Twice the time after which a silent one is dead; the streams' own items are no longer needed as a sign.
        assert len(cluster.dispatcher.live_reports()) == 1
        response = await ends(ask(cluster, stream=True))
        assert response.status_code == 200
        assert "error" not in response.text

    served(slow, use)


def test_a_router_that_stood_still_takes_no_worker_for_dead(tmp_path: Path, short_silence: None) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER, first_token_s=1.5))

    async def use(cluster: Cluster) -> None:
        asked = asyncio.create_task(ask(cluster))
        await soon(lambda: cluster.dispatcher.num_open)
        worker = cluster.replicas["replica0"]
        cluster.reporting.clear()
        worker.silent = True
        time.sleep(1.0)  # noqa: ASYNC251 (the event loop turns no more)
        await asyncio.sleep(0.15)  # and then looks around before anybody has said a word
        assert len(cluster.dispatcher.live_reports()) == 1
        worker.silent = False
        cluster.reporting.add("replica0")
        assert (await ends(asked)).status_code == 200

    served(folder, use)


@pytest.mark.parametrize("from_zero", [True, False])
def test_with_no_worker_heard_of_a_request_asks_serve_for_one(quick: Path, from_zero: bool) -> None:
    async def use(cluster: Cluster) -> None:
        # A service that may have no worker is ready without one; else something is wrong until one is heard of.
        assert (await cluster.client.get("/ready")).status_code == (200 if from_zero else 503)
        assert cluster.transport.num_wakes == 0, "nobody waits"
        asked = [asyncio.create_task(ask(cluster)) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert cluster.transport.num_wakes == 1, "asked for once, however many wait and however long"
        assert not any(task.done() for task in asked)
        replica = cluster.replicas["replica0"]
        assert cluster.transport.awake is not None
        cluster.transport.awake.set_result(
            WorkerReport("replica0", replica.engine.model, replica.engine.snapshot())
        )
        assert [(await task).status_code for task in asked] == [200] * 3

    served(quick, use, report=False, from_zero=from_zero)


def test_a_refused_request_that_waits_for_another_worker_stands_in_nobodys_way(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        busy, vetoing = cluster.replicas["replica0"], cluster.replicas["replica1"]
        longer = asyncio.create_task(ask(cluster, **ENDLESS))
        await cluster.flowing(1)
        if not busy.num_calls:
            busy, vetoing = vetoing, busy
        vetoing.vetoes = 1
        stuck = asyncio.create_task(ask(cluster))
        await soon(lambda: not vetoing.vetoes)
        await some_turns()
        assert vetoing.num_calls == 1
        assert not stuck.done(), "it waits for the one that is busy"
        # The other one is free, and those behind need not wait for the first of the queue.
        others = await ends(asyncio.gather(*(ask(cluster, max_tokens=2) for _ in range(3))))
        assert [answer.status_code for answer in others] == [200] * 3
        assert not stuck.done()
        longer.cancel()
        assert (await ends(stuck)).status_code == 200

    served(slow, use, num_replicas=2, max_running=1)


class _Items(AsyncIterator[StreamItem]):
    """A worker's call that brings these items and then nothing."""

    def __init__(self, items: list[StreamItem]) -> None:
        self.items = items
        self.closed = False

    async def __anext__(self) -> StreamItem:
        if not self.items:
            await asyncio.sleep(3600)
        return self.items.pop(0)

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("streamed", [False, True])
def test_a_grammar_that_gives_up_is_the_requests_fault_and_no_workers(quick: Path, streamed: bool) -> None:
    async def use(cluster: Cluster) -> None:
        for replica in cluster.replicas.values():
            state = replica.engine.snapshot()
            failed = Refused(InvalidRequest("response_format", "too many states"), None)
            first = TokenEvent("r", (65,), 1)
            replica.script = [Accepted(state), *([first] if streamed else []), failed]
        before = {name: replica.num_calls for name, replica in cluster.replicas.items()}
        response = await ask(cluster, stream=True)
        calls = sum(replica.num_calls - before[name] for name, replica in cluster.replicas.items())
        assert calls == 1, "it is not tried elsewhere"
        error = error_of(response) if streamed else response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
        assert response.status_code == (200 if streamed else 400)
        for replica in cluster.replicas.values():
            replica.script = None

    served(quick, use, num_replicas=2)


class _FailingEngine:
    """Gives one event that says the request failed; ``dead``: because the engine did."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead

    def submit(self, request: GenerateRequest) -> None:
        """Takes it."""

    def snapshot(self) -> Any:
        """Nothing to say."""

    def check_health(self) -> None:
        """As the test wants it."""
        if self.dead:
            raise EngineDead("it died")

    def stream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """One event."""

        async def events() -> AsyncIterator[TokenEvent]:
            yield TokenEvent(request_id, finish_reason=FinishReason.ERROR, error="too many states")

        return events()


@pytest.mark.parametrize("dead", [False, True])
def test_only_a_living_engine_puts_the_blame_on_the_grammar(dead: bool) -> None:
    from serve_app.deployments.engine_server import EngineServer
    from serve_app.policies.coalescing import CoalescingConfig

    async def run() -> StreamItem:
        engine: Any = _FailingEngine(dead)
        server = EngineServer(engine, CoalescingConfig())
        request = GenerateRequest("r", (1,), grammar=Grammar("regex", "a*"))
        return [item async for item in server.generate(request)][-1]

    last = asyncio.run(run())
    if dead:
        assert isinstance(last, TokenEvent)
    else:
        assert isinstance(last, Refused)
        assert isinstance(last.error, InvalidRequest)


def test_what_a_watch_raises_is_what_it_was_given() -> None:
    async def run() -> None:
        watch = StreamWatch("a", _Items([]), 1.0)
        reading = asyncio.create_task(watch.next())
        await asyncio.sleep(0)
        await watch.fail(WorkerLost("silent"))
        with pytest.raises(WorkerLost, match="silent"):
            await reading

    asyncio.run(run())
