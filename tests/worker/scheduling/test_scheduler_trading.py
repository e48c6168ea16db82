"""Experts and prefixes share the arena's spare bytes: what a burst left in the cache goes back to experts that miss."""

from __future__ import annotations

from memory.ledger.ledger import ArenaLedger
from memory.ledger.market import Tilt
from tests.helpers.scheduling import WITH_EXPERTS, Desk, make_desk
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
