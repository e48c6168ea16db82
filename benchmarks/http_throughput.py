"""Measures a model on a GPU through Ray Serve and HTTP under a closed loop, with both transports.

    python -m benchmarks.http_throughput --models qwen3.5-4b.bf16 --concurrency 64 [--json FILE]

What a client sees, which runs beside the service on the same machine: time to the first token, time between messages,
time per output token behind the first, output tokens per second, and goodput: requests a second whose first token came
within ``--ttft-slo`` seconds and whose further ones took at most ``--tpot-slo`` seconds each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Conditions, Report, Value, hardware, publish, report_parser
from benchmarks.shapes import DEMO, shape_folder
from benchmarks.streaming.client import quantile
from benchmarks.streaming.closed_loop import Answered, closed_loop, request_bytes
from benchmarks.streaming_path import TRANSPORTS
from worker.advise.named import find_geometry

SUFFIXES = {"haproxy": "http_haproxy", "default": "http_default"}
SERVER = "benchmarks.streaming.model_server"
STOP_TIMEOUT_S = 20.0
LOG_CHARACTERS = 20_000
"""Of each of Ray's logs, the last ones."""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of ``vocab_size`` tokens, each with a text of its own: random ids must be readable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {f"w{number}.": number for number in range(len(letters), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class ModelServer:
    """The served model in a process group of its own. :meth:`wait` comes before the first request."""

    def __init__(
        self, transport: str, options: Mapping[str, object], logs: Path, module: str = SERVER
    ) -> None:
        """``logs``: a folder, which takes what the server says; ``module`` is the program."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._transport, self._logs = transport, logs
        self._session, self._ready = "", threading.Event()
        own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        command = [sys.executable, "-m", module, str(self.port)]
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{transport}.log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **own, **TRANSPORTS[transport]},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with (self._logs / f"{self._transport}.out").open("w") as out:
            for line in self._process.stdout:
                out.write(line)
                out.flush()
                word, _, rest = line.strip().partition(" ")
                if word == "session":
                    self._session = rest
                elif word == "ready":
                    self._ready.set()

    def wait(self, timeout_s: float) -> None:
        """Until it answers; RuntimeError, with the logs kept, where it ends instead or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.1):
            code = self._process.poll()
            if code is None and time.monotonic() < deadline:
                continue
            self.keep_logs()
            what = f"ended with {code}" if code is not None else f"was not ready after {timeout_s:g} s"
            raise RuntimeError(f"the server behind {self._transport} {what}; see {self._logs}")

    def keep_logs(self) -> None:
        """Copies the ends of what Ray's processes wrote."""
        if not self._session:
            return
        found = [
            path for path in Path(self._session, "logs").rglob("*") if path.suffix in (".log", ".err", ".out")
        ]
        with (self._logs / f"{self._transport}.ray.txt").open("w") as kept:
            for path in sorted(found):
                text = path.read_text(errors="replace")[-LOG_CHARACTERS:]
                if text.strip():
                    kept.write(f"==> {path.name}\n{text}\n")

    def close(self) -> None:
        """Ends it, and whatever it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)


def figures(
    answers: Sequence[Answered], seconds: float, ttft_slo_s: float, tpot_slo_s: float
) -> dict[str, Value]:
    """What the client saw. RuntimeError where a request failed."""
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(answers)} requests failed: {failures[0]}")
    first = [1e3 * answer.first_s for answer in answers]
    gaps = [1e3 * gap for answer in answers for gap in answer.gaps_s]
    each = [1e3 * answer.per_token_s for answer in answers]
    good = sum(a.first_s <= ttft_slo_s and a.per_token_s <= tpot_slo_s for a in answers)
    return {
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / seconds,
        "ttft_p50_ms": quantile(first, 0.5),
        "ttft_p99_ms": quantile(first, 0.99),
        "itl_p50_ms": quantile(gaps, 0.5),
        "itl_p99_ms": quantile(gaps, 0.99),
        "tpot_p50_ms": quantile(each, 0.5),
        "tpot_p99_ms": quantile(each, 0.99),
        "goodput_per_s": good / seconds,
        "requests_per_s": len(answers) / seconds,
    }


@dataclass(frozen=True, slots=True)
class Served:
    """One model: what the service is told of it, and what it is asked."""

    name: str
    options: Mapping[str, object]
    requests: tuple[bytes, ...]


def serve_model(options: argparse.Namespace, name: str) -> Served:
    """MODEL.FORMAT as it is served and asked."""
    model, _, format = name.rpartition(".")
    folder = shape_folder(model, format)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    if model != DEMO:
        write_tokenizer(folder, vocab_size)
    served = {
        "model": str(folder),
        "served_name": model,
        "device": options.device,
        "load": "checkpoint" if model == DEMO else "random",
        "max_running": options.concurrency,
        "max_model_len": 2 * (options.prompt + options.output),
        "max_step_tokens": options.step_tokens,
        "prefix_cache": False,
        "arena_bytes": arena_bytes(folder, options),
        "gpus_per_worker": 0 if options.device == "cpu" else 1,
    }
    drawn = np.random.default_rng(0).integers(vocab_size // 2, vocab_size, (options.requests, options.prompt))
    return Served(
        name, served, tuple(request_bytes(model, prompt, options.output) for prompt in drawn.tolist())
    )


def arena_bytes(folder: Path, options: argparse.Namespace) -> int:
    """For twice the requests at once, so that none waits for memory."""
    tokens = options.prompt + options.output
    return 2 * options.concurrency * find_geometry(str(folder)).request_bytes(tokens) + (1 << 28)


def measure(
    server: ModelServer, served: Served, options: argparse.Namespace, transport: str
) -> dict[str, Value]:
    """One row: a model through one transport."""
    few = served.requests[: options.concurrency]
    closed_loop(server.port, few, options.concurrency)  # warms every process up
    answers, seconds = closed_loop(server.port, served.requests, options.concurrency)
    found = figures(answers, seconds, options.ttft_slo, options.tpot_slo)
    return {"case": f"{served.name}.n{options.concurrency}.{SUFFIXES[transport]}", **found}


def measure_all(options: argparse.Namespace, served: Served) -> tuple[list[dict[str, Value]], list[str]]:
    """Rows and failures. All transports' servers start at once, since starting takes longer than measuring, and are
    measured one after another, the others idle."""
    rows: list[dict[str, Value]] = []
    failures: list[str] = []
    logs = options.logs or Path(tempfile.mkdtemp(prefix="http_throughput-"))
    servers = {transport: ModelServer(transport, served.options, logs) for transport in options.transports}
    try:
        for transport, server in servers.items():
            try:
                server.wait(options.start_timeout)
                rows.append(measure(server, served, options, transport))
                print(rows[-1], flush=True)
            except Exception as error:
                server.keep_logs()
                failures.append(f"{served.name} through {transport} failed: {error}")
                print(failures[-1], flush=True)
    finally:
        for server in servers.values():
            server.close()
    return rows, failures


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3.5-4b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--transports", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--ttft-slo", type=float, default=2.0)
    parser.add_argument("--tpot-slo", type=float, default=0.025)
    parser.add_argument(
        "--start-timeout", type=float, default=120.0, help="seconds until a server must answer"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    options = parser.parse_args()
    rows: list[dict[str, Value]] = []
    failures: list[str] = []
    for name in options.models:
        found, failed = measure_all(options, serve_model(options, name))
        rows += found
        failures += failed
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="trained" if options.models == [f"{DEMO}.bf16"] else "random",
        prompts=f"random ids, {options.requests} requests, as token ids",
        cache="warm; no prefix cache",
        batch=f"closed loop of {options.concurrency}; client on the same machine",
        context=f"{options.prompt} in, {options.output} out",
        resident="all",
        hardware=machine(),
    )
    goodput = f"goodput: first token within {options.ttft_slo} s, {options.tpot_slo} s per token behind it"
    if rows:
        publish(
            Report("http_throughput", conditions, tuple(rows), (goodput, *failures), named=True), options.json
        )
    if failures:
        raise SystemExit("; ".join(failures))


def machine() -> str:
    """The processor, and the GPUs without taking one: this process is the client."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split(
            "\n"
        )
    except (OSError, subprocess.SubprocessError):
        return hardware()
    names = [name.strip() for name in found if name.strip()]
    return f"{hardware()}, {len(names)} x {names[0]}" if names else hardware()


if __name__ == "__main__":
    main()
