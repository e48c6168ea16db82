"""The routers that the simulation compares: Headroom's own policies, and the usual rules as baselines.

All know exactly what they sent and what came back; snapshots reach all of them equally late. The baselines are given
what they are given elsewhere: counts of their own requests in flight, a prefix map, or the last reported KV use.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Protocol

from benchmarks.placement.traces import MOONCAKE_BLOCK_TOKENS, SimRequest
from benchmarks.placement.workers import Row, WorkerSpec
from serve_app.policies.placement import (
    VETOED,
    Busy,
    Choice,
    Outcome,
    Placement,
    PlacementConfig,
    RequestFacts,
)
from serve_app.policies.prediction import CostModel
from serve_app.policies.prefix_affinity import PrefixAffinity
from worker.api import WorkerSnapshot

BASELINES = ("round_robin", "two_choices", "prefix_only", "least_kv")
AGELESS = ("round_robin", "two_choices", "prefix_only")
"""Baselines that read no snapshot: their own requests in flight tell them all they use."""
OURS = "ours"
OURS_WITHOUT_EXPERTS = "ours_without_experts"
UNKNOWN_LENGTH = 1 << 20


class SimRouter(Protocol):
    """What the simulation asks of a router. ``choose`` answers (worker, ticket), or None to keep it queued."""

    def add(self, name: str, now_s: float) -> None: ...

    def remove(self, name: str) -> None: ...

    def report(self, name: str, snapshot: WorkerSnapshot, now_s: float) -> None: ...

    def choose(
        self, request: SimRequest, now_s: float, exclude: Collection[str]
    ) -> tuple[str, int] | None: ...

    def started(self, row: Row, now_s: float) -> None: ...

    def done(self, row: Row, now_s: float, completed: bool) -> None: ...


class OurRouter:
    """The policies that the service runs, fed with what a Router is fed with."""

    def __init__(self, spec: WorkerSpec, seed: int, with_experts: bool = True) -> None:
        costs = CostModel(
            prefill_tokens_per_s=1.0 / spec.token_s,
            decode_ms_per_active=1e3 * spec.row_s,
            link_bytes_per_s=spec.link_bytes_per_s,
            expert_bytes=spec.expert_bytes if with_experts else 0.0,
            kv_bytes_per_token=spec.kv_bytes_per_token,
        )
        self.placement = Placement(PlacementConfig(costs=costs, block_tokens=MOONCAKE_BLOCK_TOKENS), seed)

    def add(self, name: str, now_s: float) -> None:
        self.placement.add(name, now_s)

    def remove(self, name: str) -> None:
        self.placement.remove(name)

    def report(self, name: str, snapshot: WorkerSnapshot, now_s: float) -> None:
        if name in self.placement.views:
            self.placement.report(name, snapshot, now_s)

    def choose(self, request: SimRequest, now_s: float, exclude: Collection[str]) -> tuple[str, int] | None:
        # As a Router can: conversation and tenant are told by the request, its length is not.
        keys = (request.conversation, request.tenant)
        facts = RequestFacts(request.prompt_tokens, UNKNOWN_LENGTH, request.blocks, keys)
        match self.placement.choose(facts, now_s, exclude):
            case Choice(replica_id=name, ticket=ticket):
                return name, ticket
            case Busy():
                return None

    def started(self, row: Row, now_s: float) -> None:
        self.placement.started(row.ticket, now_s)

    def done(self, row: Row, now_s: float, completed: bool) -> None:
        outcome = Outcome(True, row.hit_tokens, row.generated) if completed else VETOED
        self.placement.done(row.ticket, now_s, outcome)


class BaselineRouter:
    """Round robin, two choices by queue length, longest prefix, or least KV use."""

    def __init__(self, rule: str, seed: int) -> None:
        self._rule = rule
        self._random = Random(seed)
        self._names: list[str] = []
        self._in_flight: dict[str, int] = {}
        self._placed: dict[int, str] = {}
        self._used_bytes: dict[str, int] = {}
        self._prefixes = PrefixAffinity(MOONCAKE_BLOCK_TOKENS, max_blocks=400)
        self._turn = 0

    def add(self, name: str, now_s: float) -> None:
        self._names.append(name)
        self._in_flight[name] = 0

    def remove(self, name: str) -> None:
        self._names.remove(name)
        self._used_bytes.pop(name, None)
        self._prefixes.flush(name)

    def report(self, name: str, snapshot: WorkerSnapshot, now_s: float) -> None:
        self._used_bytes[name] = sum(kind.used_bytes for kind in snapshot.headroom.kinds.values())

    def choose(self, request: SimRequest, now_s: float, exclude: Collection[str]) -> tuple[str, int] | None:
        names = [name for name in self._names if name not in exclude]
        if not names:
            return None
        self._turn += 1
        match self._rule:
            case "round_robin":
                name = names[self._turn % len(names)]
            case "two_choices":
                name = self._two_choices(names)
            case "prefix_only":
                name = self._two_choices(self._longest_prefix(request, names))
            case "least_kv":
                least = min(self._used_bytes.get(name, 0) for name in names)
                name = self._random.choice([n for n in names if self._used_bytes.get(n, 0) == least])
            case unknown:
                raise ValueError(f"no baseline is named {unknown!r}")
        self._prefixes.placed(name, request.blocks, self._turn)
        self._in_flight[name] += 1
        self._placed[self._turn] = name
        return name, self._turn

    def _longest_prefix(self, request: SimRequest, names: list[str]) -> list[str]:
        """The workers with the longest hit, if that is half of the prompt (a shared system prompt is no reason)."""
        hits = self._prefixes.hit_tokens(request.blocks)
        longest = max(hits.get(name, 0) for name in names)
        if 2 * longest < request.prompt_tokens:
            return names
        return [name for name in names if hits.get(name, 0) == longest]

    def _two_choices(self, names: list[str]) -> str:
        drawn = self._random.sample(names, min(2, len(names)))
        return min(drawn, key=lambda name: self._in_flight[name])

    def started(self, row: Row, now_s: float) -> None:
        pass

    def done(self, row: Row, now_s: float, completed: bool) -> None:
        self._in_flight[self._placed.pop(row.ticket)] -= 1


def make_router(rule: str, spec: WorkerSpec, seed: int) -> SimRouter:
    """The router of that name."""
    if rule == OURS:
        return OurRouter(spec, seed)
    if rule == OURS_WITHOUT_EXPERTS:
        return OurRouter(spec, seed, with_experts=False)
    return BaselineRouter(rule, seed)
