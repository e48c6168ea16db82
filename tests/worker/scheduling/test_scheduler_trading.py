"""Experts and prefixes share the arena's spare bytes: what a burst left in the cache goes back to experts that miss."""

from __future__ import annotations

import pytest

from memory.ledger.ledger import ArenaLedger
from memory.ledger.market import Tilt
from tests.helpers.scheduling import WITH_EXPERTS, Desk, make_desk
from worker.scheduling.statistics import PromptCost
from worker.scheduling.trading import ExpertTotals, ExpertTrader, PagedShape

PROMPT_TOKENS = 100
PLACE_BYTES = 640


def after_a_burst() -> tuple[Desk, ExpertTrader, int]:
    """Thirty prompts have come and gone; the places that there were before."""
    desk = make_desk(WITH_EXPERTS, arena_bytes=60_000)
    assert isinstance(desk.ledger, ArenaLedger)
    trader = ExpertTrader(desk.ledger, PagedShape(4, 40, 2, PLACE_BYTES, link_bytes_per_s=1e6))
    desk.loop.step()
    before = desk.ledger.num_usable_places
    for number in range(30):
        prompt = [number, *range(PROMPT_TOKENS)]
        desk.ask(f"r{number}", prompt, max_tokens=3, ignore_eos=True)
    desk.finish()
    return desk, trader, before


def seconds_of(desk: Desk, trader: ExpertTrader, seconds: int, misses_per_s: int) -> list[Tilt]:
    """Trades ten times a second beside one running answer; the tilts."""
    desk.ask(f"after{seconds}", range(20), max_tokens=1000, ignore_eos=True)
    tilts = []
    for tenth in range(10 * seconds):
        desk.step()
        misses = tenth * misses_per_s // 10
        tilts.append(trader.trade(tenth / 10, ExpertTotals(misses, 0), 1).tilt)
    desk.abort(f"after{seconds}")
    desk.loop.settle(40)
    return tilts


def test_experts_that_miss_get_their_places_back_after_a_burst() -> None:
    desk, trader, before = after_a_burst()
    assert isinstance(desk.ledger, ArenaLedger)
    crowded = desk.ledger.num_usable_places
    assert crowded < 0.7 * before, "the burst left nothing behind: the case is not there"
    tilts = seconds_of(desk, trader, 30, misses_per_s=500)
    assert tilts[-1] is Tilt.TO_EXPERTS
    # The answer that ran meanwhile keeps a little of its own.
    assert desk.ledger.num_usable_places - crowded >= 0.75 * (before - crowded)
    desk.check_answers()
    desk.ledger.audit()


def test_prefixes_stay_where_no_expert_misses() -> None:
    desk, trader, _ = after_a_burst()
    held = sum(kind.reclaimable_bytes for kind in desk.ledger.headroom().kinds.values())
    tilts = seconds_of(desk, trader, 30, misses_per_s=0)
    assert set(tilts) == {Tilt.HOLD}
    assert sum(kind.reclaimable_bytes for kind in desk.ledger.headroom().kinds.values()) >= 0.9 * held


def test_the_market_runs_both_ways_and_prices_prompts_at_what_they_cost_here() -> None:
    """Prefixes are hit and experts are missed at a steady rate: who gives way is a matter of what a token costs."""
    ends = {}
    for scale in (0.01, 1000.0):
        desk, trader, _ = after_a_burst()
        for tenth in range(40):
            desk.ask(f"again{tenth}", [tenth % 30, *range(PROMPT_TOKENS)], max_tokens=1, ignore_eos=True)
            desk.step(6)
            decision = trader.trade(tenth / 10, ExpertTotals(60 * tenth, 0), 1, scale)
        ends[scale] = (decision.tilt, decision.spare_prefixes)
        desk.finish()
        desk.check_answers()
    assert ends[0.01] == (Tilt.TO_EXPERTS, False)
    assert ends[1000.0] == (Tilt.TO_PREFIXES, True)


def test_a_prompts_token_costs_what_steps_of_prompts_took() -> None:
    cost = PromptCost(memory=0.5, least_tokens=32)
    cost.note(31, 0, 1.0)  # too few to tell
    cost.note(64, 20, 1.0)  # mostly decode
    assert cost.ms_per_token == 0.0
    cost.note(100, 10, 0.2)
    assert cost.ms_per_token == pytest.approx(2.0)
    cost.note(100, 0, 0.4)
    assert cost.ms_per_token == pytest.approx(3.0)
    desk = make_desk()
    desk.ask("p", range(120), max_tokens=2)
    desk.finish()
    # The fake device takes 0.1 ms a step; chunks are of 64 tokens.
    assert desk.scheduler.statistics.prompt_cost.ms_per_token == pytest.approx(0.1 / 64, rel=0.3)


def test_steps_beside_a_pass_are_not_its_cost() -> None:
    cost = PromptCost()
    cost.note(0, 4, 1.0)
    cost.begin_pass()
    cost.note(0, 4, 0.25)
    cost.end_pass(100, 0.75)
    assert cost.busy_s == pytest.approx(0.5)
    assert cost.ms_per_token == pytest.approx(5.0)
    cost.note(30, 10, 0.4)
    assert cost.busy_s == pytest.approx(0.8), "a step's share of prompts counts"
