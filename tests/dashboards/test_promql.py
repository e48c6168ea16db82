"""The checks of expressions find what they are for."""

from __future__ import annotations

import pytest

from tests.dashboards.promql import problems, result_labels, rows_in


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(headroom_request_total[5m])", "headroom_request_total is not in the table"),
        ("headroom_requests_total", "headroom_requests_total is a counter without a rate"),
        ("rate(headroom_queued[5m])", "headroom_queued is a gauge"),
        ('rate(headroom_requests_total{replica="a"}[5m])', "headroom_requests_total has no label replica"),
        ("sum by (lane) (headroom_queued)", "grouped by lane, which is not there"),
        ("histogram_quantile(0.9, rate(headroom_queue_duration_seconds_sum[5m]))", "a quantile of no buckets"),
        ("headroom_queued / headroom_worker_running", "sides of / have different labels"),
        ("sum by (model) (headroom_queued) / headroom_queued", "sides of / have different labels"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(expression: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(expression)), problems(expression)


@pytest.mark.parametrize("expression", ["sum(", "rate(headroom_requests_total)", "headroom_queued{model}"])
def test_what_is_no_promql_does_not_parse(expression: str) -> None:
    with pytest.raises(ValueError):
        problems(expression)


def test_what_is_right_passes_and_is_understood() -> None:
    right = (
        "histogram_quantile(0.95, sum by (model, le) (rate(headroom_time_to_first_token_seconds_bucket"
        '{job=~"$job",model=~"$model"}[$__rate_interval]))) > 10'
    )
    assert problems(right) == []
    assert result_labels(right) == {"model"}
    assert rows_in(right) == {"headroom.time_to_first_token"}
    assert result_labels("sum(headroom_queued)") == set()
    assert result_labels("1000 * headroom_worker_running") == {"model", "replica", "job", "instance"}
