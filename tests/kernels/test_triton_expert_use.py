"""The use counts' kernel against plain torch, and plain torch against counting by hand."""

from __future__ import annotations

import pytest
import torch

from kernels._reference import expert_use as reference
from kernels._triton import expert_use as on_gpu
from kernels.expert_use import MOST_COUNTED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LAYERS = 5, 3


def choices(rows: int, experts: int, per_token: int) -> torch.Tensor:
    """Of rows, the first of which chooses nothing in its first layer."""
    found = torch.rand(rows, LAYERS, experts).topk(per_token).indices
    found[0, 0] = -1
    return found.to(DEVICE)


@pytest.mark.parametrize(("experts", "per_token"), [(128, 8), (32, 4), (12, 3), (60, 4)])
def test_the_kernel_counts_as_plain_torch_does(experts: int, per_token: int) -> None:
    torch.manual_seed(experts)
    plain = torch.zeros(SLOTS, LAYERS, experts, dtype=torch.int16, device=DEVICE)
    plain[2, 1, :] = MOST_COUNTED - 1
    ours = plain.clone()
    for rows in (1, 3, SLOTS, 3):
        slots = torch.randperm(SLOTS)[:rows].to(DEVICE)
        chosen = choices(rows, experts, per_token)
        spare = torch.cat([chosen, choices(2, experts, per_token)])  # rows behind are not looked at
        right = reference.count_use(plain, chosen, slots)
        assert torch.equal(on_gpu.count_use(ours, spare, slots), right)
        assert torch.equal(ours, plain)
    assert int(plain.max()) == MOST_COUNTED


def test_bits_are_the_experts_chosen_half_as_often_as_on_average() -> None:
    counts = torch.zeros(2, 1, 10, dtype=torch.int16)
    counts[1, 0] = torch.tensor(
        [20, 20, 20, 20, 4, 5, 6, 0, 5, 0], dtype=torch.int16
    )  # 100 before this token
    bits = reference.count_use(counts, torch.tensor([[[9, 3]]]), torch.tensor([1]))
    assert counts[1, 0].tolist() == [20, 20, 20, 21, 4, 5, 6, 0, 5, 1]
    assert counts[0].sum() == 0
    # 102 choices of 10 experts: 10.2 each on average, so 6 and more are marked.
    assert bits.tolist() == [[[0b01001111, 0]]]
