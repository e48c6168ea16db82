"""The metrics table is what a scrape shows: every name, its kind, its labels."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from memory.api import Headroom
from memory.device.residency import Lane
from serve_app.telemetry.metrics import (
    QUEUED,
    REQUESTS,
    RETRIES,
    ROUTER_METRICS,
    TABLE,
    WORKER_COUNTERS,
    WORKER_EXTRAS,
    WORKER_GAUGES,
    RouterFacts,
    RouterMetrics,
    exposed_name,
)
from worker.api import ExpertResidency, WorkerSnapshot
from worker.execution.runner import ModelRunner
from worker.experts.report import ExpertReport


def snapshot(extra: Mapping[str, float], **counters: int) -> WorkerSnapshot:
    """A worker with some counters."""
    return WorkerSnapshot(
        sequence=1,
        time_s=0.0,
        num_steps=1,
        num_submitted=1,
        num_running=2,
        num_waiting=3,
        waiting_tokens=0,
        max_running=4,
        headroom=Headroom(arena_bytes=100, gap_bytes=60, kinds={}),
        extra=extra,
        **counters,
    )


def metrics() -> RouterMetrics:
    """Metrics of a router with one worker that reports all there is, and one that has neither graphs nor experts."""
    extra = {key: float(n) for n, key in enumerate(WORKER_EXTRAS.values(), start=20)}
    facts = RouterFacts(
        num_queued=lambda: 5,
        num_open=lambda: 6,
        snapshots=lambda: {"w1": snapshot(extra, num_retractions=7, expert_misses=8), "w2": snapshot({})},
        retries=lambda: {"lost": 9},
    )
    return RouterMetrics(facts)


def test_names_are_unique_and_every_one_is_exposed_as_the_table_says() -> None:
    made = metrics()
    for metric in ROUTER_METRICS:
        if metric.kind != "gauge" and metric is not RETRIES:
            made.add(metric, 1.0, **dict.fromkeys(metric.labels, "x"))
    page = made.page()[0].decode()
    names = [exposed_name(metric) for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric, name in zip(TABLE, names, strict=True):
        assert f"# TYPE {name} {metric.kind}\n" in page, name
        assert metric.description
    shown = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    suffixes = ("_bucket", "_sum", "_count", "_created")
    assert {name for name in shown if not name.endswith(suffixes)} <= set(names), "nothing beside the table"


def test_gauges_and_counters_of_workers_come_from_their_reports() -> None:
    page = metrics().page()[0].decode()
    for line in (
        "headroom_queued 5.0",
        "headroom_open 6.0",
        "headroom_workers 2.0",
        'headroom_retries_total{reason="lost"} 9.0',
        'headroom_worker_running{worker="w1"} 2.0',
        'headroom_worker_retractions_total{worker="w1"} 7.0',
        'headroom_worker_expert_misses_total{worker="w1"} 8.0',
        'headroom_worker_arena_bytes{worker="w1"} 100.0',
        'headroom_worker_replayed_decode_steps_total{worker="w1"} 20.0',
        'headroom_worker_eager_decode_steps_total{worker="w1"} 21.0',
        'headroom_worker_expert_ghosts{worker="w1"} 27.0',
        'headroom_worker_expert_ghost_hits_total{worker="w1"} 28.0',
    ):
        assert line in page
    everywhere = len(WORKER_GAUGES) + len(WORKER_COUNTERS)
    assert page.count('{worker="w1"}') == everywhere + len(WORKER_EXTRAS)
    assert page.count('{worker="w2"}') == everywhere, "what a worker does not report is no zero"


def test_workers_report_every_key_that_the_table_asks_for() -> None:
    of_experts = ExpertReport(
        layers=(0,),
        num_experts=2,
        resident=(1,),
        counts=tuple((0,) for _ in Lane),
        block_bytes=(8,),
        num_places=3,
        frozen=False,
        ghost_hits=4,
        num_ghosts=5,
        residency=ExpertResidency(1, 2, 1, b"\x01"),
    ).extra()
    graphs = SimpleNamespace(num_eager_steps=1, num_replays=2)
    getter = ModelRunner.figures.fget
    assert getter is not None
    of_graphs = getter(SimpleNamespace(graphs=graphs, mixed=graphs))
    assert set(WORKER_EXTRAS.values()) <= {*of_experts, *of_graphs}


def test_a_label_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="has the labels"):
        metrics().add(REQUESTS, 1.0, model="m")
    with pytest.raises(KeyError):
        metrics().add(QUEUED, 1.0)
