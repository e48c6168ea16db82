"""Grouped expert products through the address table: weights are read from wherever the table points.

A program owns a tile of one expert's output rows and loops over all of that expert's tokens, so a weight tile crosses
the link at most once per launch when it fits the loop's tile of tokens; where a copy is wanted, the program stores what
it read. An address may lie in the arena or in mapped host memory: the arithmetic is the same, and so is the result.

Weights are the left operand (rows x columns), tokens the right one, so that a handful of tokens wastes little of the
tensor cores. Packed weights that lie as is usual take the launches of ``experts_few`` instead, a single token the two
of ``experts_one`` or of ``experts_single`` and many tokens per expert those of ``experts_wide``, unless results must
not depend on the number of tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels._reference.experts import DENSE, FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, Ahead, BlockFormat
from kernels._triton import experts_few, experts_one, experts_single, experts_wide
from kernels._triton.expert_tiles import (
    FEW_RULE,
    FORMATS,
    ONE_RULE,
    Case,
    Tiles,
    TileTable,
    general_rule,
    table_of,
    wide_rule,
)
from kernels._triton.expert_weights import (
    activated,
    biases_at,
    from_e2m1,
    from_fp8,
    from_int4,
    keep_tile,
    raw_tile,
    scale_cells,
    zero_cells,
)
from kernels._triton.experts_group import combine, copy_small_parts, group_pairs, launch_options

__all__ = ["CLAMPED_SWIGLU", "DENSE", "FP8_BLOCK", "INT4", "MXFP4", "SILU", "BlockFormat", "run_experts"]

SILU, CLAMPED_SWIGLU = 0, 1
FEW_AT_MOST = {FP8_BLOCK: 24, INT4: 64, MXFP4: 32}
"""Tokens that an expert has on average up to which ``experts_few``, which reads weights for sixteen of them at a time,
was the faster one on an H200."""
MAX_SHARING = 8
"""Programs that share an expert's tokens at most; each loops over the rest."""


@triton.jit
def _accumulate(
    acc, x, token_row, token_ok, x_stride, x_half, input_order, base, target, matrix, row, row_ok, scales, cell_first,
    zeros, zero_offset, width, like,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, ALIGN: tl.constexpr,
    ASM: tl.constexpr, TEE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] += weight[row] @ x[token_row]^T over the whole contraction, in a fixed order.

    Packed weights meet x with its even columns first and its odd ones from ``x_half`` on. A tile lies within one group
    of scales (COLUMNS divides GROUP); where no such tile is wide enough, every weight is scaled by itself.
    """
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    UNITS: tl.constexpr = COLUMNS // PACKED
    for start in range(0, width // PACKED, UNITS):
        unit = start + tl.arange(0, UNITS)
        unit_ok = unit < width // PACKED
        at = row.to(tl.int64)[:, None] * (width // PACKED) + unit[None, :]
        mask = row_ok[:, None] & unit_ok[None, :]
        raw = raw_tile(base + matrix, at, mask, like, KIND, ALIGN)
        if TEE:
            keep_tile(tl.where(target != 0, target + matrix, 0), at, mask, raw, like, KIND, ALIGN)
        x_mask = unit_ok[:, None] & token_ok[None, :]
        x_rows = x + token_row[None, :] * x_stride
        if KIND == 0:
            value = tl.load(x_rows + unit[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(raw, value, acc, input_precision="ieee")
        elif KIND == 1:
            value = tl.load(x_rows + unit[:, None], mask=x_mask, other=0.0)
            weight = from_fp8(raw, ASM).to(like.dtype.element_ty)
            scale = scale_cells(scales, cell_first + start // GROUP, row_ok, KIND)
            acc += tl.dot(weight, value, input_precision="ieee") * scale[:, None]
        else:
            even_at, odd_at = unit, x_half + unit
            if HAS_ORDER:
                inputs_of = input_order.to(tl.pointer_type(tl.int32))
                even_at = tl.load(inputs_of + 2 * unit, mask=unit_ok, other=0)
                odd_at = tl.load(inputs_of + 2 * unit + 1, mask=unit_ok, other=0)
            x_even = tl.load(x_rows + even_at[:, None], mask=x_mask, other=0.0)
            x_odd = tl.load(x_rows + odd_at[:, None], mask=x_mask, other=0.0)
            if GROUP % COLUMNS == 0:
                cell = cell_first + 2 * start // GROUP
                scale = scale_cells(scales, cell, row_ok, KIND)
                if KIND == 2:
                    zero = zero_cells(zeros, zero_offset, cell, row_ok, HAS_ZEROS)
                    even, odd = from_int4(raw, tl.broadcast_to(zero[:, None], raw.shape), ASM)
                else:
                    even, odd = from_e2m1(raw, ASM)
                part = tl.dot(even.to(like.dtype.element_ty), x_even, input_precision="ieee")
                part = tl.dot(odd.to(like.dtype.element_ty), x_odd, part, input_precision="ieee")
                acc += part * scale[:, None]
            else:
                even_cell = cell_first[:, None] + (2 * unit // GROUP)[None, :]
                odd_cell = cell_first[:, None] + ((2 * unit + 1) // GROUP)[None, :]
                even_zero = zero_cells(zeros, zero_offset, even_cell, mask, HAS_ZEROS).to(tl.float32)
                odd_zero = zero_cells(zeros, zero_offset, odd_cell, mask, HAS_ZEROS).to(tl.float32)
                even = (raw & 0x0F).to(tl.float32) - even_zero
                odd = (raw >> 4).to(tl.float32) - odd_zero
                even *= scale_cells(scales, even_cell, mask, KIND)
                odd *= scale_cells(scales, odd_cell, mask, KIND)
                acc = tl.dot(even.to(like.dtype.element_ty), x_even, acc, input_precision="ieee")
                acc = tl.dot(odd.to(like.dtype.element_ty), x_odd, acc, input_precision="ieee")
    return acc


@triton.jit
def _gate_up(
    x, hidden, table, tee, order, starts, experts_per_token, inner, width, x_stride, limit, alpha,
    gate_up, gate_scales, up_scales, zeros, zero_offset, gate_order, up_order, bias,
    KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ALIGN: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = row < inner
    cells = tl.cdiv(width, GROUP)
    if KIND == 1:
        gate_cell = (row // SIDE) * cells
        up_cell = gate_cell
        up_scale_at = base + up_scales
    else:
        gate_cell = row * cells
        up_cell = (inner + row) * cells
        up_scale_at = base + gate_scales
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        token = (tl.load(order + place, mask=token_ok, other=0) // experts_per_token).to(tl.int64)
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        gate = _accumulate(
            acc, x, token, token_ok, x_stride, width // 2, base + gate_order, base, target, gate_up, row, row_ok,
            base + gate_scales, gate_cell, base + zeros, zero_offset, width, x, KIND, GROUP, HAS_ZEROS, HAS_ORDER,
            ALIGN, ASM, TEE, COLUMNS, ROWS,
        )  # fmt: skip
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        up = _accumulate(
            acc, x, token, token_ok, x_stride, width // 2, base + up_order, base, target, gate_up, inner + row, row_ok,
            up_scale_at, up_cell, base + zeros, zero_offset, width, x, KIND, GROUP, HAS_ZEROS, HAS_ORDER,
            ALIGN, ASM, TEE, COLUMNS, ROWS,
        )  # fmt: skip
        if HAS_BIAS:
            biases = biases_at(base + bias, x, KIND == 0)
            gate += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
            up += tl.load(biases + inner + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        result = activated(gate, up, limit, alpha, ACTIVATION)
        # For packed weights even elements come first, as `down` wants to read them.
        column = (row % 2) * (inner // 2) + row // 2 if KIND >= 2 else row
        tl.store(
            hidden + place.to(tl.int64)[None, :] * inner + column[:, None],
            result.to(hidden.dtype.element_ty),
            mask=row_ok[:, None] & token_ok[None, :],
        )


@triton.jit
def _down(
    hidden, partial, table, tee, order, starts, inner, width, down, scales, zeros, zero_offset, bias,
    KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = row < width
    cell_first = (row // SIDE if KIND == 1 else row) * tl.cdiv(inner, GROUP)
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        acc = _accumulate(
            acc, hidden, place.to(tl.int64), token_ok, inner, inner // 2, base, base, target, down, row, row_ok,
            base + scales, cell_first, base + zeros, zero_offset, inner, hidden, KIND, GROUP, HAS_ZEROS, False,
            ALIGN, ASM, TEE, COLUMNS, ROWS,
        )  # fmt: skip
        if HAS_BIAS:
            biases = biases_at(base + bias, hidden, KIND == 0)
            acc += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        pair = tl.load(order + place, mask=token_ok, other=0).to(tl.int64)
        tl.store(
            partial + pair[None, :] * width + row[:, None], acc, mask=row_ok[:, None] & token_ok[None, :]
        )


def columns_of(kind: int, group: int, columns: int) -> tuple[int, int]:
    """(columns of a tile, group the kernel is told): a tile lies within one group, which for dense weights is none."""
    if kind == DENSE:
        return columns, 1
    if kind == FP8_BLOCK:
        return min(columns, FP8_BLOCK_SIZE), FP8_BLOCK_SIZE
    divisor = min(group & -group, columns)
    # Tensor cores take 16 columns at a time, and packed weights come as even and odd ones.
    return (divisor, group) if divisor >= 32 else (64, group)


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    block: BlockFormat,
    inner: int,
    activation: int = SILU,
    limit: float = 7.0,
    alpha: float = 1.702,
    tee: torch.Tensor | None = None,
    deterministic: bool = False,
    tiles: tuple[Tiles, Tiles] | None = None,
    ahead: Ahead | None = None,
) -> torch.Tensor:
    """``sum over a token's experts of weight * (down @ act(gate @ x, up @ x) + bias)``, in the order of the choices.

    Args:
        x: [tokens, H] contiguous; H and I even for INT4, multiples of 32 for MXFP4.
        weights: [tokens, experts_per_token] float32; experts: the same shape, int64, -1 in padding rows.
        table: [num_experts] int64 addresses of the layer's blocks, 128-byte aligned.
        block: where a block's parts are. inner: I.
        tee: [num_experts] int64, where a chosen expert's block is also stored, 0 for nowhere.
        deterministic: a token's bits do not depend on the tokens beside it.
        tiles: for gate and up, and for down, in place of the chosen ones (tuning).
        ahead: what the launches just ahead bring; ``table`` is as it was before them.

    Returns:
        [tokens, H] in x's dtype; padding rows are zero.
    """
    kernel, *chosen = (
        ("one" if len(x) == 1 and not deterministic and experts_one.serves(block) else "many", *tiles)
        if tiles
        else choose(x, experts.shape[1], len(table), block, inner, deterministic=deterministic)
    )
    inputs = (x, weights, experts, table, block, inner, activation, limit, alpha, tee)
    return run_kernel(kernel, (chosen[0], chosen[1]), inputs, ahead)


Inputs = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    BlockFormat,
    int,
    int,
    float,
    float,
    torch.Tensor | None,
]
"""Of a launch: :func:`run_experts`' arguments from x to tee."""


def run_kernel(
    kernel: str, tiles: tuple[Any, Any], inputs: Inputs, ahead: Ahead | None = None
) -> torch.Tensor:
    """What :func:`run_experts` does once kernel and tiles are chosen."""
    x, weights, experts, table, block, inner, activation, limit, alpha, tee = inputs
    if kernel == "one":
        out = experts_one.run_experts(*inputs, tiles, ahead)
    else:
        beside = ahead is not None and ahead.held is not None
        table = table if ahead is None else ahead.table
        rest = (x, weights, experts, table, block, inner, activation, limit, alpha, tee, tiles)
        if kernel == "few":
            return experts_few.run_experts(*rest, beside)
        if kernel == "single":
            return experts_single.run_experts(*rest)
        if kernel == "wide":
            return experts_wide.run_experts(*rest)
        out = _run_many(*rest)
    if tee is not None:
        copy_small_parts(table, tee, block, inner, x.shape[1], x.element_size())
    return out


def choose(
    x: torch.Tensor, per_token: int, num_experts: int, block: BlockFormat, inner: int, *, deterministic: bool,
    measured: TileTable | None = None,
) -> tuple[str, Any, Any]:  # fmt: skip
    """(kernel, tiles of gate and up, tiles of down) of a launch: what was measured on x's device (``measured`` in place
    of it), else the rule."""
    tokens, kind = len(x), block.kind
    serves = {
        "one": tokens == 1 and experts_one.serves(block),
        "single": tokens == 1 and experts_few.serves(x, block, inner),
        "few": experts_few.serves(x, block, inner),
        "many": True,
        "wide": experts_wide.serves(block, tokens, per_token, num_experts),
    }
    if not deterministic and x.dtype is torch.bfloat16:
        if measured is None:
            measured = table_of(_device_name(x.get_device())) if x.is_cuda else TileTable()
        case = Case(FORMATS[kind], x.shape[1], inner, block.group if kind == INT4 else 0)
        entry = measured.find(case, tokens)
        if entry is not None and serves[entry.kernel]:
            return entry.kernel, entry.gate_up, entry.down
    per_expert = tokens * per_token / num_experts
    if serves["wide"] and not deterministic:
        return "wide", *wide_rule(x.element_size(), per_expert)
    if serves["one"] and not deterministic:
        return "one", *ONE_RULE[kind]
    if serves["few"] and (deterministic or per_expert <= FEW_AT_MOST[kind]):
        return "few", *FEW_RULE[kind]
    return "many", *general_rule(kind, tokens, deterministic=deterministic)


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _run_many(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, table: torch.Tensor, block: BlockFormat, inner: int,
    activation: int, limit: float, alpha: float, tee: torch.Tensor | None, tiles: tuple[Tiles, Tiles],
) -> torch.Tensor:  # fmt: skip
    tokens, width = x.shape
    per_token, num_experts = experts.shape[1], table.shape[0]
    # Packed weights meet even and odd columns apart; sorted ones find theirs by the order in the block.
    split = block.kind >= INT4 and block.gate_order < 0
    order, starts, inputs = group_pairs(experts, num_experts, x, split=split)
    hidden = torch.empty(tokens * per_token, inner, dtype=x.dtype, device=x.device)
    partial = torch.empty(tokens * per_token, width, dtype=torch.float32, device=x.device)
    up, down = tiles
    shared = launch_options(x, block, inner, tee)
    copies = table if tee is None else tee
    columns, group = columns_of(block.kind, block.group, up.columns)
    sharing = min(triton.cdiv(tokens, up.tokens), MAX_SHARING)
    _gate_up[(num_experts, triton.cdiv(inner, up.rows), sharing)](
        inputs, hidden, table, copies, order, starts, per_token, inner, width, inputs.stride(0), limit, alpha,
        block.gate_up, block.gate_scales, block.up_scales, block.gate_up_zeros, block.zero_offset, block.gate_order,
        block.up_order, block.gate_up_bias, GROUP=group, HAS_ZEROS=block.gate_up_zeros >= 0,
        HAS_ORDER=block.gate_order >= 0, HAS_BIAS=block.gate_up_bias >= 0, ACTIVATION=activation, TOKENS=up.tokens,
        ROWS=up.rows, COLUMNS=columns, num_warps=up.num_warps, num_stages=up.num_stages, **shared,
    )  # fmt: skip
    columns, group = columns_of(block.kind, block.down_group or block.group, down.columns)
    sharing = min(triton.cdiv(tokens, down.tokens), MAX_SHARING)
    _down[(num_experts, triton.cdiv(width, down.rows), sharing)](
        hidden, partial, table, copies, order, starts, inner, width, block.down, block.down_scales, block.down_zeros,
        block.zero_offset, block.down_bias, GROUP=group, HAS_ZEROS=block.down_zeros >= 0,
        HAS_BIAS=block.down_bias >= 0, TOKENS=down.tokens, ROWS=down.rows, COLUMNS=columns,
        num_warps=down.num_warps, num_stages=down.num_stages, **shared,
    )  # fmt: skip
    return combine(partial, weights, experts, x)
