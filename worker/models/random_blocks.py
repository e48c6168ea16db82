"""Makes up experts where they will be read: random values in every part of a block, of ordinary size."""

from __future__ import annotations

import math
from math import prod

import torch

from memory.api import DTYPE_BYTES
from worker.quantization.base import BlockLayout, BlockPart, ExpertShape

NIBBLE_DEVIATION = 4.61
"""Standard deviation of a uniform four-bit integer."""
E2M1_DEVIATION = 2.926
"""Root mean square of a uniform e2m1 code: 0, .5, 1, 1.5, 2, 3, 4, 6 with both signs."""
E8M0_ONE = 127
BIAS_DEVIATION = 0.1
CENTRE = 0x88
"""Two zero points in the middle of the range; a format that adds one to them is off by a fifth of a deviation."""


def fill_random_blocks(
    blocks: torch.Tensor, layout: BlockLayout, shape: ExpertShape, generator: torch.Generator
) -> None:
    """Fills [experts, num_bytes] uint8 blocks of one layer, on the generator's device: weights have a standard
    deviation near fan_in^-0.5, whatever the format, and are never NaN."""
    for part in layout.parts:
        rows = part_of_all(blocks, part)
        is_down = part.name.startswith("down")
        fan_in = shape.intermediate_size if is_down else shape.hidden_size
        _fill(rows, part, layout, fan_in, generator)


def part_of_all(blocks: torch.Tensor, part: BlockPart) -> torch.Tensor:
    """One part of all blocks, [experts, *part.shape], sharing the bytes."""
    num_bytes = prod(part.shape) * DTYPE_BYTES[part.dtype]
    piece = blocks[:, part.offset_bytes : part.offset_bytes + num_bytes]
    return piece.view(getattr(torch, part.dtype)).view(len(blocks), *part.shape)


def _fill(
    rows: torch.Tensor, part: BlockPart, layout: BlockLayout, fan_in: int, generator: torch.Generator
) -> None:
    deviation = fan_in**-0.5
    if part.name.endswith("_order"):
        rows.copy_(torch.arange(rows.shape[1], device=rows.device))
    elif part.name.endswith("_bias"):
        rows.normal_(std=BIAS_DEVIATION, generator=generator)
    elif part.name.endswith("_zeros"):
        rows.fill_(CENTRE)
    elif part.name.endswith("_scales"):
        rows.fill_(_scale(layout.kernel, deviation))
    elif layout.kernel.startswith("dense_"):
        rows.normal_(std=deviation, generator=generator)
    elif layout.kernel == "fp8_block":
        for expert in rows:  # e4m3 knows no normal_; one expert at a time is copied
            expert.copy_(torch.empty(expert.shape, device=rows.device).normal_(generator=generator))
    else:
        rows.random_(0, 256, generator=generator)


def _scale(kernel: str, deviation: float) -> float:
    if kernel == "mxfp4":
        return E8M0_ONE + round(math.log2(deviation / E2M1_DEVIATION))
    return deviation / NIBBLE_DEVIATION if kernel == "int4" else deviation
