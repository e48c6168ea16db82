"""The HTTP layer's backend over the dispatchers of its models, with metrics and spans of every answer. No Ray here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from serve_app.deployments.dispatch import Dispatcher
from serve_app.deployments.protocol import WorkerReport
from serve_app.deployments.request_record import RecordedStream, RequestRecord, outcome_of
from serve_app.deployments.router_facts import router_facts
from serve_app.http.admin import ReplicaAnswer, ReplicaState, UnknownReplica
from serve_app.http.backend import ServedModel
from serve_app.telemetry import metrics as names
from serve_app.telemetry.page import CONTENT_TYPE, RouterFigures, page_of
from serve_app.telemetry.router_metrics import RouterFacts, RouterMetrics
from serve_app.telemetry.token_gaps import TokenGaps
from serve_app.telemetry.tracing import Tracing
from serve_app.telemetry.worker_metrics import WorkerState
from serve_app.text.output import TokenStream
from worker.api import GenerateRequest, ModelInfo
from worker.errors import PromptTooLong

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelService:
    """A model and the dispatcher of its workers. ``replica_bounds``: the fewest and the most that there may be."""

    model: ServedModel
    dispatcher: Dispatcher
    replica_bounds: tuple[int, int] = (1, 1)


Peers = Callable[[], Awaitable[Sequence[RouterFigures]]]
"""Asks all Routers of the application what they counted, the one that asks included or not."""


async def no_peers() -> Sequence[RouterFigures]:
    """Of the only Router."""
    return ()


@dataclass(frozen=True)
class Telemetry:
    """How a Router tells of itself. ``router``: its name. ``build``: version, Python's and Ray's. ``readers`` and
    ``resource``: of pushes, see :class:`RouterMetrics`."""

    router: str = ""
    build: tuple[str, str, str] = ("", "", "")
    tracing: Tracing = field(default_factory=Tracing)
    peers: Peers = no_peers
    readers: Callable[[TokenGaps], Sequence[MetricReader]] = lambda gaps: ()
    resource: Resource | None = None


class RouterBackend:
    """The :class:`serve_app.http.backend.Backend` over the dispatchers of all models, with metrics and spans."""

    def __init__(self, services: Sequence[ModelService], telemetry: Telemetry | None = None) -> None:
        self._services = {service.model.name: service for service in services}
        told = telemetry or Telemetry()
        self._peers = told.peers
        self.tracing = told.tracing
        self.metrics = RouterMetrics(
            RouterFacts(router_facts(services, told.build)), told.router, told.readers, told.resource
        )
        for name in self._services:
            for outcome in names.OUTCOMES:
                self.metrics.add(names.REQUESTS, 0, name, outcome)
            for counted in (names.PROMPT_TOKENS, names.CACHED_TOKENS, names.GENERATED_TOKENS):
                self.metrics.add(counted, 0, name)
        self._page: asyncio.Task[bytes] | None = None

    def models(self) -> Sequence[ServedModel]:
        """The models, in the order of the options."""
        return [service.model for service in self._services.values()]

    async def model_info(self, name: str) -> ModelInfo:
        """Facts of the loaded model."""
        return await self._services[name].dispatcher.known_model()

    async def open(self, name: str, request: GenerateRequest, may_shorten: bool = False) -> TokenStream:
        """Queues, places and starts a request; one that is shortened is one answer all the same."""
        record = RequestRecord(self.metrics, self.tracing, name, request)
        dispatcher = self._services[name].dispatcher
        try:
            try:
                events = await dispatcher.open(request, record)
            except PromptTooLong as error:
                room = error.max_tokens - len(request.prompt_token_ids)
                if not may_shorten or room < max(1, request.sampling.min_tokens):
                    raise
                shorter = replace(request, sampling=replace(request.sampling, max_tokens=room))
                events = await dispatcher.open(shorter, record)
        except BaseException as error:
            record.ended(outcome_of(error))
            raise
        return RecordedStream(record, events)

    def report(self, report: WorkerReport) -> None:
        """A worker's push; it goes to the dispatcher of its model."""
        service = self._services.get(report.model.name)
        if service is not None:
            service.dispatcher.report(report)

    def is_ready(self) -> bool:
        """Whether a worker of every model has reported lately, or would be started by a request."""
        return all(service.dispatcher.is_ready() for service in self._services.values())

    async def metrics_page(self) -> tuple[bytes, str]:
        """The figures of all Routers and workers in Prometheus text form, and its content type. Those who ask at the
        same time get the same page."""
        if self._page is None:
            self._page = asyncio.create_task(self._make_page())
            self._page.add_done_callback(self._page_made)
        return await asyncio.shield(self._page), CONTENT_TYPE

    async def _make_page(self) -> bytes:
        others: Sequence[RouterFigures] = ()
        try:
            others = await self._peers()
        except Exception:
            logger.exception("the other routers could not be asked for their figures")
        routers = [*others, self.metrics.figures()]
        return await asyncio.to_thread(page_of, routers, self._worker_states())

    def _page_made(self, page: asyncio.Task[bytes]) -> None:
        self._page = None

    def replicas(self) -> list[ReplicaState]:
        """See :class:`serve_app.http.admin.Operations`."""
        now_s = time.monotonic()
        return [
            ReplicaState(name, report.replica_id, now_s - at_s, report.snapshot)
            for name, service in self._services.items()
            for at_s, report in sorted(
                service.dispatcher.timed_reports(), key=lambda entry: entry[1].replica_id
            )
        ]

    async def ask(self, question: str, *given: Any, replica: str, timeout_s: float) -> list[ReplicaAnswer]:
        """See :class:`serve_app.http.admin.Operations`."""
        asked = [
            service.dispatcher.ask_all(question, *given, only=replica, timeout_s=timeout_s)
            for service in self._services.values()
        ]
        by_model = await asyncio.gather(*asked)
        found = [
            ReplicaAnswer(name, who, None, f"{type(answer).__name__}: {answer}")
            if isinstance(answer, Exception)
            else ReplicaAnswer(name, who, answer)
            for name, answered in zip(self._services, by_model, strict=True)
            for who, answer in answered.items()
        ]
        if replica and not found:
            raise UnknownReplica(replica)
        return found

    def _worker_states(self) -> list[WorkerState]:
        return [WorkerState(s.model, s.replica, s.age_s, s.snapshot) for s in self.replicas()]
