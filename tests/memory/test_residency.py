"""The device's residency tables: invariants over random steps, commands, the frozen set, the check against hashes."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.hashing import hash_blocks
from memory.api import PlaceRange
from memory.device.commands import MAX_RANGES, encode_places
from memory.device.place_cap import PlaceCap
from memory.device.residency import BANNED, FREE, Lane, Residency, ResidencyRules
from memory.device.residency_check import ResidencyCheck

ROWS, EXPERTS, PER_TOKEN, PLACES, BLOCK = 3, 8, 2, 10, 256


class World:
    """Blocks on the host and places in an arena; carries out what the tables decide, byte for byte."""

    def __init__(self, policy: str = "lru", places: int = PLACES, allow: int | None = None) -> None:
        torch.manual_seed(0)
        self.host = torch.randint(0, 256, (ROWS, EXPERTS, BLOCK), dtype=torch.uint8)
        self.grid = torch.zeros(places, BLOCK, dtype=torch.uint8)
        addresses = torch.tensor([[self.host[r, e].data_ptr() for e in range(EXPERTS)] for r in range(ROWS)])
        self.residency = Residency(
            addresses, self.grid.data_ptr(), BLOCK, places, ResidencyRules(policy, queue_places=places)
        )
        self.check = ResidencyCheck(self.residency, self.grid, hash_blocks(self.host), [BLOCK] * ROWS, places)
        self.step_number = 0
        self.say(allow=[PlaceRange(0, places if allow is None else allow)])

    def say(self, ban: list[PlaceRange] | None = None, allow: list[PlaceRange] | None = None) -> None:
        for block in encode_places(ban or [], allow or []):
            self.residency.apply(block)

    def place_at(self, address: int) -> int:
        return (address - self.grid.data_ptr()) // BLOCK

    def layer(self, row: int, experts: list[list[int]]) -> torch.Tensor:
        """One layer, the layer before it published on the way; asserts the invariants where the bytes would move.
        Answers where blocks were stored."""
        residency, before = self.residency, self.residency.owner.clone()
        stamps = residency.stamp.clone()
        tee = residency.decide(row, torch.tensor(experts), row - 1)
        read = {e: int(residency.address[row, e]) for token in experts for e in token if e >= 0}
        for expert in tee.nonzero().flatten().tolist():
            target = int(tee[expert])
            place = self.place_at(target)
            assert int(before[place]) != BANNED
            assert int(before[place]) // EXPERTS != row or int(before[place]) == FREE, "the layer's own place"
            assert int(stamps[place]) < self.step_number, "a place stamped in this step"
            assert not bool((residency.address == target).any()), (
                "an address still points at a place being written"
            )
            self.grid[place] = self.host[row, expert]
        for expert, address in read.items():
            on_host = address == self.host[row, expert].data_ptr()
            source = self.host[row, expert] if on_host else self.grid[self.place_at(address)]
            assert torch.equal(source, self.host[row, expert]), "a token would read another expert's bytes"
        return tee

    def step(self, experts: list[list[list[int]]], stamping: int = 1 << 20) -> None:
        self.step_number += 1
        self.residency.begin_step(self.step_number, stamping)
        for row, chosen in enumerate(experts):
            self.layer(row, chosen)
        self.residency.publish(len(experts) - 1)
        assert self.residency.audit() == []
        self.check.step()
        assert int(self.check.found[0]) == 0

    def count(self, lane: Lane) -> int:
        return int(self.residency.counts[lane].sum())


def random_step(rng: random.Random, tokens: int, experts: int = EXPERTS) -> list[list[list[int]]]:
    return [[rng.sample(range(experts), PER_TOKEN) for _ in range(tokens)] for _ in range(ROWS)]


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("seed", range(3))
def test_the_invariants_hold_over_random_steps_with_bans(policy: str, seed: int) -> None:
    rng, world = random.Random(seed), World(policy)
    banned = PlaceRange(0, 0)
    for _ in range(60):
        if rng.random() < 0.3:
            first = rng.randrange(PLACES)
            fresh = PlaceRange(first, rng.randrange(first, PLACES + 1))
            world.say(allow=[banned])
            world.say(ban=[fresh])
            world.grid[fresh.first : fresh.last] = 0xEE  # a band writes there
            banned = fresh
        tokens = rng.choice([1, 2, 4])
        world.step(random_step(rng, tokens), rng.randint(0, tokens) if rng.random() < 0.4 else tokens)
        assert bool((world.residency.owner[banned.first : banned.last] == BANNED).all())
    assert world.count(Lane.HIT) > 0
    assert world.count(Lane.TEE) > 0
    assert world.count(Lane.IN_PLACE) > 0
    assert world.count(Lane.EVICTED) > 0


def test_lru_keeps_the_latest_and_counts_lanes() -> None:
    world = World("lru", places=2)
    world.step([[[0, 1]], [[-1, -1]], [[-1, -1]]])
    assert (world.count(Lane.HIT), world.count(Lane.TEE)) == (0, 2)
    world.step([[[-1, -1]], [[3, 4]], [[-1, -1]]])
    assert world.residency.resident[0].sum() == 0, "the older layer's experts gave way"
    assert world.residency.resident[1].nonzero().flatten().tolist() == [3, 4]
    world.step([[[-1, -1]], [[3, 4]], [[-1, -1]]])
    assert (world.count(Lane.HIT), world.count(Lane.EVICTED)) == (2, 2)
    assert world.residency.generation.tolist() == [2, 2]


def test_prefill_and_padding_rows_leave_no_trace() -> None:
    world = World()
    world.step([[[0, 1]], [[2, 3]], [[4, 5]]])
    stamps, owners = world.residency.stamp.clone(), world.residency.owner.clone()
    world.step([[[0, 7], [-1, -1]], [[6, 7], [-1, -1]], [[1, 2], [-1, -1]]], 0)
    assert torch.equal(world.residency.stamp, stamps)
    assert torch.equal(world.residency.owner, owners)
    assert (world.count(Lane.PREFILL_HIT), world.count(Lane.PREFILL_IN_PLACE)) == (1, 5)
    assert (world.count(Lane.HIT), world.count(Lane.TEE), world.count(Lane.IN_PLACE)) == (0, 6, 0)


def test_a_step_that_needs_more_than_the_places_freezes_the_set_until_it_shrinks() -> None:
    world = World("lru")
    whole, nothing = [[e, e + 1] for e in range(0, EXPERTS, 2)], [[-1, -1]] * 4
    scans = [[whole, whole, nothing], [nothing, whole, whole]]  # 16 experts a step over 10 places
    for scan in scans:
        world.step(scan)
    held, evicted = world.residency.owner.clone(), world.count(Lane.EVICTED)
    assert bool(world.residency.frozen)
    for _ in range(3):
        for scan in scans:
            world.step(scan)
    assert torch.equal(world.residency.owner, held), "a scan flushed the frozen set"
    assert world.count(Lane.EVICTED) == evicted
    hits = world.count(Lane.HIT)
    world.step(scans[0])
    assert world.count(Lane.HIT) == hits + 10
    # Back below three quarters of the places: thawed at the next step's start.
    for _ in range(2):
        world.step([[[-1, -1]], [[-1, -1]], [[6, 7]]])
    assert not bool(world.residency.frozen)
    assert world.residency.resident[2, 6:].all()


def test_lfru_does_not_give_a_favourite_for_a_passer_by() -> None:
    world = World("lfru", places=2)
    for _ in range(5):
        world.step([[[0, 1]], [[-1, -1]], [[-1, -1]]])
    world.step([[[-1, -1]], [[5, 6]], [[-1, -1]]])
    assert world.residency.resident[0, :2].all()
    assert world.count(Lane.IN_PLACE) == 2
    for _ in range(12):
        world.step([[[-1, -1]], [[5, 6]], [[-1, -1]]])
    assert world.residency.resident[1, 5:7].all(), "what is used now must win in the end"


def test_banned_places_lose_their_owners_and_allowed_ones_are_free() -> None:
    world = World(places=4)
    world.step([[[0, 1], [2, 3]], [[-1, -1]] * 2, [[-1, -1]] * 2])
    world.say(ban=[PlaceRange(1, 3)])
    assert world.residency.owner[1:3].tolist() == [BANNED, BANNED]
    assert world.residency.resident[0].sum() == 2
    assert world.residency.audit() == []
    world.say(allow=[PlaceRange(2, 3), PlaceRange(0, 1)])
    assert world.residency.owner[2] == FREE
    assert world.residency.owner[0] >= 0, "allowing a place in use must not clear it"


def test_more_ranges_than_one_block_holds() -> None:
    count = 2 * MAX_RANGES + 3
    world = World(places=2 * count, allow=0)
    world.say(allow=[PlaceRange(2 * n, 2 * n + 1) for n in range(count)])
    assert world.residency.owner.tolist() == [FREE, BANNED] * count


def test_a_changed_byte_in_a_place_is_found_and_named() -> None:
    world = World(places=6)
    world.step([[[0, 1]], [[2, 3]], [[4, 7]]])
    place = int((world.residency.owner == 2 * EXPERTS + 7).nonzero())
    world.grid[place, 77] ^= 1
    before = world.check.num_checked
    world.check.step()
    assert world.check.num_checked == before + 6
    assert world.check.found.tolist() == [1, 2, 7]


def test_two_blocks_in_each_others_places_are_found() -> None:
    world = World(places=6)
    world.step([[[0, 1]], [[2, 3]], [[4, 7]]])
    first, second = (int((world.residency.owner == flat).nonzero()) for flat in (0, 1))
    world.grid[[first, second]] = world.grid[[second, first]]
    world.check.step()
    assert world.check.found.tolist() in ([2, 0, 0], [2, 0, 1])


def test_audit_names_a_stale_place() -> None:
    world = World(places=4)
    world.step([[[0, 1]], [[-1, -1]], [[-1, -1]]])
    world.residency.owner[int((world.residency.owner == 1).nonzero())] = 9
    assert any("expert 1" in problem for problem in world.residency.audit())


def test_the_hash_sees_a_word_that_changed_or_moved() -> None:
    block = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([block[8:16], block[:8], block[16:]])
    changed = block.clone()
    changed[63] ^= 128
    assert len({int(hash_blocks(b)) for b in (block, swapped, changed)}) == 3
    assert torch.equal(hash_blocks(torch.stack([block, changed]))[0], hash_blocks(block))


def test_a_cap_keeps_so_many_places_in_use_from_the_middle_of_what_is_allowed() -> None:
    cap = PlaceCap(3)
    assert cap.update([], [PlaceRange(2, 9)]) == ((), (PlaceRange(4, 7),))
    assert cap.update([PlaceRange(0, 3)], []) == ((), ())
    assert cap.update([PlaceRange(5, 6)], []) == ((PlaceRange(5, 6),), (PlaceRange(7, 8),))
    assert cap.update([], [PlaceRange(5, 6)]) == ((), ())
    assert cap.update([PlaceRange(5, 9)], []) == ((PlaceRange(6, 8),), (PlaceRange(3, 4),))
    assert cap.num_places == 2
    free = PlaceCap(None)
    assert free.update([], [PlaceRange(1, 4)]) == ((), (PlaceRange(1, 4),))
    assert free.num_places == 3


def test_a_cap_that_is_lowered_bans_what_lies_outside_the_middle_and_is_never_raised() -> None:
    cap = PlaceCap(None)
    cap.update([], [PlaceRange(0, 10)])
    cap.lower(4)
    assert cap.update([], []) == ((PlaceRange(0, 3), PlaceRange(7, 10)), ())
    cap.lower(6)
    assert cap.update([], []) == ((), ())
    assert cap.num_places == 4
