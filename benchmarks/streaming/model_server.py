"""Serves one model folder through real Ray Serve for a benchmark, in a process of its own.

    python -m benchmarks.streaming.model_server PORT OPTIONS

``OPTIONS`` is a JSON object of the service's options. ``session FOLDER`` says where Ray's logs are, and ``ready`` is
printed once it answers; the end of the input ends the process. Which transport is used is a matter of Serve's
environment variables, read when this process starts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LOGICAL_CPUS = 4
"""Ray starts as many idle processes at once."""


def main(port: int, options: dict[str, Any]) -> None:
    """Starts Ray and Serve, and stays."""
    import ray
    from ray import serve

    from serve_app.build import app
    from serve_app.config import AppArgs

    context = ray.init(
        "local",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=LOGICAL_CPUS,
        object_store_memory=200_000_000,
    )
    where = context.address_info  # type: ignore[attr-defined]  # of the class that a local start returns
    print(f"session {where['session_dir']}", flush=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    args = AppArgs(graceful_shutdown_timeout_s=1.0, log_level="warning", **options)
    serve.run(app(args), name="model", route_prefix="/")
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
