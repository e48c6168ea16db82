"""Workers' reports with every figure that the table knows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from memory.api import Headroom, KindHeadroom
from memory.device.residency import Lane
from serve_app.telemetry.worker_metrics import WorkerState
from worker.api import ExpertResidency, WorkerSnapshot
from worker.execution.runner import ModelRunner
from worker.experts.report import ExpertReport

FULL = KindHeadroom(free_bytes=1, reclaimable_bytes=2, pending_bytes=3, pinned_bytes=4, used_bytes=5)


def expert_report() -> ExpertReport:
    """Of two layers with experts of 8 and 16 bytes; lane n was taken n + 1 times in each."""
    return ExpertReport(
        layers=(0, 1),
        num_experts=2,
        resident=(1, 2),
        counts=tuple((lane + 1, lane + 1) for lane in Lane),
        block_bytes=(8, 16),
        num_places=3,
        frozen=False,
        ghost_hits=4,
        num_ghosts=5,
        residency=ExpertResidency(2, 2, 1, b"\x01"),
        link_bytes_per_s=48.0,
        num_checked=6,
    )


def arena_report() -> dict[str, Any]:
    """The parts of an arena's report that snapshots carry."""
    return {
        "moves": {"num_beside": 1, "beside_bytes": 2, "num_between": 3, "between_bytes": 4},
        "tree": {
            "nodes": 5,
            "held_bytes": {"full": 6, "state": 7},
            "evicted_bytes": 8,
            "saved_ms": 9.0,
            "computed_again_ms": 10.0,
        },
        "host_tier": {
            "budget_bytes": 11,
            "used_bytes": 12,
            "waiting_pages": 13,
            "stored_bytes": 14,
            "brought_back_bytes": 15,
        },
    }


def graph_figures() -> dict[str, float]:
    """What a runner with both kinds of graphs reports."""
    graphs = SimpleNamespace(num_eager_steps=1, num_replays=2)
    getter = ModelRunner.figures.fget
    assert getter is not None
    return dict(getter(SimpleNamespace(graphs=graphs, mixed=graphs)))


def all_extra() -> dict[str, float]:
    """What a worker that has everything puts beside its snapshot's own fields."""
    from worker.engines.figures import arena_figures

    return {**graph_figures(), **arena_figures(arena_report()), **expert_report().extra()}


def snapshot(extra: Mapping[str, float], **fields: Any) -> WorkerSnapshot:
    """A worker with some counters; 25 bytes of its arena are in no band and no gap."""
    given = {
        "sequence": 1,
        "time_s": 0.0,
        "num_steps": 1,
        "num_submitted": 1,
        "num_running": 2,
        "num_waiting": 3,
        "waiting_tokens": 0,
        "max_running": 4,
        "headroom": Headroom(arena_bytes=100, gap_bytes=60, kinds={"full": FULL}),
        **fields,
    }
    return WorkerSnapshot(extra=extra, **given)


def whole(replica: str = "w1", **fields: Any) -> WorkerState:
    """A worker that reports all there is."""
    report = expert_report()
    seen = snapshot(
        all_extra(),
        expert_hits=report.hits,
        expert_misses=report.misses,
        expert_bytes_paged=report.lane_bytes(Lane.TEE, Lane.IN_PLACE),
        experts=report.residency,
        **fields,
    )
    return WorkerState("m", replica, 0.5, seen)


def dense(replica: str = "w2") -> WorkerState:
    """A worker without graphs, paged experts, prefix cache and host tier."""
    return WorkerState("m", replica, 0.25, snapshot({}))
