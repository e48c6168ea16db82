"""Picks the figures of the arena's report that belong into every snapshot: flat numbers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = ("nodes", "evicted_bytes", "saved_ms", "computed_again_ms")
HOST_TIER = ("budget_bytes", "used_bytes", "waiting_pages", "stored_bytes", "brought_back_bytes")
MOVES = {
    "num_beside": "moves_beside",
    "num_between": "moves_between",
    "beside_bytes": "moved_beside_bytes",
    "between_bytes": "moved_between_bytes",
}


def arena_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """For ``WorkerSnapshot.extra``; nothing of a prefix tree or a host tier where there is none. ``report``: of
    :func:`memory.ledger.report.report_arena`."""
    figures = {f"arena.{name}": float(report["moves"][key]) for key, name in MOVES.items()}
    if (tree := report["tree"]) is not None:
        figures |= {f"prefix.{key}": float(tree[key]) for key in PREFIX}
        figures["prefix.held_bytes"] = float(sum(tree["held_bytes"].values()))
    if (tier := report["host_tier"]) is not None:
        figures |= {f"host_tier.{key}": float(tier[key]) for key in HOST_TIER}
    return figures
