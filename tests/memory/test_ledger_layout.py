"""Bands, floats, places and moves: who gives way to whom, at which cost, and when experts get their bytes back."""

from __future__ import annotations

import pytest

from memory.api import Grant, LedgerError, PageAsk, PlaceRange, Shortage
from memory.ledger.extents import Layout, arrange
from memory.ledger.ledger import ArenaLedger
from memory.ledger.places import ExpertPlaces
from tests.memory.geometries import full_spec, mixed_specs, small_ledger, small_state_spec, window_spec
from tests.memory.world import World

FULL, STATE = full_spec(16), small_state_spec(640)
KB = 1024


def _fill(ledger: ArenaLedger, step: int, asks: dict[int, int]) -> None:
    ledger.begin_step(step, step - 1)
    for request, tokens in asks.items():
        assert isinstance(ledger.grant(PageAsk(request, tokens)), Grant)


def test_experts_give_way_to_pages_and_get_their_places_back() -> None:
    ledger = small_ledger([FULL], 16 * KB, place_bytes=KB)
    _fill(ledger, 1, {1: 16})
    first = ledger.commit_step(1)
    assert (first.ban, first.allow) == ((), (PlaceRange(0, 15),)), (
        "the page took the top place before any allow"
    )
    _fill(ledger, 2, {2: 16 * 20})
    second = ledger.commit_step(2)
    assert (second.ban, second.allow) == ((PlaceRange(10, 15),), ())
    ledger.release(2)
    ledger.begin_step(3, 1)
    assert ledger.commit_step(3).allow == (), "step 2 may still read those pages"
    ledger.begin_step(4, 2)
    assert ledger.commit_step(4).allow == (PlaceRange(10, 14),), "one stride stays with the band"
    assert ledger.num_usable_places == 14


def test_growth_stops_at_the_floor_of_places() -> None:
    ledger = small_ledger([FULL, STATE], 16 * KB, place_bytes=KB, floor_places=6)
    ledger.begin_step(1, 0)
    count = 0
    while isinstance(ledger.grant(PageAsk(count, 16)), Grant):
        count += 1
    ledger.commit_step(1)
    assert 6 <= ledger.num_usable_places <= 7
    assert ledger.headroom().gap_bytes < KB + STATE.page_bytes
    ledger.audit()


def test_a_full_neighbour_is_compacted_before_anybody_waits() -> None:
    """States fill the low end; every second one goes; FULL then needs the holes' bytes."""
    arena = 32 * STATE.page_bytes
    world = World(small_ledger([FULL, STATE], arena), arena)
    ledger = world.ledger
    numbers = world.plan({}, [([n, n], 2) for n in range(20)])
    world.finish_all()
    for number in numbers[1::2]:
        world.release(number, donate=False)
    before = ledger.headroom()
    (long,) = world.plan({}, [([7] * 16 * 40, 640)])
    moves = world.device.queue[-1].commands.moves
    assert moves
    assert all(move.group == "state" and not move.sealed for move in moves), (
        "a running state moves between steps"
    )
    assert {move.source for move in moves} == set(range(20 - 2 * len(moves), 20, 2)), (
        "frontier pages, no others"
    )
    assert len(ledger.pages(long, "full").pages) == 40
    assert before.gap_bytes < 41 * FULL.page_bytes
    world.plan(dict.fromkeys(world.running, 1))
    world.finish_all()
    world.check()


def test_a_float_moves_on_when_its_neighbour_needs_the_bytes() -> None:
    specs = [FULL, STATE, window_spec(16, 40)]
    arena = 64 * KB
    world = World(small_ledger(specs, arena), arena)
    (first,) = world.plan({}, [([1] * 60, 60)])
    world.finish_all()
    band = world.ledger._layout.pools[1]
    assert band.spec.name == "window"
    start = band.low_byte
    assert 0 < start < arena, "a float begins at its hint"
    numbers = world.plan({}, [([n, n], 2) for n in range(60)])
    world.finish_all()
    assert len(numbers) > arena // 2 // STATE.page_bytes, "states reach past where the float lay"
    assert band.low_byte > start
    world.plan({first: 1})
    world.finish_all()
    world.check()


def test_one_step_moves_many_pages_in_one_batch() -> None:
    arena = 64 * KB
    world = World(small_ledger([FULL], arena, place_bytes=KB, move_budget_bytes=arena), arena, KB)
    numbers = world.plan({}, [([n] * 16, 16) for n in range(200)])
    world.finish_all()
    for number in numbers[1::2]:
        world.release(number, donate=False)
    world.plan({})
    moves = world.device.queue[-1].commands.moves
    assert len(moves) > 40
    assert len({move.target for move in moves}) == len(moves)
    flipped = world.device.queue[-1].commands.table[0].virtual
    assert {move.virtual for move in moves} <= set(flipped), "nobody has said that these pages are sealed"


def test_sealed_pages_move_beside_steps_and_tail_pages_between_them() -> None:
    arena = 64 * KB
    world = World(small_ledger([FULL], arena, place_bytes=KB, move_budget_bytes=arena), arena, KB)
    numbers = world.plan({}, [([n] * 24, 16) for n in range(100)])
    world.finish_all()
    world.plan(dict.fromkeys(numbers, 4))
    world.finish_all()
    for number in numbers[:80]:
        world.release(number, donate=False)
    world.plan({})
    commands = world.device.queue[-1].commands
    tails = {world.ledger.pages(number, "full").pages[1] for number in world.running}
    assert {move.sealed for move in commands.moves} == {True, False}
    assert {move.virtual for move in commands.moves if not move.sealed} <= tails
    assert not tails & {move.virtual for move in commands.moves if move.sealed}
    flipped = {v for update in commands.table for v in update.virtual}
    assert not flipped & {move.virtual for move in commands.moves if move.sealed}, (
        "not before the copy is done"
    )
    world.finish_all()
    world.plan(dict.fromkeys(world.running, 1))
    world.finish_all()
    world.check()


def test_background_moves_keep_to_the_budget_and_stop_for_urgent_ones() -> None:
    arena = 64 * KB
    budget = 5 * FULL.page_bytes
    world = World(small_ledger([FULL], arena, place_bytes=KB, move_budget_bytes=budget), arena, KB)
    numbers = world.plan({}, [([n] * 16, 16) for n in range(200)])
    world.finish_all()
    for number in numbers[1::2]:
        world.release(number, donate=False)
    for _ in range(10):
        world.plan({})
        assert 0 < len(world.device.queue[-1].commands.moves) <= 5
        world.finish_all()
    usable = world.ledger.num_usable_places
    for _ in range(40):
        world.plan({})
        world.finish_all()
    assert world.ledger.num_usable_places > usable
    assert world.ledger.num_usable_places >= (arena - 100 * FULL.page_bytes) // KB - 3, (
        "experts get all but a stride"
    )


def test_nothing_moves_while_memory_is_ample() -> None:
    specs = mixed_specs(3, 16, 40)
    arena = 1024 * KB
    world = World(small_ledger(specs, arena), arena)
    numbers = world.plan({}, [([n] * 500, 64) for n in range(20)])
    for _ in range(40):
        world.finish_all()
        world.plan(dict.fromkeys(numbers, 5))
        commands = world.device.queue[-1].commands
        assert (commands.moves, commands.ban, commands.allow) == ((), (), ())


def test_pinned_pages_do_not_move() -> None:
    arena = 24 * STATE.page_bytes
    world = World(small_ledger([FULL, STATE], arena), arena)
    numbers = world.plan({}, [([n, n], 2) for n in range(18)])
    world.finish_all()
    world.pin(numbers[-1])
    for number in numbers[:-1]:
        world.release(number, donate=False)
    ledger = world.ledger
    ledger.begin_step(world.step + 1, world.completed)
    answer = ledger.grant(PageAsk(99, 16 * 30))
    assert isinstance(answer, Shortage), "the pinned state holds the frontier"
    ledger.unpin(world.pins.pop().pin)
    assert isinstance(ledger.grant(PageAsk(99, 16 * 30)), Grant)
    ledger.audit()


def test_a_ring_is_banned_and_comes_back_after_its_steps() -> None:
    ledger = small_ledger([FULL], 16 * KB, place_bytes=KB, floor_places=4)
    _fill(ledger, 1, {1: 16})
    ledger.commit_step(1)
    ring = ledger.take_ring(6)
    assert ring == PlaceRange(4, 10)
    assert ledger.take_ring(6) is None, "the floor stays"
    ledger.begin_step(2, 1)
    assert ledger.commit_step(2).ban == (PlaceRange(4, 10),)
    ledger.audit()
    ledger.return_ring(ring)
    ledger.begin_step(3, 1)
    assert ledger.commit_step(3).allow == ()
    ledger.begin_step(4, 2)
    assert ledger.commit_step(4).allow == (), (
        "step 3 was planned before the ring's bytes were known to be free"
    )
    ledger.begin_step(5, 3)
    assert ledger.commit_step(5).allow == (PlaceRange(4, 10),)
    with pytest.raises(LedgerError, match="no ring"):
        ledger.return_ring(ring)


def test_places_are_usable_banned_or_draining() -> None:
    places = ExpertPlaces(10 * KB, KB)
    assert places.update([(9 * KB, 10 * KB)], [], 1, 0) == ((), (PlaceRange(0, 9),))
    assert places.update([(7 * KB - 1, 10 * KB)], [], 2, 0) == ((PlaceRange(6, 9),), ())
    ban, allow = places.update([(9 * KB, 10 * KB)], [(8 * KB, 8 * KB + 1)], 3, 1)
    assert (ban, allow) == ((), (PlaceRange(6, 8),)), "place 8 is still read by step 3"
    assert (places.num_usable, places.num_draining) == (8, 1)
    assert places.update([(9 * KB, 10 * KB)], [], 4, 2) == ((), ())
    assert places.update([(9 * KB, 10 * KB)], [], 5, 3) == ((), (PlaceRange(8, 9),))


def test_a_draining_place_that_is_covered_again_is_not_banned_twice() -> None:
    places = ExpertPlaces(4 * KB, KB)
    places.update([(2 * KB, 4 * KB)], [], 1, 0)
    assert places.update([(3 * KB, 4 * KB)], [(2 * KB, 3 * KB)], 2, 0) == ((), ())
    assert places.update([(2 * KB, 4 * KB)], [], 3, 0) == ((), ())
    assert places.num_draining == 0


def test_a_page_moved_between_steps_and_released_waits_for_the_step_that_carries_its_move() -> None:
    """A checkpoint outside an open step makes room by moves; the page it moved ends before the next step."""
    arena = 12 * STATE.page_bytes
    world = World(small_ledger([FULL, STATE], arena, cached=True), arena)
    ledger = world.ledger
    (first,) = world.plan({}, [([1] * 64, 64)])
    numbers = world.plan({}, [([n, n], 2) for n in range(2, 8)])
    world.finish_all()
    while True:
        more = world.plan({}, [([9] * 16, 16)])
        world.finish_all()
        if not more:
            break
    for number in numbers[::2]:
        world.release(number, donate=False)
    book = ledger._book
    states = book.pools[0]
    victim = ledger.pages(numbers[-1], "state").pages[0]
    book.relocator.vacate(0, True, states.grid.address(2), 0)
    assert book.relocator.moved(0, victim)
    world.release(numbers[-1], donate=False)
    assert states.num_pending == 1
    ledger.begin_step(world.step + 5, world.step + 4 - 4)
    ledger.audit()
    assert first in world.running


def test_a_float_gives_way_to_every_grant_of_a_step() -> None:
    """Requests are admitted one by one: each state pushes the window's pages on, and some of them more than once."""
    specs = [FULL, STATE, window_spec(16, 24)]
    arena = 120 * STATE.page_bytes
    world = World(small_ledger(specs, arena), arena)
    ledger = world.ledger
    world.plan({}, [([n, n], 2) for n in range(24)])
    world.finish_all()
    float_at = next(band for band in ledger.report()["bands"] if band["anchor"] == "float")["low_byte"]
    states = int(float_at) // STATE.page_bytes
    asked = [([n, n], 2) for n in range(24, states + 16)]
    assert len(world.plan({}, asked)) == len(asked), "there are bytes for all of them"
    world.finish_all()
    ledger.audit()


def test_a_float_that_cuts_the_gap_leaves_the_floor_whole() -> None:
    """Beginning in the middle of the gap costs the place that it cuts as well."""
    arena = 40 * KB
    for floor_places, fits in ((20, False), (19, True)):
        layout = Layout(arrange(mixed_specs(3, 16, 40), arena), arena, 2 * KB, floor_places)
        window = layout.pools[1]
        assert layout.grow(1, 1) is fits
        assert window.low_byte % (2 * KB), "the hint lies inside a place"
        assert layout.usable_places() == floor_places
