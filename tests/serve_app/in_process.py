"""The service without Ray: real dispatcher, HTTP layer and fake engines, all in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from serve_app.deployments.backend import ModelService, RouterBackend, Telemetry
from serve_app.deployments.dispatch import DispatchConfig, Dispatcher
from serve_app.deployments.engine_server import EngineServer
from serve_app.deployments.protocol import ReplicaGone, StreamItem, WorkerReport
from serve_app.deployments.trunk import SeatPlace
from serve_app.deployments.trunk_reader import SeatedStream, Trunks
from serve_app.http.backend import ServedModel
from serve_app.http.errors import WorkerLost
from serve_app.http.routes import RequestTelemetry, create_app
from serve_app.policies.coalescing import CoalescingConfig
from serve_app.policies.placement import Placement, PlacementConfig
from serve_app.text.chat_formats import make_chat_format
from serve_app.text.chat_template import ChatTemplate
from serve_app.text.tokenizer import load_text_model
from tests.helpers.eventually import some_turns, soon
from worker.api import GenerateRequest
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine
from worker.errors import Overloaded

REPORT_S = 0.02


class Call:
    """One call of a fake worker; ``lost`` makes its next item the death of the worker."""

    def __init__(self, items: AsyncIterator[StreamItem], replica: Replica) -> None:
        self._items: Any = items
        self._replica = replica

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> StreamItem:
        if self._replica.lost:
            raise WorkerLost("killed by the test")
        if self._replica.stalled:
            await asyncio.sleep(3600)
        item: StreamItem = await anext(self._items)
        if self._replica.stalled:
            await asyncio.sleep(3600)
        if self._replica.lost:
            raise WorkerLost("killed by the test")
        return item

    async def aclose(self) -> None:
        await self._items.aclose()


@dataclass
class Replica:
    """One worker: its engine, and how the test makes it misbehave."""

    engine: Any
    server: EngineServer
    lost: bool = False
    gone: bool = False
    vetoes: int = 0
    silent: bool = False
    stalled: bool = False
    script: list[StreamItem] | None = None
    num_calls: int = 0

    async def refuse(self) -> AsyncIterator[StreamItem]:
        """A veto."""
        from serve_app.deployments.protocol import Refused

        yield Refused(Overloaded("vetoed by the test", 2.0), self.engine.snapshot())

    async def play(self, script: list[StreamItem]) -> AsyncIterator[StreamItem]:
        """These items and no others."""
        for item in script:
            yield item

    async def hang(self) -> AsyncIterator[StreamItem]:
        """A worker that never answers."""
        await asyncio.sleep(3600)
        yield  # type: ignore[misc]


@dataclass
class Cluster:
    """Workers by replica id, a transport to them, and the application in front."""

    replicas: dict[str, Replica]
    dispatcher: Dispatcher
    transport: InProcessTransport
    backend: RouterBackend
    client: httpx.AsyncClient
    reporting: set[str] = field(default_factory=set)

    def num_live(self) -> int:
        """Requests in all engines together."""
        states = [replica.engine.snapshot() for replica in self.replicas.values()]
        return sum(state.num_running + state.num_waiting for state in states)

    def num_generated(self) -> int:
        """Tokens of all engines together."""
        return sum(replica.engine.snapshot().generated_tokens for replica in self.replicas.values())

    async def flowing(self, num_tokens: int) -> None:
        """Waits until so many tokens were made since now, and the first of them have reached whoever reads."""
        before = self.num_generated()
        await soon(lambda: self.num_generated() >= before + num_tokens)
        await some_turns()

    async def settle(self) -> int:
        """Waits until no engine has a request; answers how many are left."""
        return await soon(self.num_live, lambda left: not left)


class InProcessTransport:
    """Calls replicas of this process."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas
        self.trunks = Trunks(self._trunk)
        self.num_wakes = 0
        self.awake: asyncio.Future[WorkerReport | None] | None = None

    async def ask(self, replica_id: str, question: str, *given: Any) -> Any:
        """Asks what a Worker would be asked."""
        replica = self._replicas[replica_id]
        if replica.gone:
            raise ReplicaGone(replica_id)
        if replica.lost:
            raise WorkerLost("killed by the test")
        if replica.silent:
            await asyncio.sleep(3600)
        if question == "engine_report":
            return await replica.server.report(*given)
        return await getattr(replica.server, question)(*given)

    async def report_of(self, replica_id: str) -> WorkerReport:
        """Asks as a Router does that nobody pushes to."""
        replica = self._replicas[replica_id]
        if replica.silent:
            await asyncio.sleep(3600)
        if replica.gone or replica.lost:
            raise WorkerLost("killed by the test")
        return WorkerReport(replica_id, replica.engine.model, replica.engine.snapshot())

    async def wake(self) -> WorkerReport | None:
        """Waits until the test sets ``awake``."""
        self.num_wakes += 1
        self.awake = asyncio.get_running_loop().create_future()
        return await self.awake

    def start(self, replica_id: str, request: GenerateRequest) -> SeatedStream:
        """Starts a call, as the pinned router would."""
        seat = self.trunks.seat(replica_id, request.request_id)
        return SeatedStream(self._call(replica_id, request, seat.place), seat)

    def _trunk(self, replica_id: str, trunk_id: str) -> Call:
        replica = self._replicas[replica_id]
        if replica.gone:
            return Call(_gone(replica_id), replica)
        return Call(replica.hang() if replica.silent else replica.server.trunk(trunk_id), replica)

    def _call(self, replica_id: str, request: GenerateRequest, place: SeatPlace) -> Call:
        replica = self._replicas[replica_id]
        replica.num_calls += 1
        if replica.gone:
            return Call(_gone(replica_id), replica)
        if replica.silent:
            return Call(replica.hang(), replica)
        if replica.script is not None:
            return Call(replica.play(replica.script), replica)
        if replica.vetoes:
            replica.vetoes -= 1
            return Call(replica.refuse(), replica)
        return Call(replica.server.generate(request, place), replica)


async def _gone(replica_id: str) -> AsyncIterator[StreamItem]:
    raise ReplicaGone(replica_id)
    yield  # type: ignore[unreachable]


@asynccontextmanager
async def running_cluster(
    folder: Path,
    *,
    num_replicas: int = 1,
    max_running: int = 8,
    max_waiting: int = 1024,
    max_queue: int = 64,
    queue_timeout_s: float = 30.0,
    accept_timeout_s: float = 30.0,
    backlog: int = 0,
    coalescing: CoalescingConfig | None = None,
    report: bool = True,
    request_timeout_s: float = 600.0,
    from_zero: bool = False,
    wrap: Any = None,
    make_engine: Callable[[WorkerConfig], Any] = FakeEngine,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Cluster]:
    """A running service over ``folder``; its workers report every 20 ms."""
    config = WorkerConfig(
        model=str(folder),
        served_name="fake-model",
        engine="fake",
        max_running=max_running,
        max_waiting=max_waiting,
    )
    told = telemetry or Telemetry("router0")
    pace = coalescing or CoalescingConfig(messages_per_s=1e9)
    replicas = {}
    for index in range(num_replicas):
        engine = make_engine(config)
        replicas[f"replica{index}"] = Replica(engine, EngineServer(engine, pace, told.tracing))
    calls = InProcessTransport(replicas)
    dispatcher = Dispatcher(
        DispatchConfig(max_queue, queue_timeout_s, accept_timeout_s, request_timeout_s, from_zero),
        Placement(PlacementConfig(queue_share=backlog / max_running)),
        calls,
    )
    text = load_text_model(folder)
    template = ChatTemplate(text.chat_template, text.names) if text.chat_template else None
    chat_format = make_chat_format("auto", text.chat_template)
    service = ModelService(ServedModel("fake-model", text, template, chat_format, 0), dispatcher)
    backend = RouterBackend([service], told)
    requests = RequestTelemetry(backend.metrics, backend.tracing)
    app = create_app(backend, None, backend, requests) if wrap is None else wrap(backend)
    # An unhandled error must come back as the client sees it, a 500, and not fall through to the test.
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        cluster = Cluster(replicas, dispatcher, calls, backend, client, set(replicas) if report else set())
        tasks = [asyncio.create_task(_report(cluster)), asyncio.create_task(dispatcher.run())]
        try:
            yield cluster
        finally:
            for task in tasks:
                task.cancel()
            for replica in replicas.values():
                replica.engine.close()


def served(folder: Path, use: Callable[[Cluster], Awaitable[Any]], **options: Any) -> Any:
    """Runs ``use`` on a cluster; nothing may be left in engines, queue or ledger."""

    async def run() -> Any:
        async with running_cluster(folder, **options) as cluster:
            result = await use(cluster)
            assert await cluster.settle() == 0
            assert cluster.dispatcher.num_open == 0
            assert cluster.dispatcher.num_waiting == 0
            return result

    return asyncio.run(run())


async def _report(cluster: Cluster) -> None:
    while True:
        for name in list(cluster.reporting):
            engine = cluster.replicas[name].engine
            cluster.dispatcher.report(WorkerReport(name, engine.model, engine.snapshot()))
        await asyncio.sleep(REPORT_S)


def sse_chunks(body: str) -> Sequence[str]:
    """The ``data:`` contents of an event stream, in order."""
    return [block.removeprefix("data: ") for block in body.split("\n\n") if block.startswith("data: ")]
