"""One Ray cluster for all tests that need one: started on first use, shut down at the end of the session.

A test takes ``deploy`` (or ``deploy_module`` for an application that the tests of a module share) and names its
application; each gets a route prefix of its own. Only this cluster is ever touched, never another one on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from benchmarks.drills.cluster import SURROUNDINGS, free_port
from benchmarks.drills.figures import by_router
from benchmarks.drills.processes import titles
from tests.helpers.eventually import eventually
from worker.api import WorkerSnapshot

LOGICAL_CPUS = 4
DEPLOY_S = 120.0
"""Starting processes takes a multiple of the usual on a busy machine."""


@dataclass(frozen=True)
class ServedApp:
    """A running application. ``url`` is what an OpenAI client takes as its base, less ``/v1``."""

    name: str
    url: str

    def snapshots(self) -> list[WorkerSnapshot]:
        """The state of every worker, from the engines themselves."""
        from ray import serve

        handle = serve.get_deployment_handle("Worker", self.name)
        if not handle.is_initialized:
            # In throughput mode a handle without a loop of its own can only be used inside one.
            handle._init(_run_router_in_separate_loop=True)
        return list(handle.broadcast("snapshot", "").results())

    def wait_for_workers(self, count: int) -> None:
        """Returns once the Router has heard of so many workers."""
        eventually(
            lambda: httpx.get(self.url + "/metrics", timeout=20).text,
            lambda page: set(by_router(page, "headroom_workers").values()) == {count},
            within_s=DEPLOY_S,
        )

    def settled(self) -> None:
        """Waits until no worker has a request."""
        eventually(self.snapshots, lambda states: not any(s.num_running + s.num_waiting for s in states))

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by the title that Ray gives them; of no other cluster on this machine."""
        return sorted(pid for pid, title in titles() if f"ray::ServeReplica:{self.name}:Worker" in title)


Deploy = Callable[..., ServedApp]


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """Address of a fresh local Ray cluster with Serve."""
    os.environ.update(SURROUNDINGS)
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
    import ray
    from ray import serve

    # "local": a new cluster even where another one runs on this machine.
    ray.init(
        "local",
        num_cpus=LOGICAL_CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def deploying(serve_url: str) -> Iterator[Deploy]:
    """Gives a function that deploys an application, and deletes what it deployed."""
    from ray import serve

    from serve_app.build import app
    from serve_app.config import AppArgs

    names: list[str] = []

    def deploy(name: str, **options: Any) -> ServedApp:
        names.append(name)
        quick = {"engine": "fake", "graceful_shutdown_timeout_s": 2.0, "health_check_period_s": 1.0}
        args = AppArgs(**{**quick, **options})
        serve.run(app(args), name=name, route_prefix=f"/{name}")
        served = ServedApp(name, f"{serve_url}/{name}")
        served.wait_for_workers(sum(model.replicas for model in args.per_model()))
        return served

    try:
        yield deploy
    finally:
        for name in names:
            serve.delete(name)


@pytest.fixture
def deploy(serve_url: str) -> Iterator[Deploy]:
    """Deploys applications for one test."""
    with deploying(serve_url) as function:
        yield function


@pytest.fixture(scope="module")
def deploy_module(serve_url: str) -> Iterator[Deploy]:
    """Deploys applications for the tests of one module."""
    with deploying(serve_url) as function:
        yield function
