"""Measures the path of tokens from engine to client: real Ray Serve, HTTP and both transports, a fake engine.

    python -m benchmarks.streaming_path [--json FILE] [--transports haproxy default] [--streams 1 64 256 1000]

Per transport and number of streams the engine offers a fixed pace; figures are ``<transport>.s<streams>.<figure>``:
``tokens_per_s`` that arrived, ``offered_tokens_per_s``, ``first_token_ms_p50`` and ``p99`` from writing the request to
its first token (the engine's own first token takes no time) over the streams that began (``begun_per_s``),
``gap_ms_p99`` between a stream's messages, ``message_tokens_p99``, ``messages_per_s``, the processor time that a
message costs in each process (the streams' beginnings and ends included) and ``failures``: streams that were cut, or
stood still. Server and client share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.report import hardware
from benchmarks.streaming.client import Load, Measured, measure, quantile
from benchmarks.streaming.processes import cpu_seconds

TRANSPORTS: dict[str, dict[str, str]] = {
    "default": {},
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    },
}


@dataclass(frozen=True, slots=True)
class Pace:
    """The engine's pace for a number of streams: tokens a second of each."""

    num_streams: int
    tokens_per_s: float


def pace_of(num_streams: int, total_tokens_per_s: float) -> Pace:
    """At most 200 tokens a second each, and ``total_tokens_per_s`` together."""
    return Pace(num_streams, min(200.0, total_tokens_per_s / num_streams))


class Server:
    """The served application in a process of its own, as a context."""

    def __init__(self, transport: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        # Ray lets its workers stand back behind all other processes; here they are what is measured.
        own = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.streaming.server", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **TRANSPORTS[transport]},
        )

    def __enter__(self) -> Server:
        return self

    def deploy(self, pace: Pace) -> None:
        """Deploys the application anew; raises RuntimeError if that fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        options = {
            "tokens_per_s": pace.tokens_per_s,
            "tick_s": 0.004,
            "max_running": pace.num_streams + 8,
        }
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError(f"the server ended with {self._process.wait()}")

    def cpu_seconds(self) -> dict[str, float]:
        """Processor seconds so far, by kind of process."""
        return cpu_seconds(self._process.pid)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def load_of(port: int, pace: Pace, measured_s: float) -> Load:
    """Streams of at least three seconds, and so long that some 25 a second begin; opened at that rate, too."""
    stream_s = max(3.0, pace.num_streams / 25)
    tokens = int(stream_s * pace.tokens_per_s)
    return Load(port, pace.num_streams, tokens, stream_s, measured_s=measured_s)


def figures_of(measured: Measured, load: Load, pace: Pace) -> dict[str, float]:
    """The figures of one load."""
    first = [1e3 * s for s in measured.first_token_s]
    messages = max(1, measured.num_messages)
    cpu = {f"{kind}_cpu_us_per_message": 1e6 * used / messages for kind, used in measured.cpu_s.items()}
    return {
        "tokens_per_s": measured.num_tokens / load.measured_s,
        "offered_tokens_per_s": pace.tokens_per_s * load.num_streams,
        "messages_per_s": measured.num_messages / load.measured_s,
        "begun_per_s": len(first) / load.measured_s,
        **_quantiles("first_token_ms", first, 0.5, 0.99),
        **_quantiles("gap_ms", [1e3 * s for s in measured.gaps_s], 0.5, 0.99),
        **_quantiles("message_tokens", measured.sizes, 0.99),
        "message_tokens_max": max(measured.sizes, default=0),
        "failures": len(measured.failures),
        "cpu_cores": sum(measured.cpu_s.values()) / load.measured_s,
        **cpu,
    }


def _quantiles(name: str, values: Sequence[float], *shares: float) -> dict[str, float]:
    """Of what was not seen there is no figure."""
    return {f"{name}_p{100 * share:.0f}": quantile(values, share) for share in shares if values}


def run_transport(
    transport: str, streams: list[int], total_tokens_per_s: float, measured_s: float
) -> dict[str, float]:
    """All numbers of streams over one transport."""
    figures: dict[str, float] = {}
    with Server(transport) as server:
        for num_streams in streams:
            pace = pace_of(num_streams, total_tokens_per_s)
            server.deploy(pace)
            load = load_of(server.port, pace, measured_s)
            measured = asyncio.run(measure(load, server.cpu_seconds))
            for sentence in measured.failures[:3]:
                print(f"  {sentence}", flush=True)
            for name, value in figures_of(measured, load, pace).items():
                figures[f"{transport}.s{num_streams}.{name}"] = value
                print(f"{transport}.s{num_streams}.{name} = {value:.5g}", flush=True)
    return figures


def main() -> int:
    """Measures and prints; 0 if no stream failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--transports", nargs="+", choices=sorted(TRANSPORTS), default=["haproxy", "default"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64, 256, 1_000])
    parser.add_argument("--total", type=float, default=56_000.0, help="most tokens a second that are offered")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured seconds per load")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for transport in options.transports:
        figures |= run_transport(transport, options.streams, options.total, options.seconds)
    if options.json is not None:
        conditions = {
            "hardware": hardware(),
            "model": "fake engine, one letter a token, one worker and one Router",
            "client": "asyncio on the same machine, one connection per stream",
            "pace": "at most 200 tokens a second per stream",
            "transports": TRANSPORTS,
        }
        rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"conditions": conditions, "figures": rounded}, indent=1, allow_nan=False)
        options.json.write_text(text + "\n")
    return 1 if any(value for name, value in figures.items() if name.endswith(".failures")) else 0


if __name__ == "__main__":
    sys.exit(main())
