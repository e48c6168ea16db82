"""Expert products for launches with many tokens per expert: tiles of tokens against weights, bound by the tensor cores.

Packed weights are unpacked first, a few experts at a time, into rows of the activations' dtype with their scales
multiplied in: hundreds of tokens share that work, which a product that unpacks on its way would repeat for every tile
of tokens. A block is read once for each of its matrices, wherever its address points.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels._reference.experts import DENSE, FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, BlockFormat
from kernels._triton.expert_tiles import DECODE_TOKENS, WideTiles
from kernels._triton.expert_weights import (
    activated,
    biases_at,
    from_e2m1,
    from_fp8,
    from_int4,
    raw_tile,
    scale_cells,
    zero_cells,
)
from kernels._triton.experts_group import combine, copy_blocks, group_pairs

LEAST_TOKENS = {FP8_BLOCK: 192, INT4: 192, MXFP4: 128}
"""Tokens that an expert has on average from which on unpacking pays, measured on an H200."""
SCRATCH_BYTES = 320 << 20
"""Unpacked weights at a time, at most (but one expert's at least)."""
MAX_SHARING = 16
"""Programs that share an expert's tokens at most; each loops over the rest."""
UNPACKED_ROWS = 32
UNPACKED_BYTES = 128
"""Of a row that a program unpacks: whole lines, for blocks that are read over the link."""


@triton.jit
def _unpack(
    table, starts, out, first, rows, width, inner, out_stride, matrix, scales, up_scales, zeros, zero_offset,
    order, up_order,
    KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    ALIGN: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[expert - first, row, column] = the weight with its scale, for experts that have tokens."""
    expert = first + tl.program_id(0)
    if tl.load(starts + expert) == tl.load(starts + expert + 1):
        return
    base = tl.load(table + expert)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    cells = tl.cdiv(width, GROUP)
    start = tl.program_id(2) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    to = out + tl.program_id(0).to(tl.int64) * out_stride + row.to(tl.int64)[:, None] * width
    kept = row_ok[:, None] & (column < width)[None, :]
    if KIND == 1:
        # Gate and up have grids of scales of their own.
        above = row < inner
        cell = (tl.where(above, row, row - inner) // SIDE) * cells + start // GROUP
        at = tl.where(above, base + scales, base + up_scales).to(tl.pointer_type(tl.float32)) + cell
        scale = tl.load(at, mask=row_ok, other=0.0)
        raw = raw_tile(base + matrix, row[:, None] * width + column[None, :], kept, out, KIND, ALIGN)
        value = from_fp8(raw, ASM).to(tl.float32) * scale[:, None]
        tl.store(to + column[None, :], value.to(out.dtype.element_ty), mask=kept)
    else:
        # [rows, groups, bytes of a group], so that a scale is read once for its group.
        group = tl.arange(0, COLUMNS // GROUP)
        byte = tl.arange(0, GROUP // 2)
        unit = start // 2 + group[:, None] * (GROUP // 2) + byte[None, :]
        unit_ok = unit < width // 2
        mask = row_ok[:, None, None] & unit_ok[None, :, :]
        at = (row * (width // 2))[:, None, None] + unit[None, :, :]
        raw = raw_tile(base + matrix, at, mask, out, KIND, ALIGN)
        cell = (row * cells)[:, None] + (start // GROUP + group)[None, :]
        cell_ok = row_ok[:, None] & (start + group * GROUP < width)[None, :]
        if KIND == 2:
            zero = zero_cells(base + zeros, zero_offset, cell, cell_ok, HAS_ZEROS)
            even, odd = from_int4(raw, tl.broadcast_to(zero[:, :, None], raw.shape), ASM)
        else:
            even, odd = from_e2m1(raw, ASM)
        scale = scale_cells(base + scales, cell, cell_ok, KIND)[:, :, None]
        value = tl.interleave(even.to(tl.float32) * scale, odd.to(tl.float32) * scale)
        column3 = (start + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :])[None, :, :]
        kept3 = row_ok[:, None, None] & (column3 < width)
        to3 = out + tl.program_id(0).to(tl.int64) * out_stride + row.to(tl.int64)[:, None, None] * width
        if HAS_ORDER:
            orders = tl.where(row < inner, base + order, base + up_order)[:, None, None]
            column3 = tl.load(orders.to(tl.pointer_type(tl.int32)) + column3, mask=kept3, other=0)
        tl.store(to3 + column3, value.to(out.dtype.element_ty), mask=kept3)


@triton.jit
def _wide_gate_up(
    x, hidden, weights, table, order, starts, first_expert, experts_per_token, inner, width, x_stride, limit, alpha,
    gate_up, bias,
    HAS_BIAS: tl.constexpr, BIAS_IS_X: tl.constexpr, ACTIVATION: tl.constexpr, ALIGN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    expert = first_expert + tl.program_id(2)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    base = tl.load(weights + expert) + gate_up
    rows = tl.multiple_of(base.to(tl.pointer_type(x.dtype.element_ty)), ALIGN)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Rows and tokens past the end read the last one's: no load needs a mask.
    gate_at = rows + tl.minimum(row, inner - 1)[None, :] * width
    up_at = gate_at + inner * width
    step = tl.arange(0, COLUMNS)
    for chunk in range(tl.program_id(0), tl.cdiv(last - first, TOKENS), tl.num_programs(0)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token = tl.load(order + tl.minimum(place, last - 1)) // experts_per_token
        x_at = x + token.to(tl.int64)[:, None] * x_stride
        gate = tl.zeros([TOKENS, ROWS], tl.float32)
        up = tl.zeros([TOKENS, ROWS], tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + step
            if WHOLE:
                value = tl.load(x_at + column[None, :])
                gate_rows = tl.load(gate_at + column[:, None])
                up_rows = tl.load(up_at + column[:, None])
            else:
                inside = column < width
                value = tl.load(x_at + column[None, :], mask=inside[None, :], other=0.0)
                gate_rows = tl.load(gate_at + column[:, None], mask=inside[:, None], other=0.0)
                up_rows = tl.load(up_at + column[:, None], mask=inside[:, None], other=0.0)
            gate = tl.dot(value, gate_rows, gate, input_precision="ieee")
            up = tl.dot(value, up_rows, up, input_precision="ieee")
        row_ok = row < inner
        if HAS_BIAS:
            at = tl.load(table + expert) + bias
            biases = biases_at(at, x, BIAS_IS_X)
            gate += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + inner + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
        result = activated(gate, up, limit, alpha, ACTIVATION)
        tl.store(
            hidden + place.to(tl.int64)[:, None] * inner + row[None, :],
            result.to(hidden.dtype.element_ty),
            mask=(place < last)[:, None] & row_ok[None, :],
        )


@triton.jit
def _wide_down(
    hidden, partial, weights, table, order, starts, first_expert, inner, width, down, bias,
    HAS_BIAS: tl.constexpr, BIAS_IS_X: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    expert = first_expert + tl.program_id(2)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    base = tl.load(weights + expert) + down
    rows = tl.multiple_of(base.to(tl.pointer_type(hidden.dtype.element_ty)), ALIGN)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_at = rows + tl.minimum(row, width - 1)[None, :] * inner
    step = tl.arange(0, COLUMNS)
    for chunk in range(tl.program_id(0), tl.cdiv(last - first, TOKENS), tl.num_programs(0)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        held = tl.minimum(place, last - 1)
        hidden_at = hidden + held.to(tl.int64)[:, None] * inner
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
        for start in range(0, inner, COLUMNS):
            column = start + step
            if WHOLE:
                value = tl.load(hidden_at + column[None, :])
                weight = tl.load(row_at + column[:, None])
            else:
                inside = column < inner
                value = tl.load(hidden_at + column[None, :], mask=inside[None, :], other=0.0)
                weight = tl.load(row_at + column[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(value, weight, acc, input_precision="ieee")
        row_ok = row < width
        if HAS_BIAS:
            at = tl.load(table + expert) + bias
            biases = biases_at(at, hidden, BIAS_IS_X)
            acc += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order + held).to(tl.int64)
        tl.store(
            partial + pair[:, None] * width + row[None, :],
            acc,
            mask=(place < last)[:, None] & row_ok[None, :],
        )


def serves(block: BlockFormat, tokens: int, experts_per_token: int, num_experts: int) -> bool:
    """Whether a launch of so many tokens has enough of them per expert, and scales lie as unpacking takes them."""
    if block.kind == DENSE:
        return tokens > DECODE_TOKENS
    groups = (block.group, block.down_group or block.group) if block.kind >= INT4 else ()
    whole = all(group > 1 and (2 * UNPACKED_BYTES) % group == 0 for group in groups)
    return whole and tokens * experts_per_token >= LEAST_TOKENS[block.kind] * num_experts


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    block: BlockFormat,
    inner: int,
    activation: int,
    limit: float,
    alpha: float,
    tee: torch.Tensor | None,
    tiles: tuple[WideTiles, WideTiles],
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """See :func:`kernels._triton.experts.run_experts`; the result does not depend on ``scratch_bytes``."""
    (tokens, width), per_token, num_experts = x.shape, experts.shape[1], table.shape[0]
    order, starts, inputs = group_pairs(experts, num_experts, x, split=False)
    if tee is not None:
        # Stored before it is used, and used from there: a block crosses the link once.
        kept = torch.where(starts[1:] > starts[:-1], tee, 0)
        copy_blocks(table, kept, block.num_bytes)
        table = torch.where(kept != 0, kept, table)
    hidden = torch.empty(tokens * per_token, inner, dtype=x.dtype, device=x.device)
    partial = torch.empty(tokens * per_token, width, dtype=torch.float32, device=x.device)
    up, down = tiles
    size = x.element_size()
    unpacked = _Unpacked(block, x, inner, num_experts, scratch_bytes) if block.kind != DENSE else None
    shared = {
        "ALIGN": 16 if width * size % 16 == 0 and inner * size % 16 == 0 else 1,
        "BIAS_IS_X": block.kind == DENSE,
    }
    step = num_experts if unpacked is None else unpacked.num_held
    for first in range(0, num_experts, step):
        count = min(step, num_experts - first)
        held, gate_up_at, down_at = table, block.gate_up, block.down
        if unpacked is not None:
            held, gate_up_at, down_at = unpacked.fill(table, starts, first, count)
        _wide_gate_up[_grid(up, tokens, inner, count)](
            inputs, hidden, held, table, order, starts, first, per_token, inner, width, inputs.stride(0), limit, alpha,
            gate_up_at, block.gate_up_bias, HAS_BIAS=block.gate_up_bias >= 0, ACTIVATION=activation,
            WHOLE=width % up.columns == 0, **_tile(up), **shared,
        )  # fmt: skip
        _wide_down[_grid(down, tokens, width, count)](
            hidden, partial, held, table, order, starts, first, inner, width, down_at, block.down_bias,
            HAS_BIAS=block.down_bias >= 0, WHOLE=inner % down.columns == 0, **_tile(down), **shared,
        )  # fmt: skip
    return combine(partial, weights, experts, x)


def _grid(tiles: WideTiles, tokens: int, rows: int, num_experts: int) -> tuple[int, int, int]:
    # An expert's programs lie side by side, so that they find its weights in the cache.
    sharing = min(triton.cdiv(tokens, tiles.tokens), MAX_SHARING)
    return sharing, triton.cdiv(rows, tiles.rows), num_experts


def _tile(tiles: WideTiles) -> dict[str, int]:
    return {
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


class _Unpacked:
    """Room for the unpacked weights of a few experts."""

    def __init__(
        self, block: BlockFormat, x: torch.Tensor, inner: int, num_experts: int, scratch_bytes: int
    ) -> None:
        self._block, self._inner, self._width = block, inner, x.shape[1]
        size = 3 * inner * self._width
        self.num_held = max(1, min(num_experts, scratch_bytes // (size * x.element_size())))
        self._columns = UNPACKED_BYTES * (2 if block.kind >= INT4 else 1)
        self._room = torch.empty(self.num_held, size, dtype=x.dtype, device=x.device)
        where = torch.arange(num_experts, device=x.device) % self.num_held
        self._table = where * self._room.stride(0) * x.element_size() + self._room.data_ptr()
        row_bytes = (self._width // 2, inner // 2) if block.kind >= INT4 else (self._width, inner)
        self._shared = {
            "KIND": block.kind,
            "SIDE": FP8_BLOCK_SIZE,
            "ALIGN": 16 if all(n % 16 == 0 for n in row_bytes) else 1,
            "ASM": x.dtype is torch.bfloat16 and not knobs.runtime.interpret,
            "ROWS": UNPACKED_ROWS,
            "COLUMNS": self._columns,
        }

    def fill(
        self, table: torch.Tensor, starts: torch.Tensor, first: int, count: int
    ) -> tuple[torch.Tensor, int, int]:
        """Unpacks experts ``first`` .. ``first + count``; answers the table of their addresses, by expert, and where
        gate and up, and down, begin there."""
        block, inner, width = self._block, self._inner, self._width
        down = self._room[:, 2 * inner * width :]
        self._launch(
            table, starts, self._room, first, count, 2 * inner, width, inner, block.gate_up, block.gate_scales,
            block.up_scales, block.gate_up_zeros, block.group, block.gate_order, block.up_order,
        )  # fmt: skip
        self._launch(
            table, starts, down, first, count, width, inner, width, block.down, block.down_scales, block.down_scales,
            block.down_zeros, block.down_group or block.group, -1, -1,
        )  # fmt: skip
        return self._table, 0, 2 * inner * width * self._room.element_size()

    def _launch(
        self, table: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, first: int, count: int, rows: int,
        width: int, above: int, matrix: int, scales: int, up_scales: int, zeros: int, group: int, order: int,
        up_order: int,
    ) -> None:  # fmt: skip
        kind = self._block.kind
        grid = (count, triton.cdiv(rows, UNPACKED_ROWS), triton.cdiv(width, self._columns))
        _unpack[grid](
            table, starts, out, first, rows, width, above, out.stride(0), matrix, scales,
            up_scales if kind == FP8_BLOCK else scales, zeros, self._block.zero_offset, order, up_order,
            GROUP=FP8_BLOCK_SIZE if kind == FP8_BLOCK else group, HAS_ZEROS=zeros >= 0, HAS_ORDER=order >= 0,
            **self._shared,
        )  # fmt: skip
