"""Records one answer on its way through a Router: its times and tokens for the metrics, its spans for traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from serve_app.http.errors import DeadlinePassed
from serve_app.policies.placement import Choice
from serve_app.telemetry import metrics as names
from serve_app.telemetry.router_metrics import RouterMetrics
from serve_app.telemetry.tracing import Tracing
from serve_app.text.output import TokenStream
from worker.api import FinishReason, GenerateRequest, RequestTimeline, TokenEvent
from worker.errors import InvalidRequest, Overloaded


def outcome_of(error: BaseException) -> str:
    """What an answer that ended so counts as."""
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, Overloaded):
        return "refused"
    if isinstance(error, DeadlinePassed):
        return "expired"
    if isinstance(error, asyncio.CancelledError):
        return "left"
    return "failed"


class RequestRecord:
    """What metrics and traces learn of one answer; the dispatcher's :class:`RequestNotes` of it."""

    def __init__(
        self, metrics: RouterMetrics, tracing: Tracing, model: str, request: GenerateRequest
    ) -> None:
        self._metrics = metrics
        self._spans = tracing.answer(model, request)
        self._model = model
        self._num_prompt = len(request.prompt_token_ids)
        self._num_cached: int | None = None
        self._arrived_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._num_first = self._num_generated = 0

    # -- on the way to a worker -----------------------------------------------------------------------------------

    @contextmanager
    def queued(self) -> Iterator[None]:
        """See :class:`RequestNotes`."""
        began_s = time.monotonic()
        with self._spans.queue():
            yield
        self._metrics.add(names.QUEUE_DURATION, time.monotonic() - began_s, self._model)

    @contextmanager
    def placed(self, choice: Choice, num_candidates: int) -> Iterator[None]:
        """See :class:`RequestNotes`."""
        terms = asdict(choice.terms) if self._spans.is_recording else {}
        facts = {
            "candidates": num_candidates,
            "predicted_ms": choice.predicted_ms,
            "prefix_tokens": choice.hit_tokens,
            **{f"{name}_ms": value for name, value in terms.items()},
        }
        with self._spans.place(choice.replica_id, facts):
            yield

    # -- while it runs --------------------------------------------------------------------------------------------

    def came(self, event: TokenEvent) -> None:
        """A message of its worker came."""
        num_new = event.num_generated - self._num_generated
        if event.timeline is not None:
            self._told(event.timeline)
        if num_new <= 0:
            return
        now_s = time.monotonic()
        if self._first_s:
            self._metrics.gaps.came(self._model, num_new, now_s - self._last_s)
        else:
            self._first_s, self._num_first = now_s, num_new
            self._metrics.add(names.TIME_TO_FIRST_TOKEN, now_s - self._arrived_s, self._model)
            self._spans.first_tokens(num_new)
        self._last_s, self._num_generated = now_s, event.num_generated

    def started(self) -> None:
        """A worker computes it."""
        self._metrics.add(names.PROMPT_TOKENS, self._num_prompt, self._model)

    def ended(self, outcome: str) -> None:
        """It is over."""
        now_s = time.monotonic()
        self._spans.ended(outcome, self._num_generated, self._num_cached)
        self._metrics.add(names.REQUESTS, 1, self._model, outcome)
        if not self._first_s:
            return
        self._metrics.add(names.GENERATED_TOKENS, self._num_generated, self._model)
        self._metrics.add(names.REQUEST_DURATION, now_s - self._arrived_s, self._model)
        later = self._num_generated - self._num_first
        if later > 0:
            self._metrics.add(names.TIME_PER_OUTPUT_TOKEN, (now_s - self._first_s) / later, self._model)

    def _told(self, timeline: RequestTimeline) -> None:
        # With the first event and the last one: what was cached is known with the first.
        if self._num_cached is None:
            self._metrics.add(names.CACHED_TOKENS, timeline.num_cached_tokens, self._model)
        self._num_cached = timeline.num_cached_tokens


class RecordedStream:
    """Passes a started answer's events on, and records them."""

    def __init__(self, record: RequestRecord, events: TokenStream) -> None:
        self._record = record
        self._events = events
        self._outcome = "left"
        self._closed = False
        record.started()

    def __aiter__(self) -> RecordedStream:
        return self

    async def __anext__(self) -> TokenEvent:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            await self.aclose()
            raise
        except Exception as error:
            self._outcome = outcome_of(error)
            await self.aclose()
            raise
        self._record.came(event)
        if event.finish_reason is not None:
            ok = event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._outcome = event.finish_reason.value if ok else "failed"
        return event

    def completed(self) -> None:
        """See :class:`serve_app.text.output.KeepsCount`."""
        self._outcome = FinishReason.STOP.value

    async def aclose(self) -> None:
        """Ends the answer; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._record.ended(self._outcome)
        await self._events.aclose()
