"""Makes the spans of a request: those of a Router as it passes through, those of a worker from its timeline.

One tree per request: what came by HTTP; in it the reading of the prompt, and each answer, with its time in the queue,
each try at a worker, and what the worker did. Nothing of a prompt or an answer is ever in a span. Where Serve's tracing
is off there is no tracer, and a request meets one comparison per place. The provider is Serve's and is never set here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from worker.api import FinishReason, GenerateRequest, RequestTimeline, SamplingParams

PROVIDER = "headroom"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""Routes that generate, and what the conventions call that."""
_OPERATION = otel_context.create_key("headroom-operation")
_QUIET: Mapping[str, Any] = {"record_exception": False, "set_status_on_exception": False}
"""What an error says may quote what a client wrote."""


class Tracing:
    """Where spans come from; without a tracer, no span is ever made."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    @classmethod
    def of_process(cls) -> Tracing:
        """Serve's, where it traces: then it has set a provider before any deployment's class is made."""
        provider = trace.get_tracer_provider()
        return cls(provider.get_tracer("headroom") if isinstance(provider, TracerProvider) else None)

    @property
    def is_on(self) -> bool:
        """Whether spans are made at all."""
        return self._tracer is not None

    @contextmanager
    def http(self, method: str, route: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """The span of an HTTP request that generates, current meanwhile; its parent is Serve's, or the client's."""
        if self._tracer is None:
            yield INVALID_SPAN
            return
        span = self._tracer.start_span(
            f"{method} {route}",
            context=parent_of(headers),
            kind=SpanKind.SERVER,
            attributes=_http(method, route),
        )
        token = otel_context.attach(
            otel_context.set_value(_OPERATION, OPERATIONS[route], trace.set_span_in_context(span))
        )
        try:
            yield span
        finally:
            otel_context.detach(token)
            span.end()

    @contextmanager
    def inside(self, name: str) -> Iterator[Span]:
        """A span of something inside the current request, current meanwhile."""
        if self._tracer is None:
            yield INVALID_SPAN
            return
        with self._tracer.start_as_current_span(name, **_QUIET) as span:
            try:
                yield span
            except Exception as error:
                _failed(span, type(error).__name__)
                raise

    def answer(self, model: str, request: GenerateRequest) -> AnswerSpans:
        """The spans of one answer, of which the first begins now."""
        return AnswerSpans(self._tracer, model, request)

    def worker(self, request: GenerateRequest) -> WorkerSpans:
        """Remembers whose child the worker's part of a request is; its spans are made when its timeline is known."""
        return WorkerSpans(self._tracer, request)


def parent_of(headers: Mapping[str, str]) -> Context | None:
    """The context that a request belongs to: the current one, unless the client's own headers say that they are not
    sampled. Serve forgets that, and what it then starts is a tree without a root."""
    theirs = TraceContextTextMapPropagator().extract(headers)
    told = trace.get_current_span(theirs).get_span_context()
    here = trace.get_current_span().get_span_context()
    if told.is_valid and (not here.is_valid or not told.trace_flags.sampled):
        return theirs
    return None


def _http(method: str, route: str) -> dict[str, str]:
    return {"http.request.method": method, "http.route": route, "url.path": route}


def ended_http(span: Span, status: int) -> None:
    """Notes the response's status."""
    if span.is_recording():
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))


class AnswerSpans:
    """One answer in the Router: ``chat MODEL`` from its start to its last token, and in it ``queue`` and ``place``."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer | None, model: str, request: GenerateRequest) -> None:
        self._tracer = tracer
        if tracer is None:
            return
        operation = otel_context.get_value(_OPERATION) or "text_completion"
        self._span = tracer.start_span(f"{operation} {model}", kind=SpanKind.INTERNAL)
        if self._span.is_recording():
            self._span.set_attributes(_asked(str(operation), model, request))
        self._context = trace.set_span_in_context(self._span)

    @property
    def is_recording(self) -> bool:
        """Whether this answer is traced."""
        return self._tracer is not None and self._span.is_recording()

    @contextmanager
    def queue(self) -> Iterator[None]:
        """It waits for a worker."""
        if self._tracer is None:
            yield
            return
        span = self._tracer.start_span("queue", context=self._context)
        try:
            yield
        except Exception as error:
            _failed(span, type(error).__name__)
            raise
        finally:
            span.end()

    @contextmanager
    def place(self, replica: str, facts: Mapping[str, float]) -> Iterator[None]:
        """It is sent to a worker, up to the first tokens; ``facts``: what the choice was made by. Calls of workers made
        within are children of this span."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span("place", self._context, **_QUIET) as span:
            if span.is_recording():
                span.set_attribute("headroom.replica", replica)
                span.set_attributes({f"headroom.placement.{name}": value for name, value in facts.items()})
            try:
                yield
            except Exception as error:
                _failed(span, type(error).__name__)
                raise

    def first_tokens(self, num_tokens: int) -> None:
        """The first tokens came."""
        if self._tracer is not None:
            self._span.add_event("first token", {"headroom.tokens": num_tokens})

    def ended(self, outcome: str, num_generated: int, num_cached: int | None) -> None:
        """The answer is over."""
        if self._tracer is None:
            return
        if self._span.is_recording():
            self._span.set_attribute("gen_ai.usage.output_tokens", num_generated)
            if num_cached is not None:
                self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)
            if outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value):
                self._span.set_attribute("gen_ai.response.finish_reasons", [outcome])
            else:
                _failed(self._span, outcome)
        self._span.end()


class WorkerSpans:
    """What a worker did for a request: ``worker``, and in it ``queued``, ``prefill`` and ``decode``."""

    __slots__ = ("_context", "_num_prompt", "_timeline", "_tracer", "is_recording")

    def __init__(self, tracer: Tracer | None, request: GenerateRequest) -> None:
        self._tracer = tracer
        parent = trace.get_current_span() if tracer is not None else INVALID_SPAN
        # A root here is none: Serve began it for a request that is not sampled.
        self.is_recording = parent.is_recording() and getattr(parent, "parent", None) is not None
        """Whether spans will be made: not where the request is not traced."""
        self._timeline: RequestTimeline | None = None
        self._num_prompt = len(request.prompt_token_ids)
        # The end may be told from another task: a request's context does not follow there.
        self._context = otel_context.get_current() if self.is_recording else None

    def told(self, timeline: RequestTimeline | None) -> None:
        """What is known of the request so far."""
        self._timeline = timeline or self._timeline

    def ended(self, reason: FinishReason | None, facts: Mapping[str, float]) -> None:
        """The request is over; None: its caller left. ``facts``: figures of the worker over the request's time."""
        if self._tracer is None or not self.is_recording or self._timeline is None:
            return
        self.is_recording = False
        seen = self._timeline
        end_s = max(seen.finished_s, seen.first_token_s, seen.scheduled_s, seen.queued_s)
        span = self._tracer.start_span("worker", self._context, start_time=_ns(seen.queued_s))
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": self._num_prompt,
                "gen_ai.usage.cache_read.input_tokens": seen.num_cached_tokens,
                "gen_ai.usage.output_tokens": seen.num_generated_tokens,
                "headroom.retractions": seen.num_retractions,
                "headroom.finish_reason": reason.value if reason is not None else "left",
                **{f"headroom.worker.{name}": value for name, value in facts.items()},
            }
        )
        if reason is FinishReason.ERROR:
            _failed(span, "engine")
        if seen.first_token_s:
            span.add_event("first token", timestamp=_ns(seen.first_token_s))
        for at_s in seen.retracted_s:
            span.add_event("retracted", timestamp=_ns(at_s))
        self._phases(trace.set_span_in_context(span, self._context), seen, end_s)
        span.end(_ns(end_s))

    def _phases(self, context: Context, seen: RequestTimeline, end_s: float) -> None:
        stamps = (seen.queued_s, seen.scheduled_s, seen.first_token_s)
        ends: Sequence[float] = (*stamps[1:], end_s)
        assert self._tracer is not None
        for name, begun_s, over_s in zip(("queued", "prefill", "decode"), stamps, ends, strict=True):
            if begun_s:
                phase = self._tracer.start_span(name, context, start_time=_ns(begun_s))
                phase.end(_ns(over_s or end_s))


def _failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def _asked(operation: str, model: str, request: GenerateRequest) -> dict[str, Any]:
    sampling: SamplingParams = request.sampling
    asked: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "headroom.request_id": request.request_id,
    }
    if sampling.top_k:
        asked["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        asked["gen_ai.request.seed"] = sampling.seed
    if request.grammar is not None:
        asked["headroom.grammar"] = request.grammar.kind
    return asked


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
