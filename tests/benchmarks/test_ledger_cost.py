"""The ledger's cost stays within what a step can afford; limits are those of the benchmark, in processor time."""

from __future__ import annotations

import pytest

from benchmarks.ledger_cost import GEOMETRIES, evict_us_per_page, plan_moves_ms, step_ms


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
@pytest.mark.parametrize(("num_rows", "limit_ms"), [(64, 0.3), (256, 1.0)])
def test_a_decode_step_costs_little(geometry, num_rows: int, limit_ms: float) -> None:
    mean_ms, _ = step_ms(geometry, num_rows)
    assert mean_ms < limit_ms


def test_a_thousand_moves_are_planned_in_milliseconds() -> None:
    assert plan_moves_ms() < 8.0, "5 ms on a quiet core"


def test_evictions_cost_the_same_in_a_large_tree() -> None:
    small, large = evict_us_per_page(1_000, 500), evict_us_per_page(30_000, 1_000)
    assert large < 3 * small + 10
    assert large < 200
