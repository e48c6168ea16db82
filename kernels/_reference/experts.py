"""Routed experts through the address table in plain torch, and where the parts of an expert's block lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels._reference.dequantize import dequantize_fp8_block, dequantize_int4
from kernels._reference.mxfp4 import dequantize_mxfp4

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DENSE, FP8_BLOCK, INT4, MXFP4 = 0, 1, 2, 3
FP8_BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Where an expert's parts lie in its block, in bytes; -1 for a part it lacks.

    ``kind`` is DENSE (weights and biases in the dtype of the activations), FP8_BLOCK (e4m3 with float32 scales of
    128 x 128, gate and up with grids of their own), INT4 (low nibble is the even element; value = (q - zero) * scale;
    zeros are nibbles, one per scale, low nibble first, to which ``zero_offset`` is added; zero is 8 where there are
    none) or MXFP4. ``group`` is the number of inputs that share a scale in gate and up, ``down_group`` in down (0: as
    ``group``); the last group of a row may be cut off. ``gate_order``, ``up_order``: [H] int32, the input that column
    j of the rows stands for, for weights sorted by group. ``num_bytes`` is the whole block's size.
    """

    kind: int
    gate_up: int
    down: int
    gate_scales: int = -1
    up_scales: int = -1
    down_scales: int = -1
    gate_up_zeros: int = -1
    down_zeros: int = -1
    zero_offset: int = 0
    gate_up_bias: int = -1
    down_bias: int = -1
    gate_order: int = -1
    up_order: int = -1
    group: int = 1
    down_group: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What launches just ahead of the products bring, which need not be done when those begin.

    ``table`` [num_experts] int64: where each expert is to be read when they are done. An expert whose address lies from
    ``first_place`` to ``last_place`` already is not among those that are brought. ``held``: what those launches read
    beside the tables, kept for as long as they run; then pairs may be grouped beside them, who must have begun only
    when everything before them was complete, as a decision does. None: behind them.
    """

    table: torch.Tensor
    first_place: int
    last_place: int
    held: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseExpert:
    """One expert's weights as floats: ``gate_up`` [2I, H], ``down`` [H, I] and the biases or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """The [num_bytes] uint8 at an address of host memory, shared, not copied. Whoever asks keeps them alive."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class _Parts:
    """Typed views into one block."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block

    def __call__(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        return self._block[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def read_expert(
    block: torch.Tensor, where: BlockFormat, inner: int, width: int, dtype: torch.dtype
) -> DenseExpert:
    """The weights in a [num_bytes] uint8 block as the kernel sees them, rounded to ``dtype``.

    ``inner`` is I, ``width`` H; columns are in the order of the inputs.
    """
    part = _Parts(block)
    gate_up = _rows(part, where, inner, width, dtype, is_down=False)
    down = _rows(part, where, inner, width, dtype, is_down=True)
    if where.gate_order >= 0:
        gate_up = gate_up.clone()
        for first, offset in ((0, where.gate_order), (inner, where.up_order)):
            half = slice(first, first + inner)
            gate_up[half] = gate_up[half][:, part(offset, torch.int32, width).long().argsort()]
    bias_dtype = dtype if where.kind == DENSE else torch.bfloat16
    biases = [
        part(offset, bias_dtype, rows).float() if offset >= 0 else None
        for offset, rows in ((where.gate_up_bias, 2 * inner), (where.down_bias, width))
    ]
    return DenseExpert(gate_up, down, biases[0], biases[1])


def _rows(
    part: _Parts, where: BlockFormat, inner: int, width: int, dtype: torch.dtype, *, is_down: bool
) -> torch.Tensor:
    offset = where.down if is_down else where.gate_up
    rows, columns = (width, inner) if is_down else (2 * inner, width)
    if where.kind == DENSE:
        return part(offset, dtype, rows, columns)
    if where.kind == FP8_BLOCK:
        values = part(offset, torch.float8_e4m3fn, rows, columns)
        side = FP8_BLOCK_SIZE
        if is_down:
            grid = part(where.down_scales, torch.float32, -(-rows // side), -(-columns // side))
            return dequantize_fp8_block(values, grid, side).to(dtype)
        shape = (-(-inner // side), -(-columns // side))
        halves = [
            dequantize_fp8_block(half, part(scales, torch.float32, *shape), side)
            for half, scales in zip(values.chunk(2), (where.gate_scales, where.up_scales), strict=True)
        ]
        return torch.cat(halves).to(dtype)
    group = (where.down_group or where.group) if is_down else where.group
    scales_at = where.down_scales if is_down else where.gate_scales
    groups = -(-columns // group)
    if where.kind == MXFP4:
        packed = part(offset, torch.uint8, rows, groups, group // 2)
        return dequantize_mxfp4(packed, part(scales_at, torch.uint8, rows, groups)).to(dtype)
    zeros_at = where.down_zeros if is_down else where.gate_up_zeros
    zeros = part(zeros_at, torch.uint8, -(-rows * groups // 2)) if zeros_at >= 0 else None
    scales = part(scales_at, torch.float16, rows, groups)
    packed = part(offset, torch.uint8, rows, columns // 2)
    return dequantize_int4(packed, scales, zeros, where.zero_offset, group).to(dtype)


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    where: BlockFormat,
    inner: int,
    activation: Activation,
    tee: torch.Tensor | None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See the face. Weights are read where the table points; a missing expert is stored while it is there."""
    tokens, width = x.shape
    per_token = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    partial = torch.zeros(tokens * per_token, width, dtype=torch.float32)
    addresses, targets = table.tolist(), tee.tolist() if tee is not None else None
    chosen, counts = torch.unique_consecutive(flat[order], return_counts=True)
    start = 0
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        pairs = order[start : start + count]
        start += count
        if expert < 0:
            continue
        block = bytes_at(addresses[expert], where.num_bytes)
        partial[pairs] = _expert(x[pairs // per_token], block, where, inner, activation, deterministic)
        if targets is not None and targets[expert]:
            bytes_at(targets[expert], where.num_bytes).copy_(block)
    return _combine(partial.view(tokens, per_token, width), weights, experts).to(x.dtype)


def copy_blocks(table: torch.Tensor, targets: torch.Tensor, num_bytes: int) -> None:
    """See the face."""
    for source, target in zip(table.tolist(), targets.tolist(), strict=True):
        if target:
            bytes_at(target, num_bytes).copy_(bytes_at(source, num_bytes))


def _expert(
    rows: torch.Tensor,
    block: torch.Tensor,
    where: BlockFormat,
    inner: int,
    activation: Activation,
    deterministic: bool,
) -> torch.Tensor:
    """float32 outputs of one expert for its tokens."""
    expert = read_expert(block, where, inner, rows.shape[1], rows.dtype)
    multiply = _by_row if deterministic else torch.mm
    both = multiply(rows.float(), expert.gate_up.float().t())
    if expert.gate_up_bias is not None:
        both = both + expert.gate_up_bias
    gate, up = both.chunk(2, -1)
    hidden = activation(gate, up).to(rows.dtype).float()
    out = multiply(hidden, expert.down.float().t())
    return out if expert.down_bias is None else out + expert.down_bias


def _by_row(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, K] @ [K, N], each row by a product of its own: those of several rows sum in another order. Cloned, as a row's
    alignment may change the order as well."""
    return torch.cat([row.clone() @ weight for row in rows.split(1)])


def _combine(partial: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[tokens, H] float32: the choices' outputs in their order, so that the sum does not depend on who ran first."""
    total = torch.zeros_like(partial[:, 0])
    for choice in range(experts.shape[1]):
        share = torch.where(experts[:, choice] >= 0, weights[:, choice].float(), 0.0)
        total = total + share.unsqueeze(1) * partial[:, choice]
    return total
