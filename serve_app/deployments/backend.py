"""The HTTP layer's backend over a dispatcher, with the metrics of every request. No Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from serve_app.deployments.dispatch import Dispatcher
from serve_app.http.backend import ServedModel
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metrics import RouterFacts, RouterMetrics
from serve_app.text.output import TokenStream
from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenEvent, WorkerSnapshot
from worker.errors import InvalidRequest, Overloaded


class RouterBackend:
    """The :class:`serve_app.http.backend.Backend` over a dispatcher, with its metrics."""

    def __init__(self, model: ServedModel, dispatcher: Dispatcher) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._metrics = RouterMetrics(
            RouterFacts(
                num_queued=lambda: dispatcher.num_waiting,
                num_open=lambda: dispatcher.num_open,
                snapshots=self._snapshots,
                retries=lambda: dispatcher.counts.retries,
            )
        )

    def models(self) -> Sequence[ServedModel]:
        """The one model."""
        return (self._model,)

    async def model_info(self, name: str) -> ModelInfo:
        """Facts of the loaded model."""
        return await self._dispatcher.known_model()

    async def open(self, name: str, request: GenerateRequest) -> TokenStream:
        """Queues, places and starts a request."""
        arrived_s = time.monotonic()
        try:
            events = await self._dispatcher.open(request)
        except InvalidRequest:
            self._ended("invalid")
            raise
        except Overloaded:
            self._ended("refused")
            raise
        except asyncio.CancelledError:
            self._ended("left")
            raise
        except Exception:
            self._ended("failed")
            raise
        self._metrics.add(names.PROMPT_TOKENS, len(request.prompt_token_ids), model=self._model.name)
        return MeasuredStream(self, events, arrived_s)

    def is_ready(self) -> bool:
        """Whether a worker has reported lately."""
        return bool(self._dispatcher.live_reports())

    def metrics_page(self) -> tuple[bytes, str]:
        """The metrics in Prometheus text form, and its content type."""
        return self._metrics.page()

    def first_tokens(self, seconds: float) -> None:
        """Records a time to first token."""
        self._metrics.add(names.TIME_TO_FIRST_TOKEN, seconds, model=self._model.name)

    def finished(
        self, outcome: str, num_tokens: int, num_later_tokens: int, after_first_s: float, s: float
    ) -> None:
        """Records the end of a started request."""
        self._ended(outcome)
        model = self._model.name
        self._metrics.add(names.GENERATED_TOKENS, num_tokens, model=model)
        self._metrics.add(names.REQUEST_DURATION, s, model=model)
        if num_later_tokens:
            self._metrics.add(names.TIME_PER_OUTPUT_TOKEN, after_first_s / num_later_tokens, model=model)

    def _ended(self, outcome: str) -> None:
        self._metrics.add(names.REQUESTS, 1, model=self._model.name, outcome=outcome)

    def _snapshots(self) -> Mapping[str, WorkerSnapshot]:
        return {report.replica_id: report.snapshot for report in self._dispatcher.live_reports()}


class MeasuredStream:
    """Passes a request's events on and records its times once."""

    def __init__(self, backend: RouterBackend, events: TokenStream, arrived_s: float) -> None:
        self._backend = backend
        self._events = events
        self._arrived_s = arrived_s
        self._first_s = 0.0
        self._num_first = 0
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
        if not self._first_s and event.token_ids:
            self._first_s = time.monotonic()
            self._num_first = len(event.token_ids)
            self._backend.first_tokens(self._first_s - self._arrived_s)
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
        now_s = time.monotonic()
        later = self._num_tokens - self._num_first
        self._backend.finished(
            self._outcome, self._num_tokens, later, now_s - self._first_s, now_s - self._arrived_s
        )
        await self._events.aclose()
