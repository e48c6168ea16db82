"""Expert products of one token with weights of eight or four bits: two launches, each warp on its own.

As with a few tokens, what a thread reads is its part of the tensor core's left operand; so it is with the inputs, which
here come in their natural order. The second launch may begin while the first one ends: it has read its weights when the
first one's results arrive. Its eight columns are the choices: each row belongs to one, and of its products only that
one counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.experts import FP8_BLOCK, FP8_BLOCK_SIZE, BlockFormat
from kernels._triton.expert_spans import (
    HALF_WAY,
    keep_words,
    span_scales,
    step_scales,
    weigh_span,
    words_at,
    words_inside,
)
from kernels._triton.expert_tiles import SingleTiles
from kernels._triton.expert_weights import activated
from kernels._triton.experts_group import copy_words, small_parts
from kernels._triton.overlap import overlaps

WARP_WORDS = 512
"""Words of 8 bytes that a warp copies."""


@triton.jit
def _inputs(x_rows, span, ok, columns, KIND: tl.constexpr):
    """A span's inputs for eight columns of the product, [64 or 128, 8] in their order. ``x_rows``: pointers [8]."""
    thread = tl.arange(0, 4)
    at = tl.arange(0, 8)
    if KIND == 1:
        column = span * 64 + thread[:, None] * 16 + at[None, :]
        mask = (
            ok[None, :, None] & (span * 64 + thread * 16 < columns)[:, None, None] & (at >= 0)[None, None, :]
        )
        rows = x_rows[None, :, None] + column[:, None, :]
        value = tl.join(tl.load(rows, mask=mask, other=0.0), tl.load(rows + 8, mask=mask, other=0.0))
        value = tl.reshape(value, [4, 8, 2, 2, 2, 2])
        return tl.reshape(tl.permute(value, (5, 2, 0, 3, 4, 1)), [64, 8])
    else:
        column = span * 128 + thread[:, None] * 32 + at[None, :]
        mask = (
            ok[None, :, None] & (span * 128 + thread * 32 < columns)[:, None, None] & (at >= 0)[None, None, :]
        )
        rows = x_rows[None, :, None] + column[:, None, :]
        low = tl.join(tl.load(rows, mask=mask, other=0.0), tl.load(rows + 8, mask=mask, other=0.0))
        high = tl.join(tl.load(rows + 16, mask=mask, other=0.0), tl.load(rows + 24, mask=mask, other=0.0))
        value = tl.reshape(tl.join(low, high), [4, 8, 2, 2, 2, 2, 2])
        return tl.reshape(tl.permute(value, (4, 6, 5, 0, 3, 2, 1)), [128, 8])


@triton.jit
def _same_inputs(x, span, columns, KIND: tl.constexpr):
    """The same where all eight columns are one row."""
    COLUMNS: tl.constexpr = 128 if KIND >= 2 else 64
    column = span * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + column, mask=column < columns, other=0.0)
    if KIND == 1:
        value = tl.permute(tl.reshape(value, [4, 4, 4]), (1, 0, 2))
    else:
        value = tl.permute(tl.reshape(value, [4, 4, 2, 2, 2]), (4, 1, 0, 3, 2))
    return tl.broadcast_to(tl.reshape(value, [COLUMNS])[:, None], [COLUMNS, 8])


@triton.jit
def single_gate_up(
    x, hidden, table, tee, experts, limit, alpha, gate_up, gate_scales, up_scales,
    zeros, zero_offset, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr,
    ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """hidden [choices, I] = FACTOR * act(gate @ x, up @ x). A tile has ROWS / 2 rows of gate and of up, by eights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    choice = tl.program_id(0)
    expert = tl.load(experts + choice)
    if expert < 0:
        return
    base = tl.load(table + expert)
    target = tl.load(tee + expert) if TEE else base * 0
    target = tl.where(target != 0, target + gate_up, 0)
    BYTES: tl.constexpr = WIDTH // 2 if KIND >= 2 else WIDTH
    CELLS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    index = tl.arange(0, ROWS)
    is_up = index // 8 % 2
    row = tl.program_id(1) * (ROWS // 2) + index // 16 * 8 + index % 8
    row_ok = row < INNER
    weight_row = is_up * INNER + row
    if KIND == 1:
        scales = base + gate_scales
        cell_first = row // SIDE * CELLS + is_up * ((up_scales - gate_scales) // 4)
    else:
        scales = base + gate_scales
        cell_first = weight_row * CELLS
    acc = tl.zeros([ROWS, 8], tl.float32)
    column = tl.arange(0, 8)
    WORDS: tl.constexpr = 16 * SPANS
    next_0, next_zero_0, next_1, next_zero_1 = step_scales(
        0, row_ok, scales, cell_first, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS, SPANS
    )
    for step in range(0, (BYTES + 4 * WORDS - 1) // (4 * WORDS)):
        mask = words_inside(row_ok, step * WORDS, BYTES, WORDS)
        words = words_at(base + gate_up, step * WORDS, weight_row, mask, BYTES, WORDS)
        if TEE:
            keep_words(target, words, step * WORDS, weight_row, mask, BYTES, WORDS)
        scale_0, zero_0, scale_1, zero_1 = next_0, next_zero_0, next_1, next_zero_1
        next_0, next_zero_0, next_1, next_zero_1 = step_scales(
            step + 1, row_ok, scales, cell_first, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS, SPANS,
        )  # fmt: skip
        value = (_same_inputs(x, step * SPANS, WIDTH, KIND) * FACTOR).to(x.dtype.element_ty)
        if SPANS == 1:
            acc = weigh_span(acc, words, value, scale_0, zero_0, x, KIND, ASM, ROWS, 4)
        else:
            first, second = tl.split(tl.permute(tl.reshape(words, [ROWS, 2, 16]), (0, 2, 1)))
            acc = weigh_span(acc, first, value, scale_0, zero_0, x, KIND, ASM, ROWS, 4)
            value = (_same_inputs(x, 2 * step + 1, WIDTH, KIND) * FACTOR).to(x.dtype.element_ty)
            acc = weigh_span(acc, second, value, scale_1, zero_1, x, KIND, ASM, ROWS, 4)
    both = tl.permute(tl.reshape(acc, [ROWS // 16, 2, 8, 8]), (0, 2, 3, 1))
    gate, up = tl.split(both)
    out_row = (
        tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 16)[:, None] * 8 + tl.arange(0, 8)[None, :]
    )
    if HAS_BIAS:
        biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
        gate += tl.load(biases + out_row, mask=out_row < INNER, other=0.0).to(tl.float32)[:, :, None]
        up += tl.load(biases + INNER + out_row, mask=out_row < INNER, other=0.0).to(tl.float32)[:, :, None]
    result = activated(gate, up, limit, alpha, ACTIVATION) * FACTOR
    tl.store(
        hidden + choice * INNER + out_row[:, :, None] + 0 * column[None, None, :],
        result.to(hidden.dtype.element_ty),
        mask=(out_row < INNER)[:, :, None] & (column == 0)[None, None, :],
    )


@triton.jit
def single_down(
    hidden, weights, out, table, tee, experts, down, scales, zeros, zero_offset, bias, row_tiles,
    first_0, first_1, first_2, size_0, size_1, size_2,
    INNER: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SIDE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr,
    PDL: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr, AHEAD: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """out [H] = sum over the choices, in an order of its own, of weight * (down @ hidden + bias). With TEE, programs
    behind ``row_tiles`` copy the blocks' small parts. What tells where weights lie is read before the launch ahead is
    waited for, which waited for it, and past this multiprocessor's own cache, which may be older."""
    BYTES: tl.constexpr = INNER // 2 if KIND >= 2 else INNER
    CELLS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    SPANS: tl.constexpr = (BYTES + 63) // 64
    TILE: tl.constexpr = CHOICES * ROWS
    index = tl.arange(0, TILE)
    total = tl.zeros([ROWS], tl.float32)
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
    if TEE:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(0) >= row_tiles:
            if PDL:
                gdc_wait()
            copier = tl.program_id(0) - row_tiles
            chosen = tl.load(experts + copier % PER_TOKEN)
            kept = tl.load(tee + chosen, mask=chosen >= 0, other=0)
            if kept != 0:
                copy_words(
                    tl.load(table + chosen), kept, copier // PER_TOKEN, first_0, first_1, first_2, size_0, size_1,
                    size_2, COPIED,
                )  # fmt: skip
            return
    for part in tl.static_range(0, PER_TOKEN, CHOICES):
        choice = part + index // ROWS
        row = tl.program_id(0) * ROWS + index % ROWS
        expert = tl.load(experts + choice, mask=choice < PER_TOKEN, other=-1, cache_modifier=".cg")
        base = tl.load(table + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
        row_ok = (row < WIDTH) & (expert >= 0)
        at = tl.multiple_of((base + down).to(tl.pointer_type(tl.int32)), 16)
        at = at[:, None] + (row * (BYTES // 4))[:, None] + tl.arange(0, 16)[None, :]
        if TEE:
            to = tl.load(tee + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
            target = tl.where(to != 0, to + down, 0)
        cell_first = (row // SIDE if KIND == 1 else row) * CELLS
        acc = tl.zeros([TILE, 8], tl.float32)
        column = tl.arange(0, 8)
        ready = ()
        for span in tl.static_range(min(AHEAD, SPANS)):
            mask = words_inside(row_ok, span * 16, BYTES, 16)
            ready = ready + (tl.load(at + span * 16, mask=mask, other=0),)  # type: ignore[assignment] # noqa: RUF005
        if PDL and part == 0:
            gdc_wait()
        own = part + column
        own_ok = (own < PER_TOKEN) & (column < CHOICES)
        own_ok = own_ok & (tl.load(experts + own, mask=own_ok, other=-1) >= 0)
        x_rows = hidden + own * INNER
        for span in tl.static_range(SPANS):
            words = ready[span]  # type: ignore[var-annotated]
            if span + AHEAD < SPANS:
                mask = words_inside(row_ok, (span + AHEAD) * 16, BYTES, 16)
                ready = ready + (tl.load(at + (span + AHEAD) * 16, mask=mask, other=0),)  # type: ignore[assignment] # noqa: RUF005
            if TEE:
                to_at = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
                to_at = to_at[:, None] + (row * (BYTES // 4))[:, None] + span * 16 + tl.arange(0, 16)[None, :]
                tl.store(
                    to_at, words, mask=words_inside(row_ok, span * 16, BYTES, 16) & (target != 0)[:, None]
                )
            scale, zero = span_scales(
                span, row_ok, base + scales, cell_first, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS,
            )  # fmt: skip
            value = _inputs(x_rows, span, own_ok, INNER, KIND)
            acc = weigh_span(acc, words, value, scale, zero, hidden, KIND, ASM, TILE, 4)
        if HAS_BIAS:
            biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            acc += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        weight = tl.load(weights + choice, mask=row_ok, other=0.0)
        product = tl.where((part + column)[None, :] == choice[:, None], acc * weight[:, None], 0.0)
        product = tl.where(row_ok[:, None], product, 0.0)
        total += tl.sum(tl.sum(tl.reshape(product, [CHOICES, ROWS, 8]), 2), 0)
    tl.store(out + out_row, total.to(out.dtype.element_ty), mask=out_row < WIDTH)


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, table: torch.Tensor, block: BlockFormat, inner: int,
    activation: int, limit: float, alpha: float, tee: torch.Tensor | None, tiles: tuple[SingleTiles, SingleTiles],
) -> torch.Tensor:  # fmt: skip
    """See :func:`kernels._triton.experts.run_experts`; x is [1, H], and ``experts_few.serves`` says which blocks."""
    width, per_token = x.shape[1], experts.shape[1]
    up, down = tiles
    groups = [
        FP8_BLOCK_SIZE if block.kind == FP8_BLOCK else g
        for g in (block.group, block.down_group or block.group)
    ]
    hidden = torch.empty(per_token, inner, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    copies = table if tee is None else tee
    overlap = overlaps(x)
    shared = {
        "INNER": inner, "WIDTH": width, "KIND": block.kind, "SIDE": FP8_BLOCK_SIZE, "TEE": tee is not None,
        "ASM": x.dtype is torch.bfloat16 and not knobs.runtime.interpret, "PDL": overlap, "launch_pdl": overlap,
    }  # fmt: skip
    single_gate_up[(per_token, triton.cdiv(inner, up.rows // 2))](
        x, hidden, table, copies, experts, limit, alpha, block.gate_up, block.gate_scales, block.up_scales,
        block.gate_up_zeros, block.zero_offset, block.gate_up_bias, GROUP=groups[0],
        HAS_ZEROS=block.gate_up_zeros >= 0, HAS_BIAS=block.gate_up_bias >= 0, ACTIVATION=activation,
        FACTOR=HALF_WAY[block.kind], ROWS=up.rows, SPANS=up.spans, num_warps=1, num_stages=up.num_stages, **shared,
    )  # fmt: skip
    choices = min(8, triton.next_power_of_2(per_token))
    down_rows = max(down.rows, 16 // choices)
    row_tiles = triton.cdiv(width, down_rows)
    parts = small_parts(block, inner, width, x.element_size())
    pieces = triton.cdiv(sum(parts[3:]), WARP_WORDS) if tee is not None else 0
    single_down[(row_tiles + pieces * per_token,)](
        hidden, weights, out, table, copies, experts, block.down, block.down_scales, block.down_zeros,
        block.zero_offset, block.down_bias, row_tiles, *parts, PER_TOKEN=per_token, GROUP=groups[1],
        HAS_ZEROS=block.down_zeros >= 0, HAS_BIAS=block.down_bias >= 0, ROWS=down_rows, CHOICES=choices,
        AHEAD=down.num_stages, COPIED=WARP_WORDS, num_warps=1, num_stages=1, **shared,
    )  # fmt: skip
    return out
