"""The shipped record of expert routing, and the arithmetic done on such records."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from demo import expert_routing
from demo.expert_routing import Record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shipped() -> Record:
    return expert_routing.load(ROOT / "demo" / "routing")


def by_hand() -> Record:
    """Two documents of two tokens and a chat of one, one layer, two of four experts."""
    chosen = np.array([[[0, 1], [0, 2], [0, 1], [2, 3], [1, 3]]], dtype=np.uint8)
    ends, chats = np.array([2, 4, 5]), np.array([False, False, True])
    return Record(np.arange(5, dtype=np.uint16), ends, chats, chosen, 4)


def test_sets_come_back_from_their_ranks() -> None:
    sets = np.array(list(combinations(range(8), 3)), dtype=np.uint8)
    ranks = expert_routing.rank_sets(sets)
    assert sorted(ranks.tolist()) == list(range(len(sets)))
    assert (expert_routing.unrank_sets(ranks, 3, 8) == sets).all()


def test_too_many_possible_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="65,536"):
        expert_routing.rank_sets(np.array([[60, 61, 62, 63]]))


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    expert_routing.save(by_hand(), tmp_path)
    back = expert_routing.load(tmp_path)
    assert all(
        (getattr(back, n) == getattr(by_hand(), n)).all() for n in ("ids", "ends", "is_chat", "chosen")
    )


def test_reuse_loads_and_hits_of_a_record_counted_by_hand() -> None:
    record = by_hand()
    assert expert_routing.reuse(record, chats=False) == pytest.approx((0.5 + 0.0) / 2)
    assert expert_routing.loads(record)[0].tolist() == pytest.approx([1.2, 1.2, 0.8, 0.8])
    # 0 1 | 0 2 | 0 1 | 2 3 with room for two: the hits are the second 0 and the third.
    assert expert_routing.lru_hit_rate(record, chats=False, capacity=2) == pytest.approx(2 / 8)
    assert expert_routing.lru_hit_rate(record, chats=False, capacity=4) == pytest.approx(4 / 8)


def test_the_shipped_record_has_its_texts_and_stays_small(shipped: Record) -> None:
    assert len(shipped.texts(chats=False)) == len(shipped.texts(chats=True)) == 200
    assert shipped.chosen.shape == (8, len(shipped.ids), 4)
    assert (np.diff(shipped.chosen.astype(int), axis=-1) > 0).all()
    assert (ROOT / "demo/routing/routing.npz").stat().st_size < 1_000_000


def test_the_shipped_record_is_of_the_shipped_checkpoint(
    shipped: Record, demo_model: PreTrainedModel
) -> None:
    """Near ties may fall otherwise on another machine; a record of other weights shares one choice in eight."""
    spans = [shipped.texts(chats=False)[0], shipped.texts(chats=True)[0]]
    again = expert_routing.record(demo_model, [shipped.ids[s].tolist() for s in spans], [False, True])
    recorded = np.concatenate([shipped.chosen[:, s] for s in spans], axis=1)
    assert (again.chosen == recorded).mean() > 0.99


def test_equal_lengths_are_grouped_and_cut() -> None:
    groups = list(expert_routing.equal_lengths([[1], [1, 2], [3], [4]], most=2))
    assert groups == [[0, 2], [3], [1]]


def test_the_committed_figures_meet_what_the_model_card_promises(shipped: Record) -> None:
    found = json.loads((ROOT / "benchmarks/results/demo_evaluate.json").read_text())["figures"]
    assert found["bits_per_byte"] <= 1.60 < found["bzip2_bits_per_byte"]
    assert found["copy_in_window"] >= 0.95
    assert found["retrieval_1000"] >= 0.80
    assert min(found["tool_calls_valid"], found["json_valid"], found["two_digit_sums"]) >= 0.90
    assert found["mtp_agreement"] >= 0.5
    loads = expert_routing.loads(shipped)
    assert found["load_min"] == pytest.approx(float(loads.min()), abs=1e-3)
    assert found["load_max"] == pytest.approx(float(loads.max()), abs=1e-3)
    assert loads.min() >= 0.2
    assert loads.max() <= 5
    for capacity in (8, 16, 24):
        assert found[f"lru_{capacity}_chats"] == pytest.approx(
            expert_routing.lru_hit_rate(shipped, True, capacity), abs=1e-3
        )


def test_routing_of_a_text_does_not_depend_on_its_batch(demo_model: PreTrainedModel) -> None:
    texts = [[3, 100, 200, 300], [3, 400, 500, 600]]
    both = expert_routing.record(demo_model, texts, [False, False])
    one = expert_routing.record(demo_model, texts[1:], [False])
    assert torch.equal(torch.from_numpy(both.chosen[:, 4:]), torch.from_numpy(one.chosen))
