"""Wide expert products against the meaning of every format's blocks, and that nothing depends on how they are cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels._triton import experts as face
from kernels._triton import experts_wide as wide
from kernels._triton.expert_tiles import wide_rule
from kernels._triton.experts import BlockFormat
from tests.helpers.formats import CONFIGS, MadeExpert, format_of, make_expert
from worker.experts.block_format import block_format
from worker.quantization.base import ExpertShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, TOKENS, PER_TOKEN = 4, 5, 2
CHOSEN = [0, 1, 3]


@dataclass
class Case:
    """A layer's blocks, a step's tokens, and what should come out."""

    blocks: torch.Tensor
    where: BlockFormat
    inner: int
    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    want: np.ndarray
    clamped: bool

    def run(
        self, dtype: torch.dtype = torch.float32, tee: torch.Tensor | None = None, room: int = 1 << 20
    ) -> torch.Tensor:
        table = torch.tensor([block.data_ptr() for block in self.blocks], device=DEVICE)
        return wide.run_experts(
            self.x.to(DEVICE, dtype),
            self.weights.to(DEVICE),
            self.experts.to(DEVICE),
            table,
            self.where,
            self.inner,
            int(self.clamped),
            7.0,
            1.702,
            tee,
            wide_rule(dtype.itemsize, TOKENS * PER_TOKEN / NUM_EXPERTS),
            scratch_bytes=room,
        )

    def error(self, out: torch.Tensor) -> float:
        return float(np.linalg.norm(out.double().cpu().numpy() - self.want) / np.linalg.norm(self.want))


def product(made: MadeExpert, x: np.ndarray, clamped: bool) -> np.ndarray:
    gate, up = made.meaning["gate_proj"] @ x, made.meaning["up_proj"] @ x
    if not clamped:
        return made.meaning["down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
    bias = {name: made.tensors[f"{name}.bias"].double().numpy() for name in made.meaning}
    gate = np.minimum(gate + bias["gate_proj"], 7.0)
    up = np.clip(up + bias["up_proj"], -7.0, 7.0)
    return made.meaning["down_proj"] @ ((up + 1) * gate / (1 + np.exp(-1.702 * gate))) + bias["down_proj"]


def make_case(name: str, hidden: int, inner: int, clamped: bool = False) -> Case:
    config, shape = CONFIGS[name], ExpertShape(hidden, inner, has_bias=clamped)
    format = format_of(config)
    made = [make_expert(config, shape, seed) for seed in range(NUM_EXPERTS)]
    blocks = torch.full((NUM_EXPERTS, format.block_layout(shape).num_bytes), 0xA5, dtype=torch.uint8)
    for expert, block in zip(made, blocks, strict=True):
        format.pack(expert.tensors, shape, block)
    torch.manual_seed(hidden)
    experts = torch.tensor([[3, 1], [1, 0], [-1, -1], [1, 3], [0, 1]])  # nobody takes expert 2
    x, weights = torch.randn(TOKENS, hidden), torch.rand(TOKENS, PER_TOKEN)
    want = np.zeros((TOKENS, hidden))
    for token in range(TOKENS):
        for choice, expert in enumerate(experts[token].tolist()):
            if expert >= 0:
                share = float(weights[token, choice])
                want[token] += share * product(made[expert], x[token].double().numpy(), clamped)
    where = block_format(format.block_layout(shape))
    return Case(blocks.to(DEVICE), where, inner, x, weights, experts, want, clamped)


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "clamped"),
    [
        ("unquantized", 40, 24, True),
        ("fp8_block", 160, 96, False),
        ("gptq_act_order", 96, 64, False),
        ("awq", 64, 96, False),
        ("mxfp4", 64, 96, True),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_every_format_means_what_its_checkpoint_means(
    name: str, hidden: int, inner: int, clamped: bool
) -> None:
    case = make_case(name, hidden, inner, clamped)
    out = case.run()
    assert case.error(out) < 2e-6
    assert not out[2].any(), "a padding row is not zero"
    if DEVICE == "cuda" and name != "unquantized":
        assert case.error(case.run(torch.bfloat16)) < 2e-2
    kept = torch.zeros_like(case.blocks)
    tee = torch.tensor([block.data_ptr() for block in kept], device=DEVICE)
    one_at_a_time = 3 * hidden * inner * 4
    assert torch.equal(case.run(tee=tee, room=one_at_a_time), out), "room or storing changed the result"
    assert torch.equal(kept[CHOSEN], case.blocks[CHOSEN]), "a block was not stored whole"
    assert not kept[2].any(), "an expert that nobody chose was stored"


def test_launches_with_many_tokens_per_expert_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("gptq_v1", 64, 32)
    table = torch.tensor([block.data_ptr() for block in case.blocks], device=DEVICE)
    moved = (
        case.x.to(DEVICE),
        case.weights.to(DEVICE),
        case.experts.to(DEVICE),
        table,
        case.where,
        case.inner,
    )
    seen: list[int] = []
    run = wide.run_experts

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(x))
        return run(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(wide, "run_experts", counted)
    narrow = face.run_experts(*moved)
    assert not seen
    monkeypatch.setitem(wide.LEAST_TOKENS, face.INT4, 2)
    broad = face.run_experts(*moved)
    assert seen == [TOKENS]
    assert case.error(narrow) < 2e-6
    assert case.error(broad) < 2e-6
    face.run_experts(*moved, deterministic=True)
    assert seen == [TOKENS], "deterministic mode has one path whatever the number of tokens"


def test_groups_that_do_not_divide_a_tile_are_left_to_the_other_kernels() -> None:
    many = 1 << 20
    assert wide.serves(BlockFormat(face.INT4, 0, 0, group=128), many, 8, 128)
    assert not wide.serves(BlockFormat(face.INT4, 0, 0, group=128, down_group=96), many, 8, 128)
    assert not wide.serves(BlockFormat(face.INT4, 0, 0, group=2048), many, 8, 128)
    assert wide.serves(BlockFormat(face.FP8_BLOCK, 0, 0), many, 8, 128)
    assert not wide.serves(BlockFormat(face.FP8_BLOCK, 0, 0), 191, 8, 8), "too few tokens per expert"
    assert not wide.serves(BlockFormat(face.DENSE, 0, 0), 64, 8, 8), "a decode step"
