"""Predicts what placing a request on one replica costs, in milliseconds, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.policies.replica_view import ReplicaLoad


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a token, a neighbour and a missing expert cost; start values where replicas report nothing better.

    Attributes:
        prefill_tokens_per_s: until a replica's own rate is known.
        decode_ms_per_active: by how much one more active request lengthens a decode step, until it was learned.
        link_bytes_per_s: host to device, for missing experts.
        expert_bytes: bytes of one expert of one layer; 0 switches the expert term off.
        patience_ms: a wait of so long counts twice, a longer one more: the slowest answers matter more than the mean.
        neighbour_share: how much of a delay that a request's prompt brings to each active neighbour counts.
        kv_bytes_per_token: what a token comes to hold; 0 switches the headroom term off.
        retraction_factor: a token of headroom that is missing costs so many recomputed tokens.
        distrust_ms: added as trust in an aged snapshot goes, so that one that is heard of goes first among equals.
    """

    prefill_tokens_per_s: float = 8_000.0
    decode_ms_per_active: float = 0.2
    link_bytes_per_s: float = 50e9
    expert_bytes: float = 0.0
    patience_ms: float = 4_000.0
    neighbour_share: float = 0.25
    kv_bytes_per_token: float = 0.0
    retraction_factor: float = 4.0
    distrust_ms: float = 50.0


STEP_WEIGHT = 0.004
MIN_STEPS = 50
LINK_WEIGHT = 0.02


class CrowdingModel:
    """Learns from snapshots by how much one more running request lengthens a step: the slope of a straight line
    through (num_running, step_s) of all replicas, older ones fading. It holds what no table knows: the context that
    rows read, the experts that they drive out."""

    def __init__(self, start_ms: float) -> None:
        self._start_ms = start_ms
        self._num_seen = 0
        self._mean_running = self._mean_ms = self._variance = self._covariance = 0.0

    def observe(self, num_running: int, step_s: float) -> None:
        """A replica's mean or last step with so many rows; idle ones and unknown times say nothing."""
        if num_running < 1 or step_s <= 0:
            return
        self._num_seen += 1
        weight = max(STEP_WEIGHT, 1.0 / self._num_seen)
        off_running, off_ms = num_running - self._mean_running, 1e3 * step_s - self._mean_ms
        self._mean_running += weight * off_running
        self._mean_ms += weight * off_ms
        self._variance += weight * ((1 - weight) * off_running * off_running - self._variance)
        self._covariance += weight * ((1 - weight) * off_running * off_ms - self._covariance)

    @property
    def ms_per_active(self) -> float:
        """The slope in milliseconds, never negative; the start value until there is enough to tell."""
        if self._num_seen < MIN_STEPS or self._variance < 0.25:
            return self._start_ms
        return max(0.0, self._covariance / self._variance)


class LinkModel:
    """Learns which share of the replicas' steps their links spend on experts: so much of what one more request costs
    its neighbours is a matter of experts, and differs from replica to replica."""

    def __init__(self) -> None:
        self.share = 0.0

    def observe(self, bytes_paged: float, busy_s: float, link_bytes_per_s: float) -> None:
        """Between two snapshots of a replica so many bytes came over its link, in steps that took so long."""
        if busy_s > 0 and bytes_paged >= 0:
            share = min(1.0, bytes_paged / link_bytes_per_s / busy_s)
            self.share += LINK_WEIGHT * (share - self.share)


@dataclass(frozen=True, slots=True)
class Work:
    """What one request would be on one replica.

    Attributes:
        prompt_tokens: left after its prefix hit.
        new_tokens: that it will likely generate.
        missing_experts: of all layers, that its tokens would likely miss there.
        relative_missing: the same over the mean of all candidates; 1 where nothing is known.
        absent_experts: that are not resident there; a prompt's chunk reads nearly all of them.
    """

    prompt_tokens: float
    new_tokens: float
    missing_experts: float = 0.0
    relative_missing: float = 1.0
    absent_experts: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What was learned of a replica's and the fleet's speed; see :class:`CrowdingModel`, :class:`LinkModel`."""

    prefill_tokens_per_s: float
    ms_per_active: float
    link_share: float


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


def predict(work: Work, load: ReplicaLoad, rates: Rates, costs: CostModel) -> PredictedMs:
    """The cost of ``work`` on a replica under ``load``.

    A prompt costs its computation, but at least the transfer of the experts that are absent, unless prompts wait
    there already whose chunk it shares. Crowding counts both sides: the request's own steps are longer by its
    neighbours, theirs (which are half done on average) by it, and its prompt's chunk holds them up; where all rows
    are taken, the wait until one is free. Of the lengthening that it brings, the link's share is for experts: it
    is more where more of its own are missing, since they will drive others out and be driven out again.
    """
    ms_per_token = 1e3 / rates.prefill_tokens_per_s
    queue = load.backlog_tokens * ms_per_token
    expert_ms = 1e3 * costs.expert_bytes / costs.link_bytes_per_s
    alone = max(work.prompt_tokens * ms_per_token, work.absent_experts * expert_ms - queue)
    lengthening = rates.ms_per_active * work.new_tokens
    by_experts = rates.link_share * lengthening if costs.expert_bytes else 0.0
    neighbours = load.num_active / 2
    crowding = lengthening * load.num_active + (lengthening - by_experts) * neighbours
    crowding += costs.neighbour_share * alone * load.num_running
    if load.max_running and load.num_active >= load.max_running:
        crowding += (load.num_active + 1 - load.max_running) * lengthening
    return PredictedMs(
        queue=queue * (1.0 + (queue + alone) / costs.patience_ms),
        prefill=alone,
        crowding=crowding,
        experts=work.missing_experts * expert_ms + by_experts * work.relative_missing * (1.0 + neighbours),
        headroom=_shortage_ms(work, load, ms_per_token, costs),
        distrust=(1.0 - load.trust) * costs.distrust_ms if load.reported else 0.0,
    )


def _shortage_ms(work: Work, load: ReplicaLoad, ms_per_token: float, costs: CostModel) -> float:
    """What a lack of headroom costs: tokens that will be retracted and computed again."""
    if not costs.kv_bytes_per_token or load.available_bytes is None:
        return 0.0
    # Requests that run already will grow by half of an answer on average before they end.
    growing = load.num_active * work.new_tokens / 2
    needed = (work.prompt_tokens + work.new_tokens + growing) * costs.kv_bytes_per_token
    missing = max(0.0, needed - load.available_bytes)
    return costs.retraction_factor * missing / costs.kv_bytes_per_token * ms_per_token
