"""The checkpoint of a growing output: it moves along, nothing piles up, and only the last one goes to the host."""

from __future__ import annotations

import pytest

from memory.ledger.ledger import ArenaLedger
from tests.memory.geometries import mixed_specs, small_ledger, tree_for
from tests.memory.world import World

ARENA_BYTES = 1 << 17
SPECS = mixed_specs(3, 16, 40)
TOKENS = list(range(400))


def held(ledger: ArenaLedger, group: str = "state") -> int:
    """Pages of a group that the tree holds."""
    return ledger.report()["tree"]["held_bytes"][group] // ledger.specs[group].page_bytes


def grow(world: World, number: int, num_tokens: int, rolling: bool) -> None:
    """Computes a request's tokens in steps of 64, and offers it at each."""
    while world.running[number].num_computed < num_tokens:
        world.plan({number: 64})
        world.finish_all()
        computed = world.running[number].num_computed
        assert world.ledger.checkpoint(number, TOKENS, computed, rolling=rolling)
        world.check()
    world.plan({})
    world.finish_all()


@pytest.fixture
def world() -> World:
    return World(small_ledger(SPECS, ARENA_BYTES, cached=True, host_bytes=1 << 16), ARENA_BYTES)


def test_a_rolling_checkpoint_takes_the_place_of_the_last(world: World) -> None:
    [number] = world.plan({}, [(TOKENS, 64)])
    world.finish_all()
    assert world.ledger.checkpoint(number, TOKENS, 64)
    grow(world, number, 320, rolling=True)
    assert held(world.ledger) == 2, "the prompt's and the output's last"
    for num_tokens, expected in ((64, 64), (128, 64), (319, 64), (320, 320), (399, 320)):
        assert world.ledger.match(TOKENS[: num_tokens + 1]).num_tokens == expected


def test_one_that_others_went_on_from_stays(world: World) -> None:
    [number] = world.plan({}, [(TOKENS, 64)])
    world.finish_all()
    grow(world, number, 192, rolling=True)
    [other] = world.plan({}, [([*TOKENS[:192], 7, 8], 8)])
    world.finish_all()
    assert world.running[other].num_done == 192
    grow(world, number, 320, rolling=True)
    assert world.ledger.match(TOKENS[:193]).num_tokens == 192
    world.release(other, donate=False)
    world.check()


def test_only_the_last_one_goes_to_the_host(world: World) -> None:
    [number] = world.plan({}, [(TOKENS, 64)])
    world.finish_all()
    grow(world, number, 320, rolling=True)
    there = world.ledger.report()["host_tier"]["pages"]
    assert there["state"] == there["window"] == 0
    assert there["full"] == 320 // 16, "pages of tokens do not change any more"
    world.release(number, donate=False)
    world.plan({})
    world.finish_all()
    assert world.ledger.report()["host_tier"]["pages"]["state"] == 1
    world.ledger.shed({spec.name: 1 << 40 for spec in SPECS})
    assert held(world.ledger) == 0
    [again] = world.plan({}, [(TOKENS[:330], 16)])
    world.finish_all()
    assert world.running[again].num_done == 320, "the prefix did not come back"
    world.check()


def test_a_superseded_bundle_leaves_its_price_to_the_next() -> None:
    """The one further on spares all the way back to the bundle before, not just to the one whose place it took."""
    tree = tree_for(mixed_specs(2, 64, 40))

    def insert(num_tokens: int) -> int:
        offer = {"full": (0, tuple(range(num_tokens // 64))), "state": (0, (num_tokens,))}
        return tree.insert(TOKENS, num_tokens, "", offer).node

    first, middle = insert(64), insert(128)
    last = insert(192)
    assert tree.supersede(last, by=last).pages == {}
    tree.lock(middle)
    assert tree.supersede(middle, by=last).pages == {}, "somebody goes on from it"
    tree.unlock(middle)
    assert tree.supersede(middle, by=last).pages == {}, "somebody went on from it"
    assert tree.supersede(first, by=last).pages == {"state": (64,)}
    tree.audit()
    longer = insert(256)
    assert tree.supersede(last, by=longer).pages == {"state": (192,)}
    tree.audit()
    assert [tree.match(TOKENS[:n]).num_tokens for n in (64, 128, 192, 256)] == [0, 128, 128, 256]
    node = tree._nodes[longer]
    assert node.bundle is not None
    assert node.bundle.base_tokens == 128
