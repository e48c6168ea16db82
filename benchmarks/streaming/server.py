"""Serves the fake engine through real Ray Serve for the streaming benchmark, in a process of its own.

    python -m benchmarks.streaming.server PORT

Each line on standard input is a JSON object of options (``tokens_per_s``, ``tick_s``, ``max_running``); the
application is deployed anew with them and ``ready`` is printed. The end of the input ends the process. Which
transport is used is a matter of Serve's environment variables, read when this process starts.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPTED = "abcdefghijklmnop"
"""Tokens of one letter each, so that a client can count tokens as characters."""
LOGICAL_CPUS = 4


def write_model(folder: Path, source: Path, tokens_per_s: float, tick_s: float) -> None:
    """A model folder whose engine says letters at a pace for as long as it is asked to."""
    shutil.copytree(source, folder)
    script = {
        "output": "script",
        "token_ids": list(SCRIPTED.encode()),
        "tokens_per_s": tokens_per_s,
        "tick_s": tick_s,
        "max_model_len": 1 << 20,
    }
    (folder / "fake.json").write_text(json.dumps(script))


def main(port: int) -> None:
    """Starts Ray and Serve, then deploys as told."""
    import ray
    from ray import serve

    from serve_app.build import app
    from serve_app.config import AppArgs
    from serve_app.text.model_folder import FAKE_MODEL

    ray.init(
        "local",
        num_cpus=LOGICAL_CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with tempfile.TemporaryDirectory() as scratch:
        for number, line in enumerate(sys.stdin):
            options: dict[str, Any] = json.loads(line)
            folder = Path(scratch) / f"paced{number}"
            write_model(folder, FAKE_MODEL, options.pop("tokens_per_s"), options.pop("tick_s"))
            args = AppArgs(
                model=str(folder),
                served_name="paced",
                engine="fake",
                max_model_len=1 << 20,
                beyond_trained_len=True,
                graceful_shutdown_timeout_s=1.0,
                log_level="warning",
                **options,
            )
            serve.run(app(args), name="streaming", route_prefix="/")
            print("ready", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
