"""The Router deployment: the HTTP ingress, with queue and placement in the same process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from serve_app.deployments import ray_hooks
from serve_app.deployments.backend import ModelService, RouterBackend
from serve_app.deployments.dispatch import DispatchConfig, Dispatcher
from serve_app.deployments.protocol import WorkerReport
from serve_app.http.access import AccessRules
from serve_app.http.api_keys import KeyRing
from serve_app.http.backend import ServedModel
from serve_app.http.routes import create_app
from serve_app.policies.placement import Placement, PlacementConfig
from serve_app.telemetry.logging import configure_logging
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


@dataclass(frozen=True)
class RouterArgs:
    """What a Router is told."""

    models: tuple[ModelArgs, ...]
    api_keys_file: str
    max_body_bytes: int
    log_level: str


class Router:
    """One replica of the ingress. ``report`` is called by workers, everything else comes by HTTP.

    ``workers`` are the handles of the models' Worker deployments, in the order of ``args.models``.
    """

    async def __init__(self, args: RouterArgs, *workers: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        configure_logging(args.log_level)
        self._name = ray_hooks.own_replica_id()
        self._calls = [ray_hooks.PinnedCalls(worker) for worker in workers]
        services = [_service(model, calls) for model, calls in zip(args.models, self._calls, strict=True)]
        self._backend = RouterBackend(services)
        keys = KeyRing(Path(args.api_keys_file)) if args.api_keys_file else None
        # HAProxy does not say whom it speaks for: behind it, everybody would be on this machine.
        trusts_loopback = not ray_hooks.behind_haproxy()
        self._access = AccessRules(keys, args.max_body_bytes, trusts_loopback)
        self._housekeeping = [asyncio.create_task(service.dispatcher.run()) for service in services]

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._backend, self._access, self._backend)

    def check_health(self) -> None:
        """Called by Serve; raises RuntimeError, upon which Serve replaces the replica."""
        if any(task.done() for task in self._housekeeping):
            raise RuntimeError("The router's housekeeping has stopped.")

    async def report(self, report: WorkerReport) -> str:
        """A worker's push; the answer is this Router's name, by which the worker knows that it lives."""
        self._backend.report(report)
        return self._name

    async def __del__(self) -> None:
        # Serve calls and awaits this at the end of a replica. Workers would wait for what is left open.
        for calls in self._calls:
            calls.close()


def _service(args: ModelArgs, calls: ray_hooks.PinnedCalls) -> ModelService:
    dispatcher = Dispatcher(args.dispatch, Placement(args.placement), calls)
    return ModelService(served_model(args), dispatcher)


def served_model(args: ModelArgs) -> ServedModel:
    """The text side of a model; raises ModelLoadError."""
    text = load_text_model(resolve_model(args.model, args.revision, weights=False), args.chat_template)
    template = ChatTemplate(text.chat_template, text.names) if text.chat_template else None
    chat_format = make_chat_format(args.chat_format, text.chat_template)
    return ServedModel(args.name, text, template, chat_format, int(time.time()))
