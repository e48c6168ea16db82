"""Grouped expert products through the address table against the format's own float32 weights, at odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels._triton import experts as kernel
from kernels._triton import experts_group
from worker.quantization.base import BlockLayout, ExpertShape
from worker.quantization.blocks import block_part
from worker.quantization.mxfp4 import Mxfp4
from worker.quantization.unquantized import Unquantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, PER_TOKEN, TOKENS = 6, 2, 5


def offset(layout: BlockLayout, name: str) -> int:
    return next((part.offset_bytes for part in layout.parts if part.name == name), -1)


def dense_tensors(shape: ExpertShape) -> dict[str, torch.Tensor]:
    inner, hidden = shape.intermediate_size, shape.hidden_size
    return {
        "gate_proj.weight": torch.randn(inner, hidden),
        "up_proj.weight": torch.randn(inner, hidden),
        "down_proj.weight": torch.randn(hidden, inner),
    }


def mxfp4_tensors(shape: ExpertShape) -> dict[str, torch.Tensor]:
    inner, hidden = shape.intermediate_size, shape.hidden_size
    found = {}
    for name, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        found[f"{name}.weight_blocks"] = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
        found[f"{name}.weight_scales"] = torch.randint(120, 126, (rows, columns // 32), dtype=torch.uint8)
        found[f"{name}.bias"] = torch.randn(rows).bfloat16()
    return found


def blocks_of(format: Any, shape: ExpertShape, tensors: Any) -> torch.Tensor:
    blocks = torch.zeros(NUM_EXPERTS, format.block_layout(shape).num_bytes, dtype=torch.uint8)
    for expert in range(NUM_EXPERTS):
        format.pack(tensors(shape), shape, blocks[expert])
    return blocks


def expected(
    format: Any,
    shape: ExpertShape,
    blocks: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    layout = format.block_layout(shape)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(experts.shape[1]):
            expert = int(experts[token, choice])
            if expert < 0:
                continue
            gate_up, down = (w.double() for w in format.dequantize(blocks[expert], shape))
            both = gate_up @ x[token].double()
            if shape.has_bias:
                both = both + block_part(blocks[expert], layout, "gate_up_bias").double()
            gate, up = both.chunk(2)
            if shape.has_bias:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = torch.nn.functional.silu(gate) * up
            result = down @ inner
            if shape.has_bias:
                result = result + block_part(blocks[expert], layout, "down_bias").double()
            out[token] += weights[token, choice].double() * result
    return out


def case(seed: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    experts = torch.stack([torch.randperm(NUM_EXPERTS)[:PER_TOKEN] for _ in range(TOKENS)])
    experts[3] = -1  # a padding row
    experts[4] = experts[0]  # two tokens in one expert's tile
    return torch.randn(TOKENS, hidden), torch.rand(TOKENS, PER_TOKEN), experts


def run(
    blocks: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    block: Any,
    **options: Any,
) -> torch.Tensor:
    there = blocks.to(DEVICE)
    table = torch.tensor([there[expert].data_ptr() for expert in range(NUM_EXPERTS)], device=DEVICE)
    moved = (value.to(DEVICE) for value in (x, weights, experts))
    return kernel.run_experts(*moved, table, block, **options).cpu()


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 40), (192, 96)])
def test_dense_experts(hidden: int, inner: int) -> None:
    shape, format = ExpertShape(hidden, inner), Unquantized("float32")
    layout = format.block_layout(shape)
    x, weights, experts = case(hidden, hidden)
    blocks = blocks_of(format, shape, dense_tensors)
    block = kernel.BlockFormat(kernel.DENSE, offset(layout, "gate_up"), offset(layout, "down"))
    out = run(blocks, x, weights, experts, block, inner=inner)
    torch.testing.assert_close(
        out.double(), expected(format, shape, blocks, x, weights, experts), atol=2e-3, rtol=2e-5
    )
    assert torch.equal(out[3], torch.zeros(hidden)), "a padding row is not zero"


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 160)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_mxfp4_experts_with_biases_and_clamped_swiglu(hidden: int, inner: int) -> None:
    shape, format = ExpertShape(hidden, inner, has_bias=True), Mxfp4()
    layout = format.block_layout(shape)
    x, weights, experts = case(inner, hidden)
    blocks = blocks_of(format, shape, mxfp4_tensors)
    block = kernel.BlockFormat(
        kernel.MXFP4,
        offset(layout, "gate_up"),
        offset(layout, "down"),
        gate_scales=offset(layout, "gate_up_scales"),
        down_scales=offset(layout, "down_scales"),
        gate_up_bias=offset(layout, "gate_up_bias"),
        down_bias=offset(layout, "down_bias"),
        group=32,
    )
    out = run(blocks, x, weights, experts, block, inner=inner, activation=kernel.CLAMPED_SWIGLU)
    want = expected(format, shape, blocks, x, weights, experts)
    assert float((out.double() - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("counted", [True, False])
def test_pairs_are_grouped_by_expert_and_padding_comes_last(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        monkeypatch.setattr(experts_group, "MAX_COUNTED_PAIRS", 0)
    experts = torch.tensor([[2, 0], [-1, -1], [0, 2]], device=DEVICE)
    x = torch.arange(18.0, device=DEVICE).view(3, 6)
    for beside in (False, True):
        order, starts, split = experts_group.group_pairs(experts, 4, x, split=True, beside=beside)
        assert starts.tolist() == [0, 2, 2, 4, 4]
        assert order.tolist()[:4] == [1, 4, 0, 5]
        assert split[1].tolist() == [6, 8, 10, 7, 9, 11]


def test_a_token_gets_the_same_bits_beside_others() -> None:
    shape, format = ExpertShape(64, 32), Unquantized("float32")
    layout = format.block_layout(shape)
    x, weights, experts = case(5, 64)
    blocks = blocks_of(format, shape, dense_tensors)
    block = kernel.BlockFormat(kernel.DENSE, offset(layout, "gate_up"), offset(layout, "down"))
    together = run(blocks, x, weights, experts, block, inner=32, deterministic=True)
    for token in (0, 1, 4):
        part = slice(token, token + 1)
        alone = run(blocks, x[part], weights[part], experts[part], block, inner=32, deterministic=True)
        assert torch.equal(alone[0], together[token])
