"""The loads of the replay: fixed lengths at a fixed number of clients, and the beginnings of public traces.

Token contents are made up, except that equal prefix blocks of the Mooncake traces get equal tokens.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
TRACES = ("azure_2023_conv", "azure_2023_code", "mooncake_conversation", "mooncake_synthetic")


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come: at ``arrival_s`` (open loop) or when a client is free (closed loop)."""

    prompt: tuple[int, ...]
    output_tokens: int
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs in order. ``clients`` > 0: closed loop of so many clients; 0: jobs come at their arrival times.
    ``certain``: the scheduler is told that outputs end only at ``max_tokens``."""

    name: str
    jobs: tuple[Job, ...]
    clients: int = 0
    certain: bool = False


def fixed_clients(
    name: str,
    input_tokens: int,
    output_tokens: tuple[int, int],
    clients: int,
    num_jobs: int,
    grain: int,
    seed: int = 0,
) -> Load:
    """``clients`` clients that send prompts of one length, each its next when the last one ended. Outputs are uniform
    over a range that ends at ``max_tokens``; nobody tells the scheduler how long each will be. Real tokens."""
    dice = random.Random(seed)
    prompt = input_tokens // grain
    low, high = (tokens // grain for tokens in output_tokens)
    jobs = tuple(
        Job(tuple(range(number * prompt, (number + 1) * prompt)), dice.randint(low, high), high)
        for number in range(num_jobs)
    )
    return Load(name, jobs, clients)


def trace_beginning(folder: Path, name: str, num_jobs: int, grain: int, speed: float) -> Load:
    """The first ``num_jobs`` requests of a trace, arriving ``speed`` times as fast. ``max_tokens`` is the longest
    output among them: what a client would set who does not know the answer's length."""
    path = folder / f"{name}.{'csv' if name.startswith('azure') else 'jsonl'}.xz"
    if not path.exists():
        raise FileNotFoundError(f"trace {path} is missing; --traces names the folder that holds it")
    with lzma.open(path, "rt") as file:
        rows = _azure(file, grain) if name.startswith("azure") else _mooncake(file, grain)
        jobs = [job for job, _ in zip(rows, range(num_jobs), strict=False)]
    longest = max(job.output_tokens for job in jobs)
    return Load(name, tuple(replace(j, max_tokens=longest, arrival_s=j.arrival_s / speed) for j in jobs))


def _azure(file: io.TextIOBase, grain: int) -> Iterator[Job]:
    start: datetime | None = None
    next_token = 0
    for row in csv.DictReader(file):
        arrival = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or arrival
        prompt, output = (
            _coarse(int(row["ContextTokens"]), grain),
            _coarse(int(row["GeneratedTokens"]), grain),
        )
        tokens = tuple(range(next_token, next_token + prompt))
        next_token += prompt
        yield Job(tokens, output, output, (arrival - start).total_seconds())


def _mooncake(file: io.TextIOBase, grain: int) -> Iterator[Job]:
    block = MOONCAKE_BLOCK_TOKENS // grain
    for line in file:
        row = json.loads(line)
        tokens = [block * number + index for number in row["hash_ids"] for index in range(block)]
        prompt = tuple(tokens[: _coarse(row["input_length"], grain)])
        output = _coarse(row["output_length"], grain)
        yield Job(prompt, output, output, row["timestamp"] / 1000)


def _coarse(num_tokens: int, grain: int) -> int:
    return max(1, round(num_tokens / grain))


def with_burst(num_burst: int, num_quiet: int, gap_s: float, grain: int, seed: int = 0) -> Load:
    """Short requests ``gap_s`` apart, and in the middle of them a burst of long prompts at once."""
    dice = random.Random(seed)
    jobs = []
    for number in range(num_quiet):
        prompt = _distinct(number, 512 // grain)
        jobs.append(Job(prompt, dice.randint(128, 384) // grain, 1024 // grain, number * gap_s))
    burst = [
        Job(_distinct(num_quiet + number, 8192 // grain), dice.randint(128, 384) // grain, 1024 // grain, at)
        for number, at in enumerate([num_quiet // 4 * gap_s] * num_burst)
    ]
    return Load("burst", tuple(sorted(jobs + burst, key=lambda job: job.arrival_s)))


def with_storm(
    num_before: int, num_storm: int, num_after: int, clients: int, grain: int, seed: int = 0
) -> Load:
    """Short outputs for long, so that the scheduler comes to expect them; then ``num_storm`` requests that all run to
    ``max_tokens``; then short ones again."""
    dice = random.Random(seed)
    jobs = []
    for number in range(num_before + num_storm + num_after):
        storm = num_before <= number < num_before + num_storm
        output = 8192 if storm else dice.randint(256, 768)
        jobs.append(Job(_distinct(number, 1024 // grain), output // grain, 8192 // grain))
    return Load("storm", tuple(jobs), clients)


def _distinct(number: int, num_tokens: int) -> tuple[int, ...]:
    """Tokens that no other request shares, for numbers below a million."""
    return tuple(range(number * 1_000_000, number * 1_000_000 + num_tokens))
