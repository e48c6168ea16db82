"""Faults that other engines met: in each test one of them would show."""

from __future__ import annotations

import pytest

from memory.api import Grant, LedgerError, PageAsk, Row, Shortage
from memory.ledger.ledger import ArenaLedger
from memory.ledger.specs import attention_spec, state_spec
from tests.memory.geometries import full_spec, mixed_specs, small_ledger, small_state_spec, window_spec
from tests.memory.world import World

KB = 1024
FULL, STATE = full_spec(16), small_state_spec(640)


def _granted_until_full(ledger: ArenaLedger, num_tokens: int, first: int = 0) -> int:
    """Grants requests of ``num_tokens`` until one is refused; answers how many got in."""
    count = 0
    while isinstance(ledger.grant(PageAsk(first + count, num_tokens)), Grant):
        count += 1
    return count


def test_a_state_without_bytes_is_not_free_by_count() -> None:
    """21 MB of gap are no room for a state of 54 MB, whatever a start-up label says."""
    ledger = small_ledger([FULL, STATE], 40 * STATE.page_bytes)
    ledger.begin_step(1, 0)
    assert isinstance(ledger.grant(PageAsk(0, 16 * 103)), Grant)
    assert ledger.headroom().gap_bytes < 5 * STATE.page_bytes
    granted = _granted_until_full(ledger, 1, first=1)
    left = ledger.headroom().gap_bytes
    assert granted == 3
    assert 0 < left < STATE.page_bytes
    short = ledger.grant(PageAsk(99, 1))
    assert isinstance(short, Shortage)
    assert short.missing_bytes
    ledger.audit()


@pytest.mark.parametrize("num_kinds", [2, 3, 4])
def test_no_byte_is_granted_to_two_kinds(num_kinds: int) -> None:
    """For every pair of kinds there is room, for all together there is not: nobody gets anything."""
    specs = mixed_specs(num_kinds, 16, 40)
    each = 6 * KB
    arena = each * num_kinds - 2 * KB
    ledger = small_ledger(specs, arena)
    ledger.begin_step(1, 0)
    before = ledger.headroom().available_bytes
    need = {g: each // ledger._book.pools[g].page_bytes for g in range(num_kinds)}
    pair = dict(list(need.items())[:2])
    assert num_kinds == 2 or ledger._room.lacking_bytes(pair) == 0
    assert not ledger._room.make(need)
    assert ledger.headroom().available_bytes == before, "nothing was taken, and nothing is counted twice"
    ledger.audit()


def test_evictable_bytes_are_credited_once() -> None:
    """Cached pages of FULL serve FULL or the states, not both."""
    arena = 24 * KB
    world = World(small_ledger([FULL, STATE], arena, cached=True), arena)
    ledger = world.ledger
    (first,) = world.plan({}, [([1] * 640, 640)])
    world.finish_all()
    world.release(first, donate=True)
    room = ledger.headroom()
    assert room.kinds["full"].reclaimable_bytes == 40 * FULL.page_bytes
    assert room.available_bytes == arena, "all that is not used can be had, once"
    ledger.begin_step(world.step + 1, world.completed)
    full_pages = arena * 3 // 4 // FULL.page_bytes
    states = arena // 2 // STATE.page_bytes
    need = {ledger._book.number["full"]: full_pages, ledger._book.number["state"]: states}
    assert not ledger._room.make(need)
    assert ledger.headroom().kinds["full"].reclaimable_bytes == 40 * FULL.page_bytes, (
        "nothing was evicted in vain"
    )


def test_a_prefix_hit_pays_for_the_copy_of_its_state() -> None:
    """An arena with room for one state only: a match would need two, so it is no match and the request goes on."""
    arena = STATE.page_bytes + 8 * FULL.page_bytes
    world = World(small_ledger([FULL, STATE], arena, cached=True), arena)
    (first,) = world.plan({}, [(list(range(64)), 64)])
    world.finish_all()
    world.release(first, donate=True)
    tokens = [*range(64), *range(300, 340)]
    assert world.ledger.can_ever_grant(len(tokens)) is None
    for _ in range(3):
        if not world.running:
            world.plan({}, [(tokens, 104)])
            world.finish_all()
    assert world.running, "the request starves beside its own prefix"


def test_over_admission_is_an_answer() -> None:
    for cached in (False, True):
        ledger = small_ledger(mixed_specs(4, 16, 40), 48 * KB, cached=cached)
        ledger.begin_step(1, 0)
        assert _granted_until_full(ledger, 100) > 0
        for request in range(500, 520):
            assert isinstance(ledger.grant(PageAsk(request, 100)), Shortage)
        ledger.audit()


@pytest.mark.parametrize("floor_places", [0, 3])
def test_whoever_is_let_in_can_finish_and_whoever_cannot_is_refused_with_the_bytes(floor_places: int) -> None:
    """Up to the longest request that fits, token by token, alone in a used arena; one token more is refused."""
    specs = [FULL, STATE, window_spec(16, 40)]
    arena = 24 * KB
    world = World(small_ledger(specs, arena, place_bytes=KB, floor_places=floor_places, chunk=64), arena, KB)
    ledger = world.ledger
    longest = max(n for n in range(1, 2000) if ledger.can_ever_grant(n) is None)
    for n in range(5):
        world.plan(dict.fromkeys(world.running, 1), [([n] * 40, 40)])
        world.finish_all()
    for number in list(world.running):
        world.release(number, donate=False)
    refused = ledger.can_ever_grant(longest + 1)
    assert refused is not None
    assert refused.never
    assert sum(refused.missing_bytes.values()) > arena - (floor_places + 3) * KB - 2 * KB
    (number,) = world.plan({}, [([5] * longest, 64)])
    for _ in range(longest):
        if world.running[number].num_computed == longest:
            break
        world.plan({number: 64})
        world.finish_all()
    assert world.running[number].num_computed == longest
    world.check()


def test_frees_on_their_way_are_told_before_anybody_is_sent_back() -> None:
    ledger = small_ledger([FULL, STATE], 8 * KB)
    ledger.begin_step(1, 0)
    count = _granted_until_full(ledger, 16)
    ledger.commit_step(1)
    for request in range(count):
        ledger.release(request)
    ledger.begin_step(2, 0)
    short = ledger.grant(PageAsk(100, 16))
    assert isinstance(short, Shortage)
    assert short.pending_bytes == count * (FULL.page_bytes + STATE.page_bytes)
    assert ledger.headroom().available_bytes == 8 * KB, "pending bytes are capacity to come"


def test_virtual_ids_survive_moves_and_physical_ones_stay_inside() -> None:
    arena = 64 * KB
    world = World(small_ledger([FULL], arena, place_bytes=KB, move_budget_bytes=arena), arena, KB)
    numbers = world.plan({}, [([n] * 16, 16) for n in range(100)])
    world.finish_all()
    held = {number: world.ledger.pages(number, "full") for number in numbers}
    for number in numbers[1::2]:
        world.release(number, donate=False)
    moved = 0
    for _ in range(4):
        world.plan({})
        moved += len(world.device.queue[-1].commands.moves)
        world.finish_all()
    assert moved > 20
    assert all(world.ledger.pages(number, "full") == held[number] for number in numbers[::2])


def test_two_readers_of_one_page_each_hold_it() -> None:
    ledger = small_ledger([FULL], 4 * FULL.page_bytes)
    ledger.begin_step(1, 0)
    ledger.grant(PageAsk(1, 64))
    pins = [ledger.pin(1), ledger.pin(1), ledger.pin(1)]
    ledger.commit_step(1)
    ledger.release(1)
    ledger.end_step(1)
    for pin in pins:
        assert ledger.headroom().kinds["full"].pinned_bytes == 4 * FULL.page_bytes
        ledger.audit()
        ledger.unpin(pin)
    assert ledger.headroom().available_bytes == 4 * FULL.page_bytes


def test_one_transfer_does_not_stop_the_moves_of_others() -> None:
    arena = 64 * KB
    world = World(small_ledger([FULL], arena, place_bytes=KB, move_budget_bytes=arena), arena, KB)
    numbers = world.plan({}, [([n] * 16, 16) for n in range(200)])
    world.finish_all()
    world.pin(numbers[3])
    for number in numbers[4::2]:
        world.release(number, donate=False)
    world.plan({})
    assert len(world.device.queue[-1].commands.moves) > 40


def test_kinds_need_no_common_page_size() -> None:
    """A prompt of twelve tokens beside a state of 51.5 MB takes one page of sixteen tokens, not a third of memory."""
    full = attention_spec("full", range(8), 8, 128, "bfloat16", 16)
    parts = [Row("s", (32, 128, 128), "float32"), Row("conv", (8192, 3), "bfloat16")]
    ledger = ArenaLedger([full, state_spec("state", range(24), parts)], 1 << 30, expert_place_bytes=4_718_592)
    ledger.begin_step(1, 0)
    ledger.grant(PageAsk(1, 12))
    room = ledger.headroom()
    assert room.kinds["full"].used_bytes == full.page_bytes == 16 * 32_768
    assert room.kinds["full"].free_bytes < 4_718_592, "a band grows by a stride"
    assert room.gap_bytes > (1 << 30) - 51_511_296 - 2 * 4_718_592


def test_the_cap_of_running_requests_is_what_the_arena_holds() -> None:
    """No share given at start limits a kind: states alone, then tokens alone, may take all of it."""
    arena = 64 * KB
    ledger = small_ledger([FULL, STATE, window_spec(16, 40)], arena)
    ledger.begin_step(1, 0)
    request_bytes = STATE.page_bytes + 2 * FULL.page_bytes
    count = _granted_until_full(ledger, 1)
    assert count >= arena // request_bytes - 2
    ledger.commit_step(1)
    for request in range(count):
        ledger.release(request)
    ledger.begin_step(2, 1)
    assert isinstance(ledger.grant(PageAsk(900, 16 * 200, 16 * 200 - 1)), Grant)
    ledger.audit()


def test_a_burst_after_idle_compaction_waits_for_no_move() -> None:
    """While idle, bands compact a few bytes a step; a burst is granted in its first step."""
    arena = 64 * KB
    world = World(small_ledger([FULL, STATE], arena, place_bytes=KB, move_budget_bytes=2 * KB), arena, KB)
    numbers = world.plan({}, [([n] * 16, 16) for n in range(30)])
    world.finish_all()
    for number in numbers[::2]:
        world.release(number, donate=False)
    world.plan({})
    assert 0 < len(world.device.queue[-1].commands.moves) <= 2 * KB // FULL.page_bytes
    burst = world.plan({}, [([n] * 200, 200) for n in range(5)])
    assert len(burst) == 5
    world.finish_all()
    world.check()


def test_resumed_state_is_restored_never_empty() -> None:
    """Sent back with a checkpoint behind it, a request goes on from there, and its state's bytes are the ones."""
    specs = [FULL, STATE, window_spec(16, 40)]
    arena = 64 * KB
    world = World(small_ledger(specs, arena, cached=True), arena)
    tokens = list(range(150))
    (first,) = world.plan({}, [(tokens, 64)])
    world.finish_all()
    assert world.ledger.checkpoint(first, tokens, 64)
    world.plan({first: 30})
    world.finish_all()
    world.release(first, donate=True)
    (again,) = world.plan({}, [(tokens, 16)])
    assert world.running[again].num_computed == 80, "from the checkpoint at 64"
    for _ in range(4):
        world.finish_all()
        world.plan({again: 16})
    world.finish_all()
    world.check()


@pytest.mark.parametrize("num_kinds", [1, 2, 4])
def test_a_round_trip_through_the_host_brings_back_every_byte(num_kinds: int) -> None:
    specs = mixed_specs(num_kinds, 16, 40)
    arena = 64 * KB
    world = World(small_ledger(specs, arena, cached=True, host_bytes=64 * KB), arena)
    tokens = list(range(130))
    (first,) = world.plan({}, [(tokens[:128], 64)])
    world.plan({first: 64})
    world.finish_all()
    world.release(first, donate=True)
    world.plan({})
    assert any(copy.to_host for copy in world.device.queue[-1].commands.copies)
    world.finish_all()
    world.ledger.shed({spec.name: arena for spec in specs})
    assert sum(kind.reclaimable_bytes for kind in world.ledger.headroom().kinds.values()) == 0
    match = world.ledger.match(tokens)
    assert match.num_tokens == 128
    assert match.host_bytes >= 8 * FULL.page_bytes
    (again,) = world.plan({}, [(tokens, 1)])
    assert any(copy.from_host for copy in world.device.queue[-1].commands.copies)
    world.plan({again: 1})
    world.finish_all()
    world.check()


def test_a_host_match_is_valid_for_its_step_only() -> None:
    arena = 64 * KB
    world = World(small_ledger([FULL], arena, cached=True, host_bytes=64 * KB), arena)
    tokens = list(range(65))
    (first,) = world.plan({}, [(tokens[:64], 64)])
    world.finish_all()
    world.release(first, donate=True)
    world.plan({})
    world.finish_all()
    ledger = world.ledger
    ledger.shed({"full": arena})
    ledger.begin_step(10, world.completed)
    match = ledger.match(tokens)
    ledger.commit_step(10)
    ledger.begin_step(11, world.completed)
    assert ledger.grant(PageAsk(70, 65, 64, match)) == Shortage({})


def test_double_free_and_unknown_ids_raise() -> None:
    ledger = small_ledger([FULL], 8 * KB)
    ledger.begin_step(1, 0)
    ledger.grant(PageAsk(1, 16))
    ledger._book.drop(0, ledger.pages(1, "full").pages[0])
    with pytest.raises(LedgerError, match="released twice"):
        ledger.release(1)
    with pytest.raises(LedgerError, match="holds no pages"):
        ledger.pin(77)
    with pytest.raises(LedgerError, match="no virtual page"):
        ledger._book.tables[0].hold(99)


def test_the_audit_notices_what_it_is_for() -> None:
    def fresh() -> ArenaLedger:
        ledger = small_ledger([FULL, STATE], 16 * KB, place_bytes=KB, floor_places=2)
        ledger.begin_step(1, 0)
        ledger.grant(PageAsk(1, 40))
        ledger.commit_step(1)
        ledger.release(1)
        ledger.begin_step(2, 0)
        ledger.grant(PageAsk(2, 40))
        ledger.audit()
        return ledger

    full = 1
    for harm in (
        lambda book: book.tables[full].users.__setitem__(book.pools[full].owner[63], 2),
        lambda book: book.deferred.retire(99),
        lambda book: book.pools[full].state.__setitem__(0, 1),
        lambda book: setattr(book.pools[0], "last", 16),
        lambda book: book.pools[full].owner.__setitem__(max(book.tables[full].physical), 99),
        lambda book: setattr(book.pools[full], "num_free", 99),
        lambda book: setattr(book.tables[full], "num_pinned", 1),
        lambda book: setattr(book.layout, "floor_places", 16),
    ):
        ledger = fresh()
        harm(ledger._book)
        with pytest.raises(LedgerError):
            ledger.audit()
