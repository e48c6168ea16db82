"""Expert products of a single token: two launches of row dots, without tiles of tokens or a sum over partial results.

Every weight is used once, so the time is that of reading it: each program streams a few rows and multiplies on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._triton.expert_weights import (
    from_e2m1,
    from_fp8,
    from_int4,
    keep_tile,
    raw_tile,
    scale_cells,
    zero_cells,
)


@triton.jit
def _row_dots(
    acc, x, expert, factor, order, base, target, matrix, row, row_ok, scales, cell_first, cell_ok, zeros, zero_offset,
    like, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr, ALIGN: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """acc [rows, groups, columns] += weight[row] * x * factor * scale, without the sum over groups and columns.

    Nothing is read of ``x`` where ``expert`` is negative. GROUP columns share a scale, GROUPS of them make a tile; a
    packed tile has half as many bytes as columns. Cells of row r begin at ``cell_first[r]``.
    """
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    for start in tl.static_range(0, WIDTH, GROUP * GROUPS):
        group = start // GROUP + tl.arange(0, GROUPS)
        unit = group[:, None] * (GROUP // PACKED) + tl.arange(0, GROUP // PACKED)[None, :]
        if WIDTH % (GROUP * GROUPS) == 0:
            inside = unit >= 0
        else:
            inside = unit < WIDTH // PACKED
        live = inside & (unit * 0 + expert >= 0)
        at = row.to(tl.int64)[:, None, None] * (WIDTH // PACKED) + unit[None, :, :]
        mask = row_ok[:, None, None] & inside[None, :, :]
        raw = raw_tile(base + matrix, at, mask, like, KIND, ALIGN)
        if TEE:
            keep_tile(tl.where(target != 0, target + matrix, 0), at, mask, raw, like, KIND, ALIGN)
        if KIND < 2:
            value = tl.load(x + unit, mask=live, other=0.0).to(tl.float32) * factor
            if KIND == 0:
                acc += raw.to(tl.float32) * value[None, :, :]
            else:
                cell = cell_first[:, None] + group[None, :]
                ok = cell_ok[:, None] & (group * GROUP < WIDTH)[None, :]
                scale = scale_cells(scales, cell, ok, KIND)
                acc += from_fp8(raw, ASM).to(tl.float32) * value[None, :, :] * scale[:, :, None]
        else:
            even_at, odd_at = 2 * unit, 2 * unit + 1
            if HAS_ORDER:
                inputs_of = order.to(tl.pointer_type(tl.int32))
                even_at = tl.load(inputs_of + even_at, mask=inside, other=0)
                odd_at = tl.load(inputs_of + odd_at, mask=inside, other=0)
            x_even = tl.load(x + even_at, mask=live, other=0.0).to(tl.float32) * factor
            x_odd = tl.load(x + odd_at, mask=live, other=0.0).to(tl.float32) * factor
            cell = cell_first[:, None] + group[None, :]
            ok = cell_ok[:, None] & (group * GROUP < WIDTH)[None, :]
            scale = scale_cells(scales, cell, ok, KIND)
            if KIND == 2:
                zero = zero_cells(zeros, zero_offset, cell, ok, HAS_ZEROS)
                even, odd = from_int4(raw, tl.broadcast_to(zero[:, :, None], raw.shape), ASM)
            else:
                even, odd = from_e2m1(raw, ASM)
            both = even.to(tl.float32) * x_even[None, :, :] + odd.to(tl.float32) * x_odd[None, :, :]
            acc += both * scale[:, :, None]
    return acc


@triton.jit
def one_gate_up(
    x, hidden, table, tee, experts, limit, alpha, gate_up, gate_scales, up_scales, zeros, zero_offset, gate_order,
    up_order, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ALIGN: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """hidden [choices, I] = act(gate @ x, up @ x); a program has ROWS rows of gate and the same rows of up."""
    choice = tl.program_id(0)
    expert = tl.load(experts + choice)
    if expert < 0:
        return
    base = tl.load(table + expert)
    target = tl.load(tee + expert) if TEE else base * 0
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    # Rows of gate, then the same rows of up, as one tile: all its loads are under way together.
    half = tl.arange(0, 2 * ROWS) // ROWS
    inner_row = tl.program_id(1) * ROWS + tl.arange(0, 2 * ROWS) % ROWS
    row_ok = inner_row < INNER
    row = half * INNER + inner_row
    acc = tl.zeros([2 * ROWS, GROUPS, GROUP // PACKED], tl.float32)
    CELLS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    if KIND == 1:
        apart = (up_scales - gate_scales) // 4
        cell_first = half * apart + (inner_row // SIDE) * CELLS
    else:
        cell_first = row * CELLS
    if HAS_ORDER:
        gate_acc = tl.zeros([2 * ROWS, GROUPS, GROUP // PACKED], tl.float32)
        gate_acc = _row_dots(
            gate_acc, x, expert, 1.0, base + gate_order, base, target, gate_up, row, row_ok & (half == 0),
            base + gate_scales, cell_first, row_ok, base + zeros, zero_offset, x, WIDTH, KIND, GROUP, HAS_ZEROS, True,
            ALIGN, ASM, TEE, GROUPS,
        )  # fmt: skip
        acc = _row_dots(
            acc, x, expert, 1.0, base + up_order, base, target, gate_up, row, row_ok & (half == 1),
            base + gate_scales, cell_first, row_ok, base + zeros, zero_offset, x, WIDTH, KIND, GROUP, HAS_ZEROS, True,
            ALIGN, ASM, TEE, GROUPS,
        )  # fmt: skip
        # Masked rows are zero bytes, which a zero point turns into numbers: only the half that was read counts.
        acc = tl.where((half == 0)[:, None, None], gate_acc, acc)
    else:
        acc = _row_dots(
            acc, x, expert, 1.0, base, base, target, gate_up, row, row_ok, base + gate_scales, cell_first, row_ok,
            base + zeros, zero_offset, x, WIDTH, KIND, GROUP, HAS_ZEROS, False, ALIGN, ASM, TEE, GROUPS,
        )  # fmt: skip
    total = tl.sum(tl.sum(acc, 2), 1)
    if HAS_BIAS:
        if KIND == 0:
            biases = (base + bias).to(tl.pointer_type(x.dtype.element_ty))
        else:
            biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
        total += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)
    pair = tl.reshape(total, (2, ROWS))
    first = (tl.arange(0, 2) == 0)[:, None]
    gate = tl.sum(tl.where(first, pair, 0.0), 0)
    up = tl.sum(tl.where(first, 0.0, pair), 0)
    if ACTIVATION == 0:
        result = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    out = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(hidden + choice * INNER + out, result.to(hidden.dtype.element_ty), mask=out < INNER)


@triton.jit
def one_down(
    hidden, weights, out, table, tee, experts, down, scales, zeros, zero_offset, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, ASM: tl.constexpr,
    TEE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out [H] = sum over the choices, in their order, of weight * (down @ hidden + bias)."""
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    CELLS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = row < WIDTH
    cell_first = (row // SIDE if KIND == 1 else row) * CELLS
    acc = tl.zeros([ROWS, GROUPS, GROUP // PACKED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        expert = tl.load(experts + choice)
        at = tl.maximum(expert, 0)
        weight = tl.where(expert >= 0, tl.load(weights + choice), 0.0)
        base = tl.load(table + at)
        target = tl.load(tee + at) if TEE else base * 0
        target = tl.where(expert >= 0, target, 0)
        read = row_ok & (row * 0 + expert >= 0)
        # A padding choice left its part of `hidden` as it was: nothing of it may be read.
        acc = _row_dots(
            acc, hidden + choice * INNER, expert, weight, base, base, target, down, row,
            read, base + scales, cell_first, read, base + zeros, zero_offset, hidden,
            INNER, KIND, GROUP, HAS_ZEROS, False, ALIGN, ASM, TEE, GROUPS,
        )  # fmt: skip
        if HAS_BIAS:
            if KIND == 0:
                biases = (base + bias).to(tl.pointer_type(hidden.dtype.element_ty))
            else:
                biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            total += weight * tl.load(biases + row, mask=read, other=0.0).to(tl.float32)
    total += tl.sum(tl.sum(acc, 2), 1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row_ok)
