"""Decides which replica gets a request: the one with the least predicted milliseconds, without ever stampeding it.

A Router keeps one ``Placement`` and drives it from its event loop (not thread-safe)::

    placement = Placement(PlacementConfig())
    placement.add("a", now_s)                               # replicas as Serve names them; report() adds, too
    placement.report("a", snapshot, now_s)                  # every pushed WorkerSnapshot
    choice = placement.choose(facts, now_s, exclude=())     # Choice, or Busy: keep it queued
    placement.started(choice.ticket, now_s)                 # at the first token
    placement.done(choice.ticket, now_s, Outcome(...))      # always, in a finally: finished, failed, vetoed
    placement.expire(now_s)                                 # once a second: leaked tickets
    placement.remove("a")                                   # the replica is gone

A veto is ``done(ticket, now_s, VETOED)``, then ``report`` of the snapshot that came with it, then ``choose`` again
with the replica in ``exclude``. ``choose`` books its placement at once, so that a burst under one old snapshot
spreads: each request sees all the ones before it. Several Routers each keep their own; what they cannot see of each
other comes back in snapshots. Of ``WorkerSnapshot.extra`` the keys ``kv_bytes_per_token``, ``expert_bytes`` and
``link_bytes_per_s`` replace the cost model's start values where a worker reports them; ``expert_places`` less
``experts_resident`` is how many experts would find a free place there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from serve_app.policies.expert_affinity import ExpertAffinity
from serve_app.policies.fair_share import FairShare
from serve_app.policies.prediction import (
    CostModel,
    CrowdingModel,
    LinkModel,
    PredictedMs,
    Rates,
    Work,
    predict,
)
from serve_app.policies.prefix_affinity import DEFAULT_BLOCK_TOKENS, PrefixAffinity
from serve_app.policies.replica_view import Accepted, ReplicaLoad, ReplicaView, SentLoad
from serve_app.policies.tenant_homes import TenantHomes
from worker.api import WorkerSnapshot

OUTPUT_WEIGHT = 0.05
REPORTED_COSTS = ("kv_bytes_per_token", "expert_bytes", "link_bytes_per_s")


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """The rules of choice.

    Attributes:
        costs: start values of the prediction.
        block_tokens: tokens per block of ``RequestFacts.prefix``.
        tie_share, tie_ms: candidates within best * (1 + share) + ms are near ties; two of them are drawn.
        stay_share, stay_ms: a conversation stays where it was while that is within this band of the best.
        share_window_s, most_share, min_share_placements: no replica gets more than ``most_share`` times its fair share
            of the placements of the window, once there were so many per replica.
        queue_share: a replica takes requests until max_running * (1 + share) are active; above, it is full.
        default_new_tokens: length of an answer before any ended.
        ticket_ttl_s: a ticket older than this leaked.
        max_homes: conversations whose replica is remembered.
        expert_affinity: whether missing experts count; without it replicas are alike in that.
    """

    costs: CostModel = field(default_factory=CostModel)
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    tie_share: float = 0.05
    tie_ms: float = 2.0
    stay_share: float = 0.1
    stay_ms: float = 10.0
    share_window_s: float = 2.0
    most_share: float = 2.0
    min_share_placements: float = 3.0
    queue_share: float = 1.0
    default_new_tokens: float = 128.0
    ticket_ttl_s: float = 900.0
    max_homes: int = 16_384
    expert_affinity: bool = True


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the Router knows of a request.

    Attributes:
        num_prompt_tokens: at least 1.
        max_tokens: the most that it may generate.
        prefix: ``prefix_affinity.block_hashes`` of the prompt.
        affinity_keys: conversation, prefix, tenant: most specific first; may be empty.
    """

    num_prompt_tokens: int
    max_tokens: int
    prefix: Sequence[int] = ()
    affinity_keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Place it on ``replica_id``; ``ticket`` goes back with ``done``. ``terms`` is for traces and metrics."""

    replica_id: str
    predicted_ms: float
    ticket: int
    terms: PredictedMs
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Busy:
    """No replica can take it now: keep it queued, or refuse with Retry-After. ``reason`` for logs."""

    retry_after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a placement ended. ``cached_tokens`` and ``generated_tokens`` are of the request's timeline (None:
    unknown), ``used_expert_bits`` a bitmap like ``ExpertResidency.bits`` where the worker reports one."""

    completed: bool
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    used_expert_bits: bytes | None = None


VETOED = Outcome(completed=False)
"""The replica refused, or died before the first token."""


@dataclass(slots=True)
class _Placed:
    replica_id: str
    facts: RequestFacts
    sent_s: float
    hit_tokens: int
    last_use: int
    """When the deepest block of the believed hit was used before."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    view: ReplicaView
    num_active: float
    hit_tokens: int
    work: Work
    terms: PredictedMs
    total_ms: float


class Placement:
    """The placement ledger of one Router and the choice made from it. Without a ``seed`` ties are drawn differently in
    every Router, or all of them would draw the same replica."""

    def __init__(self, config: PlacementConfig, seed: int | None = None) -> None:
        self._config = config
        self._random = Random(seed)
        self._views: dict[str, ReplicaView] = {}
        self._costs: dict[str, CostModel] = {}
        self._placed: OrderedDict[int, _Placed] = OrderedDict()
        self._next_ticket = 1
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._new_tokens = config.default_new_tokens
        self._answer_s = 1.0
        self._share = FairShare(config.share_window_s, config.most_share, config.min_share_placements)
        self._crowding = CrowdingModel(config.costs.decode_ms_per_active)
        self._link = LinkModel()
        self.prefixes = PrefixAffinity(config.block_tokens)
        self.experts = ExpertAffinity()
        self._use_is_told = False
        self._tenants = TenantHomes()

    # -- replicas -----------------------------------------------------------------------------------------------

    @property
    def views(self) -> Mapping[str, ReplicaView]:
        """The views by replica id, to read."""
        return self._views

    @property
    def num_open(self) -> int:
        """Placements that have not ended."""
        return len(self._placed)

    def add(self, replica_id: str, now_s: float) -> None:
        """Makes a replica known before it reports: it is assumed to be an average one."""
        if replica_id not in self._views:
            rate = self._config.costs.prefill_tokens_per_s
            if known := [view.prefill_tokens_per_s for view in self._views.values() if view.snapshot]:
                rate = sum(known) / len(known)
            self._views[replica_id] = ReplicaView(replica_id, rate)
            self._costs[replica_id] = self._config.costs

    def report(self, replica_id: str, snapshot: WorkerSnapshot, now_s: float) -> bool:
        """Takes a snapshot in; False if a later one was there already."""
        self.add(replica_id, now_s)
        view = self._views[replica_id]
        last = view.snapshot
        if view.accept(snapshot, now_s) is Accepted.OUT_OF_ORDER:
            return False
        if known := {name: snapshot.extra[name] for name in REPORTED_COSTS if name in snapshot.extra}:
            self._costs[replica_id] = replace(self._config.costs, **known)
        self._crowding.observe(snapshot.num_running, snapshot.step_s)
        if last is not None:
            paged = snapshot.expert_bytes_paged - last.expert_bytes_paged
            busy_s = (snapshot.num_steps - last.num_steps) * snapshot.step_s
            self._link.observe(paged, busy_s, self._costs[replica_id].link_bytes_per_s)
        self._shrink_prefixes(replica_id, snapshot)
        return True

    def remove(self, replica_id: str) -> None:
        """Forgets a replica; its open tickets may still be ended."""
        self._views.pop(replica_id, None)
        self._costs.pop(replica_id, None)
        self.prefixes.flush(replica_id)
        self._tenants.remove(replica_id)

    # -- placements ---------------------------------------------------------------------------------------------

    def choose(self, facts: RequestFacts, now_s: float, exclude: Collection[str] = ()) -> Choice | Busy:
        """The replica for a request, booked in the ledger; Busy when none lives, or all are full."""
        alive = {
            name: view.load(now_s)
            for name, view in self._views.items()
            if not view.is_dead(now_s) and not (view.snapshot and view.snapshot.draining)
        }
        if not alive:
            return Busy(1.0, "no replica is known to be alive")
        loads = {name: load for name, load in with_fleet_mean(alive).items() if name not in exclude}
        if not loads:
            return Busy(0.1, "every replica refused")
        free = {name: load for name, load in loads.items() if not self._is_full(load)}
        if not free:
            return Busy(self._retry_after_s(loads), "every replica is full")
        fair = self._share.allowed(free, now_s)
        return self._book(facts, self._pick(facts, self._candidates(facts, free, fair)), now_s)

    def started(self, ticket: int, now_s: float) -> None:
        """The first token came: the prompt is computed. Unknown tickets are ignored."""
        placed = self._placed.get(ticket)
        if placed is not None and (view := self._views.get(placed.replica_id)) is not None:
            view.started(ticket)

    def done(self, ticket: int, now_s: float, outcome: Outcome) -> None:
        """A placement ended; learns from it. Unknown tickets (expired ones) are ignored."""
        placed = self._placed.pop(ticket, None)
        if placed is None:
            return
        view = self._views.get(placed.replica_id)
        if view is None:
            return
        view.ended(ticket)
        facts = placed.facts
        if not outcome.completed:
            self.prefixes.withdraw(view.replica_id, facts.prefix[placed.hit_tokens // self._block :], ticket)
            return
        self._answer_s += OUTPUT_WEIGHT * (now_s - placed.sent_s - self._answer_s)
        if outcome.generated_tokens is not None:
            self._new_tokens += OUTPUT_WEIGHT * (outcome.generated_tokens - self._new_tokens)
        if outcome.cached_tokens is not None and outcome.cached_tokens + self._block <= placed.hit_tokens:
            self.prefixes.forget_until(view.replica_id, placed.last_use)
        self._learn_experts(facts.affinity_keys, outcome.used_expert_bits, view.resident_bits)

    def expire(self, now_s: float) -> int:
        """Ends tickets older than their time to live; answers how many leaked."""
        leaked = [
            t for t, placed in self._placed.items() if now_s - placed.sent_s > self._config.ticket_ttl_s
        ]
        for ticket in leaked:
            placed = self._placed.pop(ticket)
            if (view := self._views.get(placed.replica_id)) is not None:
                view.ended(ticket)
        return len(leaked)

    # -- inside -------------------------------------------------------------------------------------------------

    def _learn_experts(self, keys: Sequence[str], used: bytes | None, resident: bytes | None) -> None:
        """Where workers say what requests used, what was resident teaches only those of whom nothing better is known:
        an answer that a stop string ended comes without."""
        self._use_is_told |= used is not None
        if used is None and self._use_is_told:
            keys = [key for key in keys if self.experts.profile([key]) is None]
        evidence = used or resident
        if evidence is not None and keys:
            self.experts.observe(keys, evidence)

    @property
    def _block(self) -> int:
        return self._config.block_tokens

    def _is_full(self, load: ReplicaLoad) -> bool:
        # Without a snapshot nothing is known: be optimistic, or a fresh replica would never get its first request.
        return load.max_running > 0 and load.num_active >= load.max_running * (1 + self._config.queue_share)

    def _retry_after_s(self, loads: Mapping[str, ReplicaLoad]) -> float:
        """Time until the first row comes free, at the answers' mean length in seconds."""
        rows = sum(load.max_running for load in loads.values())
        return min(30.0, max(0.1, self._answer_s / max(1, rows)))

    def _candidates(
        self, facts: RequestFacts, loads: Mapping[str, ReplicaLoad], names: Collection[str]
    ) -> list[_Candidate]:
        hits = self.prefixes.hit_tokens(facts.prefix)
        missing = self._missing_experts(facts)
        mean = sum(missing.values()) / len(missing) if missing else 0.0
        new_tokens = min(float(facts.max_tokens), self._new_tokens)
        found: list[_Candidate] = []
        for name in names:
            view, load = self._views[name], loads[name]
            hit = min(hits.get(name, 0), facts.num_prompt_tokens - 1)
            left = facts.num_prompt_tokens - hit
            # Where experts have no size they are no reason either.
            # One that finds a free place drives nobody out: it is missed once, wherever the request goes.
            free = view.num_free_places
            missed = max(0.0, missing.get(name, 0.0) - free) if self._costs[name].expert_bytes else 0.0
            absent = max(0, view.num_absent_experts - free) if self._config.expert_affinity else 0
            work = Work(left, new_tokens, missed, missed / mean if mean else 1.0, absent)
            rates = Rates(view.prefill_tokens_per_s, self._crowding.ms_per_active, self._link.share)
            terms = predict(work, load, rates, self._costs[name])
            found.append(_Candidate(view, load.num_active, hit, work, terms, terms.total))
        return found

    def _missing_experts(self, facts: RequestFacts) -> dict[str, float]:
        """Likely misses per replica; one that reports no residency is taken for an average one, not for a full."""
        profile = self.experts.profile(facts.affinity_keys) if self._config.expert_affinity else None
        if profile is None:
            return {}
        bits = {name: view.resident_bits for name, view in self._views.items()}
        known = {name: self.experts.expected_misses(profile, b) for name, b in bits.items() if b is not None}
        mean = sum(known.values()) / len(known) if known else 0.0
        return {name: known.get(name, mean) for name in bits}

    def _pick(self, facts: RequestFacts, candidates: Sequence[_Candidate]) -> _Candidate:
        rules = self._config
        best_ms = min(candidate.total_ms for candidate in candidates)
        home = self._homes.get(facts.affinity_keys[0]) if facts.affinity_keys else None
        near_ms = best_ms * (1 + rules.stay_share) + rules.stay_ms
        near = {c.view.replica_id: c for c in candidates if c.total_ms <= near_ms}
        if home is None:
            home = self._tenants_home(facts, list(near.values()))
        if home in near:
            return near[home]
        near_ms = best_ms * (1 + rules.tie_share) + rules.tie_ms
        ties = _with_fewest_missing([c for c in candidates if c.total_ms <= near_ms])
        drawn = self._random.sample(ties, min(2, len(ties)))
        return min(drawn, key=lambda candidate: (candidate.num_active, candidate.total_ms))

    def _tenants_home(self, facts: RequestFacts, near: list[_Candidate]) -> str | None:
        """Where a new conversation's user or tenant is at home; None where experts are no matter. One that lost its
        home settles where the fewest of its experts are missing."""
        paged = self._config.expert_affinity and any(
            self._costs[candidate.view.replica_id].expert_bytes for candidate in near
        )
        if not paged or len(facts.affinity_keys) < 2:
            return None
        tenant = facts.affinity_keys[1]
        if self.experts.profile([tenant]) is not None:
            near = _with_fewest_missing(near)
        return self._tenants.home(tenant, [candidate.view.replica_id for candidate in near])

    def _book(self, facts: RequestFacts, chosen: _Candidate, now_s: float) -> Choice:
        ticket, name = self._next_ticket, chosen.view.replica_id
        self._next_ticket += 1
        held = (chosen.work.prompt_tokens + chosen.work.new_tokens) * self._costs[name].kv_bytes_per_token
        self._share.placed(name, now_s)
        chosen.view.sent(ticket, SentLoad(chosen.work.prompt_tokens, held), now_s)
        depth = chosen.hit_tokens // self._block
        last_use = self.prefixes.last_use(name, facts.prefix[depth - 1]) if depth else 0
        self.prefixes.placed(name, facts.prefix, ticket)
        self._placed[ticket] = _Placed(name, facts, now_s, chosen.hit_tokens, last_use)
        if facts.affinity_keys:
            self._homes[facts.affinity_keys[0]] = name
            self._homes.move_to_end(facts.affinity_keys[0])
            if len(self._homes) > self._config.max_homes:
                self._homes.popitem(last=False)
        return Choice(name, chosen.total_ms, ticket, chosen.terms, chosen.hit_tokens)

    def _shrink_prefixes(self, replica_id: str, snapshot: WorkerSnapshot) -> None:
        """A replica cannot hold more of prefixes than its FULL pages do: after a flush this empties the map."""
        token_bytes = self._costs[replica_id].kv_bytes_per_token
        full = snapshot.headroom.kinds.get("full")
        if full is None or not token_bytes:
            return
        held = (full.used_bytes + full.reclaimable_bytes + full.pending_bytes) / token_bytes
        coming = snapshot.waiting_tokens + self._views[replica_id].unseen_tokens
        self.prefixes.resize(replica_id, int((held + coming) / self._block) + 1)


def _with_fewest_missing(ties: list[_Candidate]) -> list[_Candidate]:
    """Among near ties those where about the fewest experts are missing: locality that costs nothing now pays later,
    also where a missing expert is cheap."""
    fewest = min(candidate.work.missing_experts for candidate in ties)
    return [candidate for candidate in ties if candidate.work.missing_experts <= fewest * 1.1]


def with_fleet_mean(loads: Mapping[str, ReplicaLoad]) -> dict[str, ReplicaLoad]:
    """Loads in which an untrusted one is raised towards what the trusted report, and none is lowered.

    An aged one is raised towards their mean: not heard of is not idle. One that never reported is new: it counts as
    the least loaded of them at its last snapshot, plus what was sent to it since: its share, and no flood.
    """
    trusted = [load for load in loads.values() if load.trust >= 1.0]
    if not trusted or len(trusted) == len(loads):
        return dict(loads)
    active = [load.num_active for load in trusted]
    backlog = [load.backlog_tokens for load in trusted]
    least_active = min(load.num_active - load.unseen_active for load in trusted)
    least_backlog = max(0.0, min(load.backlog_tokens - load.unseen_tokens for load in trusted))
    mean_active, mean_backlog = sum(active) / len(active), sum(backlog) / len(backlog)
    blended: dict[str, ReplicaLoad] = {}
    for name, load in loads.items():
        if load.reported:
            doubt = 1.0 - load.trust
            more_active = doubt * max(0.0, mean_active - load.num_active)
            more_backlog = doubt * max(0.0, mean_backlog - load.backlog_tokens)
        else:
            more_active, more_backlog = least_active, least_backlog
        blended[name] = replace(
            load,
            num_active=load.num_active + more_active,
            backlog_tokens=load.backlog_tokens + more_backlog,
        )
    return blended
