"""What Serve asks for the processors of its spans: they go to a collector by OTLP, less Serve's own background noise.

``RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=serve_app.telemetry.spans:span_processors`` on every process of a cluster.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from serve_app.config import own_otlp_settings
from serve_app.telemetry.otlp import OtlpSettings

BACKGROUND = ("report", "trunk", "worker_report", "router_figures", "snapshot")
"""Methods that workers and Routers call of each other, request or not: many a second, and one never ends."""

INGRESS = "__call__"
"""The method of a request from outside, as Serve calls it."""


def span_processors() -> list[SpanProcessor]:
    """As Serve wants it: no arguments, a list. The exporter reads the standard variables of OpenTelemetry."""
    return [WithoutBackground(BatchSpanProcessor(span_exporter(own_otlp_settings())))]


def span_exporter(settings: OtlpSettings) -> SpanExporter:
    """Sends to the collector that the environment names."""
    if settings.traces_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class WithoutBackground(SpanProcessor):
    """Hands on all spans but those of Serve that belong to no request."""

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See the base class."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """See the base class."""
        if not is_background(span.name, span.parent is not None):
            self._inner.on_end(span)

    def shutdown(self) -> None:
        """See the base class."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See the base class."""
        return self._inner.force_flush(timeout_millis)


def is_background(name: str, has_parent: bool) -> bool:
    """Whether a span is Serve's (``<what> <deployment> <method>``) and of no request: of a call in the background, or
    of a call between deployments that says of no caller. Serve begins such roots where a request is not sampled."""
    what, _, rest = name.partition(" ")
    if what not in ("route_to_replica", "replica_handle_request"):
        return False
    method = rest.rpartition(" ")[2]
    return method in BACKGROUND or not (has_parent or method == INGRESS)
