"""The fused decision against the tensor operations, step by step: same tables and answers, whatever went before."""

from __future__ import annotations

import copy

import pytest
import torch

from kernels._triton import residency as fused
from memory.device.residency import Residency, ResidencyRules
from memory.device.residency_rules import FROZEN_MARGIN, RECENCY_WEIGHT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, EXPERTS, PER_TOKEN, PLACE_BYTES, BASE = 3, 12, 3, 256, 1 << 20


def a_residency(num_places: int, policy: str, queue_places: int) -> Residency:
    host = torch.arange(ROWS * EXPERTS, device=DEVICE).view(ROWS, EXPERTS) * 4096 + (1 << 30)
    found = Residency(host, BASE, PLACE_BYTES, num_places, ResidencyRules(policy, queue_places))
    found._fused = None  # the tensor operations, on a GPU too
    return found


def allow(residency: Residency, first: int, stop: int) -> None:
    residency._owner[first:stop] = -1


@pytest.mark.parametrize(
    ("policy", "num_places", "queue_places"),
    [("lfru", 5, 64), ("lfru", 20, 7), ("lru", 40, 1024), ("lru", 4, 2)],
)
def test_the_fused_decision_is_that_of_the_tensor_operations(
    policy: str, num_places: int, queue_places: int
) -> None:
    plain = a_residency(num_places, policy, queue_places)
    allow(plain, 0, num_places - 1)
    other = copy.deepcopy(plain)
    tables = fused.ResidencyTables(**other.tables())
    torch.manual_seed(num_places)
    took = 0
    for step in range(1, 13):
        for residency in (plain, other):
            residency.begin_step(step)
        assert torch.equal(plain._queue, other._queue)
        tokens = 1 + step % 7
        for row in range(ROWS):
            experts = torch.rand(tokens, EXPERTS).topk(PER_TOKEN).indices.to(DEVICE)
            experts[torch.rand(tokens) < 0.2] = -1
            stamping = (torch.rand(tokens) < 0.8).to(DEVICE)
            want = plain.decide(row, experts, stamping)
            got = fused.decide(
                tables, row, experts, stamping, BASE, PLACE_BYTES, RECENCY_WEIGHT, FROZEN_MARGIN,
                is_lru=policy == "lru",
            )  # fmt: skip
            assert torch.equal(got, want), f"step {step}, row {row}"
            took += int((got > 0).sum())
            plain.publish(row)
            fused.publish(tables, row, BASE, PLACE_BYTES)
            for name in ("address", "owner", "stamp", "generation", "seen", "taken"):
                size = len(tables.taken) if name == "taken" else len(getattr(tables, name)) - 1
                ours, theirs = getattr(tables, name), plain.tables()[name]
                assert torch.equal(ours[:size], theirs[:size]), f"{name} at step {step}, row {row}"
            torch.testing.assert_close(tables.uses[:-1], plain.tables()["uses"][:-1])
            assert torch.equal(tables.counts, plain.counts)
            assert int(tables.demand) == int(plain.tables()["demand"])
    assert not other.audit()
    assert took >= 3, "nothing ever took a place: the test shows nothing"
