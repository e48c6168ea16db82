"""The elastic benchmark: its arithmetic by hand-made figures, and the whole of it, briefly, on the demo model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.elastic import main, make_setup, parse
from benchmarks.elasticity.merge import merge_parts
from benchmarks.elasticity.phases import Asked, PhaseLog, Progress, recovered_s
from benchmarks.elasticity.routing import TRACE_STEPS, ImposedRouting, Routing, draw_trace
from benchmarks.elasticity.stage import Stage, count_wrong
from benchmarks.elasticity.stalls import StepFacts, max_stall_s

BRIEF = [
    "--seconds",
    "0.6",
    "--arena-mb",
    "16",
    "--long-tokens",
    "400",
    "--longs",
    "2",
    "--chats",
    "1",
    "--link-mb-per-s",
    "4000",
]


def test_recovery_is_counted_from_the_end_of_the_burst() -> None:
    burst = PhaseLog("burst", began_s=10.0, ended_s=20.0)
    before = [(float(t), 100.0) for t in range(10)]
    during = [(float(t), 40.0) for t in range(10, 20)]
    after = [(20.0, 50.0), (21.0, 80.0), (22.5, 95.0), (23.0, 100.0)]
    assert recovered_s([*before, *during, *after], burst) == 2.5
    assert recovered_s([*before, *during, (20.0, 50.0), (26.0, 60.0)], burst) == 6.0


def test_a_stall_is_what_neither_rows_nor_misses_explain() -> None:
    calm = [StepFacts(4, 0.010, 0, 0)] * 3 + [StepFacts(8, 0.020, 0, 0)] * 3
    assert max_stall_s([*calm, StepFacts(4, 0.015, 5_000_000, 1)], 1e9) == pytest.approx(0.0)
    assert max_stall_s([*calm, StepFacts(8, 0.030, 5_000_000, 1)], 1e9) == pytest.approx(0.005)
    assert max_stall_s([*calm, StepFacts(5, 9.0, 0, 1)], 1e9) == 0.0, "nothing to compare it with"


def test_goodput_counts_prompts_as_far_as_they_came() -> None:
    progress = Progress()
    progress.note(1, 10.0, 14.0, 64, 400)  # 64 tokens came from the cache
    progress.note(1, 16.0, 18.0, 464, 136)
    assert progress.tokens(1, 9.0) == 0.0
    assert progress.tokens(1, 12.0) == 264.0
    assert progress.tokens(1, 15.0) == 464.0
    assert progress.tokens(1, 20.0) == 600.0
    assert progress.tokens(2, 20.0) == 0.0
    log = PhaseLog("mixed", began_s=2.0, seconds=10.0, ended_s=30.0, output_tokens=36)
    log.asked = [Asked(0, 100, first_s=3.0), Asked(1, 600, first_s=18.0), Asked(2, 50)]
    assert log.tokens_per_s(progress) == (36 + 100 + 264) / 10


def part(settings: dict[str, float], **more: float) -> dict[str, Any]:
    conditions = dict.fromkeys(("model", "weights", "prompts", "cache", "batch", "context", "resident"), "-")
    figures = {f"burst.{name}": value for name, value in settings.items()} | more
    return {"conditions": conditions, "figures": figures, "notes": ["30 s a phase"]}


def test_parts_of_a_run_are_put_together() -> None:
    report = merge_parts([part({"elastic": 90.0}, max_stall_ms=1.0), part({"k40": 100.0, "k92": 60.0})])
    assert report.figures() == {
        "burst.elastic": 90.0,
        "burst.k40": 100.0,
        "burst.k92": 60.0,
        "burst.vs_best": 0.9,
        "max_stall_ms": 1.0,
    }
    assert report.notes == ("30 s a phase", "merged of 2 parts")
    with pytest.raises(ValueError, match="in two parts"):
        merge_parts([part({"k40": 1.0}), part({"k40": 2.0})])
    other = part({"k64": 1.0})
    other["conditions"]["batch"] = "more"
    with pytest.raises(ValueError, match="batch"):
        merge_parts([part({"k40": 1.0}), other])


def test_imposed_routing_is_the_same_whenever_passes_run() -> None:
    """Decode steps take turns through the trace; a pass between two of them moves nothing."""
    imposed = ImposedRouting(rows=3, seed=1)
    trace = draw_trace(2, 16, 2, imposed)
    assert trace.shape == (2, TRACE_STEPS, 3, 2)
    assert (trace[..., 0] != trace[..., 1]).all()
    routing = Routing(2, 16, 2, imposed, torch.device("cpu"))
    own = torch.zeros(2, 2, dtype=torch.int64)
    own[1] = -1
    for step in (1, 2):
        found = [routing.choose(layer, own) for layer in range(2)]
        assert [rows[0].tolist() for rows in found] == [trace[n, step, 0].tolist() for n in range(2)]
        assert (found[0][1] == -1).all(), "padding takes nothing"
        routing.passing = True
        prompt = routing.choose(0, torch.zeros(200, 2, dtype=torch.int64))
        assert prompt[:3].tolist() == trace[0, 0].tolist()
        routing.passing = False
    routing.rewind()
    assert routing.choose(0, own)[0].tolist() == trace[0, 1, 0].tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_of_it(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    main(
        [*BRIEF, "--settings", "elastic", "k4", "--prefill", "200", "--prefill-at", "4", "--json", str(path)]
    )
    written = json.loads(path.read_text())
    figures = written["figures"]
    for phase in ("chats_before", "burst", "chats_after", "mixed"):
        assert figures[f"{phase}.elastic"] > 0
        assert figures[f"{phase}.k4"] > 0
        assert figures[f"{phase}.vs_best"] > 0
    assert figures["wrong_tokens"] == 0
    assert figures["exchanged_mb"] > 0, "nothing changed hands beside decode steps"
    assert figures["k_least"] < figures["k_before"]
    assert figures["prefill.t200.ttft_ms"] > 0
    assert figures["prefill.itl_p99_ratio"] > 0
    assert "reduced: phases of 0.6 s" in written["conditions"]["batch"]
    assert any("link simulated" in note for note in written["notes"])


def test_wrong_tokens_are_counted() -> None:
    setup = make_setup(parse([*BRIEF, "--prefill"]))
    setup = replace(setup, phases=setup.phases[:1])
    stage = Stage(setup, keep=True)
    stage.run()
    stage.close()
    recorded = stage.recorder.steps
    sampling = next(step for step in recorded if step.plan.samples.any())
    spoilt = sampling.result.token_ids.copy()
    spoilt[sampling.plan.samples.argmax(), 0] += 1
    steps = [
        replace(step, result=replace(step.result, token_ids=spoilt)) if step is sampling else step
        for step in recorded
    ]
    assert count_wrong(setup, recorded) == 0
    assert count_wrong(setup, steps) == 1
