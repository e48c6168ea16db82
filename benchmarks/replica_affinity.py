"""Measures what expert affinity saves: four real replicas of the demo model, experts paged, four domains of requests.

    python -m benchmarks.replica_affinity [--json FILE] [--conversations 96]

The same conversations run through real Ray Serve without the expert term of placement, with it learning from what is
resident where requests end, and with it learning from what the workers say that each used; everything else of the
router is the same. Bytes paged in are the engines' own counters, from the moment that every domain has
been seen. ``overlap`` is how much of one domain's expert choices falls on another's twelve most used experts of each
layer: where domains used the same experts there would be nothing to save. With a replica for each tenant to be at home
on, what the term learns from makes no difference; it does where a tenant loses its home or cannot be taken there.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.drills.clients import new_client
from benchmarks.drills.cluster import running_cluster
from benchmarks.report import Conditions, Report, publish, report_parser
from demo.tasks import arithmetic, conversation, copying, tools
from demo.tasks.sample import Message, Sample, render

DEMO = Path(__file__).resolve().parents[1] / "demo" / "model"
DOMAINS: Mapping[str, Callable[[random.Random], Sample]] = {
    "sums": arithmetic.two_digit_sum,
    "stories": conversation.story,
    "copying": copying.copy_twice,
    "calls": tools.one_call,
}
REPLICAS = 4
TURNS = 2
ANSWER_TOKENS = 40
TOP = 12
EXPERT_BYTES = 20 << 20
"""About eight tenths of the experts of all layers, in float32."""
LONGEST_PAUSE_S = 2.0
ARMS: Mapping[str, Mapping[str, bool]] = {
    "without_term": {"expert_affinity": False},
    "by_residency": {"expert_affinity": True, "expert_use": False},
    "by_use": {"expert_affinity": True, "expert_use": True},
}
LINK_BYTES_PER_S = 1e9
"""An expert of the demo model then costs as long on the way as one of 4.7 MB over PCIe 5: 0.1 ms."""


@dataclass
class Run:
    """What one run of all conversations saw."""

    bytes_paged: int = 0
    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0
    returned: int = 0
    later_turns: int = 0
    num_astray: int = 0
    num_requests: int = 0
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def miss_rate(self) -> float:
        """Of the experts that decode steps looked up."""
        return self.misses / max(1, self.hits + self.misses)


def options_of(arm: str, expert_bytes: int = EXPERT_BYTES) -> dict[str, Any]:
    """The service's options in one of the :data:`ARMS`."""
    return {
        "model": str(DEMO),
        "served_name": "demo",
        "engine": "native",
        "device": "cpu",
        "num_threads": 1,
        "replicas": REPLICAS,
        "max_running": 8,
        "arena_bytes": 40 << 20,
        "experts": "paged",
        "expert_bytes": expert_bytes,
        **ARMS[arm],
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "graceful_shutdown_timeout_s": 2.0,
        "log_level": "warning",
    }


async def converse(http: httpx.AsyncClient, domain: str, number: int, turns: int = TURNS) -> int:
    """One conversation of several turns; how many prompt tokens of the later ones came from a prefix cache."""
    chance = random.Random(f"{domain} {number}")
    messages: list[Message] = []
    cached = 0
    for _ in range(turns):
        sample = DOMAINS[domain](chance)
        messages += [m for m in sample.messages[:-1] if m["role"] == "user"]
        body = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        more = {"user": domain} | ({"tools": sample.tools} if sample.tools and len(messages) == 1 else {})
        headers = {"x-session-id": f"{domain}-{number}"}
        response = await http.post("/v1/chat/completions", json=body | more, headers=headers)
        response.raise_for_status()
        answer = response.json()
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        text = answer["choices"][0]["message"].get("content") or ""
        messages.append({"role": "assistant", "content": text})
    return cached


async def run_all(url: str, per_domain: int, first: int) -> int:
    """A tenant of each domain at a time, one conversation after another with pauses to think; answers the prompt
    tokens that came from prefix caches."""
    async with new_client(url) as http:

        async def tenant(domain: str) -> int:
            pauses = random.Random(f"{domain} {first}")
            cached = 0
            for number in range(first, first + per_domain):
                await asyncio.sleep(pauses.uniform(0.0, LONGEST_PAUSE_S))
                cached += await converse(http, domain, number)
            return cached

        return sum(await asyncio.gather(*map(tenant, DOMAINS)))


def measure(service: Any, conversations: int) -> Run:
    """Runs the load against a deployed service: half of it first, unmeasured, which fills the expert places."""
    per_domain = conversations // len(DOMAINS)
    asyncio.run(run_all(service.url, -(-per_domain // 2), 10_000))
    before, seen = service.snapshots(), {a.replica: len(a.affinity_keys) for a in service.arrivals()}
    cached = asyncio.run(run_all(service.url, per_domain, 0))
    after, arrivals = service.snapshots(), service.arrivals()
    run = Run(cached_tokens=cached)
    for states, sign in ((before, -1), (after, 1)):
        run.bytes_paged += sign * sum(state.expert_bytes_paged for state in states)
        run.hits += sign * sum(state.expert_hits for state in states)
        run.misses += sign * sum(state.expert_misses for state in states)
    trace(run, {a.replica: a.affinity_keys[seen[a.replica] :] for a in arrivals})
    run.num_astray = sum(a.num_astray for a in arrivals)
    return run


def trace(run: Run, arrived: Mapping[str, Sequence[str]]) -> None:
    """Fills in where each conversation went, from what reached the workers."""
    turns: dict[str, Counter[str]] = {}
    for replica, keys in arrived.items():
        for key in keys:
            turns.setdefault(key, Counter())[replica] += 1
            domain = next(name for name in DOMAINS if name in key)
            run.by_domain.setdefault(domain, Counter())[replica] += 1
    run.num_requests = sum(len(keys) for keys in arrived.values())
    run.later_turns = sum(counts.total() - 1 for counts in turns.values())
    run.returned = sum(max(counts.values()) - 1 for counts in turns.values())


def overlaps(num_samples: int = 8) -> tuple[dict[str, float], list[str]]:
    """By pair of domains the overlap, and the table; from the reference's router over answers of the task programs."""
    import torch
    from tokenizers import Tokenizer

    from demo.expert_routing import record
    from demo.reference import load_reference

    torch.set_num_threads(1)
    model, tokenizer = load_reference(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    use: dict[str, np.ndarray] = {}
    for domain, make in DOMAINS.items():
        chosen = []
        for number in range(num_samples):
            sample = make(random.Random(number))
            ids = [
                tokenizer.encode(render(list(part), sample.tools), add_special_tokens=False).ids
                for part in (sample.messages, sample.messages[:-1])
            ]
            chosen.append(record(model, [ids[0]], [True]).chosen[:, len(ids[1]) :])
        joined, num_experts = np.concatenate(chosen, axis=1), model.config.num_experts
        counts = np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in joined])
        use[domain] = counts / counts.sum(1, keepdims=True)
    found = {}
    lines = ["", f"share of the row's choices on the column's {TOP} most used experts of each layer:"]
    lines.append(" " * 10 + "".join(f"{name:>10}" for name in DOMAINS))
    for row in DOMAINS:
        for column in DOMAINS:
            best = np.argsort(use[column], axis=1)[:, -TOP:]
            found[f"{row}.{column}"] = float(np.take_along_axis(use[row], best, axis=1).sum(1).mean())
        lines.append(f"{row:>10}" + "".join(f"{found[f'{row}.{column}']:10.2f}" for column in DOMAINS))
    return found, lines


def figures_of(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """A row for each arm, and what the term saves in it."""
    plain = max(1, runs["without_term"].bytes_paged)
    return [
        {
            "router": arm,
            "mb_paged": run.bytes_paged / 1e6,
            "miss_rate": run.miss_rate,
            "returned_share": run.returned / max(1, run.later_turns),
            "cached_tokens": run.cached_tokens,
            "requests": run.num_requests,
            "astray": run.num_astray,
            "bytes_saved_share": 1 - run.bytes_paged / plain,
        }
        for arm, run in runs.items()
    ]


def main() -> int:
    """Runs all arms, prints and writes the figures."""
    parser = report_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=96)
    options = parser.parse_args()
    overlap, lines = overlaps()
    runs: dict[str, Run] = {}
    with running_cluster("default") as address:
        from benchmarks.drills.service import Service

        for arm in ARMS:
            service = Service(f"affinity-{arm}", address, options_of(arm))
            service.deploy()
            service.wait_until_whole(REPLICAS, 1, 120.0)
            runs[arm] = measure(service, options.conversations)
            service.delete()
    for arm, run in runs.items():
        lines.append(f"{arm}, requests of each domain by replica:")
        replicas = sorted({replica for counts in run.by_domain.values() for replica in counts})
        for domain in DOMAINS:
            counts = run.by_domain[domain]
            lines.append(f"{domain:>10}" + "".join(f"{counts[replica]:6}" for replica in replicas))
    conditions = Conditions(
        model="demo/model",
        weights="trained",
        prompts=f"{options.conversations} conversations of {TURNS} turns from demo.tasks: {', '.join(DOMAINS)}",
        cache="warm: half as many conversations before",
        batch=f"{len(DOMAINS)} tenants, each at most one conversation at a time; 1 thread a replica",
        context=f"up to 500 tokens, {ANSWER_TOKENS} new ones a turn",
        resident=f"{EXPERT_BYTES >> 20} MiB of 25 MB a replica; placement takes the link for {LINK_BYTES_PER_S:g} B/s",
    )
    notes = [*lines, *(f"overlap.{pair} {share:.2f}" for pair, share in overlap.items())]
    publish(Report("replica_affinity", conditions, tuple(figures_of(runs)), tuple(notes)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
