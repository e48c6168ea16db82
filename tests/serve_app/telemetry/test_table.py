"""The metrics table: names by the conventions, every figure read where it really is."""

from __future__ import annotations

import re

import pytest

from serve_app.telemetry.metric import Metric, exposed_labels, exposed_name
from serve_app.telemetry.metrics import HTTP_DURATION, ROUTER_METRICS, TABLE
from serve_app.telemetry.worker_metrics import WORKER_METRICS, WorkerState
from tests.serve_app.telemetry.workers import dense, whole

NAMES = {row.metric.name.removeprefix("headroom.worker."): row for row in WORKER_METRICS}


def read(name: str, state: WorkerState) -> dict[tuple[str, ...], float]:
    """One row of a worker."""
    return dict(NAMES[name].read(state))


def test_names_and_units_are_as_the_conventions_have_them() -> None:
    assert (
        len({metric.name for metric in TABLE})
        == len({exposed_name(metric) for metric in TABLE})
        == len(TABLE)
    )
    for metric in TABLE:
        assert re.fullmatch(r"(headroom|http)(\.[a-z][a-z_]*)+", metric.name), metric.name
        assert not re.search(r"_(total|seconds|bytes|s|count|sum|bucket)$", metric.name), metric.name
        assert re.fullmatch(r"|s|By|\{[a-z]+\}(/s)?", metric.unit), metric.name
        assert metric.unit or metric.kind == "gauge", f"{metric.name} counts something: say what"
        assert metric.kind in ("counter", "gauge", "histogram")
        assert metric.description.endswith((".", "free."))
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize(
    ("kind", "unit", "name"),
    [
        ("counter", "{request}", "a_b_total"),
        ("counter", "By", "a_b_bytes_total"),
        ("gauge", "s", "a_b_seconds"),
        ("gauge", "{retraction}/s", "a_b_per_second"),
        ("gauge", "", "a_b"),
    ],
)
def test_the_exposed_name_has_the_unit_and_the_kind(kind: str, unit: str, name: str) -> None:
    assert exposed_name(Metric("a.b", kind, unit, "Of a test.")) == name


def test_each_figure_says_whose_it_is() -> None:
    for metric in ROUTER_METRICS:
        assert exposed_labels(metric)[-1] == "router"
    for row in WORKER_METRICS:
        assert exposed_labels(row.metric)[:2] == ("model", "replica")
    assert exposed_labels(HTTP_DURATION)[0] == "http_request_method"


def test_every_row_is_read_from_a_worker_that_reports_everything() -> None:
    state = whole()
    for row in WORKER_METRICS:
        samples = list(row.read(state))
        assert samples, f"{row.metric.name} is in no report"
        assert len({labels for labels, _ in samples}) == len(samples)
        assert all(len(labels) == len(row.metric.labels) - 2 for labels, _ in samples)


def test_what_a_worker_does_not_report_is_no_zero() -> None:
    absent = {name for name in NAMES if not read(name, dense())}
    assert absent == {
        name
        for name in NAMES
        if name.startswith(("expert", "prefix_", "host_tier", "graph_", "moves", "moved", "link_"))
    }


def test_bands_gap_and_what_is_withheld_make_up_the_arena() -> None:
    bands = read("band", whole())
    assert bands == {
        ("full", "used"): 5,
        ("full", "pinned"): 4,
        ("full", "pending"): 3,
        ("full", "reclaimable"): 2,
        ("full", "free"): 1,
    }
    assert read("withheld", whole()) == {(): 25}
    parts = sum(bands.values()) + read("gap", whole())[()] + read("withheld", whole())[()]
    assert parts == read("arena", whole())[()] == 100
    assert read("available", whole()) == {(): 60 + 1 + 2 + 3}


def test_experts_are_told_by_lane() -> None:
    # Of two layers, lane n + 1 times in each; blocks of 8 and 16 bytes.
    assert read("expert_uses", whole()) == {
        ("hit",): 2,
        ("tee",): 4,
        ("in_place",): 6,
        ("prefill_hit",): 8,
        ("prefill_in_place",): 10,
        ("staged",): 16,
    }
    assert read("expert_brought", whole()) == {
        ("tee",): 2 * 24,
        ("in_place",): 3 * 24,
        ("prefill_in_place",): 5 * 24,
        ("staged",): 8 * 24,
    }
    assert read("link_busy", whole()) == {(): (2 + 3) * 24 / 48.0}
    assert read("experts", whole()) == {(): 4}
    assert read("experts_resident", whole()) == {(): 3}
    assert read("expert_checks", whole()) == {(): 6}
    assert read("expert_missed", whole()) == {(): 5 * 24}


def test_graphs_arena_tree_and_host_tier_are_told() -> None:
    assert read("graph_steps", whole()) == {
        ("decode", "replayed"): 2,
        ("decode", "eager"): 1,
        ("mixed", "replayed"): 2,
        ("mixed", "eager"): 1,
    }
    assert read("moved", whole()) == {("beside",): 2, ("between",): 4}
    assert read("moves", whole()) == {("beside",): 1, ("between",): 3}
    assert read("prefix_held", whole()) == {(): 13}
    assert read("prefix_saved", whole()) == {(): pytest.approx(0.009)}
    assert read("host_tier_restored", whole()) == {(): 15}
    assert read("report_age", whole()) == {(): 0.5}
