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
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.report import Conditions, Report, Value, publish, report_parser
from benchmarks.shapes import DEMO, shape_folder
from benchmarks.streaming.client import quantile
from benchmarks.streaming.closed_loop import Answered, closed_loop, request_bytes
from benchmarks.streaming_path import TRANSPORTS

SUFFIXES = {"haproxy": "http_haproxy", "default": "http_default"}


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
    """The served model in a process of its own, as a context."""

    def __init__(self, transport: str, options: Mapping[str, object]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.streaming.model_server",
                str(self.port),
                json.dumps(dict(options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **TRANSPORTS[transport]},
        )

    def __enter__(self) -> ModelServer:
        """Waits until it answers; RuntimeError where it ends instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return self
        raise RuntimeError(f"the server ended with {self._process.wait()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


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


def measure(options: argparse.Namespace, name: str, transport: str) -> dict[str, Value]:
    """One row: a model through one transport."""
    from benchmarks.gpu_engine import random_prompts

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
        "gpus_per_worker": 0 if options.device == "cpu" else 1,
    }
    prompts = random_prompts(options.requests, options.prompt, vocab_size)
    requests = [request_bytes(model, prompt, options.output) for prompt in prompts]
    with ModelServer(transport, served) as server:
        closed_loop(
            server.port, requests[: options.concurrency], options.concurrency
        )  # warms every process up
        answers, seconds = closed_loop(server.port, requests, options.concurrency)
    found = figures(answers, seconds, options.ttft_slo, options.tpot_slo)
    return {"case": f"{name}.n{options.concurrency}.{SUFFIXES[transport]}", **found}


def main() -> None:
    """Measures and publishes."""
    parser = report_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3.5-4b.bf16"], help="MODEL.FORMAT")
    parser.add_argument("--transports", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--ttft-slo", type=float, default=2.0)
    parser.add_argument("--tpot-slo", type=float, default=0.025)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for transport in options.transports:
            rows.append(measure(options, name, transport))
            print(rows[-1], flush=True)
    conditions = Conditions(
        model=", ".join(options.models) + " (shapes)",
        weights="random",
        prompts=f"random ids, {options.requests} requests, as token ids",
        cache="warm; no prefix cache",
        batch=f"closed loop of {options.concurrency}; client on the same machine",
        context=f"{options.prompt} in, {options.output} out",
        resident="all",
    )
    notes = (f"goodput: first token within {options.ttft_slo} s, {options.tpot_slo} s per token behind it",)
    publish(Report("http_throughput", conditions, tuple(rows), notes), options.json)


if __name__ == "__main__":
    main()
