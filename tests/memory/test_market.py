"""The market between prefixes and expert places: which way bytes flow, when they stop, and that it settles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memory.api import Grant, PageAsk, Shortage
from memory.ledger.market import (
    ExpertReading,
    Market,
    MarketDecision,
    PrefixReading,
    RunningReading,
    Tilt,
)
from tests.memory.geometries import full_spec, small_ledger

PLACE = 5_000_000
GIB = 1 << 30


def experts(misses: float = 0, ghost_hits: float = 0, places: int = 1000, staged: float = 0) -> ExpertReading:
    return ExpertReading(int(misses), int(staged), int(ghost_hits), 100, places, 6144, PLACE, 0.1, 128, 8)


def prefixes(saved: float = 0.0, ghost: float = 0.0, evicted: int = 0, held: int = 10 * GIB) -> PrefixReading:
    return PrefixReading(saved, ghost, evicted, held)


def test_price_is_milliseconds_per_byte_and_second() -> None:
    market = Market(1e9)
    market.step(0.0, experts(), prefixes())
    market.step(2.0, experts(misses=51_440), prefixes(saved=2000.0))
    # 51,440 misses in 2 s over 5,144 missing experts: 5 reads a second each, 0.1 ms a read, 5 MB a place. The coldest
    # that has a place is taken to be read half as often again.
    assert market.prices.expert == pytest.approx(1.5 * 5 * 0.1 / PLACE)
    assert market.prices.prefix == pytest.approx(0.25 * 1000.0 / (10 * GIB))


@pytest.mark.parametrize(
    # All bytes of the prefixes as places would save 1.5 x misses / 5,144 / 0.01 s x 0.1 ms x 2,147 places.
    ("misses", "gain_ms"),
    [(1000, 250.0), (20, 20 * 6.26), (1, 6.26)],
)
def test_idle_prefixes_give_way_to_missing_experts_at_the_agreed_pace(misses: int, gain_ms: float) -> None:
    market = Market(bytes_per_s=4e9)
    market.step(0.0, experts(), prefixes())
    decision = market.step(0.01, experts(misses=misses), prefixes())
    assert decision.tilt is Tilt.TO_EXPERTS
    assert decision.evict_bytes == pytest.approx((1 + 7 * gain_ms / 250) * 4e7, rel=0.01)
    assert market.step(0.01, experts(misses=misses), prefixes()).evict_bytes == 0  # no time has passed


def test_nothing_moves_while_prices_are_close_and_flow_stops_where_they_meet() -> None:
    market = Market(1e9, hysteresis=1.5, half_life_s=1e-9)
    even = 0.25 * 1000 / (10 * GIB)  # the prefix side's price at 1,000 ms saved a second
    misses_for = 5144 * PLACE / 0.1 * even / 1.5

    def step(second: int, ratio: float) -> Tilt:
        market_misses[0] += ratio * misses_for
        return market.step(
            float(second), experts(misses=market_misses[0]), prefixes(saved=1000.0 * second)
        ).tilt

    market_misses = [0.0]
    ratios = [1.0, 1.2, 1.4, 1.6, 1.2, 1.01, 0.99, 0.8, 0.7, 0.6, 0.9, 0.99, 1.01]
    hold, to_experts, to_prefixes = Tilt.HOLD, Tilt.TO_EXPERTS, Tilt.TO_PREFIXES
    assert [step(i, ratio) for i, ratio in enumerate(ratios)] == [
        hold, hold, hold, to_experts, to_experts, to_experts, hold, hold, hold, to_prefixes, to_prefixes,
        to_prefixes, hold,
    ]  # fmt: skip


def test_all_experts_resident_leave_prefixes_alone() -> None:
    market = Market(1e9)
    market.step(0.0, experts(), prefixes())
    assert market.step(1.0, experts(misses=10_000, ghost_hits=5000, places=6144), prefixes()).evict_bytes == 0


def test_evicting_what_is_needed_again_turns_the_flow() -> None:
    market = Market(1e9, half_life_s=1.0)
    market.step(0.0, experts(), prefixes())
    assert market.step(1.0, experts(misses=1000), prefixes()).tilt is Tilt.TO_EXPERTS
    # A gibibyte went and costs 4 s of computing a second.
    decision = market.step(2.0, experts(misses=2000), prefixes(ghost=4000.0, evicted=GIB))
    assert decision.tilt is Tilt.TO_PREFIXES
    assert decision.spare_prefixes
    assert decision.evict_bytes == 0


def test_places_lost_and_missed_again_raise_the_price_above_the_average_miss() -> None:
    market = Market(1e9)
    market.step(0.0, experts(), prefixes())
    market.step(1.0, experts(misses=2000, ghost_hits=1500), prefixes())
    assert market.prices.expert == pytest.approx(15 * 0.1 / PLACE)


def test_after_a_burst_places_come_back_within_thirty_seconds() -> None:
    """A closed loop: 24 GB of prefixes that nobody asks for again stand where experts stood before the burst."""
    market = Market(bytes_per_s=4e9)
    before, held, now, misses = 5500, 24_000_000_000, 0.0, 0.0
    places = before - held // PLACE
    while now < 30.0:
        misses += (6144 - places) * 0.02
        decision = market.step(now, experts(misses=misses, places=places), prefixes(held=held))
        freed = decision.evict_bytes // PLACE
        held, places, now = held - freed * PLACE, places + freed, now + 0.02
    assert places >= 0.95 * before


def test_two_useful_sides_settle_instead_of_swinging() -> None:
    """Diminishing returns on both sides: the split must stop moving, near where the prices meet."""
    market = Market(bytes_per_s=2e9)
    total, held = 30_000_000_000, 29_000_000_000
    now = misses = saved = 0.0
    history = []
    for _ in range(6000):
        places = (total - held) // PLACE
        misses += 0.02 * 4000 * (1 - places / 6144) ** 2
        saved += 0.02 * 1000 * (held / total) ** 0.5
        decision = market.step(
            now, experts(misses=misses, places=places), prefixes(saved=saved, held=max(1, held))
        )
        held -= decision.evict_bytes
        if decision.spare_prefixes:
            held = min(total - 500 * PLACE, held + 10_000_000)
        history.append(held)
        now += 0.02
    last = history[-1500:]
    assert (max(last) - min(last)) / total < 0.05
    assert market.prices.expert == pytest.approx(market.prices.prefix, rel=0.6)


@pytest.mark.parametrize(
    ("num_running", "gigabytes", "staged_share", "hold"),
    # The link is busy 40 % of the time with reads of 5,144 missing experts. Pages of 6 GB keep 1,200 experts out: they
    # cost 1.5 x 1,200 x 0.78 reads a second x 0.1 ms = 0.14 s a second; 28 GB cost 0.65. With 64 running, another one
    # wants few experts of its own (e = 0.067), with 2 nearly all (e = 0.94).
    [(64, 6, 0.0, False), (64, 28, 0.0, False), (64, 47, 0.0, True), (2, 6, 0.0, False), (2, 28, 0.0, True),
     (64, 27, 1.0, True), (64, 20, 1.0, False)],
)  # fmt: skip
def test_one_more_request_starts_as_long_as_it_brings_more_than_it_costs(
    num_running: int, gigabytes: int, staged_share: float, hold: bool
) -> None:
    market = Market(1e9, half_life_s=1e-9)
    market.step(0.0, experts(), prefixes())
    reading = experts(misses=4000, staged=4000 * staged_share)
    decision = market.step(1.0, reading, prefixes(), RunningReading(num_running, gigabytes * 1_000_000_000))
    assert decision.hold_new is hold


def test_nobody_is_held_back_where_all_experts_have_places() -> None:
    market = Market(1e9, half_life_s=1e-9)
    market.step(0.0, experts(), prefixes())
    full = RunningReading(64, 100_000_000_000)
    assert not market.step(1.0, experts(misses=9000, places=6144), prefixes(), full).hold_new


def test_nonsense_settings_are_refused() -> None:
    for settings in ({"bytes_per_s": 0.0}, {"bytes_per_s": 1.0, "hysteresis": 0.9}):
        with pytest.raises(ValueError, match="market needs"):
            Market(**settings)


def test_the_ledger_holds_new_requests_back_only_beside_others() -> None:
    ledger = small_ledger([full_spec(16)], 64 * 1024, place_bytes=1024)
    ledger.follow(MarketDecision(hold_new=True))
    ledger.begin_step(1, 0)
    assert isinstance(ledger.grant(PageAsk(1, 16)), Grant), "alone it starts, or nobody ever would"
    assert ledger.grant(PageAsk(2, 16)) == Shortage({})
    assert isinstance(ledger.grant(PageAsk(1, 64)), Grant), "who runs goes on"
    ledger.follow(MarketDecision())
    assert isinstance(ledger.grant(PageAsk(2, 16)), Grant)


def test_misses_ask_for_no_places_while_some_are_free() -> None:
    """After the start, or after a burst, everything is missed once: more places would not have helped."""
    for free, price in ((0, 1.5 * 5 * 0.1 / PLACE), (200, 0.0)):
        market = Market(1e9)
        now = [replace(experts(misses=misses), num_free=free) for misses in (0, 25_720)]
        market.step(0.0, now[0], prefixes())
        market.step(1.0, now[1], prefixes())
        assert market.prices.expert == pytest.approx(price)


@pytest.mark.parametrize(("prompt_s", "hold"), [(0.0, False), (0.3, False), (0.9, True)])
def test_time_spent_on_prompts_gets_no_shorter_by_another_request(prompt_s: float, hold: bool) -> None:
    """Pages of 20 GB cost 0.47 s a second; with most of the time spent on prompts, one more answer brings less."""
    market = Market(1e9, half_life_s=1e-9)
    market.step(0.0, experts(), prefixes())
    running = RunningReading(64, 20_000_000_000, prompt_s)
    assert market.step(1.0, experts(misses=4000), prefixes(), running).hold_new is hold
