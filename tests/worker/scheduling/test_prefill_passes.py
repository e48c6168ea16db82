"""Prefill passes, decided: who shares one, what is held meanwhile, and that nothing of it is lost or read too early."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memory.api import PageSpec
from memory.ledger.ledger import ArenaLedger
from tests.helpers.fake_pass import PassRunner
from tests.helpers.fake_runner import expert_spec, full_spec, state_spec, window_spec
from tests.helpers.scheduling import Desk, bytes_for, make_desk, optimist
from worker.api import FinishReason
from worker.loop import STREAMS_PACE
from worker.scheduling.limits import RingRule
from worker.scheduling.step import StepResult

SPECS: dict[str, tuple[PageSpec, ...]] = {
    "full": (full_spec(), expert_spec()),
    "hybrid": (full_spec(64), window_spec(40), state_spec(), expert_spec()),
}
RULE = RingRule(num_layers=2, num_experts=16)


def desk_of(specs: str = "full", arena_bytes: int = 1 << 19, **options: object) -> Desk:
    given = {"pass_tokens": 256, "ring": RULE, "max_step_tokens": 32, **options}
    return make_desk(SPECS[specs], "arena", arena_bytes, **given)  # type: ignore[arg-type]


def runner_of(desk: Desk) -> PassRunner:
    assert isinstance(desk.runner, PassRunner)
    return desk.runner


def prompt(number: int, length: int) -> list[int]:
    return [(number * 31 + i * 7) % 200 for i in range(length)]


def test_prompts_that_wait_share_a_pass_and_streams_go_on_beside_it() -> None:
    desk = desk_of()
    desk.ask("stream", prompt(0, 4), max_tokens=60, ignore_eos=True)
    desk.step(4)
    for number in range(1, 4):
        desk.ask(f"p{number}", prompt(number, 80), max_tokens=3)
    plans = desk.step(1)
    found = [(plan.staged, plan.num_rows, plan.num_tokens) for plan in plans]
    assert found == [(True, 3, 240), (False, 1, 1)], "the stream waited for a pass to begin"
    assert plans[0].ring is not None
    got = len(desk.tokens("stream"))
    plans = desk.step(2)
    assert all(not plan.staged and plan.num_rows == 1 for plan in plans), "a prompt's row ran beside its pass"
    assert len(desk.tokens("stream")) == got + 2
    desk.step(1)
    assert all(len(desk.tokens(f"p{number}")) >= 1 for number in range(1, 4))
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    assert runner_of(desk).begun[0].budgets[0] is not None


def test_the_pace_of_streams_leaves_the_rest_of_the_time_to_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a millisecond take two beside a pass: streams are slowed down by what is agreed, not by more."""
    desk = desk_of()
    runner = runner_of(desk)
    collect = runner.collect

    def slowed(handle: object) -> StepResult:
        beside = bool(runner.begun) and runner.begun[-1].num_left > 0
        return replace(collect(handle), seconds=2e-3 if beside else 1e-3)

    monkeypatch.setattr(runner, "collect", slowed)
    desk.ask("stream", prompt(0, 4), max_tokens=60, ignore_eos=True)
    desk.step(4)
    desk.ask("p", prompt(1, 80), max_tokens=3)
    desk.step(6)
    assert runner.begun[-1].budgets == pytest.approx([STREAMS_PACE * 1e-3 - 2e-3] * 3)


def test_a_pass_has_its_time_where_steps_have_become_longer_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes follow each other while rows come and experts go: what a step took before all that is no measure."""
    desk = desk_of()
    runner = runner_of(desk)
    collect = runner.collect
    monkeypatch.setattr(
        runner, "collect", lambda handle: replace(collect(handle), seconds=8e-3 if runner.begun else 1e-3)
    )
    desk.ask("stream", prompt(0, 4), max_tokens=60, ignore_eos=True)
    desk.step(4)
    desk.ask("p", prompt(1, 80), max_tokens=3)
    desk.step(6)
    assert runner.begun[-1].budgets == pytest.approx([(STREAMS_PACE / 2 - 1) * 8e-3] * 3)


def test_a_pass_alone_is_computed_at_once() -> None:
    desk = desk_of()
    desk.ask("p", prompt(1, 200), max_tokens=2)
    desk.step(2)
    assert len(desk.tokens("p")) >= 1
    assert runner_of(desk).begun[0].budgets[-1] is None


def test_a_prompt_longer_than_a_pass_takes_several() -> None:
    desk = desk_of()
    desk.ask("p", prompt(1, 700), max_tokens=4)
    desk.finish()
    desk.check_answers()
    assert [plan.num_tokens for plan in desk.runner.plans if plan.staged] == [256, 256, 188]


def test_few_tokens_ride_in_steps() -> None:
    desk = desk_of()
    desk.ask("stream", prompt(0, 4), max_tokens=40, ignore_eos=True)
    desk.ask("p", prompt(1, 4), max_tokens=2)
    desk.finish()
    desk.check_answers()
    assert not runner_of(desk).begun


def test_rings_are_two_layers_of_what_is_missing() -> None:
    assert RULE.places(0) == 32
    assert RULE.places(20) == 12
    assert RULE.places(32) == 0
    desk = desk_of(arena_bytes=1 << 21)
    desk.ask("p", prompt(1, 100), max_tokens=2)
    desk.step(2)
    ring = next(plan.ring for plan in desk.runner.plans if plan.staged)
    assert ring is not None
    assert ring.last - ring.first == 32
    desk.finish()
    desk.scheduler.note_resident(32)
    desk.ask("q", prompt(2, 100), max_tokens=2)
    desk.step(2)
    assert next(plan.ring for plan in desk.runner.plans[::-1] if plan.staged) is None


def test_a_short_pass_takes_no_places_from_the_experts() -> None:
    desk = desk_of(ring=RingRule(num_layers=2, num_experts=16, least_tokens=64), prefix_cache=False)
    for number, length in enumerate((63, 64)):
        desk.ask(f"p{number}", prompt(number, length), max_tokens=2)
        desk.finish()
    passes = [plan for plan in desk.runner.plans if plan.staged]
    assert [plan.ring is not None for plan in passes] == [False, True]


def test_pages_of_a_pass_stay_where_they_are() -> None:
    """Streams end while a pass is under way: the holes they leave are filled, but not with its pages."""
    desk = desk_of(arena_bytes=1 << 16, prefix_cache=False)
    for number in range(3):
        desk.ask(f"s{number}", prompt(number, 120), max_tokens=200, ignore_eos=True)
    desk.ask("stays", prompt(3, 100), max_tokens=60, ignore_eos=True)
    desk.step(6)
    for number in (5, 6):
        desk.ask(f"p{number}", prompt(number, 100), max_tokens=30)
    assert [plan.staged for plan in desk.step(1)] == [True, False]
    for number in range(3):
        desk.abort(f"s{number}")
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    moves = [len(plan.commands.moves) for plan in desk.runner.plans]
    assert sum(moves) > 0, "nothing ever moved"


def test_a_ring_leaves_the_floor_of_places() -> None:
    for floor, fits in ((0, True), (20, True), (40, False)):
        ledger = ArenaLedger(SPECS["full"], 48 * expert_spec().page_bytes, floor_places=floor)
        ledger.begin_step(0, -1)
        assert (ledger.take_ring(16) is not None) == fits


def test_an_abort_in_a_pass_waits_for_its_end() -> None:
    desk = desk_of()
    desk.ask("stream", prompt(0, 4), max_tokens=30, ignore_eos=True)
    desk.step(3)
    desk.ask("p", prompt(1, 100), max_tokens=5)
    desk.step(1)
    desk.abort("p")
    assert not desk.events["p"]
    desk.finish()
    assert desk.last("p").finish_reason is FinishReason.ABORT
    desk.check_answers()
    desk.check_empty()


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("overlap", [False, True])
def test_random_loads_in_too_little_memory_get_the_right_answers(specs: str, overlap: bool) -> None:
    """Retractions, aborts, prefix hits, a host tier, pages moving and experts scribbling in every free place."""
    rng = random.Random(len(specs) + overlap)
    budget = int(1.5 * bytes_for(SPECS[specs], "arena", 420))
    desk = desk_of(
        specs,
        budget,
        max_running=6,
        overlap=overlap,
        forecast=optimist(),
        host_tier_bytes=1 << 16,
    )
    desk.runner.keep_plans = False
    starts = [prompt(n, 130) for n in range(3)]
    for number in range(120):
        tail = [rng.randrange(200) for _ in range(rng.choice((2, 20, 150)))]
        tokens = (rng.choice(starts) + tail) if rng.random() < 0.5 else tail
        desk.ask(f"r{number}", tokens, max_tokens=rng.choice((1, 8, 60)), ignore_eos=rng.random() < 0.3)
        for _ in range(rng.choice((0, 1, 4))):
            desk.take(desk.loop.step())
        if rng.random() < 0.1:
            name = f"r{rng.randrange(number + 1)}"
            if not desk.events[name] or desk.last(name).finish_reason is None:
                desk.abort(name)
    desk.finish()
    desk.check_answers()
    desk.check_empty()
    runner = runner_of(desk)
    assert len(runner.begun) > 20
    assert sum(any(rows) for rows in runner.beside) > 5, "no streams ran beside passes"
    assert desk.scheduler.statistics.retractions.num_retractions > 0, "memory was never short"
