"""The replay of expert policies: Belady is the best, the generator gives the published curve, the device agrees."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from benchmarks.expert_replay import Trace, rows_of
from benchmarks.routing_traces import PUBLISHED, RoutingModel, Steps, generate, layer_lru_hits, recorded
from memory.api import PlaceRange
from memory.device.commands import encode_places
from memory.device.residency import Residency, ResidencyRules
from worker.experts.policies import (
    Frozen,
    Lfru,
    Lru,
    Policy,
    Pool,
    Successor,
    belady_hits,
    foresight_hits,
)

SMALL = RoutingModel(num_layers=3, num_experts=16, per_token=2)


def random_steps(seed: int, num: int, layers: int = 3, experts: int = 8) -> Steps:
    rng = random.Random(seed)
    return [
        [
            np.array(sorted(layer * experts + e for e in rng.sample(range(experts), rng.randint(1, 3))))
            for layer in range(layers)
        ]
        for _ in range(num)
    ]


def test_the_generator_gives_the_published_curve() -> None:
    steps = generate(RoutingModel(num_layers=2), (0,), 500, seed=0)
    for capacity, wanted in PUBLISHED.items():
        assert abs(layer_lru_hits(steps, capacity) - wanted) < 0.035, f"K={capacity}"


def test_streams_of_one_domain_share_experts() -> None:
    one, same, apart = (
        np.mean([len(k) for step in generate(RoutingModel(num_layers=1), d, 60, 0) for k in step])
        for d in ((0,), (0, 0, 0, 0), (0, 1, 2, 3))
    )
    assert one == 8
    assert one < same < apart < 32


@pytest.mark.parametrize(("policy", "ranked"), [("lru", True), ("lfru", True), ("lfru", False)])
@pytest.mark.parametrize("places", [3, 10])
def test_the_device_does_what_the_policy_says(policy: str, ranked: bool, places: int) -> None:
    """Same hits and same resident experts, step by step, with freezing."""
    pool = Pool(places, 3, 8)
    pure = (Lru if policy == "lru" else Lfru)(pool, ranked=ranked)
    host = torch.arange(1, 25).view(3, 8) * 128 + (1 << 30)
    device = Residency(host, 1 << 20, 128, places, ResidencyRules(policy, places, ranked=ranked))
    for block in encode_places([], [PlaceRange(0, places)]):
        device.apply(block)
    seen = 0
    frozen = set()
    for number, layers in enumerate(random_steps(places, 120)):
        device.begin_step(number + 1, 1)
        for row, keys in enumerate(layers):
            chosen = torch.from_numpy(keys % 8).unsqueeze(0)
            device.decide(row, chosen)
            device.publish(row)
        hits = pure.step(layers)
        total = int(device.counts[0].sum())
        assert total - seen == hits, f"step {number}"
        seen = total
        assert device.resident.flatten().nonzero().flatten().tolist() == pure.resident.tolist()
        assert bool(device.frozen) == pure.frozen
        frozen.add(pure.frozen)
    assert pure.evictions == int(device.counts[5].sum())
    assert any(frozen) == (places == 3), "few places freeze under these steps, many never do"


def test_belady_equals_trying_everything() -> None:
    """Against exhaustive search over what to keep, on traces of a few accesses."""

    def best(flat: list[int], places: int) -> int:
        states = {frozenset[int](): 0}
        for key in flat:
            after: dict[frozenset[int], int] = {}
            for held, hits in states.items():
                options = [held]
                if key not in held:
                    options.append(held | {key})
                else:
                    hits += 1
                for option in options:
                    for size in range(min(places, len(option)) + 1):
                        for kept in map(frozenset, itertools.combinations(option, size)):
                            after[kept] = max(after.get(kept, -1), hits)
            states = after
        return max(states.values())

    for seed in range(12):
        rng = random.Random(seed)
        flat = [rng.randrange(5) for _ in range(9)]
        steps = [[np.array([key])] for key in flat]
        assert sum(belady_hits(steps, 2)) == best(flat, 2), flat


def test_no_policy_beats_belady_and_scans_do_not_flush() -> None:
    steps = generate(SMALL, (0, 1), 300, seed=3)
    pool = Pool(12, 3, 16)
    bound = sum(belady_hits(steps, 12))
    policies: list[Policy] = [Lru(pool), Lfru(pool), Successor(pool), Frozen(pool, 50)]
    hits = [sum(policy.step(layers) for layers in steps) for policy in policies]
    assert all(0 < h <= bound for h in hits)
    scan = [[np.arange(8) + 8 * layer for layer in range(3)]] * 40
    lru = Lru(Pool(8, 3, 8))
    assert sum(lru.step(layers) for layers in scan) >= 38 * 8


def test_belady_lets_a_layer_replace_what_it_has_just_used() -> None:
    """One place: key 1 is used for the last time in the step, and in the layer, in which key 0 is missed."""
    steps = [[np.array([1])], [np.array([0, 1])], [np.array([0])]]
    assert belady_hits(steps, 1) == [0, 1, 1]


def test_foresight_of_everything_is_beladys_rule_and_more_of_it_is_no_worse() -> None:
    steps = random_steps(5, 80)
    pool = Pool(7, 3, 8)
    hits = [sum(foresight_hits(steps, pool, window)) for window in (-1, 0, 2, 80)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]
    assert hits[-1] == sum(belady_hits(steps, 7))


def test_what_follows_is_learnt() -> None:
    """Keys take turns in pairs: 0 brings 1, 2 brings 3. Counts alone cannot tell which comes next."""
    rng = random.Random(1)
    steps: Steps = []
    for _ in range(200):
        first = rng.choice((0, 2, 4))
        steps += [[np.array([first])], [np.array([first + 1])]]
    pool = Pool(2, 1, 6)
    known = Successor(pool)
    for layers in steps[:201]:
        known.step(layers)
    worth = known.known_worth()
    came = int(steps[200][0][0])
    assert worth.argmax() == came + 1
    known.step(steps[201])
    assert known.known_worth().argmax() in {0, 2, 4}


def test_recorded_texts_become_streams() -> None:
    chosen = np.arange(2 * 7 * 1).reshape(2, 7, 1) % 5
    texts = [slice(0, 3), slice(3, 5), slice(5, 7)]
    one = recorded(chosen.astype(np.uint8), texts, 5, 1)
    assert len(one) == 7
    assert [keys.tolist() for keys in one[1]] == [[1], [5 + 3]]
    two = recorded(chosen.astype(np.uint8), texts, 5, 2)
    assert [keys.tolist() for keys in two[0]] == [[0, 3], [5 + 0, 5 + 2]]
    assert len(two) == 3, "texts 0 and 1, then 0 and 2; the tail with one stream is left out"


def test_a_row_names_every_policy_and_its_share_of_belady() -> None:
    trace = Trace("small", generate(SMALL, (0,), 60, 1), 3, 16, (4,), True)
    (row,) = rows_of(trace)
    assert list(row) == [
        "case",
        "experts_per_step",
        "belady",
        "lru",
        "lfru",
        "lfru_by_number",
        "successor",
        "frozen",
        "lfru_of_belady",
        "successor_of_belady",
        "lfru_net_of_frozen",
        "best_known_of_belady",
        "told_0_of_belady",
        "told_1_of_belady",
        "told_2_of_belady",
        "lfru_of_best_known",
        "lfru_of_told_2",
    ]
    for name in ("lru", "lfru", "successor", "frozen"):
        assert 0 < float(row[name] or 0) <= float(row["belady"] or 0)
    assert 0 < float(row["best_known_of_belady"] or 0) < float(row["told_2_of_belady"] or 0) <= 1.0


def test_where_places_are_scarce_a_learning_set_is_no_worse_than_one_that_stands_still() -> None:
    """Four domains ask for more than the places: the set freezes, comes to the most used experts all the same, and what
    is gained pays for the evictions. Misses in the order of their numbers do not get there."""
    trace = Trace("crowded", generate(RoutingModel(num_layers=2), (0, 1, 2, 3), 400, 3), 2, 128, (8, 24))
    for row in rows_of(trace):
        assert float(row["lfru_net_of_frozen"] or 0) >= 1.0, row["case"]
        assert float(row["lfru"] or 0) > float(row["lfru_by_number"] or 0), row["case"]
