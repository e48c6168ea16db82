"""Who may call: checks the key ahead of every route, holds it to its limits, and bounds every body.

Operators' routes are for callers on this machine, and for admin keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.admin import ADMIN_PATHS
from serve_app.http.api_keys import KeyEntry, KeyRing
from serve_app.http.choices import AnswerPlan
from serve_app.http.errors import ApiError
from serve_app.policies.expert_affinity import joined_levels

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", "/docs", "/redoc"})
"""Probes and scrapers have no key."""
SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """``keys``: None lets everyone in, but operators' routes. ``max_body_bytes``: bound of every body, also of keys
    without one. ``trusts_loopback``: whether the address that a request comes from is the caller's own."""

    keys: KeyRing | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    trusts_loopback: bool = True


class BodyTooLarge(Exception):
    """More of a body came than is allowed."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.max_bytes = max_bytes


class AccessMiddleware:
    """An ASGI middleware. The entry of the caller's key is at ``scope["state"]["key"]`` afterwards."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, 413 or 429, or passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        keys = self._rules.keys
        is_admin = _is_under(_path(scope), ADMIN_PATHS)
        is_open = is_admin and self._rules.trusts_loopback and _is_local(HTTPConnection(scope))
        if is_open or (keys is None and not is_admin) or _path(scope) in OPEN_PATHS:
            await self._bounded(scope, receive, send, self._rules.max_body_bytes)
            return
        entry = keys.find(_bearer(scope), time.monotonic()) if keys is not None else None
        if keys is None or (is_admin and entry is not None and not entry.admin):
            await _refuse(scope, receive, send, _not_an_operator())
            return
        if entry is None:
            await _refuse(scope, receive, send, _unknown_key())
            return
        reached = keys.enter(entry, time.monotonic())
        if reached is not None:
            headers = {"Retry-After": str(max(1, round(reached.retry_after_s + 0.5)))}
            error = ApiError(
                429, reached.message, "rate_limit_error", code="rate_limit_exceeded", headers=headers
            )
            await _refuse(scope, receive, send, error)
            return
        scope.setdefault("state", {})["key"] = entry
        limits = [limit for limit in (entry.max_body_bytes, self._rules.max_body_bytes) if limit]
        try:
            await self._bounded(scope, receive, send, min(limits))
        finally:
            keys.leave(entry)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        declared = HTTPConnection(scope).headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > max_bytes:
            await _refuse(scope, receive, send, too_large(max_bytes))
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            return message

        await self._app(scope, counted, send)


def for_caller(plan: AnswerPlan, connection: HTTPConnection) -> AnswerPlan:
    """The plan with what the caller's key and session add: prefixes are shared only under one key, and requests of a
    session belong together, those of a user less, those of a key least."""
    entry: KeyEntry | None = getattr(connection.state, "key", None)
    session = connection.headers.get(SESSION_HEADER, "")
    salt, levels = plan.cache_salt, [plan.affinity_key, session]
    if entry is not None:
        # Within the key's own prefix: nobody can name another key's salt.
        salt = f"{entry.sha256[:16]}/{salt}"
        levels.insert(0, entry.name)
    return replace(plan, cache_salt=salt, affinity_key=joined_levels(levels))


def too_large(max_bytes: int) -> ApiError:
    """The answer to a body that is too large."""
    return ApiError(
        413, f"The body is larger than {max_bytes} bytes.", "invalid_request_error", code="request_too_large"
    )


def _unknown_key() -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(
        401,
        "The API key is missing or not valid; send it as 'Authorization: Bearer KEY'.",
        "authentication_error",
        code="invalid_api_key",
        headers=headers,
    )


def _not_an_operator() -> ApiError:
    return ApiError(
        403,
        'This is for callers on the machine itself and for keys with "admin": true.',
        "permission_error",
        code="not_an_operator",
    )


def _is_under(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def _is_local(connection: HTTPConnection) -> bool:
    """Whether the caller is on this machine: by its address, and not a proxy or a web page that speaks for others. A
    page whose own name was made to lead here asks without an origin, but by that name: only this machine's own are
    good."""
    headers = connection.headers
    if any(name in headers for name in ("x-forwarded-for", "forwarded", "x-real-ip", "origin")):
        return False
    try:
        asked_for = urlsplit("//" + headers.get("host", "")).hostname or ""
        return (
            connection.client is not None
            and ip_address(connection.client.host).is_loopback
            and (asked_for == "localhost" or ip_address(asked_for).is_loopback)
        )
    except ValueError:
        return False


def _bearer(scope: Scope) -> str:
    kind, _, key = HTTPConnection(scope).headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    await error.response()(scope, receive, send)
