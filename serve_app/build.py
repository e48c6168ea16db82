"""All wiring on one page: options in, a Serve application out."""

# Serve reads the builder's annotation at run time, so it must be the class itself and no string: no
# ``from __future__ import annotations`` here.

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.schema import LoggingConfig

from serve_app.config import AppArgs
from serve_app.deployments import ray_hooks
from serve_app.deployments.dispatch import DispatchConfig
from serve_app.deployments.router import ModelArgs, Router, RouterArgs, served_model
from serve_app.deployments.worker import Worker, WorkerArgs
from serve_app.http.api_keys import KeyRing
from serve_app.policies.coalescing import CoalescingConfig
from serve_app.policies.placement import PlacementConfig
from serve_app.policies.prediction import CostModel

ROUTER_REQUESTS = 10_000
"""The limit that sheds load is the Router's own queue; Serve's must not come before it."""

PROXY_MESSAGES = 1_500.0
HAPROXY_MESSAGES = 7_000.0
"""Stream messages a second through one Router, on two cores that the workers and the clients share
(benchmarks/streaming_path.py)."""

QUIET = LoggingConfig(enable_access_log=False)
"""Else every report of every worker is a line in the log."""

SCALING_POLICY = "serve_app.policies.autoscaling:ScalingPolicy"
LOOK_BACK_INTERVALS = 5
"""Serve samples a replica's metrics five times in its look-back, and at least once an interval."""
DRAIN_POLL_S = 0.5
"""A replica that is taken away looks so often whether its last request has ended."""
STEP_DELAY_S = 1.0
"""The policy has its own patience; Serve's would come on top."""
TICKET_MARGIN_S = 300.0
"""A booking outlives the longest request by so much."""

ROUTING: dict[str, Any] = {
    "request_router_class": "serve_app.deployments.ray_hooks.PinnedRouter",
    "request_routing_stats_period_s": 1.0,
}


def app(args: AppArgs) -> Application:
    """The application: Routers that hold the handles of each model's Workers. Raises ModelLoadError or ConfigError
    before anything is started when a text file of a model, or a file named in the options, is missing or wrong."""
    return application(args, Worker)


def application(args: AppArgs, worker: type[Worker]) -> Application:
    """The same with Workers of another class, for drills."""
    models = args.per_model()
    told = router_args(args, models)
    for model in told.models:
        served_model(model)
    if args.api_keys_file:
        KeyRing(Path(args.api_keys_file))
    workers = [
        worker_deployment(model, _worker_name(model, models), worker).bind(worker_args(model))
        for model in models
    ]
    return _router(args).bind(told, *workers)


def deployment_names(args: AppArgs) -> list[str]:
    """Of the application's deployments."""
    models = args.per_model()
    return ["Router", *(_worker_name(model, models) for model in models)]


def router_args(args: AppArgs, models: Sequence[AppArgs]) -> RouterArgs:
    """The Router's part of the options."""
    return RouterArgs(
        models=tuple(_model_args(model) for model in models),
        api_keys_file=args.api_keys_file,
        max_body_bytes=args.max_body_bytes,
        log_level=args.log_level,
        num_routers=args.router_replicas,
    )


def _model_args(args: AppArgs) -> ModelArgs:
    return ModelArgs(
        name=args.name,
        model=args.model,
        revision=args.revision,
        chat_template=args.chat_template,
        chat_format=args.chat_format,
        dispatch=DispatchConfig(
            max_queue=args.max_queue,
            queue_timeout_s=args.queue_timeout_s,
            accept_timeout_s=args.accept_timeout_s,
            request_timeout_s=args.request_timeout_s,
            from_zero=bool(args.max_replicas) and args.min_replicas == 0,
        ),
        placement=PlacementConfig(
            costs=CostModel(link_bytes_per_s=args.link_bytes_per_s),
            queue_share=args.worker_backlog / args.worker.max_running,
            ticket_ttl_s=args.request_timeout_s + TICKET_MARGIN_S,
            expert_affinity=args.expert_affinity,
        ),
        replica_bounds=(args.min_replicas, args.max_replicas)
        if args.max_replicas
        else (args.replicas, args.replicas),
    )


def worker_args(args: AppArgs) -> WorkerArgs:
    """The Worker's part of the options."""
    return WorkerArgs(
        config=args.worker_config(),
        revision=args.revision,
        snapshot_interval_s=args.snapshot_interval_s,
        coalescing=CoalescingConfig(
            # What one worker may send, when all send alike.
            messages_per_s=_messages_per_s(args) * args.router_replicas / max(1, args.replicas)
        ),
        log_level=args.log_level,
    )


def _messages_per_s(args: AppArgs) -> float:
    return args.messages_per_s or (HAPROXY_MESSAGES if ray_hooks.behind_haproxy() else PROXY_MESSAGES)


def _router(args: AppArgs) -> serve.Deployment:
    make = serve.deployment(
        name="Router",
        num_replicas=args.router_replicas,
        max_ongoing_requests=ROUTER_REQUESTS,
        ray_actor_options={"num_cpus": args.cpus_per_router},
        health_check_period_s=args.health_check_period_s,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        logging_config=QUIET,
    )
    return make(serve.ingress()(Router))


def _worker_name(args: AppArgs, models: Sequence[AppArgs]) -> str:
    """ "Worker", and with several models the model's name behind it."""
    return "Worker" if len(models) == 1 else "Worker-" + re.sub(r"[^\w.-]", "-", args.name)


def worker_deployment(args: AppArgs, name: str, worker: type[Worker] = Worker) -> serve.Deployment:
    """The Worker deployment of one model."""
    make = serve.deployment(
        name=name,
        max_ongoing_requests=args.worker.max_running + args.worker.max_waiting + args.worker_backlog,
        ray_actor_options={"num_cpus": args.cpus_per_worker, "num_gpus": _gpus(args)},
        health_check_period_s=args.health_check_period_s,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(**ROUTING),
        **_replicas(args),
    )
    return make(worker)


def _replicas(args: AppArgs) -> dict[str, Any]:
    """Serve's options for how many workers there are."""
    if not args.max_replicas:
        return {"num_replicas": args.replicas}
    policy = AutoscalingPolicy(policy_function=SCALING_POLICY, policy_kwargs=args.scaling_rules)
    scaling = AutoscalingConfig(
        min_replicas=args.min_replicas,
        initial_replicas=args.replicas,
        max_replicas=args.max_replicas,
        upscale_delay_s=STEP_DELAY_S,
        downscale_delay_s=STEP_DELAY_S,
        downscale_to_zero_delay_s=STEP_DELAY_S,
        metrics_interval_s=args.scaling_interval_s,
        look_back_period_s=LOOK_BACK_INTERVALS * args.scaling_interval_s,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _gpus(args: AppArgs) -> float:
    if args.gpus_per_worker >= 0:
        return args.gpus_per_worker
    if args.worker.engine == "fake" or args.worker.device == "cpu":
        return 0
    if args.worker.device.startswith("cuda"):
        return 1
    resources: dict[str, float] = ray.cluster_resources() if ray.is_initialized() else {}  # type: ignore[no-untyped-call]
    return min(1.0, resources.get("GPU", 0.0))
