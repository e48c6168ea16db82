"""The benchmark of paged experts: its routing follows the published curve, its rows add up, a small run ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import paged_decode
from benchmarks.limits import LinkCurve
from benchmarks.paging.attainable import Machine, least_step_s, need_of
from benchmarks.paging.cases import COLUMNS, Measured, Plan, case_row
from benchmarks.paging.publishing import report, write
from benchmarks.paging.routing import CALIBRATED, DOMAINS, RANDOM, TRACE_STEPS, Routing, make_trace
from benchmarks.report import Conditions, Report
from benchmarks.routing_traces import PUBLISHED, RoutingModel, layer_lru_hits
from memory.device.residency import Lane


def test_the_calibrated_trace_follows_the_published_curve() -> None:
    trace = make_trace(CALIBRATED, RoutingModel(num_layers=4), 1, 500, seed=1)
    assert all(len(set(chosen)) == 8 for chosen in trace.reshape(-1, 8).tolist())
    steps = [[np.unique(step[layer, 0] + 128 * layer) for layer in range(4)] for step in trace]
    for capacity, hits in PUBLISHED.items():
        assert layer_lru_hits(steps, capacity) == pytest.approx(hits, abs=0.04)


def test_streams_of_one_domain_share_experts_and_those_of_four_do_not() -> None:
    model = RoutingModel(num_layers=3)
    kinds = {kind: make_trace(kind, model, 4, 60, seed=2) for kind in (RANDOM, CALIBRATED, DOMAINS)}
    distinct = {
        kind: np.mean([len(np.unique(layer)) for step in trace for layer in step])
        for kind, trace in kinds.items()
    }
    assert 8 < distinct[CALIBRATED] < distinct[DOMAINS] <= distinct[RANDOM] + 1 < 32


def test_decode_rows_take_the_traces_experts_step_by_step_and_padding_takes_none() -> None:
    trace = make_trace(RANDOM, RoutingModel(num_layers=2, num_experts=16, per_token=3), 2, 5, seed=3)
    routing = Routing(2, 4, 3, torch.device("cpu"))
    routing.impose(trace)
    own = torch.tensor([[1, 2, 3], [4, 5, 6], [-1, -1, -1]])
    for step in range(1, 2 * TRACE_STEPS):
        for layer in range(2):
            found = routing.choose(layer, own)
            assert torch.equal(found[:2], torch.from_numpy(trace[step % TRACE_STEPS % 5, layer]))
            assert found[2].tolist() == [-1] * 3


def test_a_row_is_measured_against_the_resident_step_and_the_link() -> None:
    counts = torch.zeros(len(Lane), 2, dtype=torch.float64)
    counts[Lane.HIT] = torch.tensor([6.0, 8.0])
    counts[Lane.TEE], counts[Lane.IN_PLACE] = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
    curve = LinkCurve(((1.0, 1e-3), (2.0, 1.5e-3)))
    row = case_row("x", 4, 5e-3, counts, 1000, 2e-3, curve, memory_rate=60e6)
    assert row["hit_rate"] == pytest.approx(14 / 16)
    assert row["bytes_per_step"] == 2000
    assert row["tokens_per_s"] == pytest.approx(800)
    # 2 ms resident; the first layer's two misses take 1.5 ms, of which its hits cover 0.1.
    assert row["limit_ms"] == pytest.approx(3.4)
    assert row["share"] == pytest.approx(3.4 / 5)
    assert row["link_busy"] == pytest.approx(1.5 / 5)


def test_a_small_run_on_the_demonstration_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode, "COMPARED_PLACES", 20)
    monkeypatch.setattr(paged_decode, "CROWDED_PLACES", 20)
    out = tmp_path / "paged.json"
    paged_decode.main(
        ["--model", "demo", "--formats", "bf16", "--device", "cpu", "--places", "20", "--batches", "1", "4",
         "--routings", "calibrated", "--scan-tokens", "200", "--json", str(out)]
    )  # fmt: skip
    figures = json.loads(out.read_text())["figures"]
    assert figures["bf16.k32.calibrated.b4.hit_rate"] == 1.0
    assert 0.1 < figures["bf16.k20.calibrated.b1.hit_rate"] < 0.98
    assert figures["bf16.k20.calibrated.b1.bytes_per_step"] > 0
    assert figures["bf16.k20.in_place.b4.evictions"] == 0 < figures["bf16.k20.domains.b4.evictions"]
    assert (
        figures["all_hit_over_resident"]
        >= figures["bf16.k32.calibrated.b4.step_ms"] / figures["bf16.k32.calibrated.b4.resident_ms"]
    )
    assert figures["bf16.k20.domains.b4.hit_rate"] > 0.9 * figures["bf16.k20.in_place.b4.hit_rate"] > 0.2
    again = ["--model", "demo", "--formats", "bf16", "--device", "cpu", "--places", "24", "--batches", "1",
             "--routings", "calibrated", "--cases-only", "--json", str(tmp_path / "both.json")]  # fmt: skip
    with pytest.raises(ValueError, match="another batch"):
        paged_decode.main([*again, "--onto", str(out)])
    assert abs(figures["scan.hit_rate_after"] - figures["scan.hit_rate_before"]) < 0.2


def test_a_cut_run_keeps_what_it_has_and_two_runs_are_one_table(tmp_path: Path) -> None:
    def one(format: str, places: int, worst: float) -> Report:
        found = Measured(format, Plan((places,), (1,), (CALIBRATED,), {}, 1e9))
        row = dict.fromkeys(COLUMNS, 1.0)
        found.rows.append({**row, "case": f"{format}.k{places}.calibrated.b1"})
        found.summary |= {"graph.eager_decode_steps": 2.0, "all_hit_over_resident": worst}
        if format == "fp8":
            found.summary["scan.hit_rate_before"] = 0.5
        conditions = Conditions("shape", "random", "ids", "warm", "1", "2", f"K = {places}", commit=format)
        return report([found], conditions)

    first, both = tmp_path / "first.json", tmp_path / "both.json"
    write(one("fp8", 24, 1.03), first)
    write(one("int4", 24, 1.02), both, first)
    write(one("int4", 40, 1.01), both, first)  # behind the next case; the earlier run is counted once
    written = json.loads(both.read_text())
    assert {"fp8.k24.calibrated.b1.share", "int4.k40.calibrated.b1.share"} <= written["figures"].keys()
    assert written["figures"]["graph.eager_decode_steps"] == 4
    assert written["figures"]["all_hit_over_resident"] == 1.03
    assert written["figures"]["scan.hit_rate_before"] == 0.5
    assert any("commit fp8" in note for note in written["notes"])


def test_what_streams_can_share_is_counted_on_the_trace() -> None:
    """Two experts that every stream takes in every step, and two of each stream's own that never come again."""
    model = RoutingModel(num_layers=2, num_experts=64, per_token=4)
    fresh = np.arange(8 * 2 * 2).reshape(8, 1, 2, 2).repeat(2, 1) + 2
    trace = np.concatenate([np.broadcast_to([0, 1], fresh.shape), fresh], -1)
    need = need_of(trace, model, 3)
    assert (need.distinct, need.misses) == (6, 4)
    machine = Machine(1000, LinkCurve(((1.0, 1e-3), (8.0, 8e-3))), memory_rate=1e6)
    # Four misses take 4 ms a layer, of which two hits at 1 GB/s cover 2.
    assert least_step_s(need, 2, 3e-3, machine) == pytest.approx(3e-3 + 2 * 2e-3)
