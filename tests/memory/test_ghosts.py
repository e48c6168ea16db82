"""Ghosts: who lost a place lately, and what their misses say about the worth of a few more places."""

from __future__ import annotations

import random

import pytest
import torch

from memory.api import PlaceRange
from memory.device.commands import encode_places
from memory.device.ghosts import Ghosts
from memory.device.residency import Lane, Residency, ResidencyRules
from memory.device.residency_rules import GHOST_SHIFT

ROWS, EXPERTS, PER_TOKEN = 4, 64, 4


def test_the_last_losses_are_remembered_and_counted_when_wanted() -> None:
    rng = random.Random(3)
    ghosts, hits = Ghosts(2, 8, torch.device("cpu")), 0
    lost: list[tuple[int, int]] = []
    before: set[tuple[int, int]] = set()
    every = [(row, expert) for row in range(2) for expert in range(8)]
    known: set[tuple[int, int]] = set()
    for step in range(200):
        wanted = set(rng.sample(every, 4))
        resident = before - set(rng.sample(every, 3)) | set(rng.sample(every, 2))
        remembered = 2 + step // 50
        hits += len(wanted & known)
        lost.extend(sorted(before - resident))
        known = set(lost[-remembered:]) - resident
        before = resident
        ghosts.step(mask(wanted), mask(resident), torch.tensor(remembered - 1))
        assert (int(ghosts.hits.sum()), int(ghosts.num)) == (hits, len(known))
    assert hits > 20


def mask(pairs: set[tuple[int, int]]) -> torch.Tensor:
    found = torch.zeros(2, 8, dtype=torch.bool)
    for row, expert in pairs:
        found[row, expert] = True
    return found


def residency(places: int, policy: str) -> Residency:
    """Tables over addresses that nobody reads."""
    host = torch.arange(ROWS * EXPERTS).view(ROWS, EXPERTS) * 128 + (1 << 40)
    found = Residency(host, 1 << 20, 128, places, ResidencyRules(policy))
    for block in encode_places([], [PlaceRange(0, places)]):
        found.apply(block)
    return found


def skewed(num_steps: int) -> list[torch.Tensor]:
    """[ROWS, PER_TOKEN] per step: experts by a power law of their rank, another ranking in each layer."""
    generator = torch.Generator().manual_seed(0)
    share = torch.arange(1.0, EXPERTS + 1) ** -0.9
    ranked = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(ROWS)])
    steps = []
    for _ in range(num_steps):
        drawn = torch.multinomial(share.expand(ROWS, -1), PER_TOKEN, generator=generator)
        steps.append(ranked.gather(1, drawn))
    return steps


def misses(tables: Residency, steps: list[torch.Tensor], first: int = 0) -> int:
    """Decode misses of the steps; numbers go on from ``first``."""
    before = tables.counts[[Lane.TEE, Lane.IN_PLACE]].sum()
    for number, step in enumerate(steps, start=first + 1):
        tables.begin_step(number, 1)
        for row in range(ROWS):
            tables.decide(row, step[row : row + 1])
            tables.publish(row)
    return int(tables.counts[[Lane.TEE, Lane.IN_PLACE]].sum() - before)


@pytest.mark.parametrize(("policy", "low", "high"), [("lru", 0.9, 1.1), ("lfru", 0.7, 1.3)])
def test_ghosts_tell_what_more_places_would_save(policy: str, low: float, high: float) -> None:
    """Under LRU what a larger set holds beyond a smaller one are the last losses (but for a layer's own places, which
    it never takes), so there the count is nearly exact."""
    places, warm = 64, 100
    more = (places >> GHOST_SHIFT) + 1
    steps = skewed(400)
    fewer, larger = residency(places, policy), residency(places + more, policy)
    for tables in (fewer, larger):
        misses(tables, steps[:warm])
    before = int(fewer.ghosts.hits.sum())
    saved = misses(fewer, steps[warm:], warm) - misses(larger, steps[warm:], warm)
    hits = int(fewer.ghosts.hits.sum()) - before
    assert saved > 80
    assert 0 < int(fewer.ghosts.num) <= more
    assert low <= hits / saved <= high


def test_a_ban_makes_ghosts_and_a_place_ends_them() -> None:
    tables = residency(16, "lru")
    step = [torch.arange(4).expand(ROWS, 4)]
    misses(tables, step)
    tables.begin_step(2, 1)
    assert int(tables.ghosts.num) == 0
    for block in encode_places([PlaceRange(0, 14)], []):
        tables.apply(block)
    tables.begin_step(3, 1)
    assert int(tables.ghosts.num) == 1, "two usable places: one loss is remembered"
    for block in encode_places([], [PlaceRange(0, 14)]):
        tables.apply(block)
    tables.begin_step(4, 1)
    assert int(tables.ghosts.num) == 3, "sixteen usable places: the three last losses are"
    misses(tables, step, 4)
    tables.begin_step(6, 1)
    assert int(tables.ghosts.num) == 0
    assert int(tables.ghosts.hits.sum()) == 3


def test_prefill_neither_hits_ghosts_nor_makes_them() -> None:
    tables = residency(16, "lru")
    step = torch.arange(4).expand(ROWS, 4)
    misses(tables, [step])
    for block in encode_places([PlaceRange(0, 16)], []):
        tables.apply(block)
    for block in encode_places([], [PlaceRange(0, 16)]):
        tables.apply(block)
    for number in (2, 3, 4):
        tables.begin_step(number, 0)
        for row in range(ROWS):
            tables.decide(row, step[row : row + 1])
            tables.publish(row)
    assert int(tables.ghosts.hits.sum()) == 0
    assert int(tables.counts[Lane.PREFILL_IN_PLACE].sum()) == 3 * ROWS * 4
