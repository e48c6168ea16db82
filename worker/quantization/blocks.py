"""Lays parts into an expert's block and finds them again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from memory.api import DTYPE_BYTES, align_bytes
from worker.quantization.base import BlockLayout, BlockPart


def layout_parts(
    parts: Sequence[tuple[str, tuple[int, ...], str]],
    kernel: str,
    group: int = 1,
    down_group: int = 1,
    zero_offset: int = 0,
) -> BlockLayout:
    """(name, shape, dtype) parts one behind the other, each from a multiple of 128 bytes; the rest as
    :class:`BlockLayout` has it."""
    found, offset = [], 0
    for name, shape, dtype in parts:
        found.append(BlockPart(name, shape, dtype, offset))
        offset += align_bytes(prod(shape) * DTYPE_BYTES[dtype])
    return BlockLayout(tuple(found), offset, kernel, group, down_group, zero_offset)


def block_part(block: torch.Tensor, layout: BlockLayout, name: str) -> torch.Tensor:
    """A part of a [num_bytes] uint8 block as a tensor of its own shape and dtype, sharing the bytes. KeyError for a
    part that the layout lacks."""
    for part in layout.parts:
        if part.name == name:
            num_bytes = prod(part.shape) * DTYPE_BYTES[part.dtype]
            piece = block[part.offset_bytes : part.offset_bytes + num_bytes]
            return piece.view(getattr(torch, part.dtype)).view(part.shape)
    raise KeyError(f"the block has no part {name!r}")
