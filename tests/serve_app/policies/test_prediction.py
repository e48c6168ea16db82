"""What a placement is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.policies.fair_share import FairShare
from serve_app.policies.prediction import CostModel, CrowdingModel, LinkModel, Rates, Work, predict
from serve_app.policies.replica_view import ReplicaLoad

COSTS = CostModel(expert_bytes=1e6, link_bytes_per_s=1e9, kv_bytes_per_token=100.0, patience_ms=1e12)
IDLE = ReplicaLoad(1.0, 0.0, 0.0, 8, 0.0, 1e12)
RATES = Rates(prefill_tokens_per_s=1_000.0, ms_per_active=2.0, link_share=0.5)
WORK = Work(prompt_tokens=300.0, new_tokens=10.0)


@pytest.mark.parametrize(
    ("work", "load", "term", "expected_ms"),
    [
        ({}, {}, "prefill", 300.0),
        ({}, {}, "total", 300.0 + 10.0),  # half of its own lengthening is for experts, here average ones
        ({}, {"backlog_tokens": 500.0}, "queue", 500.0),
        ({"absent_experts": 700.0}, {}, "prefill", 700.0),  # the transfer is longer than the computation
        ({"absent_experts": 700.0}, {"backlog_tokens": 300.0}, "prefill", 400.0),  # and shared with who waits
        ({"absent_experts": 700.0}, {"backlog_tokens": 900.0}, "prefill", 300.0),
        ({}, {"num_active": 4.0}, "crowding", 4 * 20.0 + 2 * 10.0),
        ({}, {"num_active": 4.0, "num_running": 2.0}, "crowding", 100.0 + 2 * 0.25 * 300.0),
        ({}, {"num_active": 9.0}, "crowding", 9 * 20.0 + 4.5 * 10.0 + 2 * 20.0),  # rows: two must leave first
        ({"missing_experts": 50.0}, {}, "experts", 50.0 + 10.0),
        ({"relative_missing": 3.0}, {"num_active": 2.0}, "experts", 3 * 10.0 * 2.0),
        ({"relative_missing": 0.0}, {"num_active": 2.0}, "experts", 0.0),
        ({}, {"available_bytes": 31_000.0}, "headroom", 0.0),
        ({}, {"available_bytes": 30_000.0}, "headroom", 4 * 10.0),
        ({}, {"available_bytes": 31_000.0, "num_active": 4.0}, "headroom", 4 * 20.0),
        ({}, {"available_bytes": None}, "headroom", 0.0),
        ({}, {"trust": 0.5}, "distrust", 25.0),
        ({}, {"trust": 0.0, "available_bytes": None}, "distrust", 0.0),  # new, not old
    ],
)
def test_terms(work: dict[str, float], load: dict[str, float], term: str, expected_ms: float) -> None:
    terms = predict(replace(WORK, **work), replace(IDLE, **load), RATES, COSTS)
    assert getattr(terms, term) == pytest.approx(expected_ms)


def test_long_waits_count_more_than_in_proportion() -> None:
    costs = replace(COSTS, patience_ms=1_000.0)
    waits = [
        predict(replace(WORK, prompt_tokens=1.0), replace(IDLE, backlog_tokens=b), RATES, costs).queue
        for b in (100, 1_000)
    ]
    assert waits[0] == pytest.approx(110.1)
    assert waits[1] == pytest.approx(2_001)


def test_without_expert_bytes_the_whole_lengthening_is_crowding() -> None:
    load = replace(IDLE, num_active=4.0)
    terms = predict(WORK, load, RATES, replace(COSTS, expert_bytes=0.0))
    assert (terms.experts, terms.crowding) == (0.0, pytest.approx(4 * 20.0 + 2 * 20.0))


def test_the_crowding_slope_is_learned_from_steps() -> None:
    model = CrowdingModel(start_ms=9.0)
    for i in range(40):
        model.observe(1 + i % 8, 0.010 + 0.003 * (1 + i % 8))
    assert model.ms_per_active == 9.0  # not enough to tell
    for i in range(400):
        model.observe(1 + i % 8, 0.010 + 0.003 * (1 + i % 8))
        model.observe(0, 0.5)  # an idle replica says nothing
        model.observe(4, 0.0)
    assert model.ms_per_active == pytest.approx(3.0, rel=0.05)


def test_equal_rows_or_falling_steps_give_no_slope() -> None:
    model = CrowdingModel(start_ms=9.0)
    for i in range(200):
        model.observe(4, 0.01 + i * 1e-4)
    assert model.ms_per_active == 9.0
    falling = CrowdingModel(start_ms=9.0)
    for i in range(200):
        falling.observe(1 + i % 8, 0.1 - 0.01 * (i % 8))
    assert falling.ms_per_active == 0.0


def test_the_links_share_is_of_step_time_and_never_above_one() -> None:
    model = LinkModel()
    for _ in range(300):
        model.observe(2e8, 0.8, 1e9)
        model.observe(5e8, 0.0, 1e9)  # no steps, no word
    assert model.share == pytest.approx(0.25, rel=0.01)
    for _ in range(600):
        model.observe(9e9, 0.5, 1e9)
    assert model.share == pytest.approx(1.0, rel=0.01)


def test_a_share_is_bounded_over_the_window_only() -> None:
    share = FairShare(window_s=2.0, most=2.0, min_per_replica=2.0)
    names = ["a", "b", "c", "d"]
    for i in range(7):
        assert share.allowed(names, i * 0.1) == names  # too few to tell
        share.placed("a", i * 0.1)
    assert share.allowed(names, 0.7) == ["b", "c", "d"]
    assert share.allowed(["a"], 0.7) == ["a"]  # nobody else is there
    assert share.allowed(names, 3.0) == names
