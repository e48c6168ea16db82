"""Fixed walks through every act of the ledger against the pretended device: quick, and the same each time."""

from __future__ import annotations

import random

import pytest

from memory.api import PageAsk, PlaceRange
from memory.ledger.specs import attention_spec
from tests.memory.geometries import (
    full_spec,
    latent_specs,
    mixed_specs,
    small_ledger,
    small_state_spec,
    window_spec,
)
from tests.memory.world import World


def _walk(seed: int, world: World, num_acts: int) -> dict[str, int]:
    """Random acts; answers how often the rare things happened."""
    dice = random.Random(seed)
    ledger, base = world.ledger, [token % 3 for token in range(400)]
    rings: list[PlaceRange] = []
    seen = dict.fromkeys(("urgent", "beside", "copies", "back", "allow"), 0)
    for _ in range(num_acts):
        act = dice.random()
        numbers = list(world.running)
        if act < 0.6:
            while len(world.device.queue) >= dice.choice([1, 2, 2]):
                world.finish_step()
            tokens = base[: dice.choice([0, 64, 128, 256])] + [dice.randrange(3, 6)] * dice.randrange(2, 200)
            admit = [(tokens, dice.choice([64, 64, 16]))] if dice.random() < 0.7 else []
            world.plan(
                {number: dice.choice([1, 1, 64]) for number in numbers},
                [entry for entry in admit if ledger.can_ever_grant(len(entry[0])) is None],
            )
            commands = world.device.queue[-1].commands
            seen["urgent"] += sum(not move.sealed for move in commands.moves)
            seen["beside"] += sum(move.sealed for move in commands.moves)
            seen["copies"] += sum(not (copy.to_host or copy.from_host) for copy in commands.copies)
            seen["back"] += sum(copy.from_host for copy in commands.copies)
            seen["allow"] += len(commands.allow)
        elif act < 0.72 and numbers:
            world.release(dice.choice(numbers), donate=dice.random() < 0.6)
        elif act < 0.82 and numbers:
            for number in numbers:
                request = world.running[number]
                ledger.checkpoint(number, request.tokens, request.num_computed, rolling=number % 2 == 0)
        elif act < 0.86 and numbers:
            world.pin(dice.choice(numbers))
        elif act < 0.92 and world.pins:
            world.unpin(dice.choice(world.pins))
        elif act < 0.95:
            ring = ledger.take_ring(dice.randrange(1, 5))
            rings += [ring] if ring else []
        elif rings:
            ledger.return_ring(rings.pop())
        world.check()
    world.finish_all()
    return seen


@pytest.mark.parametrize("num_kinds", [2, 3, 4])
def test_no_byte_is_ever_wrong_on_long_walks(num_kinds: int) -> None:
    seen = dict.fromkeys(("urgent", "beside", "copies", "back", "allow"), 0)
    for seed in range(5):
        page_tokens = [16, 64, 1, 128, 16][seed]
        arena_bytes = 1024 * [96, 200, 64, 300, 48][seed]
        specs = mixed_specs(num_kinds, page_tokens, [40, 130, 5, 200, 17][seed])
        ledger = small_ledger(
            specs,
            arena_bytes,
            place_bytes=512,
            floor_places=3,
            cached=seed != 1,
            host_bytes=20_000 * (seed % 2 == 0),
        )
        dice = random.Random(seed)
        world = World(ledger, arena_bytes, 512, lambda dice=dice: dice.random() < 0.5)
        for name, count in _walk(seed, world, 150).items():
            seen[name] = seen.get(name, 0) + count
    assert min(seen[name] for name in ("urgent", "beside", "copies", "back", "allow")) > 0, (
        f"the walks are too tame: {seen}"
    )


def test_no_byte_is_wrong_with_latents_and_states() -> None:
    specs = latent_specs(64)
    ledger = small_ledger(specs, 192 * 1024, place_bytes=512, cached=True)
    dice = random.Random(3)
    _walk(3, World(ledger, 192 * 1024, 512, lambda: dice.random() < 0.5), 200)


def test_no_byte_is_wrong_with_fixed_shares() -> None:
    specs = mixed_specs(3, 16, 40)
    ledger = small_ledger(specs, 96 * 1024, place_bytes=512, floor_places=4, mode="split", cached=True)
    seen = _walk(5, World(ledger, 96 * 1024, 512), 200)
    assert seen["urgent"] == seen["beside"] == 0, "fixed shares do not move pages"


def test_no_pinned_page_flips() -> None:
    """A copy is under way when a transfer pins the page; the transfer reads on while the copy ends."""
    arena_bytes = 64 * 1024
    ledger = small_ledger([full_spec(16)], arena_bytes, place_bytes=1024, move_budget_bytes=arena_bytes)
    world = World(ledger, arena_bytes, 1024)
    numbers = world.plan({}, [([n] * 40, 16) for n in range(100)])
    world.finish_all()
    world.plan(dict.fromkeys(numbers, 4))
    world.finish_all()
    for number in numbers[:80]:
        world.release(number, donate=False)
    world.plan({})
    copied = {move.virtual for move in world.device.queue[-1].commands.moves if move.sealed}
    pinned = [number for number in world.running if copied & set(ledger.pages(number, "full").pages)]
    assert pinned
    for number in pinned:
        world.pin(number)
    world.plan({})
    for _ in range(3):
        world.finish_step()
        world.plan({})
    world.finish_all()
    world.check()


def test_a_page_is_not_copied_before_its_last_writer_is_done() -> None:
    """The step that fills the page is in flight: it may move between steps, not beside that one."""
    ledger = small_ledger([full_spec(16)], 64 * 1024, place_bytes=1024, move_budget_bytes=0)
    ledger.begin_step(1, 0)
    for request in range(40):
        ledger.grant(PageAsk(request, 16))
    ledger.commit_step(1)
    ledger.begin_step(2, 1)
    for request in range(30):
        ledger.release(request)
    ledger.commit_step(2)
    ledger.begin_step(3, 1)
    for request in range(30, 40):
        ledger.grant(PageAsk(request, 16, 16))
    ledger._book.relocator.move_budget_bytes = 1 << 20
    moves = ledger.commit_step(3).moves
    assert len(moves) == 10
    assert not any(move.sealed for move in moves)


ODD_MODELS = {
    "states only": [small_state_spec()],
    "windows only": [window_spec(16, 40)],
    "full only": [full_spec(1)],
    "two full groups": [full_spec(16), attention_spec("other", [9], 2, 8, "float16", 32)],
    "two windows and full": [full_spec(64), window_spec(16, 40), window_spec(4, 100, "window2")],
    "windows and states": [window_spec(16, 40), small_state_spec()],
}


@pytest.mark.parametrize("name", ODD_MODELS)
def test_no_byte_is_wrong_in_odd_models(name: str) -> None:
    for seed, cached in ((1, False), (2, True)):
        ledger = small_ledger(
            ODD_MODELS[name],
            80 * 1024,
            place_bytes=512,
            floor_places=2,
            cached=cached,
            host_bytes=20_000 * cached,
        )
        dice = random.Random(seed)
        _walk(seed, World(ledger, 80 * 1024, 512, lambda dice=dice: dice.random() < 0.5), 120)
