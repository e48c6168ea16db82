"""Expert products of a single token: two launches of row dots, without tiles of tokens or a sum over partial results.

Every weight is used once, so the time is that of reading it: each program streams a few rows and multiplies on the way.
The second launch may begin while the first one ends (PDL): it reads its first weights before it waits for its inputs.
With AHEAD the first may begin beside the launches ahead that decide where missing experts come to lie and bring them:
an expert that lies in the arena is read at once, and only others wait for those launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.experts import FP8_BLOCK_SIZE, INT4, Ahead, BlockFormat
from kernels._triton.expert_tiles import Tiles
from kernels._triton.expert_weights import (
    activated,
    biases_at,
    from_e2m1,
    from_fp8_shrunk,
    from_int4,
    keep_tile,
    raw_tile,
    scale_cells,
    zero_cells,
)
from kernels._triton.experts_group import launch_options

HALF_WAY: tl.constexpr = tl.constexpr(2.0**60)
"""FP8 weights come times 2^-120. Half of that is made good in the inputs and half in the sum: neither can overflow."""


@triton.jit
def _inputs(x, unit, live, order, factor, KIND: tl.constexpr, HAS_ORDER: tl.constexpr, CACHE: tl.constexpr):
    """x at a tile's columns, times ``factor``, float32; packed weights: (even columns, odd columns). CACHE ``.cg``: not
    through the multiprocessor's own cache, for what an earlier kernel wrote that was not waited for here."""
    if KIND < 2:
        even = tl.load(x + unit, mask=live, other=0.0, cache_modifier=CACHE).to(tl.float32) * factor
        odd = even
    elif HAS_ORDER:
        inputs_of = order.to(tl.pointer_type(tl.int32))
        even_at = tl.load(inputs_of + 2 * unit, mask=live, other=0)
        odd_at = tl.load(inputs_of + 2 * unit + 1, mask=live, other=0)
        even = tl.load(x + even_at, mask=live, other=0.0, cache_modifier=CACHE).to(tl.float32) * factor
        odd = tl.load(x + odd_at, mask=live, other=0.0, cache_modifier=CACHE).to(tl.float32) * factor
    else:
        # Read side by side and parted in registers: two strided loads would be one instruction per element.
        both = 2 * unit[:, :, None] + tl.arange(0, 2)[None, None, :]
        mask = live[:, :, None] & (both >= 0)
        value = tl.load(x + both, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32) * factor
        even, odd = tl.split(value)
    return even, odd


@triton.jit
def _add(
    acc, raw, even, odd, scales, cell_first, group, ok, zeros, zero_offset, read,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [rows, groups, units] += a tile's weights times its inputs. FP8: all rows share ``cell_first``."""
    if KIND == 0:
        acc += raw.to(tl.float32) * even[None, :, :]
    elif KIND == 1:
        scale = scale_cells(scales, cell_first + group, ok, KIND) * HALF_WAY
        acc += from_fp8_shrunk(raw, ASM) * (even * scale[:, None])[None, :, :]
    else:
        cell = cell_first[:, None] + group[None, :]
        mask = read[:, None] & ok[None, :]
        scale = scale_cells(scales, cell, mask, KIND)
        if KIND == 2:
            zero = zero_cells(zeros, zero_offset, cell, mask, HAS_ZEROS)
            low, high = from_int4(raw, tl.broadcast_to(zero[:, :, None], raw.shape), ASM)
        else:
            low, high = from_e2m1(raw, ASM)
        both = low.to(tl.float32) * even[None, :, :] + high.to(tl.float32) * odd[None, :, :]
        acc += both * scale[:, :, None]
    return acc


@triton.jit
def _total(acc, KIND: tl.constexpr):
    total = tl.sum(tl.sum(acc, 2), 1)
    return total * HALF_WAY if KIND == 1 else total


@triton.jit
def one_gate_up(
    x, hidden, table, tee, experts, ahead, first_place, last_place, limit, alpha, gate_up, gate_scales, up_scales,
    zeros, zero_offset, gate_order, up_order, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ALIGN: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """hidden [choices, I] = act(gate @ x, up @ x); a program has ROWS rows of gate and the same rows of up. GROUP
    columns share a scale, GROUPS of them make a tile; a packed tile has half as many bytes as columns."""
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    if PDL and not AHEAD:
        gdc_launch_dependents()
    choice = tl.program_id(0)
    expert = tl.load(experts + choice, cache_modifier=CACHE)
    if expert < 0:
        if PDL and AHEAD:
            gdc_wait()  # whoever waits for this launch waits for those ahead too
        return
    base = tl.load(table + expert, cache_modifier=CACHE)
    if AHEAD:  # noqa: SIM102 (one is known when the kernel is compiled)
        if (base < first_place) | (base >= last_place):
            if PDL:
                gdc_wait()
            base = tl.load(ahead + expert, cache_modifier=CACHE)
    target = tl.load(tee + expert) if TEE else base * 0
    target = tl.where(target != 0, target + gate_up, 0)
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    CELLS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = row < INNER
    up_row = INNER + row
    if KIND == 1:
        gate_cell = (tl.program_id(1) * ROWS // SIDE) * CELLS
        up_cell = gate_cell
        up_scale_at = base + up_scales
    else:
        gate_cell = row * CELLS
        up_cell = up_row * CELLS
        up_scale_at = base + gate_scales
    gate_acc = tl.zeros([ROWS, GROUPS, GROUP // PACKED], tl.float32)
    up_acc = tl.zeros([ROWS, GROUPS, GROUP // PACKED], tl.float32)
    COLUMNS: tl.constexpr = GROUP * GROUPS
    EVEN: tl.constexpr = WIDTH % COLUMNS == 0
    unit = tl.arange(0, GROUPS)[:, None] * (GROUP // PACKED) + tl.arange(0, GROUP // PACKED)[None, :]
    gate_at = row.to(tl.int64)[:, None, None] * (WIDTH // PACKED) + unit[None, :, :]
    up_at = up_row.to(tl.int64)[:, None, None] * (WIDTH // PACKED) + unit[None, :, :]
    inside = unit < WIDTH // PACKED
    mask = row_ok[:, None, None] & inside[None, :, :]
    gate_raw = raw_tile(base + gate_up, gate_at, mask, x, KIND, ALIGN)
    up_raw = raw_tile(base + gate_up, up_at, mask, x, KIND, ALIGN)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        next_mask = mask
        next_gate_raw = gate_raw
        next_up_raw = up_raw
        if start + COLUMNS < WIDTH:
            # Under way before this tile is waited for: what parts the inputs below is a barrier that no load passes.
            next_inside = unit + (start + COLUMNS) // PACKED < WIDTH // PACKED if not EVEN else unit >= 0
            next_mask = row_ok[:, None, None] & next_inside[None, :, :]
            next_gate_raw = raw_tile(
                base + gate_up, gate_at + (start + COLUMNS) // PACKED, next_mask, x, KIND, ALIGN
            )
            next_up_raw = raw_tile(
                base + gate_up, up_at + (start + COLUMNS) // PACKED, next_mask, x, KIND, ALIGN
            )
        here = unit + start // PACKED
        inside = here < WIDTH // PACKED if not EVEN else here >= 0
        group = start // GROUP + tl.arange(0, GROUPS)
        ok = group * GROUP < WIDTH
        if TEE:
            keep_tile(target, gate_at + start // PACKED, mask, gate_raw, x, KIND, ALIGN)
            keep_tile(target, up_at + start // PACKED, mask, up_raw, x, KIND, ALIGN)
        even, odd = _inputs(x, here, inside, base + gate_order, 1.0, KIND, HAS_ORDER, CACHE)
        gate_acc = _add(
            gate_acc, gate_raw, even, odd, base + gate_scales, gate_cell, group, ok, base + zeros, zero_offset, row_ok,
            KIND, HAS_ZEROS, ASM,
        )  # fmt: skip
        if HAS_ORDER:
            even, odd = _inputs(x, here, inside, base + up_order, 1.0, KIND, True, CACHE)
        up_acc = _add(
            up_acc, up_raw, even, odd, up_scale_at, up_cell, group, ok, base + zeros, zero_offset, row_ok,
            KIND, HAS_ZEROS, ASM,
        )  # fmt: skip
        mask = next_mask
        gate_raw = next_gate_raw
        up_raw = next_up_raw
    gate = _total(gate_acc, KIND)
    up = _total(up_acc, KIND)
    if HAS_BIAS:
        biases = biases_at(base + bias, x, KIND == 0)
        gate += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)
        up += tl.load(biases + up_row, mask=row_ok, other=0.0).to(tl.float32)
    result = activated(gate, up, limit, alpha, ACTIVATION)
    if PDL and AHEAD:
        # Not earlier: the launch behind reads ``ahead`` before it waits.
        gdc_wait()
        gdc_launch_dependents()
    tl.store(hidden + choice * INNER + row, result.to(hidden.dtype.element_ty), mask=row_ok)


@triton.jit
def one_down(
    hidden, weights, out, table, tee, experts, down, scales, zeros, zero_offset, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, ASM: tl.constexpr,
    TEE: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out [H] = sum over the choices, in their order, of weight * (down @ hidden + bias)."""
    PACKED: tl.constexpr = 2 if KIND >= 2 else 1
    CELLS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if KIND == 1:
        cell_first = (tl.program_id(0) * ROWS // SIDE) * CELLS
    else:
        cell_first = row * CELLS
    acc = tl.zeros([ROWS, GROUPS, GROUP // PACKED], tl.float32)
    biased = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        expert = tl.load(experts + choice)
        some = tl.maximum(expert, 0)
        weight = tl.where(expert >= 0, tl.load(weights + choice), 0.0)
        base = tl.load(table + some)
        target = tl.load(tee + some) if TEE else base * 0
        target = tl.where((target != 0) & (expert >= 0), target + down, 0)
        read = (row < WIDTH) & (row * 0 + expert >= 0)
        for start in tl.static_range(0, INNER, GROUP * GROUPS):
            group = start // GROUP + tl.arange(0, GROUPS)
            unit = group[:, None] * (GROUP // PACKED) + tl.arange(0, GROUP // PACKED)[None, :]
            inside = unit < INNER // PACKED if INNER % (GROUP * GROUPS) else unit >= 0
            ok = group * GROUP < INNER
            at = row.to(tl.int64)[:, None, None] * (INNER // PACKED) + unit[None, :, :]
            mask = read[:, None, None] & inside[None, :, :]
            raw = raw_tile(base + down, at, mask, hidden, KIND, ALIGN)
            if PDL and choice == 0 and start == 0:
                gdc_wait()
            if TEE:
                keep_tile(target, at, mask, raw, hidden, KIND, ALIGN)
            # A choice without an expert left its part of `hidden` as it was: nothing of it may be read.
            live = inside & (unit * 0 + expert >= 0)
            even, odd = _inputs(hidden + choice * INNER, unit, live, base, weight, KIND, False, "")
            acc = _add(
                acc, raw, even, odd, base + scales, cell_first, group, ok, base + zeros, zero_offset, read,
                KIND, HAS_ZEROS, ASM,
            )  # fmt: skip
        if HAS_BIAS:
            biases = biases_at(base + bias, hidden, KIND == 0)
            biased += weight * tl.load(biases + row, mask=read, other=0.0).to(tl.float32)
    total = biased + _total(acc, KIND)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < WIDTH)


def serves(block: BlockFormat) -> bool:
    """Whether a tile of these kernels lies within whole groups of scales."""
    groups = (block.group, block.down_group or block.group)
    return block.kind < INT4 or all(32 <= group <= 256 and group & (group - 1) == 0 for group in groups)


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, table: torch.Tensor, block: BlockFormat, inner: int,
    activation: int, limit: float, alpha: float, tee: torch.Tensor | None, tiles: tuple[Tiles, Tiles],
    ahead: Ahead | None,
) -> torch.Tensor:  # fmt: skip
    """See :func:`kernels._triton.experts.run_experts`; x is [1, H]."""
    width, per_token = x.shape[1], experts.shape[1]
    up, down = tiles
    groups = [
        g if block.kind >= INT4 else FP8_BLOCK_SIZE for g in (block.group, block.down_group or block.group)
    ]
    hidden = torch.empty(per_token, inner, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    shared = launch_options(x, block, inner, tee)
    copies = table if tee is None else tee
    overlap = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    shared["PDL"] = overlap
    behind = table if ahead is None else ahead.table
    places = (0, 0) if ahead is None else (ahead.first_place, ahead.last_place)
    one_gate_up[(per_token, triton.cdiv(inner, up.rows))](
        x, hidden, table, copies, experts, behind, *places, limit, alpha, block.gate_up, block.gate_scales,
        block.up_scales, block.gate_up_zeros, block.zero_offset, block.gate_order, block.up_order, block.gate_up_bias,
        INNER=inner, WIDTH=width, GROUP=groups[0], HAS_ZEROS=block.gate_up_zeros >= 0, HAS_ORDER=block.gate_order >= 0,
        HAS_BIAS=block.gate_up_bias >= 0, ACTIVATION=activation, ROWS=up.rows, GROUPS=up.columns,
        AHEAD=ahead is not None, num_warps=up.num_warps, launch_pdl=overlap and ahead is not None, **shared,
    )  # fmt: skip
    one_down[(triton.cdiv(width, down.rows),)](
        hidden, weights, out, behind, copies, experts, block.down, block.down_scales, block.down_zeros,
        block.zero_offset, block.down_bias, INNER=inner, WIDTH=width, PER_TOKEN=per_token, GROUP=groups[1],
        HAS_ZEROS=block.down_zeros >= 0, HAS_BIAS=block.down_bias >= 0, ROWS=down.rows, GROUPS=down.columns,
        num_warps=down.num_warps, launch_pdl=overlap, **shared,
    )  # fmt: skip
    return out
