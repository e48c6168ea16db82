"""The elastic benchmark: its arithmetic by hand-made figures, and the whole of it, briefly, on the demo model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.elastic import count_wrong, main, make_setup, parse, run_phases
from benchmarks.elasticity.phases import PhaseLog, recovered_s
from benchmarks.elasticity.stalls import StepFacts, max_stall_s

BRIEF = [
    "--seconds",
    "0.1",
    "--arena-mb",
    "16",
    "--long-tokens",
    "400",
    "--longs",
    "3",
    "--chats",
    "2",
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_of_it(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    main([*BRIEF, "--fixed", "4,16", "--prefill", "200", "--json", str(path)])
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
    assert any("link simulated: 4000 MB/s" in note for note in written["notes"])


def test_wrong_tokens_are_counted() -> None:
    setup = make_setup(parse(BRIEF))
    setup = replace(setup, phases=setup.phases[:1], link_bytes_per_s=0.0)
    run = run_phases(setup, setup.config, keep=True)
    sampling = next(step for step in run.steps if step.plan.samples.any())
    spoilt = sampling.result.token_ids.copy()
    spoilt[sampling.plan.samples.argmax(), 0] += 1
    steps = [
        replace(step, result=replace(step.result, token_ids=spoilt)) if step is sampling else step
        for step in run.steps
    ]
    assert count_wrong(setup, run.steps) == 0
    assert count_wrong(setup, steps) == 1
