"""Predicts what placing a request on one replica costs, in milliseconds, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.policies.replica_view import ReplicaLoad


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a token, a neighbour and a missing expert cost; start values where replicas report nothing better.

    Attributes:
        prefill_tokens_per_s: until a replica's own rate is known.
        decode_ms_per_active: by how much one more active request lengthens a decode step.
        link_bytes_per_s: host to device, for missing experts.
        expert_bytes: bytes of one expert of one layer; 0 switches the expert term off.
        expert_displacement: a full expert cache gives up one expert for each that it brings in, and will want it
            back: missing bytes count so many times.
        kv_bytes_per_token: what a token comes to hold; 0 switches the headroom term off.
        retraction_factor: a token of headroom that is missing costs so many recomputed tokens.
        distrust_ms: added as trust in an aged snapshot goes, so that one that is heard of goes first among equals.
    """

    prefill_tokens_per_s: float = 8_000.0
    decode_ms_per_active: float = 0.2
    link_bytes_per_s: float = 50e9
    expert_bytes: float = 0.0
    expert_displacement: float = 2.0
    kv_bytes_per_token: float = 0.0
    retraction_factor: float = 4.0
    distrust_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one request would be on one replica: ``prompt_tokens`` left after its prefix hit, tokens it will likely
    generate, and experts (of all layers) that it would likely miss there."""

    prompt_tokens: float
    new_tokens: float
    missing_experts: float


@dataclass(frozen=True, slots=True)
class PredictedMs:
    """The terms of a prediction, in milliseconds."""

    queue: float = 0.0
    prefill: float = 0.0
    crowding: float = 0.0
    experts: float = 0.0
    headroom: float = 0.0
    distrust: float = 0.0

    @property
    def total(self) -> float:
        """The sum that candidates are compared by."""
        return self.queue + self.prefill + self.crowding + self.experts + self.headroom + self.distrust


def predict(work: Work, load: ReplicaLoad, tokens_per_s: float, costs: CostModel) -> PredictedMs:
    """The cost of ``work`` on a replica under ``load`` that prefills ``tokens_per_s``.

    Crowding counts both sides: the request's own steps are longer by its neighbours, theirs by it; and where all
    rows are taken, the wait until one is free.
    """
    ms_per_token = 1e3 / tokens_per_s
    crowding = work.new_tokens * costs.decode_ms_per_active * load.num_active
    if load.max_running and load.num_active >= load.max_running:
        ahead = load.num_active + 1 - load.max_running
        row_ms = work.new_tokens * costs.decode_ms_per_active * load.max_running
        crowding += ahead * row_ms / load.max_running
    headroom = 0.0
    if costs.kv_bytes_per_token and load.available_bytes is not None:
        # Requests that run already will grow by half of an answer on average before they end.
        growing = load.num_active * work.new_tokens / 2
        needed = (work.prompt_tokens + work.new_tokens + growing) * costs.kv_bytes_per_token
        missing = max(0.0, needed - load.available_bytes)
        headroom = costs.retraction_factor * missing / costs.kv_bytes_per_token * ms_per_token
    paged_bytes = work.missing_experts * costs.expert_bytes * costs.expert_displacement
    return PredictedMs(
        queue=load.backlog_tokens * ms_per_token,
        prefill=work.prompt_tokens * ms_per_token,
        crowding=crowding,
        experts=1e3 * paged_bytes / costs.link_bytes_per_s,
        headroom=headroom,
        distrust=(1.0 - load.trust) * costs.distrust_ms if load.reported else 0.0,
    )
