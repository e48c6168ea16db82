"""The ledger does what the market decides: prefixes go for experts, or experts give way first."""

from __future__ import annotations

from memory.api import Grant, PageAsk
from memory.ledger.market import MarketDecision, Tilt
from tests.memory.geometries import full_spec, small_ledger
from tests.memory.world import World

KB = 1024
FULL = full_spec(16)
ARENA = 64 * KB


def _world_with_prefixes(move_budget_bytes: int = ARENA) -> World:
    """Forty cached prefixes of two pages each, experts in the gap."""
    ledger = small_ledger([FULL], ARENA, place_bytes=KB, cached=True, move_budget_bytes=move_budget_bytes)
    world = World(ledger, ARENA, KB)
    numbers = world.plan({}, [([n + 1] * 32, 32) for n in range(40)])
    world.finish_all()
    for number in numbers:
        world.release(number, donate=True)
    world.plan({})
    world.finish_all()
    return world


def test_prefixes_let_go_become_expert_places() -> None:
    world = _world_with_prefixes()
    ledger = world.ledger
    usable, held = ledger.num_usable_places, ledger.prefix_reading().held_bytes
    assert held == 80 * FULL.page_bytes
    freed = ledger.follow(MarketDecision(Tilt.TO_EXPERTS, 40 * FULL.page_bytes))
    assert freed == 40 * FULL.page_bytes
    assert ledger.prefix_reading().held_bytes == held - freed
    assert ledger.prefix_reading().evicted_bytes == freed
    for _ in range(4):
        world.plan({})
        world.finish_all()
        world.check()
    assert ledger.num_usable_places >= usable + freed // KB - 2, "moves bring the holes to the frontier"
    assert ledger.follow(MarketDecision()) == 0


def test_grants_spare_prefixes_only_while_the_market_says_so() -> None:
    for spare in (True, False):
        world = _world_with_prefixes()
        ledger = world.ledger
        ledger.follow(MarketDecision(Tilt.HOLD, 0, spare_prefixes=spare))
        before = ledger.prefix_reading().held_bytes
        gap = ledger.headroom().gap_bytes
        ledger.begin_step(world.step + 1, world.completed)
        assert isinstance(ledger.grant(PageAsk(900, 16 * 60)), Grant)
        evicted = before - ledger.prefix_reading().held_bytes
        if spare:
            assert evicted == 0
            assert ledger.headroom().gap_bytes < gap
        else:
            assert evicted >= 50 * FULL.page_bytes
            assert ledger.headroom().gap_bytes == gap, "experts keep their places"


def test_a_page_larger_than_the_budget_moves_alone() -> None:
    for budget, expected in ((FULL.page_bytes // 2, 1), (0, 0)):
        world = _world_with_prefixes(move_budget_bytes=budget)
        world.ledger.follow(MarketDecision(Tilt.TO_EXPERTS, 40 * FULL.page_bytes))
        world.plan({})
        assert len(world.device.queue[-1].commands.moves) == expected


def test_without_a_tree_there_is_nothing_to_trade() -> None:
    ledger = small_ledger([FULL], ARENA, place_bytes=KB)
    assert ledger.follow(MarketDecision(Tilt.TO_EXPERTS, 4096)) == 0
    assert ledger.shed({"full": 4096}) == 0
    assert ledger.prefix_reading().held_bytes == 0
