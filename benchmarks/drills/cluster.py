"""A fresh local Ray cluster with Serve, as a context. Which transport it has is decided by its environment variables,
which Serve reads when it is first imported."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

TRANSPORTS: dict[str, dict[str, str]] = {
    "default": {},
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "4",
    },
}
SURROUNDINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # Ray gives its processes the least share of a busy machine unless told otherwise.
    "RAY_worker_niceness": "0",
    # Serve gives its proxy five seconds to start, and Serve's start fails with it: too few on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
}
LOGICAL_CPUS = 4
PORTS = range(20_000, 32_000)
"""Above those of Ray's workers, below those that systems hand out by themselves: whoever takes one of these must name
it, so that a port which is free now is still free when Serve's proxy has started."""


def free_port() -> int:
    """A port that nothing listens on."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {PORTS} is free")


@contextmanager
def running_cluster(transport: str) -> Iterator[str]:
    """Its address, ``http://host:port``. Never joins a cluster that runs already."""
    os.environ.update(SURROUNDINGS | TRANSPORTS[transport])
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        "local",
        num_cpus=LOGICAL_CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
