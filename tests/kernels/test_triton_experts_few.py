"""Expert products of one token and of a few with packed weights against the meaning of their blocks, code by code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels._reference.experts import Ahead, read_expert
from kernels._triton import expert_tiles, experts_few, experts_group
from kernels._triton.expert_spans import place_of
from kernels._triton.experts import run_kernel
from worker.experts.block_format import block_format
from worker.quantization.base import ExpertShape
from worker.quantization.blocks import block_part
from worker.quantization.fp8_block import Fp8Block
from worker.quantization.int4 import Int4
from worker.quantization.int4_tensors import Int4Layout
from worker.quantization.mxfp4 import Mxfp4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.bfloat16, 5e-3) if DEVICE == "cuda" else (torch.float32, 1e-5)
ON_GPU = pytest.mark.gpu
FORMATS: dict[str, Any] = {
    "fp8": Fp8Block(),
    "int4": Int4(),
    "int4 zeros": Int4(Int4Layout("gptq", 128, symmetric=False, zero_offset=1)),
    "int4 rows": Int4(Int4Layout("gptq", 0, symmetric=True, zero_offset=1)),
    "mxfp4": Mxfp4(),
}
SIZES = [(64, 192)]
LARGE = [(256, 96), (192, 192), (128, 2880)]
NUM_EXPERTS, PER_TOKEN = 5, 3
SINGLE = (expert_tiles.SingleTiles(128, 2, 2), expert_tiles.SingleTiles(64, 2))
"""The interpreter takes its time per program: few of them."""


class Case:
    """Random blocks of all codes (``codes`` of them for the weights), a step's tokens, and what should come out."""

    def __init__(self, name: str, hidden: int, inner: int, tokens: int, codes: range = range(256)) -> None:
        torch.manual_seed(hidden + inner + tokens)
        self.name, self.inner, self.clamped = name, inner, name == "mxfp4"
        shape, format = ExpertShape(hidden, inner, has_bias=self.clamped), FORMATS[name]
        layout = format.block_layout(shape)
        self.where = block_format(layout)
        self.blocks = torch.zeros(NUM_EXPERTS, layout.num_bytes, dtype=torch.uint8)
        for block in self.blocks:
            for part in layout.parts:
                view = block_part(block, layout, part.name)
                if part.name in ("gate_up", "down"):
                    chosen = torch.tensor([code for code in codes if name != "fp8" or code % 128 != 127])
                    view.view(torch.uint8).copy_(chosen[torch.randint(len(chosen), view.shape)].byte())
                elif view.dtype == torch.uint8:
                    view.random_(*((110, 124) if "scales" in part.name else (0, 256)))
                else:
                    view.copy_(torch.randn(view.shape) * 0.02)
        self.x = torch.randn(tokens, hidden).to(DTYPE)
        self.weights = torch.rand(tokens, PER_TOKEN)
        self.experts = torch.stack([torch.randperm(NUM_EXPERTS)[:PER_TOKEN] for _ in range(tokens)])

    def run(
        self, rows: slice = slice(None), tee: torch.Tensor | None = None, single: bool = False, tiles: Any = None,
        spoiled: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """``single``: by the kernels for one token. ``spoiled``: every expert is read from where launches ahead bring
        it, and the table holds others' addresses."""
        self.there = self.blocks.to(DEVICE)
        table = torch.tensor([block.data_ptr() for block in self.there], device=DEVICE)
        moved = [value[rows].to(DEVICE) for value in (self.x, self.weights, self.experts)]
        assert experts_few.serves(moved[0], self.where, self.inner)
        own: Any = expert_tiles.SINGLE_RULE if single else expert_tiles.FEW_RULE[self.where.kind]
        if DEVICE == "cpu":
            own = SINGLE if single else (replace(own[0], rows=512), replace(own[1], rows=512))
        held = table.flip(0) if spoiled else table
        kernel, ahead = "single" if single else "few", Ahead(table, 0, 0) if spoiled else None
        rest = (held, self.where, self.inner, int(self.clamped), 7.0, 1.702, tee)
        return run_kernel(kernel, tiles or own, (moved[0], moved[1], moved[2], *rest), ahead).cpu()

    def want(self) -> torch.Tensor:
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        dense = [
            read_expert(block, self.where, self.inner, self.x.shape[1], torch.float32)
            for block in self.blocks
        ]
        for token, choice in ((t, c) for t in range(len(out)) for c in range(PER_TOKEN)):
            if (expert := int(self.experts[token, choice])) < 0:
                continue
            own = dense[expert]
            both = own.gate_up.double() @ self.x[token].double()
            both += 0.0 if own.gate_up_bias is None else own.gate_up_bias.double()
            gate, up = both.chunk(2)
            if self.clamped:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
                inside = up * gate * torch.sigmoid(1.702 * gate)
            else:
                inside = up * torch.nn.functional.silu(gate)
            result = own.down.double() @ inside
            result += 0.0 if own.down_bias is None else own.down_bias.double()
            out[token] += self.weights[token, choice].double() * result
        return out

    def error(self, out: torch.Tensor) -> float:
        want = self.want()
        return float((out.double() - want).norm() / want.norm())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inner"), [*SIZES, *(pytest.param(*size, marks=ON_GPU) for size in LARGE)]
)
def test_products_of_a_few_tokens(name: str, hidden: int, inner: int) -> None:
    if name == "mxfp4" and (hidden % 64 or inner % 64):
        inner += 32
    case = Case(name, hidden, inner, 19)
    case.experts[3] = -1  # a padding row
    case.experts[4:, 0] = 2  # more than a tile of tokens in one expert
    case.experts[4:, 1:] = torch.tensor([0, 4])
    out = case.run()
    assert case.error(out) < TOLERANCE
    assert not out[3].any(), "a padding row is not zero"


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inner"), [*SIZES, *(pytest.param(*size, marks=ON_GPU) for size in LARGE)]
)
def test_products_of_one_token(name: str, hidden: int, inner: int) -> None:
    if name == "mxfp4" and (hidden % 64 or inner % 64):
        inner += 32
    case = Case(name, hidden, inner, 1)
    out = case.run(single=True)
    assert case.error(out) < TOLERANCE
    assert torch.equal(case.run(single=True, spoiled=True), out), (
        "a block was not read from where it was brought"
    )
    case.experts[0, 1] = -1
    assert case.error(case.run(single=True)) < TOLERANCE


VARIANTS = [{"spans": 2, "ahead": True}, {"spans": 2, "ahead": True, "tiles": 3}, {"tiles": 2}]
WALKS = [("fp8", 96), ("int4 zeros", 32), ("mxfp4", 192)]


@pytest.mark.parametrize(("name", "inner"), WALKS)
def test_no_tile_changes_a_bit(name: str, inner: int) -> None:
    case = Case(name, 192 if name == "mxfp4" else 160, inner, 2)
    case.experts[:] = torch.tensor([1, -1, -1])
    plain: Any = tuple(replace(tiles, rows=128, spans=1) for tiles in expert_tiles.FEW_RULE[case.where.kind])
    want = case.run(tiles=plain)
    assert case.error(want) < TOLERANCE
    for variant in VARIANTS:
        found = case.run(tiles=tuple(replace(tiles, **variant) for tiles in plain))
        assert torch.equal(found, want), variant


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("name", "codes"), [("fp8", range(8)), ("mxfp4", range(2))])
def test_the_smallest_codes_keep_their_values(name: str, codes: range, single: bool) -> None:
    case = Case(name, 128, 64, 1, codes)
    assert case.error(case.run(single=single)) < TOLERANCE


def check_storing(name: str, single: bool) -> None:
    case = Case(name, 64, 192, 1)
    kept = torch.zeros_like(case.blocks, device=DEVICE)
    expert = int(case.experts[0, 1])
    tee = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device=DEVICE)
    tee[expert] = kept[expert].data_ptr()
    assert case.error(case.run(tee=tee, single=single)) < TOLERANCE
    assert torch.equal(kept[expert].cpu(), case.blocks[expert])
    assert not kept[torch.arange(NUM_EXPERTS) != expert].any(), "a block was stored where no tee points"


@pytest.mark.parametrize("name", ["fp8", "int4 zeros", "mxfp4"])
def test_a_block_is_stored_whole_where_the_tee_points(name: str) -> None:
    check_storing(name, single=False)


@pytest.mark.parametrize("name", ["fp8", "int4 zeros", "mxfp4"])
def test_one_token_stores_a_block_whole_too(name: str) -> None:
    check_storing(name, single=True)


@pytest.mark.parametrize("name", ["fp8", "int4 zeros", "mxfp4"])
def test_a_token_gets_the_same_bits_beside_others(name: str) -> None:
    case = Case(name, 64, 64, 18)
    case.experts[:] = torch.tensor([1, 3, 0])
    together = case.run()
    for token in (0, 17):
        assert torch.equal(case.run(slice(token, token + 1))[0], together[token])


def test_pairs_that_are_sorted_give_what_counted_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("int4", 64, 128, 3)
    counted = case.run()
    monkeypatch.setattr(experts_group, "MAX_COUNTED_PAIRS", 0)
    assert torch.equal(case.run(), counted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int4 zeros", "mxfp4"])
def test_a_gpu_stores_blocks_and_keeps_bits_too(name: str) -> None:
    for single in (False, True):
        check_storing(name, single)
    test_a_token_gets_the_same_bits_beside_others(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "codes"), [("fp8", range(8)), ("mxfp4", range(2))])
def test_a_gpu_keeps_the_smallest_codes_too(name: str, codes: range) -> None:
    for single in (False, True):
        test_the_smallest_codes_keep_their_values(name, codes, single)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "inner"), [*WALKS, ("int4", 2880)])
def test_no_tile_changes_a_bit_on_a_gpu(name: str, inner: int) -> None:
    test_no_tile_changes_a_bit(name, inner)


@pytest.mark.parametrize(
    ("format", "hidden", "inner"),
    [
        (Int4(Int4Layout("gptq", 32, symmetric=True, zero_offset=1)), 128, 128),
        (Int4(Int4Layout("gptq", 128, symmetric=True, act_order=True, zero_offset=1)), 128, 128),
        (Mxfp4(), 160, 128),
        (Fp8Block(), 128, 40),
    ],
)
def test_other_layouts_are_left_to_the_general_kernels(format: Any, hidden: int, inner: int) -> None:
    where = block_format(format.block_layout(ExpertShape(hidden, inner)))
    assert not experts_few.serves(torch.zeros(1, hidden), where, inner)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device function, called as plain Python by the interpreter")
@pytest.mark.parametrize("kind", [1, 2])
def test_places_of_a_span_are_its_columns_in_another_order(kind: int) -> None:
    span = 64 if kind == 1 else 128
    column = torch.arange(2 * span)
    places = place_of.fn(column, kind)
    assert torch.equal(places.sort().values, column)
    assert torch.equal(places[span:], places[:span] + span)
