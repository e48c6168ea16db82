"""Decides how many replicas there should be, from retractions, queue wait, load and headroom of those there are.

``desired_replicas`` is the decision, plain values in and out. ``ScalingPolicy`` fits it to Serve: instantiated once
in the controller with plain keyword arguments, then called about ten times a second. An exception there would freeze
every application of the cluster, so its whole body is guarded. Only the standard library is imported: the controller
loads this module.

Up fast: several replicas at once, as far as pressure says, then hold while they load. Down slowly: one at a time,
after a calm stretch that every replica confirms. A metric that is missing is unknown, never zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.api import WorkerSnapshot

logger = logging.getLogger(__name__)

METRICS = ("retraction_rate", "queue_wait_s", "active_share", "headroom_share")
CALM_SINCE = "headroom_calm_since_s"
CALM_TARGET = "headroom_calm_target"
"""Keys of this policy in Serve's policy state."""


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """When to grow and when to shrink.

    Attributes:
        retractions_high: retractions a second of one replica that call for more; pressure is measured against it.
        queue_wait_high_s: the same for the seconds that requests waited on a replica.
        active_high: the same for active requests (running and waiting) over rows.
        headroom_low: share of the arena left, below which a replica with waiting requests is short of memory.
        active_low: shrink only if all active requests would fill the rows left by at most so much.
        headroom_high: and only if every replica has this share of its arena left.
        up_factor: at most so many times the replicas of before, at once.
        cool_down_s: after growing, time for the new replicas to take load before growing again.
        down_hold_s: how long it must be calm before one replica goes; the last one (to zero) takes zero_hold_s.
    """

    retractions_high: float = 0.2
    queue_wait_high_s: float = 2.0
    active_high: float = 1.2
    headroom_low: float = 0.05
    active_low: float = 0.6
    headroom_high: float = 0.3
    up_factor: float = 3.0
    cool_down_s: float = 15.0
    down_hold_s: float = 120.0
    zero_hold_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica's last metrics; None is unknown."""

    retraction_rate: float | None = None
    queue_wait_s: float | None = None
    active_share: float | None = None
    headroom_share: float | None = None

    @property
    def complete(self) -> bool:
        """Whether every metric is known."""
        return None not in (self.retraction_rate, self.queue_wait_s, self.active_share, self.headroom_share)


@dataclass(frozen=True, slots=True)
class ScalingInputs:
    """What is known at one moment.

    Attributes:
        now_s: any clock, the same for all times here.
        num_running: replicas that take requests.
        target: replicas asked for so far; above num_running while new ones load.
        minimum, maximum: bounds of the answer.
        num_requests: requests in handles and replicas, as Serve counts them.
        readings: of the running replicas, in any order; those without metrics may be left out.
        last_up_s: when the target last grew; None if never.
        calm_since_s, calm_target: this policy's memory: since when it has been calm at which target; None if not.
    """

    now_s: float
    num_running: int
    target: int
    minimum: int
    maximum: int
    num_requests: float
    readings: Sequence[ReplicaReading] = ()
    last_up_s: float | None = None
    calm_since_s: float | None = None
    calm_target: int | None = None


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many replicas, why (for logs), and what to remember."""

    target: int
    reason: str
    calm_since_s: float | None = None
    calm_target: int | None = None


def desired_replicas(inputs: ScalingInputs, rules: ScalingRules) -> ScalingDecision:
    """The number of replicas there should be, within the bounds."""
    decision = _decide(inputs, rules)
    bounded = min(inputs.maximum, max(inputs.minimum, decision.target))
    return ScalingDecision(bounded, decision.reason, decision.calm_since_s, decision.calm_target)


def _decide(inputs: ScalingInputs, rules: ScalingRules) -> ScalingDecision:
    target = inputs.target
    if target == 0:
        if inputs.num_requests > 0:
            return ScalingDecision(1, "a request came to zero replicas")
        return ScalingDecision(0, "nothing to do")
    if inputs.num_running < target:
        return ScalingDecision(target, "replicas are loading")
    if not inputs.readings:
        return ScalingDecision(target, "no metrics yet")
    pressure, cause = _pressure(inputs.readings, rules)
    if pressure >= 1.0:
        if inputs.last_up_s is not None and inputs.now_s - inputs.last_up_s < rules.cool_down_s:
            return ScalingDecision(target, f"cooling down under {cause}")
        more = max(target + 1, ceil(target * min(rules.up_factor, pressure)))
        return ScalingDecision(more, cause)
    if not _is_calm(inputs, rules):
        return ScalingDecision(target, "in balance")
    # Counted anew at each target. The wish to shrink stands until the target follows: Serve obeys it only after a
    # delay in which it did not change.
    known = inputs.calm_since_s is not None and inputs.calm_target == target
    since_s = inputs.calm_since_s if known and inputs.calm_since_s is not None else inputs.now_s
    hold_s = rules.zero_hold_s if target == 1 else rules.down_hold_s
    calm_s = inputs.now_s - since_s
    if target <= max(inputs.minimum, 0) or calm_s < hold_s:
        return ScalingDecision(target, "calm", since_s, target)
    return ScalingDecision(target - 1, f"calm for {calm_s:.0f} s", since_s, target)


def _pressure(readings: Sequence[ReplicaReading], rules: ScalingRules) -> tuple[float, str]:
    """The strongest call for more replicas as a multiple of its bound, and what it is.

    Rates and loads are means over the replicas that report them: one hot replica is the placement's business. A
    replica short of headroom with requests waiting counts fully, since nothing placed there can be admitted.
    """
    found = [(0.0, "no pressure")]
    for cause, values, high in (
        ("retractions", [r.retraction_rate for r in readings], rules.retractions_high),
        ("queue wait", [r.queue_wait_s for r in readings], rules.queue_wait_high_s),
        ("load", [r.active_share for r in readings], rules.active_high),
    ):
        known = [value for value in values if value is not None]
        if known:
            found.append((sum(known) / len(known) / high, cause))
    short = [
        r.headroom_share is not None
        and r.headroom_share < rules.headroom_low
        and (r.queue_wait_s or 0.0) > 0.0
        for r in readings
    ]
    if all(short):
        found.append((1.0, "headroom"))
    return max(found)


def _is_calm(inputs: ScalingInputs, rules: ScalingRules) -> bool:
    """Whether one replica could go: every running replica says so, with all of its metrics."""
    readings = [reading for reading in inputs.readings if reading.complete]
    if len(readings) < inputs.num_running:
        return False
    if inputs.target == 1:
        return inputs.num_requests == 0 and all(r.active_share == 0 for r in readings)
    active = sum(r.active_share or 0.0 for r in readings)
    return (
        all(not r.retraction_rate for r in readings)
        and all((r.queue_wait_s or 0.0) < rules.queue_wait_high_s / 4 for r in readings)
        and all((r.headroom_share or 0.0) >= rules.headroom_high for r in readings)
        and active / (inputs.target - 1) <= rules.active_low
    )


def autoscaling_stats(snapshot: WorkerSnapshot) -> dict[str, float]:
    """What a replica answers to Serve's ``record_autoscaling_stats``: this policy's metrics, all of them floats."""
    arena = snapshot.headroom.arena_bytes
    active = snapshot.num_running + snapshot.num_waiting
    return {
        "retraction_rate": float(snapshot.retraction_rate),
        "queue_wait_s": float(snapshot.queue_wait_s) if snapshot.num_waiting else 0.0,
        "active_share": active / max(1, snapshot.max_running),
        # A worker without an arena (an engine that hides its memory) is never short of it.
        "headroom_share": snapshot.headroom.available_bytes / arena if arena else 1.0,
    }


class ScalingPolicy:
    """The policy class that Serve's ``AutoscalingPolicy(policy_function=..., policy_kwargs={...})`` names.

    Keyword arguments are those of :class:`ScalingRules`. Serve applies its own delays on top: set its
    ``upscale_delay_s`` and ``downscale_delay_s`` small.
    """

    def __init__(
        self,
        retractions_high: float = 0.2,
        queue_wait_high_s: float = 2.0,
        active_high: float = 1.2,
        headroom_low: float = 0.05,
        active_low: float = 0.6,
        headroom_high: float = 0.3,
        up_factor: float = 3.0,
        cool_down_s: float = 15.0,
        down_hold_s: float = 120.0,
        zero_hold_s: float = 600.0,
    ) -> None:
        self._rules = ScalingRules(
            retractions_high, queue_wait_high_s, active_high, headroom_low, active_low, headroom_high,
            up_factor, cool_down_s, down_hold_s, zero_hold_s,
        )  # fmt: skip
        self._last_target = self._last_wish = 1
        self._last_error = ""

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Serve's context in, (replicas, state) out; on any failure what was asked for before."""
        state: dict[str, Any] = {}
        try:
            self._last_target = int(ctx.target_num_replicas)
            state = dict(ctx.policy_state or {})
            decision = desired_replicas(inputs_of(ctx, state), self._rules)
            if decision.target not in (ctx.target_num_replicas, self._last_wish):  # ten times a second
                logger.info(
                    "replicas %d -> %d: %s", ctx.target_num_replicas, decision.target, decision.reason
                )
            state[CALM_SINCE], state[CALM_TARGET] = decision.calm_since_s, decision.calm_target
            self._last_target = self._last_wish = decision.target
        except Exception as error:
            if repr(error) != self._last_error:  # ten calls a second: say it once
                self._last_error = repr(error)
                logger.exception("the scaling policy failed; replicas stay at %d", self._last_target)
        return self._last_target, state


def inputs_of(ctx: Any, state: Mapping[str, Any]) -> ScalingInputs:
    """Serve's ``AutoscalingContext`` as plain values.

    The last raw value of a metric counts, not the mean over Serve's look-back; replicas that are no longer running
    are left out, and so are those that have not reported.
    """
    raw, aggregated = _value(ctx.raw_metrics) or {}, _value(ctx.aggregated_metrics) or {}
    running = list(ctx.running_replicas or ())
    readings: list[ReplicaReading] = []
    for replica in running:
        values = [_latest(raw.get(name), aggregated.get(name), replica) for name in METRICS]
        if any(value is not None for value in values):
            readings.append(ReplicaReading(*values))
    return ScalingInputs(
        now_s=float(ctx.current_time),
        num_running=len(running),
        target=int(ctx.target_num_replicas),
        minimum=int(ctx.capacity_adjusted_min_replicas),
        maximum=int(ctx.capacity_adjusted_max_replicas),
        num_requests=float(_value(ctx.total_num_requests) or 0.0),
        readings=tuple(readings),
        last_up_s=ctx.last_scale_up_time,
        calm_since_s=state.get(CALM_SINCE),
        calm_target=state.get(CALM_TARGET),
    )


def _value(given: Any) -> Any:
    """Serve gives some values as functions, to be computed only if asked for."""
    return given() if isinstance(given, Callable) else given  # type: ignore[arg-type]


def _latest(
    raw: Mapping[Any, Any] | None, aggregated: Mapping[Any, Any] | None, replica: Any
) -> float | None:
    series = (raw or {}).get(replica)
    if series:
        return float(series[-1].value)
    mean = (aggregated or {}).get(replica)
    return None if mean is None else float(mean)
