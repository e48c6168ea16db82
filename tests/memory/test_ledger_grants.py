"""Grants over all kinds: exact pages, all or nothing, prefixes shared and copied, pins, steps out of order."""

from __future__ import annotations

import pytest

from memory.api import Grant, LedgerError, PageAsk, PageGrowth, PageKind, PageRun, Shortage
from memory.ledger.ledger import ArenaLedger
from memory.ledger.specs import expert_spec
from tests.memory.geometries import full_spec, mixed_specs, small_ledger, small_state_spec, window_spec
from tests.memory.world import World

FULL, STATE, WINDOW = full_spec(16), small_state_spec(), window_spec(16, 40)


def _granted(ledger: ArenaLedger, ask: PageAsk) -> Grant:
    answer = ledger.grant(ask)
    assert isinstance(answer, Grant), answer
    return answer


def _refused(ledger: ArenaLedger, ask: PageAsk) -> Shortage:
    answer = ledger.grant(ask)
    assert isinstance(answer, Shortage), answer
    return answer


def test_a_grant_brings_every_kind_at_once() -> None:
    ledger = small_ledger([FULL, STATE, WINDOW], 64 * 1024)
    ledger.begin_step(1, 0)
    grant = _granted(ledger, PageAsk(7, 33))
    assert {(g.group, g.first, len(g.pages)) for g in grant.growth} == {
        ("full", 0, 3),
        ("state", 0, 1),
        ("window", 0, 3),
    }
    assert ledger.capacity_tokens(7) == 48
    assert ledger.grant(PageAsk(7, 48, 33)) == Grant(), "the room is there already"
    assert [g for g in _granted(ledger, PageAsk(7, 49, 48)).growth if g.group == "full"] == [
        PageGrowth("full", 3, (3,))
    ]


def test_commands_bind_what_was_granted_and_unbind_what_was_released() -> None:
    ledger = small_ledger([FULL, STATE], 64 * 1024)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 20))
    updates = {update.group: update for update in ledger.commit_step(1).table}
    assert updates["full"].virtual == (0, 1)
    assert updates["full"].physical == (255, 254), "FULL hands out high ids first"
    assert updates["state"].physical == (0,)
    ledger.release(1)
    ledger.begin_step(2, 1)
    assert {u.group: u.physical for u in ledger.commit_step(2).table} == {"full": (-1, -1), "state": (-1,)}


def test_window_pages_leave_exactly_when_the_last_query_has_passed() -> None:
    """A window of 40 at position 70 sees 31..70: of pages of 16, page 1 (16..31) still, page 0 no more."""
    ledger = small_ledger([FULL, WINDOW], 64 * 1024)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 64))
    assert ledger.pages(1, "window") == PageRun(0, (0, 1, 2, 3))
    ledger.grant(PageAsk(1, 71, 54))
    assert ledger.pages(1, "window").first == 0
    ledger.grant(PageAsk(1, 71, 55))
    assert ledger.pages(1, "window").first == 1, "position 55 sees 16..55"
    ledger.grant(PageAsk(1, 71, 70))
    assert ledger.pages(1, "window") == PageRun(1, (1, 2, 3, 4))
    ledger.grant(PageAsk(1, 72, 71))
    assert ledger.pages(1, "window") == PageRun(2, (2, 3, 4))
    assert ledger.pages(1, "full") == PageRun(0, (0, 1, 2, 3, 4))


def test_an_import_asks_only_for_what_its_window_still_sees() -> None:
    ledger = small_ledger([FULL, WINDOW], 64 * 1024)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 100, 96))
    assert ledger.pages(1, "window") == PageRun(3, (0, 1, 2, 3))


def test_a_refused_ask_takes_nothing_of_any_kind() -> None:
    ledger = small_ledger([FULL, STATE], 8 * 1024)
    ledger.begin_step(1, 0)
    before = ledger.headroom()
    short = _refused(ledger, PageAsk(1, 16 * 16 * 9))
    assert short.missing_bytes["full"] > 0
    assert not short.never
    assert ledger.capacity_tokens(1) == 0
    after = ledger.headroom()
    assert after.available_bytes == before.available_bytes == 8 * 1024
    assert all(kind.used_bytes == 0 for kind in after.kinds.values())
    with pytest.raises(LedgerError, match="holds no pages"):
        ledger.pages(1, "full")


def test_a_released_page_waits_for_the_step_that_reads_it() -> None:
    ledger = small_ledger([FULL], FULL.page_bytes * 4)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 64))
    ledger.commit_step(1)
    ledger.release(1)
    ledger.begin_step(2, 0)
    short = _refused(ledger, PageAsk(2, 16))
    assert short.pending_bytes == 4 * FULL.page_bytes
    assert ledger.headroom().kinds["full"].pending_bytes == 4 * FULL.page_bytes
    ledger.end_step(1)
    _granted(ledger, PageAsk(2, 64))


def test_pinned_pages_outlive_their_request_and_come_free_with_the_last_pin() -> None:
    ledger = small_ledger([FULL], FULL.page_bytes * 4)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 64))
    first, second = ledger.pin(1), ledger.pin(1)
    ledger.commit_step(1)
    ledger.release(1)
    ledger.end_step(1)
    kind = ledger.headroom().kinds["full"]
    assert (kind.pinned_bytes, kind.used_bytes, kind.pending_bytes) == (4 * FULL.page_bytes, 0, 0)
    ledger.unpin(first)
    ledger.begin_step(2, 1)
    _refused(ledger, PageAsk(2, 16))
    ledger.unpin(second)
    _granted(ledger, PageAsk(2, 64))
    with pytest.raises(LedgerError, match="no pin"):
        ledger.unpin(second)


def test_steps_out_of_order_raise() -> None:
    ledger = small_ledger([FULL], 8192)
    ledger.begin_step(3, 2)
    with pytest.raises(LedgerError, match="is open"):
        ledger.begin_step(4, 2)
    with pytest.raises(LedgerError, match="not open"):
        ledger.commit_step(4)
    ledger.commit_step(3)
    with pytest.raises(LedgerError, match="handed out"):
        ledger.end_step(4)
    with pytest.raises(LedgerError, match="cannot be done"):
        ledger.begin_step(4, 4)
    with pytest.raises(LedgerError, match="after 3"):
        ledger.begin_step(3, 2)


def test_releasing_twice_raises() -> None:
    ledger = small_ledger([FULL], 8192)
    ledger.begin_step(1, 0)
    _granted(ledger, PageAsk(1, 16))
    ledger.release(1)
    with pytest.raises(LedgerError, match="holds no pages"):
        ledger.release(1)


def test_release_bytes_counts_shared_pages_as_shared() -> None:
    world = World(small_ledger([FULL], 64 * 1024, cached=True), 64 * 1024)
    ledger, tokens = world.ledger, list(range(70))
    (first,) = world.plan({}, [(tokens, 70)])
    world.finish_all()
    assert ledger.release_bytes(first) == 5 * FULL.page_bytes
    assert ledger.checkpoint(first, tokens, 70)
    (second,) = world.plan({}, [([*tokens, 5], 71)])
    assert ledger.pages(second, "full").pages[:4] == ledger.pages(first, "full").pages[:4]
    assert ledger.release_bytes(first) == FULL.page_bytes
    assert ledger.headroom().kinds["full"].used_bytes == 6 * FULL.page_bytes


def test_a_match_shares_pages_and_copies_the_state_on_write() -> None:
    specs = mixed_specs(3, 16, 40)
    world = World(small_ledger(specs, 64 * 1024, cached=True), 64 * 1024)
    tokens = list(range(100))
    (first,) = world.plan({}, [(tokens[:64], 64)])
    world.finish_all()
    world.release(first, donate=True)
    (second,) = world.plan({}, [(tokens, 8)])
    request = world.running[second]
    assert request.num_computed == 72
    copies = world.device.queue[-1].commands.copies
    assert [copy.group for copy in copies] == ["state"]
    assert copies[0].source != copies[0].target
    world.plan({second: 8})
    world.finish_all()
    assert world.ledger.match(tokens).num_tokens == 64, "the original is still there, unwritten"
    third = world.plan({}, [([*tokens[:64], 999], 4)])
    assert third
    world.finish_all()


def test_a_match_never_covers_the_last_token() -> None:
    world = World(small_ledger([FULL], 64 * 1024, cached=True), 64 * 1024)
    (first,) = world.plan({}, [(list(range(64)), 64)])
    world.finish_all()
    world.release(first, donate=True)
    assert world.ledger.match(list(range(64))).num_tokens == 48
    assert world.ledger.match(list(range(65))).num_tokens == 64
    assert world.ledger.match(list(range(65)), salt="other").num_tokens == 0
    assert world.ledger.match([0]).num_tokens == 0


def test_a_state_between_checkpoints_is_not_donated() -> None:
    specs = [FULL, STATE]
    world = World(small_ledger(specs, 64 * 1024, cached=True), 64 * 1024)
    tokens = list(range(100))
    (first,) = world.plan({}, [(tokens, 80)])
    world.finish_all()
    assert not world.ledger.checkpoint(first, tokens, 80)
    world.release(first, donate=True)
    assert world.ledger.match(tokens).num_tokens == 0


def test_cached_pages_give_way_to_requests_and_a_stale_match_is_refused() -> None:
    world = World(small_ledger([FULL], 5 * FULL.page_bytes, cached=True), 5 * FULL.page_bytes)
    ledger = world.ledger
    (first,) = world.plan({}, [(list(range(64)), 64)])
    world.finish_all()
    world.release(first, donate=True)
    kind = ledger.headroom().kinds["full"]
    assert (kind.reclaimable_bytes, kind.used_bytes) == (4 * FULL.page_bytes, 0)
    ledger.begin_step(world.step + 1, world.completed)
    match = ledger.match([*range(64), 1])
    assert match.num_tokens == 64
    _granted(ledger, PageAsk(50, 64))
    assert _refused(ledger, PageAsk(51, 65, 64, match)) == Shortage({})
    ledger.audit()


def test_fixed_shares_are_hard_limits() -> None:
    specs = [full_spec(16), small_state_spec(), window_spec(16, 40)]
    ledger = small_ledger(specs, 128 * 1024, mode="split")
    side = ledger.headroom()
    assert side.gap_bytes == 0
    ledger.begin_step(1, 0)
    count = 0
    while isinstance(ledger.grant(PageAsk(count, 1)), Grant):
        count += 1
    free = ledger.headroom().kinds["full"].free_bytes
    assert free > 40 * 1024, "FULL's room serves no other kind"
    assert ledger.can_ever_grant(4096) is None
    assert ledger.can_ever_grant(4097) is not None
    assert small_ledger(specs, 128 * 1024).can_ever_grant(4097) is None
    assert ledger.commit_step(1).moves == ()


def test_split_ratio_shifts_the_shares() -> None:
    free = {}
    for ratio in (0.1, 0.5, 0.9):
        ledger = ArenaLedger([FULL, STATE], 100_000, mode="split", split_ratio=ratio)
        kinds = ledger.headroom().kinds
        free[ratio] = kinds["state"].free_bytes / 100_000
        assert abs(free[ratio] - ratio) < 0.02
        assert abs(kinds["full"].free_bytes / 100_000 - (1 - ratio)) < 0.02
    with pytest.raises(ValueError, match="memory_mode"):
        ArenaLedger([FULL], 100_000, mode="both")


def test_an_expert_spec_gives_the_places() -> None:
    ledger = ArenaLedger([FULL, expert_spec("expert", 1000)], 64 * 1024, floor_places=4)
    assert ledger.specs["expert"].kind is PageKind.EXPERT
    ledger.begin_step(1, 0)
    allowed = ledger.commit_step(1).allow
    assert [(r.first, r.last) for r in allowed] == [(0, 64)], "the first step allows the whole gap"
    assert ledger.num_usable_places == 64
