"""The elastic benchmark: its arithmetic by hand-made figures, and the whole of it, briefly, on the demo model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.elastic import main, make_setup, parse
from benchmarks.elasticity import stage as stage_module
from benchmarks.elasticity.merge import merge_parts
from benchmarks.elasticity.phases import Asked, PhaseLog, Progress, recovered_s
from benchmarks.elasticity.routing import TRACE_STEPS, ImposedRouting, Routing, draw_trace
from benchmarks.elasticity.stage import Stage, WatchedPass, count_wrong, fill_places
from benchmarks.elasticity.stalls import Machine, StepFacts, find_stalls
from benchmarks.elasticity.watch import StepWatch
from benchmarks.limits import LinkCurve
from worker.execution.runner import LaunchedPass
from worker.experts.pager import ExpertPager

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


def step_of(rows: int, seconds: float, tokens: int = 0, misses: int = 0, banned: int = 0) -> StepFacts:
    return StepFacts(0, rows, tokens, seconds, (8,), (misses,), banned)


def test_a_stall_is_what_neither_rows_nor_context_nor_misses_explain() -> None:
    """Steps of 4 rows take 10 ms, of 8 rows 20 ms, a token of context 1 us, and a miss 5 ms; a layer that misses costs
    calm steps another millisecond, which no limit has."""
    machine = Machine(LinkCurve.at_rate(5_000_000, 1e9), 5_000_000)
    calm = [step_of(4, 0.010 + 1e-6 * tokens, tokens) for tokens in (0, 1000, 3000, 5000)]
    calm += [step_of(8, 0.020 + 1e-6 * tokens, tokens) for tokens in (0, 2000, 4000)]
    calm += [step_of(4, 0.016, misses=1)] * 6

    def stall_ms(step: StepFacts) -> float:
        return 1e3 * find_stalls([*calm, step], machine)[0].seconds

    assert stall_ms(step_of(4, 0.017, 2000, 1, 1)) == pytest.approx(0.0)
    assert stall_ms(step_of(8, 0.030, 0, 1, 1)) == pytest.approx(5.0)
    assert stall_ms(step_of(5, 0.017, 3000, 0, 1)) == pytest.approx(4.0), "not against steps of fewer rows"
    assert find_stalls([*calm, step_of(3, 9.0, banned=1)], machine) == [], "nothing to compare it with"
    assert find_stalls(calm, machine) == []
    assert 1e3 * find_stalls(calm, machine, calm=True)[0].seconds == pytest.approx(1.0), "a layer that misses"
    beside = [replace(step, beside_pass=True, seconds=1.0) for step in calm]
    assert find_stalls([*beside, step_of(4, 0.017, banned=1)], machine) == []


def test_hits_hide_their_share_of_the_link_and_context_costs_no_less_than_its_bytes() -> None:
    machine = Machine(LinkCurve.at_rate(5_000_000, 1e9), 5_000_000, 2e10, token_bytes=20_000.0)
    calm = [step_of(4, 0.010)] * 3
    found = find_stalls([*calm, step_of(4, 0.020, 1000, 1, 1)], machine)[0]
    assert found.link_s == pytest.approx(0.005 - 8 * 0.25e-3)
    assert found.resident_s == pytest.approx(0.010 + 1000 * 1e-6), "its slope was made up"
    assert "1 at 1.0 GB/s, 64 at 1.0 GB/s" in machine.lines()[0]


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


@pytest.mark.parametrize("watched", [True, False])
def test_a_pass_takes_what_prompts_take_where_all_is_resident_too(watched: bool) -> None:
    routing = Routing(1, 16, 2, ImposedRouting(rows=3), torch.device("cpu"))
    watch = StepWatch(place_bytes=1) if watched else None
    seen: list[bool] = []

    class Inner(LaunchedPass):
        def __init__(self) -> None:
            pass

        def advance(self, seconds: float | None) -> bool:
            seen.append(routing.passing)
            return len(seen) == 2

    running = WatchedPass(Inner(), watch, routing)
    assert [running.advance(0.1), running.advance(0.1)] == [False, True]
    assert seen == [True, True]
    assert not routing.passing
    if watch is not None:
        watch.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_of_it(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    prompts = ["--prefill", "200", "--prefill-at", "4", "--replay-seconds", "0.3"]
    main([*BRIEF, "--settings", "elastic", "k4", *prompts, "--json", str(path)])
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
    assert any("of a round of phases of 0.3 s" in note for note in written["notes"])
    assert figures["banning_steps"] > 0
    assert any(note.startswith("step ") and "banned" in note for note in written["notes"])


def check_fixed_places(stage: Stage) -> int:
    """Whatever has a place is filled, and no decode step or pass is told otherwise; answers the steps kept so far."""
    kept = len(stage.recorder.steps)
    could_audit: list[bool] = []

    def fill(pager: ExpertPager, per_layer: int) -> None:
        other = Thread(target=lambda: could_audit.append(stage.engine._changed.acquire(blocking=False)))
        other.start()
        other.join()
        fill_places(pager, per_layer)

    with patch.object(stage_module, "fill_places", fill):
        stage.fix_places(5)
    assert could_audit == [False], "an idle engine would audit places that are being filled"
    residency = stage.pager.residency
    assert stage.pager.num_places == 5 * stage.num_layers
    assert int(residency.resident.sum()) == 5 * stage.num_layers
    assert residency.audit() == []
    held = residency.owner[residency.owner >= 0]
    blocks = [stage.pager.host.block(stage.pager.host.layers[o // 32], o % 32) for o in held.tolist()]
    grid = stage.recorder.runner.arena.grids["expert"][residency.owner >= 0]  # type: ignore[union-attr]
    assert all(torch.equal(place[: len(block)], block) for place, block in zip(grid, blocks, strict=True))
    return kept


def test_wrong_tokens_are_counted() -> None:
    setup = make_setup(parse([*BRIEF, "--prefill"]))
    setup = replace(setup, phases=setup.phases[:1])
    stage = Stage(setup, keep=True)
    stage.run()
    counted = check_fixed_places(stage)
    stage.close()
    recorded = list(stage.recorder.steps)
    decoded = stage.recorder.facts
    assert decoded
    assert all(step.host_s >= step.commands_s > 0 for step in decoded)
    assert all(sum(step.hits) + sum(step.misses) > 0 for step in decoded)
    assert any(step.banned_bytes for step in decoded), "a pass's ring was taken from nobody"
    sampling = next(step for step in recorded if step.plan.samples.any())
    spoilt = sampling.result.token_ids.copy()
    spoilt[sampling.plan.samples.argmax(), 0] += 1
    steps = [
        replace(step, result=replace(step.result, token_ids=spoilt)) if step is sampling else step
        for step in recorded
    ]
    assert counted == len(recorded), "steps at fixed places are not the elastic run's"
    assert count_wrong(setup, recorded) == 0
    assert count_wrong(setup, steps) == 1
