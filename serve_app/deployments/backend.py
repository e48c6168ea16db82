"""The HTTP layer's backend over the dispatchers of its models, with the metrics of every request. No Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.deployments.dispatch import Dispatcher
from serve_app.deployments.protocol import WorkerReport
from serve_app.http.admin import ReplicaAnswer, ReplicaState, UnknownReplica
from serve_app.http.backend import ServedModel
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metrics import RouterFacts, RouterMetrics
from serve_app.text.output import TokenStream
from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenEvent, WorkerSnapshot
from worker.errors import InvalidRequest, Overloaded


@dataclass(frozen=True)
class ModelService:
    """A model and the dispatcher of its workers."""

    model: ServedModel
    dispatcher: Dispatcher


class RouterBackend:
    """The :class:`serve_app.http.backend.Backend` over the dispatchers of all models, with their metrics."""

    def __init__(self, services: Sequence[ModelService]) -> None:
        self._services = {service.model.name: service for service in services}
        dispatchers = [service.dispatcher for service in services]
        self._metrics = RouterMetrics(
            RouterFacts(
                num_queued=lambda: sum(dispatcher.num_waiting for dispatcher in dispatchers),
                num_open=lambda: sum(dispatcher.num_open for dispatcher in dispatchers),
                snapshots=self._snapshots,
                retries=lambda: _added(dispatcher.counts.retries for dispatcher in dispatchers),
            )
        )

    def models(self) -> Sequence[ServedModel]:
        """The models, in the order of the options."""
        return [service.model for service in self._services.values()]

    async def model_info(self, name: str) -> ModelInfo:
        """Facts of the loaded model."""
        return await self._services[name].dispatcher.known_model()

    async def open(self, name: str, request: GenerateRequest) -> TokenStream:
        """Queues, places and starts a request."""
        record = RequestRecord(self._metrics, name)
        try:
            events = await self._services[name].dispatcher.open(request)
        except InvalidRequest:
            record.ended("invalid")
            raise
        except Overloaded:
            record.ended("refused")
            raise
        except asyncio.CancelledError:
            record.ended("left")
            raise
        except Exception:
            record.ended("failed")
            raise
        self._metrics.add(names.PROMPT_TOKENS, len(request.prompt_token_ids), model=name)
        return MeasuredStream(record, events)

    def report(self, report: WorkerReport) -> None:
        """A worker's push; it goes to the dispatcher of its model."""
        service = self._services.get(report.model.name)
        if service is not None:
            service.dispatcher.report(report)

    def is_ready(self) -> bool:
        """Whether a worker of every model has reported lately, or would be started by a request."""
        return all(service.dispatcher.is_ready() for service in self._services.values())

    def metrics_page(self) -> tuple[bytes, str]:
        """The metrics in Prometheus text form, and its content type."""
        return self._metrics.page()

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

    def _snapshots(self) -> Mapping[str, WorkerSnapshot]:
        reports = [
            report for service in self._services.values() for report in service.dispatcher.live_reports()
        ]
        return {report.replica_id: report.snapshot for report in reports}


class RequestRecord:
    """What the metrics learn of one request."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived_s = time.monotonic()
        self._first_s = 0.0
        self._num_first = 0

    def first_tokens(self, num_tokens: int) -> None:
        """The first message came."""
        self._first_s = time.monotonic()
        self._num_first = num_tokens
        self._metrics.add(names.TIME_TO_FIRST_TOKEN, self._first_s - self._arrived_s, model=self._model)

    def ended(self, outcome: str, num_tokens: int = 0) -> None:
        """The request is over."""
        now_s = time.monotonic()
        self._metrics.add(names.REQUESTS, 1, model=self._model, outcome=outcome)
        if not self._first_s:
            return
        self._metrics.add(names.GENERATED_TOKENS, num_tokens, model=self._model)
        self._metrics.add(names.REQUEST_DURATION, now_s - self._arrived_s, model=self._model)
        later = num_tokens - self._num_first
        if later > 0:
            self._metrics.add(names.TIME_PER_OUTPUT_TOKEN, (now_s - self._first_s) / later, model=self._model)


class MeasuredStream:
    """Passes a request's events on and records its times once."""

    def __init__(self, record: RequestRecord, events: TokenStream) -> None:
        self._record = record
        self._events = events
        self._begun = False
        self._num_tokens = 0
        self._outcome = "left"
        self._closed = False

    def __aiter__(self) -> MeasuredStream:
        return self

    async def __anext__(self) -> TokenEvent:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            await self.aclose()
            raise
        except Exception:
            self._outcome = "failed"
            await self.aclose()
            raise
        if not self._begun and event.token_ids:
            self._begun = True
            self._record.first_tokens(len(event.token_ids))
        self._num_tokens = max(self._num_tokens, event.num_generated)
        if event.finish_reason is not None:
            ok = event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._outcome = event.finish_reason.value if ok else "failed"
        return event

    async def aclose(self) -> None:
        """Ends the request; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._record.ended(self._outcome, self._num_tokens)
        await self._events.aclose()


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total
