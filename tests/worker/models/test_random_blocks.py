"""Random experts drawn in their blocks: of ordinary size in every format, never NaN, the same for a seed."""

from __future__ import annotations

import pytest
import torch

from worker.models.random_blocks import fill_random_blocks
from worker.quantization.base import ExpertShape, Format
from worker.quantization.blocks import block_part
from worker.quantization.fp8_block import Fp8Block
from worker.quantization.int4 import Int4
from worker.quantization.int4_tensors import Int4Layout
from worker.quantization.mxfp4 import Mxfp4
from worker.quantization.unquantized import Unquantized

FORMATS: dict[str, Format] = {
    "bf16": Unquantized(),
    "fp8": Fp8Block(),
    "int4": Int4(),
    "int4 with zero points": Int4(Int4Layout("gptq", 32, symmetric=False, zero_offset=1)),
    "int4 sorted": Int4(Int4Layout("gptq", 64, symmetric=True, act_order=True, zero_offset=1)),
    "mxfp4": Mxfp4(),
}
SHAPE = ExpertShape(hidden_size=256, intermediate_size=192, has_bias=True)


def filled(format: Format, seed: int = 0) -> torch.Tensor:
    layout = format.block_layout(SHAPE)
    blocks = torch.full((3, layout.num_bytes), 0xFF, dtype=torch.uint8)
    fill_random_blocks(blocks, layout, SHAPE, torch.Generator().manual_seed(seed))
    return blocks


@pytest.mark.parametrize("name", FORMATS)
def test_weights_keep_the_size_of_activations(name: str) -> None:
    format = FORMATS[name]
    for block in filled(format):
        gate_up, down = format.dequantize(block, SHAPE)
        for weight in (gate_up, down):
            size = weight.float().std().item() * weight.shape[1] ** 0.5
            assert 0.65 < size < 1.5, size  # a power of two per group is off by up to sqrt(2)
        bias = block_part(block, format.block_layout(SHAPE), "down_bias").float()
        assert 0.05 < bias.std().item() < 0.2


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_depend_on_the_seed_alone(name: str) -> None:
    first = filled(FORMATS[name])
    assert torch.equal(first, filled(FORMATS[name]))
    assert not torch.equal(first, filled(FORMATS[name], seed=1))
    assert not torch.equal(first[0], first[1])
