"""How many replicas there should be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from memory.api import Headroom
from serve_app.policies.autoscaling import (
    CALM_SINCE,
    CALM_TARGET,
    METRICS,
    ReplicaReading,
    ScalingInputs,
    ScalingPolicy,
    ScalingRules,
    autoscaling_stats,
    desired_replicas,
)
from tests.serve_app.policies.builders import snapshot

RULES = ScalingRules(
    retractions_high=0.5,
    queue_wait_high_s=2.0,
    active_high=1.25,
    cool_down_s=20.0,
    down_hold_s=60.0,
    zero_hold_s=300.0,
)
CALM = ReplicaReading(0.0, 0.0, 0.1, 0.9)
IDLE = ReplicaReading(0.0, 0.0, 0.0, 1.0)
BUSY = ReplicaReading(0.0, 0.1, 0.9, 0.5)


def inputs(target: int, *readings: ReplicaReading, **changes: Any) -> ScalingInputs:
    plain = ScalingInputs(
        now_s=1_000.0,
        num_running=target,
        target=target,
        minimum=1,
        maximum=8,
        num_requests=5.0,
        readings=readings,
    )
    return replace(plain, calm_target=target, **changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # up
        (inputs(1, ReplicaReading(0.6, 0, 0.9, 0.5)), 2),
        (inputs(1, ReplicaReading(1.2, 0, 0.9, 0.5)), 3),
        (inputs(2, *[ReplicaReading(50.0, 0, 1, 0.5)] * 2), 6),  # at most up_factor at once
        (inputs(4, *[ReplicaReading(50.0, 0, 1, 0.5)] * 4), 8),  # and at most the maximum
        (inputs(2, ReplicaReading(0, 3.0, 1, 0.5), ReplicaReading(0, 2.0, 1, 0.5)), 3),
        (inputs(2, *[ReplicaReading(0, 0, 1.3, 0.5)] * 2), 3),
        (inputs(2, *[ReplicaReading(0, 0.5, 1.0, 0.01)] * 2), 3),  # short of headroom, requests waiting
        (inputs(2, ReplicaReading(1.2, None, None, None)), 5),  # one metric of one replica is enough to grow
        # no more than needed
        (inputs(2, *[ReplicaReading(0, 0.0, 1.0, 0.01)] * 2), 2),  # headroom used well, nobody waits
        (
            inputs(2, ReplicaReading(0, 0.5, 1, 0.01), BUSY),
            2,
        ),  # one short replica is the placement's business
        (inputs(4, ReplicaReading(1.0, 0, 1, 0.5), BUSY, BUSY, BUSY), 4),
        (inputs(2, BUSY, BUSY), 2),
        # hold
        (inputs(3, ReplicaReading(9.0, 9.0, 2.0, 0.0), num_running=1), 3),  # still loading
        (inputs(2, *[ReplicaReading(9.0, 9.0, 2.0, 0.0)] * 2, last_up_s=985.0), 2),  # cooling down
        (inputs(2, *[ReplicaReading(1.0, 0.0, 1.0, 0.5)] * 2, last_up_s=975.0), 4),
        (inputs(3), 3),  # no data is not zero
        (inputs(3, calm_since_s=0.0), 3),
        # down
        (inputs(3, CALM, CALM, CALM, calm_since_s=935.0), 2),
        (inputs(3, CALM, CALM, CALM, calm_since_s=945.0), 3),
        (inputs(3, CALM, CALM, CALM), 3),
        (inputs(3, CALM, CALM, calm_since_s=0.0), 3),  # the third did not report
        (inputs(3, CALM, CALM, ReplicaReading(None, 0.0, 0.0, 0.9), calm_since_s=0.0), 3),
        (inputs(3, CALM, CALM, replace(CALM, retraction_rate=0.01), calm_since_s=0.0), 3),
        (inputs(3, CALM, CALM, replace(CALM, headroom_share=0.2), calm_since_s=0.0), 3),
        (inputs(2, replace(CALM, active_share=0.5), CALM, calm_since_s=0.0), 1),
        (inputs(2, replace(CALM, active_share=0.6), CALM, calm_since_s=0.0), 2),  # would not fit into one
        (inputs(1, IDLE, calm_since_s=0.0, num_requests=0.0), 1),  # the minimum
        # to and from zero
        (inputs(1, IDLE, minimum=0, num_requests=0.0, calm_since_s=600.0), 0),
        (inputs(1, IDLE, minimum=0, num_requests=0.0, calm_since_s=800.0), 1),
        (inputs(1, IDLE, minimum=0, num_requests=1.0, calm_since_s=600.0), 1),
        (inputs(1, minimum=0, num_requests=0.0, calm_since_s=600.0), 1),  # a replica that says nothing stays
        (inputs(0, minimum=0, num_requests=0.0), 0),
        (inputs(0, minimum=0, num_requests=1.0), 1),
        (inputs(0, minimum=2, num_requests=0.0), 2),
    ],
)
def test_desired_replicas(given: ScalingInputs, expected: int) -> None:
    decision = desired_replicas(given, RULES)
    assert decision.target == expected, decision


def test_pressure_ends_the_calm() -> None:
    assert desired_replicas(inputs(2, BUSY, BUSY, calm_since_s=0.0), RULES).calm_since_s is None
    assert desired_replicas(inputs(2, CALM, CALM, calm_since_s=990.0), RULES).calm_since_s == 990.0


def test_calm_counts_anew_at_each_target() -> None:
    given = replace(inputs(3, CALM, CALM, CALM, calm_since_s=0.0), calm_target=4)
    decision = desired_replicas(given, RULES)
    assert (decision.target, decision.calm_since_s, decision.calm_target) == (3, 1_000.0, 3)


def test_the_wish_to_shrink_stands_until_the_target_follows() -> None:
    """Serve obeys only a decision that did not change for its own delay."""
    given = inputs(3, CALM, CALM, CALM, calm_since_s=930.0)
    for _ in range(50):
        decision = desired_replicas(given, RULES)
        assert decision.target == 2
        given = replace(
            given,
            now_s=given.now_s + 0.1,
            calm_since_s=decision.calm_since_s,
            calm_target=decision.calm_target,
        )


def test_a_burst_goes_up_in_two_steps_and_comes_down_one_by_one() -> None:
    target, running, last_up, seen = 1, 1, None, [1]
    calm: tuple[float | None, int | None] = (None, None)
    for now in range(0, 600):
        reading = ReplicaReading(3.0 / running, 1.0, 1.0, 0.1) if now < 60 else CALM
        given = replace(
            inputs(target, *[reading] * running, now_s=float(now), last_up_s=last_up, maximum=4),
            num_running=running,
            calm_since_s=calm[0],
            calm_target=calm[1],
        )
        decision = desired_replicas(given, RULES)
        last_up = float(now) if decision.target > target else last_up
        target, calm = decision.target, (decision.calm_since_s, decision.calm_target)
        if now % 5 == 0:  # loading takes up to five seconds, leaving none
            running = target
        running = min(running, target)
        if seen[-1] != target:
            seen.append(target)
    assert seen == [1, 3, 4, 3, 2, 1]


@dataclass
class Context:
    """The fields of Serve's AutoscalingContext that the policy reads."""

    target_num_replicas: int = 1
    running_replicas: list[str] = field(default_factory=lambda: ["a"])
    raw_metrics: Any = field(default_factory=dict)
    aggregated_metrics: Any = field(default_factory=dict)
    total_num_requests: Any = 4.0
    capacity_adjusted_min_replicas: int = 0
    capacity_adjusted_max_replicas: int = 8
    last_scale_up_time: float | None = None
    current_time: float = 1_000.0
    policy_state: dict[str, Any] | None = None


def metrics(**replicas: tuple[float, float, float, float]) -> dict[str, dict[str, list[Any]]]:
    return {
        name: {r: [SimpleNamespace(value=99.0), SimpleNamespace(value=v[i])] for r, v in replicas.items()}
        for i, name in enumerate(METRICS)
    }


def test_the_policy_reads_the_last_raw_values() -> None:
    policy = ScalingPolicy(retractions_high=0.5)
    assert policy(Context(raw_metrics=metrics(a=(0.0, 0.0, 0.5, 0.5))))[0] == 1
    assert policy(Context(raw_metrics=metrics(a=(0.6, 0.0, 0.5, 0.5))))[0] == 2
    assert policy(Context(raw_metrics=lambda: metrics(a=(0.6, 0.0, 0.5, 0.5))))[0] == 2
    assert policy(Context(aggregated_metrics={"retraction_rate": {"a": 0.6}}))[0] == 2
    gone = metrics(a=(0.0, 0.0, 0.5, 0.5), gone=(9.0, 9.0, 9.0, 0.0))
    assert policy(Context(raw_metrics=gone))[0] == 1


def test_the_policy_keeps_its_memory_and_others_in_serves_state() -> None:
    policy = ScalingPolicy(down_hold_s=30.0)
    calm = metrics(a=(0.0, 0.0, 0.1, 0.9), b=(0.0, 0.0, 0.1, 0.9))
    context = Context(2, ["a", "b"], calm, policy_state={"serve": 7})
    target, state = policy(context)
    assert (target, state) == (2, {"serve": 7, CALM_SINCE: 1_000.0, CALM_TARGET: 2})
    context.policy_state, context.current_time = state, 1_031.0
    assert policy(context)[0] == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"raw_metrics": 7},
        {"raw_metrics": {"retraction_rate": {"a": [SimpleNamespace(value="many")]}}},
        {"current_time": None},
        {"total_num_requests": lambda: 1 / 0},
    ],
)
def test_a_failure_inside_never_leaves_the_policy(broken: dict[str, Any]) -> None:
    policy = ScalingPolicy()
    assert policy(Context(target_num_replicas=3, **broken))[0] == 3


def test_even_a_context_that_is_none_gets_the_last_answer() -> None:
    policy = ScalingPolicy()
    assert policy(None) == (1, {})
    policy(Context(target_num_replicas=4, running_replicas=["a"]))
    assert policy(None) == (4, {})


def test_a_snapshot_becomes_metrics_that_are_all_floats() -> None:
    given = replace(
        snapshot(1, running=6, waiting=2, max_running=4),
        headroom=Headroom(1_000, 250),
        retraction_rate=0.5,
        queue_wait_s=3.0,
    )
    stats = autoscaling_stats(given)
    assert stats == {"retraction_rate": 0.5, "queue_wait_s": 3.0, "active_share": 2.0, "headroom_share": 0.25}
    assert tuple(stats) == METRICS
    assert all(type(value) is float for value in stats.values())
    assert autoscaling_stats(replace(given, num_waiting=0, headroom=Headroom()))["headroom_share"] == 1.0
    assert autoscaling_stats(replace(given, num_waiting=0))["queue_wait_s"] == 0.0


def test_the_controller_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = {n.split('.')[0] for n in sys.modules}; import serve_app.policies.autoscaling;"
        "new = {n.split('.')[0] for n in sys.modules} - before - set(sys.stdlib_module_names);"
        "print(sorted(new))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "['serve_app']"
