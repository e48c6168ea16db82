"""Reads the shared traces as simulated requests, and draws the traffic domains that the traces do not name.

Lengths, arrivals and (where a trace has them) prefix blocks are the trace's own. Which tenant a request belongs to is
drawn: tenants have Zipf-distributed weights, a tenant's traffic is of one domain, and a prefix family belongs to one
tenant. A Router is told the tenant and the conversation, never the domain.
"""

from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

TRACES = ("azure_2023_conv", "azure_2023_code", "mooncake_conversation", "mooncake_synthetic")
MOONCAKE_BLOCK_TOKENS = 512
MAX_PROMPT_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: arrival in seconds, lengths in tokens, prefix block ids, and what it belongs to."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    conversation: str
    tenant: str
    domain: int


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """How a trace is used: its first ``num_requests``, arrivals ``speed`` times as fast, tenants and domains drawn."""

    trace: str
    num_requests: int
    speed: float
    num_domains: int = 8
    num_tenants: int = 32
    zipf: float = 1.0
    seed: int = 7


def load_requests(folder: Path, spec: TrafficSpec) -> list[SimRequest]:
    """The requests of ``spec``, in order of arrival. Raises FileNotFoundError where the trace is not in ``folder``."""
    rng = Random(spec.seed)
    weights = [1.0 / (rank + 1) ** spec.zipf for rank in range(spec.num_tenants)]
    tenants: dict[int, int] = {}
    requests: list[SimRequest] = []
    for number, (arrival_s, prompt, output, blocks) in enumerate(_rows(folder, spec.trace)):
        if number == spec.num_requests:
            break
        # The first block of a trace may be everybody's system prompt; the second one tells conversations apart.
        family = blocks[min(1, len(blocks) - 1)] if blocks else -1 - number
        if family not in tenants:
            tenants[family] = rng.choices(range(spec.num_tenants), weights)[0]
        tenant = tenants[family]
        kept = tuple(blocks[: (min(prompt, MAX_PROMPT_TOKENS) - 1) // MOONCAKE_BLOCK_TOKENS])
        requests.append(
            SimRequest(
                number=number,
                arrival_s=arrival_s / spec.speed,
                prompt_tokens=max(1, min(prompt, MAX_PROMPT_TOKENS)),
                output_tokens=max(1, output),
                blocks=kept,
                conversation=f"conversation {family}",
                tenant=f"tenant {tenant}",
                domain=tenant % spec.num_domains,
            )
        )
    return requests


def drawn_requests(
    num_requests: int,
    per_s: float,
    lengths: Callable[[Random], tuple[int, int]],
    num_domains: int = 4,
    num_tenants: int = 16,
    turns: int = 1,
    seed: int = 11,
) -> list[SimRequest]:
    """Requests without a trace: Poisson arrivals of ``per_s``, prompt and output tokens by ``lengths``, tenants of
    equal weight, conversations of ``turns`` whose prompts grow by what came before."""
    rng = Random(seed)
    requests: list[SimRequest] = []
    now_s, family, turn, prompt, tenant = 0.0, 0, turns, 0, 0
    for number in range(num_requests):
        now_s += rng.expovariate(per_s)
        if turn == turns:
            family, turn, prompt, tenant = number, 0, 0, rng.randrange(num_tenants)
        added, output = lengths(rng)
        turn, prompt = turn + 1, prompt + added
        blocks = tuple(hash((family, depth)) for depth in range((prompt - 1) // MOONCAKE_BLOCK_TOKENS))
        conversation = f"conversation {family}"
        domain = tenant % num_domains
        requests.append(
            SimRequest(number, now_s, prompt, output, blocks, conversation, f"tenant {tenant}", domain)
        )
    return requests


def _rows(folder: Path, trace: str) -> Iterator[tuple[float, int, int, list[int]]]:
    """Arrival seconds from the first, prompt tokens, output tokens, block ids."""
    if trace.startswith("azure"):
        with lzma.open(folder / f"{trace}.csv.xz", "rt") as lines:
            first: float | None = None
            for row in csv.DictReader(lines):
                # Seven decimals of a second; Python reads six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                first = at if first is None else first
                yield at - first, int(row["ContextTokens"]), int(row["GeneratedTokens"]), []
        return
    with lzma.open(folder / f"{trace}.jsonl.xz", "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            yield entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"], entry["hash_ids"]
