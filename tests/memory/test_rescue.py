"""What a ban drops is carried over to colder places: hottest first, within the budget, bytes and tables at once."""

from __future__ import annotations

import random

import pytest
import torch

from memory.api import PlaceRange
from memory.device.commands import encode_places
from memory.device.rescue import Rescuer
from memory.device.residency import BANNED, FREE, Lane
from tests.memory.test_residency import BLOCK, EXPERTS, PLACES, ROWS, World, random_step

NOBODY: list[list[int]] = [[-1, -1]]


def world_with(policy: str = "lfru", places: int = PLACES, budget: int = PLACES) -> tuple[World, Rescuer]:
    world = World(policy, places)
    return world, Rescuer(world.residency, world.grid, budget * BLOCK)


def ban(world: World, rescuer: Rescuer, *ranges: PlaceRange, allow: tuple[PlaceRange, ...] = ()) -> None:
    """Bans, rescues, and then writes what a band would write."""
    rescuer.apply(encode_places(ranges, allow))
    for entry in ranges:
        world.grid[entry.first : entry.last] = 0xEE


def place_of(world: World, row: int, expert: int) -> int | None:
    address = int(world.residency.address[row, expert])
    return None if address == world.host[row, expert].data_ptr() else world.place_at(address)


def test_the_hottest_go_over_the_coldest() -> None:
    world, rescuer = world_with(places=4)
    world.step([[[0, 1]], [[2, 3]], NOBODY])
    for _ in range(3):
        world.step([[[0, 0]], [[2, 2]], NOBODY])
    world.step([NOBODY, NOBODY, [[-1, -1]]])
    hot, cold = {(0, 0), (1, 2)}, {(0, 1), (1, 3)}
    gone = [place_of(world, 0, 0), place_of(world, 0, 1)]
    assert None not in gone
    ban(world, rescuer, *(PlaceRange(p, p + 1) for p in gone if p is not None))
    assert {key for key in hot | cold if place_of(world, *key) is not None} == hot
    assert world.residency.counts[Lane.RESCUED].tolist() == [1, 0, 0]
    assert world.residency.audit() == []
    world.check.check(torch.arange(4))
    assert int(world.check.found[0]) == 0, "the rescued bytes are another's"
    world.step([[[0, 0]], [[2, 2]], NOBODY])
    assert world.count(Lane.TEE) == 4, "what was rescued is hit again"


def test_the_budget_bounds_the_copies() -> None:
    for budget in (0, 1, 3):
        world, rescuer = world_with(places=12, budget=budget)
        world.step([[[0, 1], [2, 3]], [[4, 5]], NOBODY])
        world.step([NOBODY, NOBODY, NOBODY])
        held = world.residency.owner >= 0
        ban(world, rescuer, PlaceRange(0, 6))
        assert world.count(Lane.RESCUED) == min(budget, int(held[:6].sum()))
        assert int(world.residency.resident.sum()) == int(held[6:].sum()) + world.count(Lane.RESCUED)


def test_nothing_is_put_over_what_the_last_step_used() -> None:
    """Hot experts in banned places, and in the others colder ones that the last step used: those stay."""
    world, rescuer = world_with(places=4)
    for _ in range(4):
        world.step([[[0, 1]], NOBODY, NOBODY])
    hot = [place_of(world, 0, 0), place_of(world, 0, 1)]
    world.step([NOBODY, [[4, 5]], NOBODY])
    used = [place_of(world, 1, 4), place_of(world, 1, 5)]
    assert None not in used
    assert None not in hot
    ban(world, rescuer, *(PlaceRange(p, p + 1) for p in hot if p is not None))
    assert [place_of(world, 1, 4), place_of(world, 1, 5)] == used
    assert world.count(Lane.RESCUED) == 0


def test_places_allowed_in_the_same_step_take_the_rescued() -> None:
    world, rescuer = world_with(places=6)
    world.say(ban=[PlaceRange(3, 6)])
    world.step([[[0, 1]], [[2, 2]], NOBODY])
    world.step([NOBODY, NOBODY, NOBODY])
    ban(world, rescuer, PlaceRange(0, 3), allow=(PlaceRange(3, 6),))
    assert bool((world.residency.owner[:3] == BANNED).all())
    assert bool((world.residency.owner[3:] >= 0).all())
    assert world.residency.audit() == []
    world.check.check(torch.arange(6))
    assert int(world.check.found[0]) == 0


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("seed", range(3))
def test_the_invariants_hold_over_random_steps_with_rescues(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    world, rescuer = world_with(policy, places=16, budget=3)
    banned = PlaceRange(0, 0)
    for _ in range(80):
        if rng.random() < 0.4:
            first = rng.randrange(16)
            fresh = PlaceRange(first, rng.randrange(first, 17))
            old = [p for p in range(banned.first, banned.last) if not fresh.first <= p < fresh.last]
            allow = tuple(PlaceRange(p, p + 1) for p in old)
            now = tuple(
                PlaceRange(p, p + 1)
                for p in range(fresh.first, fresh.last)
                if not banned.first <= p < banned.last
            )
            ban(world, rescuer, *now, allow=allow)
            world.check.check(torch.arange(16))
            assert int(world.check.found[0]) == 0
            banned = fresh
        tokens = rng.choice([1, 2, 4])
        world.step(random_step(rng, tokens), rng.randint(0, tokens) if rng.random() < 0.4 else tokens)
        owner = world.residency.owner
        assert bool((owner[banned.first : banned.last] == BANNED).all())
        assert int(((owner >= FREE) & (owner < ROWS * EXPERTS)).sum()) == 16 - (banned.last - banned.first)
    assert world.count(Lane.RESCUED) > 0
