"""The Router deployment: the HTTP ingress, with queue and placement in the same process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from opentelemetry.sdk.metrics.export import MetricReader
from ray.serve.handle import DeploymentHandle

from serve_app.config import own_otlp_settings
from serve_app.deployments import ray_hooks
from serve_app.deployments.backend import ModelService, RouterBackend, Telemetry, no_peers
from serve_app.deployments.dispatch import DispatchConfig, Dispatcher
from serve_app.deployments.protocol import WorkerReport
from serve_app.http.access import AccessRules
from serve_app.http.api_keys import KeyRing
from serve_app.http.backend import ServedModel
from serve_app.http.routes import RequestTelemetry, create_app
from serve_app.policies.placement import Placement, PlacementConfig
from serve_app.telemetry.logging import configure_logging
from serve_app.telemetry.page import RouterFigures
from serve_app.telemetry.push import otlp_exporter, push_reader, resource_of
from serve_app.telemetry.token_gaps import TokenGaps
from serve_app.telemetry.tracing import Tracing
from serve_app.text.chat_formats import make_chat_format
from serve_app.text.chat_template import ChatTemplate
from serve_app.text.model_folder import resolve_model
from serve_app.text.tokenizer import load_text_model


@dataclass(frozen=True)
class ModelArgs:
    """What a Router is told of one model."""

    name: str
    model: str
    revision: str
    chat_template: str
    chat_format: str
    dispatch: DispatchConfig
    placement: PlacementConfig
    replica_bounds: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class RouterArgs:
    """What a Router is told. ``num_routers``: how many there are of it."""

    models: tuple[ModelArgs, ...]
    api_keys_file: str
    max_body_bytes: int
    log_level: str
    num_routers: int = 1


class Router:
    """One replica of the ingress. ``report`` is called by workers, everything else comes by HTTP.

    ``workers`` are the handles of the models' Worker deployments, in the order of ``args.models``.
    """

    async def __init__(self, args: RouterArgs, *workers: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        configure_logging(args.log_level)
        self._name = ray_hooks.own_replica_id()
        self._calls = [ray_hooks.PinnedCalls(worker) for worker in workers]
        services = [_service(model, calls) for model, calls in zip(args.models, self._calls, strict=True)]
        self._backend = RouterBackend(services, self._telemetry(args.num_routers))
        keys = KeyRing(Path(args.api_keys_file)) if args.api_keys_file else None
        # HAProxy does not say whom it speaks for: behind it, everybody would be on this machine.
        trusts_loopback = not ray_hooks.behind_haproxy()
        self._access = AccessRules(keys, args.max_body_bytes, trusts_loopback)
        self._housekeeping = [asyncio.create_task(service.dispatcher.run()) for service in services]

    def __serve_build_asgi_app__(self) -> FastAPI:
        telemetry = RequestTelemetry(self._backend.metrics, self._backend.tracing)
        return create_app(self._backend, self._access, self._backend, telemetry)

    def check_health(self) -> None:
        """Called by Serve; raises RuntimeError, upon which Serve replaces the replica."""
        if any(task.done() for task in self._housekeeping):
            raise RuntimeError("The router's housekeeping has stopped.")

    async def report(self, report: WorkerReport) -> str:
        """A worker's push; the answer is this Router's name, by which the worker knows that it lives."""
        self._backend.report(report)
        return self._name

    async def router_figures(self) -> RouterFigures:
        """What this Router counted, for the page of another."""
        return self._backend.metrics.figures()

    def _telemetry(self, num_routers: int) -> Telemetry:
        settings, version = own_otlp_settings(), ray_hooks.versions()
        resource = resource_of(settings, "router", self._name, version[0])
        peers = ray_hooks.Broadcast("Router", "router_figures")

        async def ask_all() -> list[RouterFigures]:
            heard = await peers.send()
            return [figures for figures in heard.answers if isinstance(figures, RouterFigures)]

        def pushes(gaps: TokenGaps) -> list[MetricReader]:
            return [push_reader(otlp_exporter(settings), gaps)] if settings.pushes_metrics else []

        return Telemetry(
            self._name,
            version,
            Tracing.of_process(),
            ask_all if num_routers > 1 else no_peers,
            pushes,
            resource,
        )

    async def __del__(self) -> None:
        # Serve calls and awaits this at the end of a replica. Workers would wait for what is left open.
        for calls in self._calls:
            calls.close()
        await asyncio.to_thread(self._backend.metrics.close)


def _service(args: ModelArgs, calls: ray_hooks.PinnedCalls) -> ModelService:
    dispatcher = Dispatcher(args.dispatch, Placement(args.placement), calls)
    return ModelService(served_model(args), dispatcher, args.replica_bounds)


def served_model(args: ModelArgs) -> ServedModel:
    """The text side of a model; raises ModelLoadError."""
    text = load_text_model(resolve_model(args.model, args.revision, weights=False), args.chat_template)
    template = ChatTemplate(text.chat_template, text.names) if text.chat_template else None
    chat_format = make_chat_format(args.chat_format, text.chat_template)
    return ServedModel(args.name, text, template, chat_format, int(time.time()))
