"""The host tier's bytes follow the ledger's slots, under the ledger's budget."""

from __future__ import annotations

import random

import pytest
import torch

from memory.device.host_tier import HostTier as HostBytes
from memory.ledger.host_tier import HostTier as HostSlots

SIZES = {"full": 128, "window": 384, "state": 1280}


def test_pages_of_all_groups_share_one_budget_and_come_back_bit_for_bit() -> None:
    slots, held = HostSlots(4 * 1280, SIZES), HostBytes(SIZES, 4 * 1280, pinned=False)
    rng, content = random.Random(0), dict[tuple[str, int], torch.Tensor]()
    seen = set()
    for number in range(400):
        # Each group in turn fills the tier, so that every slab changes hands.
        group = ("full", "window", "state")[number // 25 % 3]
        stored = slots.store(group, number)
        assert stored is not None
        for gone in stored.evicted:
            del content[gone.group, gone.virtual]
        page = torch.randint(0, 256, (SIZES[group],), dtype=torch.uint8)
        held.store(group, stored.slot, page)
        content[group, number] = page
        seen.add(group)
        other, virtual = rng.choice(list(content))
        slot = slots.find(other, virtual)
        assert slot is not None
        back = torch.zeros(SIZES[other], dtype=torch.uint8)
        held.load(other, slot, back)
        assert torch.equal(back, content[other, virtual])
        assert held.num_bytes <= slots.budget_bytes
    assert seen == set(SIZES)


def test_memory_that_cannot_be_pinned_serves_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refuse(data: torch.Tensor) -> str:
        asked.append(data.numel())
        return "the driver refused"

    monkeypatch.setattr("memory.device.host_tier.pin", refuse)
    held = HostBytes(SIZES, 3 * 1280 + 100, pinned=True)
    assert asked == [held.num_bytes] == [3 * 1280], "pinned at its exact size"
    assert not held.pinned
    assert "host_tier_bytes: the driver refused" in caplog.text
    held.store("full", 29, torch.full((128,), 7, dtype=torch.uint8))
    assert (held.page("full", 29) == 7).all()
    HostBytes(SIZES, 0, pinned=True)
    assert len(asked) == 1, "nothing is pinned for no tier"
