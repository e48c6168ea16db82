"""The HTTP surface: an application whose routes hand requests to a backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from serve_app.http.access import AccessMiddleware, AccessRules, BodyTooLarge, for_caller, too_large
from serve_app.http.admin import Operations, UnknownReplica, add_admin
from serve_app.http.backend import Backend, ServedModel
from serve_app.http.chat import chat_body, chat_chunks, plan_chat
from serve_app.http.choices import start_answers
from serve_app.http.completions import completion_body, completion_chunks, plan_completion
from serve_app.http.documentation import (
    ChatBody,
    CompletionBody,
    ModelCard,
    ModelList,
    ResponseBody,
    Status,
    TokenList,
    TokenText,
    answers,
    document,
)
from serve_app.http.errors import (
    ApiError,
    DeadlinePassed,
    UnknownModel,
    WorkerLost,
    describe_error,
    describe_validation,
)
from serve_app.http.response_schemas import ResponseRequest
from serve_app.http.responses import as_chat, response_body, response_events
from serve_app.http.schemas import ChatRequest, CompletionRequest, Lenient
from serve_app.http.streaming import start_stream
from serve_app.http.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from serve_app.telemetry.http import TelemetryMiddleware
from serve_app.telemetry.router_metrics import RouterMetrics
from serve_app.telemetry.tracing import Tracing
from worker.errors import HeadroomError

logger = logging.getLogger(__name__)

LONG_BODY_BYTES = 256 * 1024
"""Tokenising a longer body would hold up every stream of this Router for tens of milliseconds or more."""

_Given = TypeVarTuple("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class RequestTelemetry:
    """Where times and spans of requests go."""

    metrics: RouterMetrics | None = None
    tracing: Tracing = field(default_factory=Tracing)


def create_app(
    backend: Backend,
    access: AccessRules | None = None,
    operations: Operations | None = None,
    telemetry: RequestTelemetry | None = None,
) -> FastAPI:
    """The application; operators' routes only with ``operations``, times and spans of requests with ``telemetry``.
    FastAPI's own spans are switched off where it has them: they would begin a trace of their own beside Serve's."""
    app = FastAPI(title="Headroom", version="1", **_telemetry_off())
    app.add_middleware(AccessMiddleware, rules=access or AccessRules())
    _add_error_answers(app)

    told = telemetry or RequestTelemetry()
    _add_generation(app, backend, told.tracing)
    _add_facts(app, backend)
    if operations is not None:
        add_admin(app, operations)
    document(app)
    if told.metrics is not None:
        paths = [route.path for route in app.routes if isinstance(route, Route)]
        app.add_middleware(TelemetryMiddleware, metrics=told.metrics, tracing=told.tracing, routes=paths)
    return app


def find_model(backend: Backend, name: str | None) -> ServedModel:
    """The model a request names; the first one when it names none. Raises UnknownModel."""
    served = backend.models()
    if name is None:
        return served[0]
    for model in served:
        if model.name == name:
            return model
    raise UnknownModel(name, [model.name for model in served])


def ignored_header(body: Lenient) -> dict[str, str]:
    """Tells the client which of its fields had no effect."""
    names = [name for name in body.unknown_fields() if name.isascii() and name.isprintable()]
    return {"x-ignored-fields": ", ".join(names)[:1000]} if names else {}


async def _beside_streams(request: Request, make: Callable[[*_Given], _Made], *given: *_Given) -> _Made:
    """What ``make`` makes of a body; in a thread where the body is long, as the event loop carries every stream."""
    if len(await request.body()) < LONG_BODY_BYTES:
        return make(*given)
    return await asyncio.to_thread(make, *given)


def _add_generation(app: FastAPI, backend: Backend, tracing: Tracing) -> None:
    async def planned(request: Request, make: Callable[[*_Given], _Made], *given: *_Given) -> _Made:
        with tracing.inside("tokenize"):
            return await _beside_streams(request, make, *given)

    @app.post("/v1/completions", response_model=None, responses=answers(CompletionBody, stream=True))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        model = find_model(backend, body.model)
        plan = await planned(request, plan_completion, body, model)
        started = await start_answers(backend, model, for_caller(plan, request))
        if body.stream:
            return await start_stream(completion_chunks(started, body, plan, model), ignored_header(body))
        content = await completion_body(started, body, plan, model)
        return JSONResponse(content, headers=ignored_header(body))

    @app.post("/v1/chat/completions", response_model=None, responses=answers(ChatBody, stream=True))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        model = find_model(backend, body.model)
        plan = await planned(request, plan_chat, body, model)
        started = await start_answers(backend, model, for_caller(plan.answer, request))
        if body.stream:
            return await start_stream(chat_chunks(started, body, plan, model), ignored_header(body))
        return JSONResponse(await chat_body(started, plan, model), headers=ignored_header(body))

    @app.post("/v1/responses", response_model=None, responses=answers(ResponseBody, stream=True))
    async def responses(request: Request, body: ResponseRequest) -> Response:
        model = find_model(backend, body.model)
        plan = await planned(request, plan_chat, as_chat(body), model)
        started = await start_answers(backend, model, for_caller(plan.answer, request))
        if body.stream:
            events = response_events(started, body, plan, model)
            return await start_stream(events, ignored_header(body), named=True)
        return JSONResponse(await response_body(started, body, plan, model), headers=ignored_header(body))

    @app.post("/tokenize", responses=answers(TokenList))
    async def tokenize_text(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        model = find_model(backend, body.model)
        info = await backend.model_info(model.name)
        return await _beside_streams(request, tokenize, body, model, info.max_model_len)

    @app.post("/detokenize", responses=answers(TokenText))
    async def detokenize_ids(body: DetokenizeRequest) -> dict[str, Any]:
        return detokenize(body, find_model(backend, body.model))


def _add_facts(app: FastAPI, backend: Backend) -> None:
    @app.get("/v1/models", responses=answers(ModelList))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(model) for model in backend.models()]}

    @app.get("/v1/models/{name:path}", responses=answers(ModelCard))
    async def model(name: str) -> dict[str, Any]:
        return _model_card(find_model(backend, name))

    @app.get("/health", responses=answers(Status))
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", response_model=None, responses={200: {"model": Status}, 503: {"model": Status}})
    async def ready() -> JSONResponse:
        if backend.is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "no worker has reported"}, status_code=503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        page, content_type = await backend.metrics_page()
        return Response(page, media_type=content_type)


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "headroom"}


def _add_error_answers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return describe_error(error).response()

    for kind in (HeadroomError, UnknownModel, WorkerLost, DeadlinePassed):
        app.add_exception_handler(kind, known)

    @app.exception_handler(UnknownReplica)
    async def unknown_replica(request: Request, error: UnknownReplica) -> Response:
        message = f"No live worker is called {error.args[0]!r}; GET /admin/replicas lists them."
        return ApiError(404, message, "invalid_request_error", param="replica").response()

    @app.exception_handler(BodyTooLarge)
    async def large(request: Request, error: BodyTooLarge) -> Response:
        return too_large(error.max_bytes).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return describe_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, BodyTooLarge):  # as FastAPI hands it on
            return too_large(error.__cause__.max_bytes).response()
        headers: Mapping[str, str] = error.headers or {}
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, "invalid_request_error", headers=headers).response()

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        logger.exception("request failed: %s %s", request.method, request.url.path, exc_info=error)
        return describe_error(error).response()


def _telemetry_off() -> dict[str, Any]:
    # The argument exists only in recent FastAPI versions.
    names = FastAPI.__init__.__code__.co_varnames
    return {"telemetry": {"tracing": False}} if "telemetry" in names else {}
