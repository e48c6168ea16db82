"""Grouped expert products through the address table: weights are read from wherever the table points.

A program owns a tile of one expert's output rows and loops over all of that expert's tokens, so a weight tile crosses
the link at most once per launch when it fits the loop's tile of tokens. An address may lie in the arena or in mapped
host memory: the arithmetic is the same, and so is the result.

Rows of a block are read along the contraction; gate and up tiles are read apart, so no tile straddles the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._reference.experts import DENSE, FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, BlockFormat

SILU, CLAMPED_SWIGLU = 0, 1
COPY_BYTES = 16384
"""bytes of a block that one program copies"""
DECODE_ROWS = 32
"""Output rows of a program at decode: few, so that eight experts alone fill the card."""


@triton.jit
def _dense_tile(address, row, column, row_ok, column_ok, width, like, ALIGN: tl.constexpr):
    # What comes out of a table has no known alignment, and without one loads are not vectorised.
    base = tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), ALIGN)
    at = base + row[:, None] * width + column[None, :]
    return tl.load(at, mask=row_ok[:, None] & column_ok[None, :], other=0.0)


@triton.jit
def _fp8_tile(
    address, scales, row, column, row_first, column_first, row_ok, column_ok, width, like,
    SIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    base = tl.multiple_of(address.to(tl.pointer_type(tl.float8e4nv)), ALIGN)
    at = base + row[:, None] * width + column[None, :]
    value = tl.load(at, mask=row_ok[:, None] & column_ok[None, :], other=0.0).to(tl.float32)
    # A tile never straddles two blocks of the grid: its sides divide theirs.
    cell = (
        scales.to(tl.pointer_type(tl.float32))
        + (row_first // SIDE) * tl.cdiv(width, SIDE)
        + column_first // SIDE
    )
    return (value * tl.load(cell)).to(like.dtype.element_ty)


@triton.jit
def _spread(cells, ROWS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """[rows, groups] to [rows, pairs], each group's value for every byte of the group."""
    wide = tl.broadcast_to(tl.expand_dims(cells, 2), (ROWS, GROUPS, PAIRS // GROUPS))
    return tl.reshape(wide, (ROWS, PAIRS))


@triton.jit
def _nibble_tiles(
    address, scales, zeros, zero_offset, row, pair, pair_first, row_ok, pair_ok, width, like,
    GROUP: tl.constexpr, IS_MXFP4: tl.constexpr, HAS_ZEROS: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Even and odd columns of a tile: a byte holds two neighbours along the contraction."""
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN)
    at = base + row[:, None] * (width // 2) + pair[None, :]
    packed = tl.load(at, mask=row_ok[:, None] & pair_ok[None, :], other=0)
    low = (packed & 0x0F).to(tl.int32)
    high = (packed >> 4).to(tl.int32)
    if 2 * PAIRS % GROUP == 0:
        GROUPS: tl.constexpr = 2 * PAIRS // GROUP
        group = pair_first * 2 // GROUP + tl.arange(0, GROUPS)
        mask = row_ok[:, None] & (group * GROUP < width)[None, :]
    else:
        group = pair * 2 // GROUP
        mask = row_ok[:, None] & pair_ok[None, :]
    cell = row[:, None] * tl.cdiv(width, GROUP) + group[None, :]
    if IS_MXFP4:
        exponent = tl.load(scales.to(tl.pointer_type(tl.uint8)) + cell, mask=mask, other=0).to(tl.float32)
        scale = tl.exp2(exponent - 127.0)
        if 2 * PAIRS % GROUP == 0:
            scale = _spread(scale, ROWS, GROUPS, PAIRS)
        even = _e2m1(low) * scale
        odd = _e2m1(high) * scale
    else:
        scale = tl.load(scales.to(tl.pointer_type(tl.float16)) + cell, mask=mask, other=0.0).to(tl.float32)
        zero = tl.full(cell.shape, 8, tl.int32)
        if HAS_ZEROS:
            pairs = tl.load(zeros.to(tl.pointer_type(tl.uint8)) + cell // 2, mask=mask, other=0).to(tl.int32)
            zero = ((pairs >> ((cell % 2) * 4).to(tl.int32)) & 0x0F) + zero_offset
        if 2 * PAIRS % GROUP == 0:
            scale = _spread(scale, ROWS, GROUPS, PAIRS)
            zero = _spread(zero, ROWS, GROUPS, PAIRS)
        even = (low - zero).to(tl.float32) * scale
        odd = (high - zero).to(tl.float32) * scale
    return even.to(like.dtype.element_ty), odd.to(like.dtype.element_ty)


@triton.jit
def _e2m1(code):
    size = code & 7
    magnitude = tl.where(
        size < 2, size * 0.5, (1.0 + (size & 1) * 0.5) * tl.exp2((size >> 1).to(tl.float32) - 1.0)
    )
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _accumulate(
    acc, inputs, token_row, token_ok, address, scales, zeros, zero_offset, order, row, row_first, row_ok, width, stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    SIDE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """acc [tokens, rows] += inputs[token_row] @ weight[row]^T over the whole contraction, in a fixed order."""
    if KIND < 2:
        for start in range(0, width, BLOCK_IN):
            column = start + tl.arange(0, BLOCK_IN)
            column_ok = column < width
            mask = token_ok[:, None] & column_ok[None, :]
            x = tl.load(inputs + token_row[:, None] * stride + column[None, :], mask=mask, other=0.0)
            if KIND == 0:
                w = _dense_tile(address, row, column, row_ok, column_ok, width, inputs, ALIGN)
            else:
                w = _fp8_tile(
                    address,
                    scales,
                    row,
                    column,
                    row_first,
                    start,
                    row_ok,
                    column_ok,
                    width,
                    inputs,
                    SIDE,
                    ALIGN,
                )
            acc += tl.dot(x, tl.trans(w), input_precision="ieee")
    else:
        for start in range(0, width // 2, BLOCK_IN // 2):
            pair = start + tl.arange(0, BLOCK_IN // 2)
            pair_ok = pair < width // 2
            mask = token_ok[:, None] & pair_ok[None, :]
            even_column = 2 * pair
            odd_column = 2 * pair + 1
            if HAS_ORDER:
                inputs_of = order.to(tl.pointer_type(tl.int32))
                even_column = tl.load(inputs_of + even_column, mask=pair_ok, other=0)
                odd_column = tl.load(inputs_of + odd_column, mask=pair_ok, other=0)
            x_even = tl.load(
                inputs + token_row[:, None] * stride + even_column[None, :], mask=mask, other=0.0
            )
            x_odd = tl.load(inputs + token_row[:, None] * stride + odd_column[None, :], mask=mask, other=0.0)
            even, odd = _nibble_tiles(
                address, scales, zeros, zero_offset, row, pair, start, row_ok, pair_ok, width, inputs,
                GROUP, KIND == 3, HAS_ZEROS, ALIGN, BLOCK_OUT, BLOCK_IN // 2,
            )  # fmt: skip
            acc += tl.dot(x_even, tl.trans(even), input_precision="ieee")
            acc += tl.dot(x_odd, tl.trans(odd), input_precision="ieee")
    return acc


@triton.jit
def _gate_up(
    x, hidden, table, order, starts, experts_per_token, inner, width, x_stride, limit, alpha,
    gate_up, gate_scales, up_scales, zeros, zero_offset, gate_order, up_order, bias,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr, SIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROW_BYTES_NUM: tl.constexpr, ROW_BYTES_DEN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    row_first = tl.program_id(1) * BLOCK_OUT
    row = row_first + tl.arange(0, BLOCK_OUT)
    row_ok = row < inner
    up_base = base + gate_up + inner.to(tl.int64) * width * ROW_BYTES_NUM // ROW_BYTES_DEN
    groups = tl.cdiv(width, GROUP)
    scale_bytes = 1 if KIND == 3 else 2
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, BLOCK_T), tl.num_programs(2)):
        place = first + chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        token_ok = place < last
        token = (tl.load(order + place, mask=token_ok, other=0) // experts_per_token).to(tl.int64)
        acc = tl.zeros([BLOCK_T, BLOCK_OUT], tl.float32)
        gate = _accumulate(
            acc, x, token, token_ok, base + gate_up, base + gate_scales, base + zeros, zero_offset, base + gate_order,
            row, row_first, row_ok, width, x_stride, KIND, GROUP, HAS_ZEROS, HAS_ORDER, SIDE, ALIGN,
            BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
        acc = tl.zeros([BLOCK_T, BLOCK_OUT], tl.float32)
        up_scale_at = base + up_scales
        up_zero_at = base + zeros
        if KIND >= 2:
            up_scale_at = base + gate_scales + inner.to(tl.int64) * groups * scale_bytes
            up_zero_at = base + zeros + inner.to(tl.int64) * groups // 2  # I is even: whole bytes
        up = _accumulate(
            acc, x, token, token_ok, up_base, up_scale_at, up_zero_at, zero_offset, base + up_order,
            row, row_first, row_ok, width, x_stride, KIND, GROUP, HAS_ZEROS, HAS_ORDER, SIDE, ALIGN,
            BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
        if HAS_BIAS:
            if KIND == 0:
                biases = (base + bias).to(tl.pointer_type(x.dtype.element_ty))
            else:
                biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            gate += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + inner + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 0:
            result = gate * tl.sigmoid(gate) * up
        else:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
        tl.store(
            hidden + place.to(tl.int64)[:, None] * inner + row[None, :],
            result.to(hidden.dtype.element_ty),
            mask=token_ok[:, None] & row_ok[None, :],
        )


@triton.jit
def _down(
    hidden, partial, table, order, starts, inner, width, down, scales, zeros, zero_offset, bias,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, SIDE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    row_first = tl.program_id(1) * BLOCK_OUT
    row = row_first + tl.arange(0, BLOCK_OUT)
    row_ok = row < width
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, BLOCK_T), tl.num_programs(2)):
        place = first + chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        token_ok = place < last
        acc = tl.zeros([BLOCK_T, BLOCK_OUT], tl.float32)
        acc = _accumulate(
            acc, hidden, place.to(tl.int64), token_ok, base + down, base + scales, base + zeros, zero_offset, base,
            row, row_first, row_ok, inner, inner, KIND, GROUP, HAS_ZEROS, False, SIDE, ALIGN, BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
        if HAS_BIAS:
            if KIND == 0:
                biases = (base + bias).to(tl.pointer_type(hidden.dtype.element_ty))
            else:
                biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            acc += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order + place, mask=token_ok, other=0).to(tl.int64)
        tl.store(
            partial + pair[:, None] * width + row[None, :], acc, mask=token_ok[:, None] & row_ok[None, :]
        )


@triton.jit
def _combine(partial, weights, experts, out, experts_per_token, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(0, experts_per_token):
        pair = token * experts_per_token + choice
        value = tl.load(partial + pair * width + column, mask=inside, other=0.0)
        # A pair without an expert (a padding row) has no row in `partial`: what lies there may be NaN.
        total += tl.where(tl.load(experts + pair) >= 0, tl.load(weights + pair) * value, 0.0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def group_pairs(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, choice) pairs sorted by expert, without a host sync.

    Args:
        experts: [tokens, experts_per_token] int64, -1 in padding rows.

    Returns:
        order [pairs] int64, pair numbers by expert and then by token, padding last; starts [num_experts + 1] int64.
    """
    flat = experts.flatten()
    keys = torch.where(flat < 0, num_experts, flat)
    ordered, order = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, bounds)


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
) -> torch.Tensor:
    """``sum over a token's experts of weight * (down @ act(gate @ x, up @ x) + bias)``, in the order of the choices.

    Args:
        x: [tokens, H] contiguous; H and I even for INT4, multiples of 32 for MXFP4.
        weights: [tokens, experts_per_token] float32; experts: the same shape, int64, -1 in padding rows.
        table: [num_experts] int64 addresses of the layer's blocks, 128-byte aligned.
        block: where a block's parts are. inner: I.

    Returns:
        [tokens, H] in x's dtype; padding rows are zero.
    """
    tokens, width = x.shape
    per_token, num_experts = experts.shape[1], table.shape[0]
    order, starts = group_pairs(experts, num_experts)
    hidden = torch.empty(tokens * per_token, inner, dtype=x.dtype, device=x.device)
    partial = torch.empty(tokens * per_token, width, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    block_t = 16 if tokens <= 64 else 64
    # Decode: one program loops over an expert's tokens. Prefill: programs share them.
    sharing = 1 if tokens <= 64 else triton.cdiv(tokens, 4 * block_t)
    bits = {DENSE: x.element_size() * 8, FP8_BLOCK: 8, INT4: 4, MXFP4: 4}[block.kind]
    rows, stages = (DECODE_ROWS, 4) if tokens <= 64 else (64, 3)
    shared = {
        "KIND": block.kind, "SIDE": FP8_BLOCK_SIZE, "ALIGN": 16 if inner * width * bits // 8 % 16 == 0 else 1,
        "BLOCK_T": block_t, "BLOCK_OUT": rows, "BLOCK_IN": FP8_BLOCK_SIZE, "num_warps": 4, "num_stages": stages,
    }  # fmt: skip
    _gate_up[(num_experts, triton.cdiv(inner, rows), sharing)](
        x, hidden, table, order, starts, per_token, inner, width, x.stride(0), limit, alpha,
        block.gate_up, block.gate_scales, block.up_scales, block.gate_up_zeros, block.zero_offset, block.gate_order,
        block.up_order, block.gate_up_bias, GROUP=block.group, HAS_ZEROS=block.gate_up_zeros >= 0,
        HAS_ORDER=block.gate_order >= 0, HAS_BIAS=block.gate_up_bias >= 0, ACTIVATION=activation,
        ROW_BYTES_NUM=bits, ROW_BYTES_DEN=8, **shared,
    )  # fmt: skip
    _down[(num_experts, triton.cdiv(width, rows), sharing)](
        hidden, partial, table, order, starts, inner, width, block.down, block.down_scales, block.down_zeros,
        block.zero_offset, block.down_bias, GROUP=block.down_group or block.group, HAS_ZEROS=block.down_zeros >= 0,
        HAS_BIAS=block.down_bias >= 0, **shared,
    )  # fmt: skip
    _combine[(tokens, triton.cdiv(width, 512))](partial, weights, experts, out, per_token, width, BLOCK=512)
    return out


@triton.jit
def _copy(table, targets, num_words, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    target = tl.load(targets + expert)
    if target == 0:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    source = tl.load(table + expert).to(tl.pointer_type(tl.int64))
    tl.store(target.to(tl.pointer_type(tl.int64)) + word, tl.load(source + word, mask=inside), mask=inside)


def copy_blocks(table: torch.Tensor, targets: torch.Tensor, num_bytes: int) -> None:
    """Copies the block at ``table[expert]`` to ``targets[expert]`` for every expert whose target is not 0.

    Args:
        table, targets: [num_experts] int64 addresses, 128-byte aligned.
        num_bytes: of a block, a multiple of 128.
    """
    words = COPY_BYTES // 8
    grid = (table.shape[0], triton.cdiv(num_bytes, COPY_BYTES))
    _copy[grid](table, targets, num_bytes // 8, BLOCK=words)
