"""Products beside the launches that bring missing experts: the same bits as products behind them."""

from __future__ import annotations

import pytest
import torch

from kernels._triton import experts as kernel
from kernels._triton import experts_few, residency_gather
from kernels.experts import Ahead
from memory.device.host_experts import HostExperts, LayerBlocks
from worker.experts.block_format import block_format
from worker.quantization.base import ExpertShape
from worker.quantization.fp8_block import Fp8Block
from worker.quantization.unquantized import Unquantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, PER_TOKEN = 5, 3


@pytest.mark.parametrize(
    ("format", "size_of", "tokens"),
    [
        pytest.param(Unquantized("float32"), 32, 1, id="dense-1"),
        pytest.param(Unquantized("float32"), 32, 2, id="dense-2"),
        pytest.param(Fp8Block(), 128, 1, id="fp8-1", marks=pytest.mark.gpu),
        pytest.param(Fp8Block(), 128, 2, id="fp8-2"),
    ],
)
def test_what_is_brought_ahead_is_read_where_it_comes_to_lie(
    format: Unquantized | Fp8Block, size_of: int, tokens: int
) -> None:
    torch.manual_seed(tokens)
    shape = ExpertShape(size_of, size_of)
    layout = format.block_layout(shape)
    size, where = layout.num_bytes, block_format(layout)
    host = HostExperts({0: LayerBlocks(EXPERTS, size)})
    if DEVICE == "cuda":
        assert host.pin() is None
    weights_of = torch.randint(0, 60, (EXPERTS, size), dtype=torch.uint8)  # small numbers, whatever the dtype
    host.layer_blocks(0).copy_(weights_of)
    home = host.addresses()[0].to(DEVICE)
    places = torch.zeros(EXPERTS, size, dtype=torch.uint8, device=DEVICE)
    there = places.data_ptr() + torch.arange(EXPERTS, device=DEVICE) * size
    x = torch.randn(tokens, size_of, device=DEVICE)
    weights = torch.rand(tokens, PER_TOKEN, device=DEVICE)
    experts = torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN] for _ in range(tokens)]).to(DEVICE)
    experts[-1, 1] = -1
    want = kernel.run_experts(x, weights, experts, home, where, size_of)
    for resident, taken in ((EXPERTS, 0), (2, 2), (0, EXPERTS)):
        places.fill_(0xFF)
        places[:resident] = weights_of[:resident].to(DEVICE)
        table, targets = home.clone(), torch.zeros_like(home)
        table[:resident] = there[:resident]
        targets[resident : resident + taken] = there[resident : resident + taken]
        first = places.data_ptr()
        ahead = Ahead(torch.where(targets > 0, targets, table), first, first + places.numel(), held=targets)
        residency_gather.gather(table, targets, size)
        found = kernel.run_experts(x, weights, experts, table, where, size_of, ahead=ahead)
        assert torch.equal(found, want), f"{resident} resident, {taken} brought"
        assert torch.equal(places[: resident + taken].cpu(), weights_of[: resident + taken])


@pytest.mark.parametrize("held", [True, False])
def test_pairs_are_grouped_beside_what_is_brought_only_while_that_is_held(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Fp8Block().block_layout(ExpertShape(128, 128))
    table = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    told: list[bool] = []

    def group(*_: object, beside: bool, **__: object) -> None:
        told.append(beside)
        raise StopIteration

    monkeypatch.setattr(experts_few, "group_pairs", group)
    x, weights = torch.zeros(2, 128, device=DEVICE), torch.ones(2, PER_TOKEN, device=DEVICE)
    experts = torch.zeros(2, PER_TOKEN, dtype=torch.int64, device=DEVICE)
    ahead = Ahead(table, 0, 1, held=table if held else None)
    with pytest.raises(StopIteration):
        kernel.run_experts(x, weights, experts, table, block_format(layout), 128, ahead=ahead)
    assert told == [held]
