"""Times every HTTP request by route and status, and opens the span of those that generate."""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.requests import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.telemetry.metrics import HTTP_DURATION
from serve_app.telemetry.router_metrics import RouterMetrics
from serve_app.telemetry.tracing import OPERATIONS, Tracing, ended_http

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
OTHER_METHOD = "_OTHER"
"""As the HTTP conventions call what a client made up."""
CLIENT_LEFT = 499
"""Where there was nobody left to answer."""


class TelemetryMiddleware:
    """An ASGI middleware outside of all others, so that refusals count, too. ``routes``: the paths there are; a request
    for another one has no route, as anybody can make up paths."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, tracing: Tracing, routes: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._routes = frozenset(path for path in routes if "{" not in path)
        self._patterns = [(path.partition("{")[0], path) for path in routes if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; a stream has ended when its last byte was sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        route = self._route(scope)
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        try:
            if self._tracing.is_on and method == "POST" and route in OPERATIONS:
                with self._tracing.http(method, route, Headers(scope=scope)) as span:
                    try:
                        await self._app(scope, receive, watched)
                    finally:
                        ended_http(span, status)
            else:
                await self._app(scope, receive, watched)
        except Exception:
            # Answered further out, with 500 unless a response had begun.
            status = 500 if status == CLIENT_LEFT else status
            raise
        finally:
            self._metrics.add(HTTP_DURATION, time.monotonic() - began_s, method, route, str(status))

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if path in self._routes:
            return path
        return next((route for start, route in self._patterns if path.startswith(start)), "")
