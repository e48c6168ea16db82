"""A collector of this process's own: takes OTLP over HTTP on a local port and keeps what came."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What was sent to :attr:`url` so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._posted: list[tuple[str, bytes]] = []

    def take(self, path: str, body: bytes) -> None:
        """One post."""
        self._posted.append((path, body))

    def spans(self) -> list[Any]:
        """All spans, as OTLP has them."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self._bodies("/v1/traces")]
        scopes = [s for request in requests for r in request.resource_spans for s in r.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def metrics(self) -> dict[str, set[str]]:
        """Names of metrics by the part (``router``, ``worker``) that pushed them."""
        found: dict[str, set[str]] = {}
        for body in self._bodies("/v1/metrics"):
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                told = {a.key: a.value.string_value for a in resource.resource.attributes}
                names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
                found.setdefault(told.get("headroom.part", ""), set()).update(names)
        return found

    def _bodies(self, path: str) -> list[bytes]:
        return [body for at, body in list(self._posted) if at == path]


def branches(spans: Sequence[Any]) -> set[tuple[str, ...]]:
    """Of each span without children here, the names from its topmost span down to it."""
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    parents = {(span.trace_id, span.parent_span_id) for span in spans}
    found = set()
    for key, span in by_id.items():
        names: list[str] = []
        above: Any = span if key not in parents else None
        while above is not None:
            names.append(above.name)
            above = by_id.get((above.trace_id, above.parent_span_id))
        if names:
            found.add(tuple(reversed(names)))
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, gzip.decompress(body) if self.headers["content-encoding"] else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
