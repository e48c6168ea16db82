"""Expert products of a few tokens with weights of eight or four bits, through the address table.

A program walks down one or more tiles of an expert's output rows, a step of 64 or 128 bytes of each row at a time, with
several steps' weights under way; a walk over several tiles reads the next one's weights while it ends the one before.
Neither the tiles nor the length of a step change the order in which an output's products are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.experts import FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, BlockFormat
from kernels._triton.expert_spans import (
    HALF_WAY,
    keep_words,
    place_of,
    step_scales,
    weigh_span,
    words_at,
    words_inside,
)
from kernels._triton.expert_tiles import FewTiles
from kernels._triton.expert_weights import activated
from kernels._triton.experts_group import COPIED_WORDS, combine, copy_words, group_pairs, padded, small_parts
from kernels._triton.overlap import overlaps

MAX_SHARING = 8
"""Programs that share an expert's tokens at most; each loops over the rest."""


@triton.jit
def _add_step(
    acc, words, x_rows, x_ok, step, first, first_zero, last, last_zero, like,
    KIND: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """acc += a step's weights, one span or two, times its inputs, which lie in their order at pointers [1, tokens]."""
    COLUMNS: tl.constexpr = 128 if KIND >= 2 else 64
    column = tl.arange(0, COLUMNS)[:, None]
    if SPANS == 1:
        value = tl.load(x_rows + step * COLUMNS + column, mask=x_ok, other=0.0)
        return weigh_span(acc, words, value, first, first_zero, like, KIND, ASM, ROWS, 2)
    else:
        low, high = tl.split(tl.permute(tl.reshape(words, [ROWS, 2, 16]), (0, 2, 1)))
        value = tl.load(x_rows + 2 * step * COLUMNS + column, mask=x_ok, other=0.0)
        acc = weigh_span(acc, low, value, first, first_zero, like, KIND, ASM, ROWS, 2)
        value = tl.load(x_rows + (2 * step + 1) * COLUMNS + column, mask=x_ok, other=0.0)
        return weigh_span(acc, high, value, last, last_zero, like, KIND, ASM, ROWS, 2)


@triton.jit
def _walked(turn, first_tile, STEPS: tl.constexpr, TILES: tl.constexpr):
    """(tile, step) of a turn of a program's walk over TILES tiles of STEPS steps."""
    if TILES == 1:
        return first_tile, turn
    else:
        return first_tile + turn // STEPS, turn % STEPS


@triton.jit
def _gate_up_rows(
    tile, up_scales_from, INNER: tl.constexpr, KIND: tl.constexpr, SIDE: tl.constexpr, CELLS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A tile's rows of the matrix, which of them there are, and each one's first scale. Half are gate's and half up's,
    by eights: a thread has both of a pair."""
    index = tl.arange(0, ROWS)
    is_up = index // 8 % 2
    row = tile * (ROWS // 2) + index // 16 * 8 + index % 8
    row_ok = row < INNER
    if KIND == 1:
        cell_first = row // SIDE * CELLS + is_up * up_scales_from
    else:
        cell_first = (is_up * INNER + row) * CELLS
    return row + is_up * INNER, row_ok, cell_first


@triton.jit
def _end_gate_up(
    acc, tile, hidden, place, token_ok, hidden_stride, biases, limit, alpha,
    INNER: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores FACTOR * act(gate, up) of a tile's sums, in the order in which down reads them."""
    row = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1)))
    gate = tl.reshape(gate, [ROWS // 2, TOKENS])
    up = tl.reshape(up, [ROWS // 2, TOKENS])
    if HAS_BIAS:
        at = biases.to(tl.pointer_type(tl.bfloat16)) + row
        gate += tl.load(at, mask=row < INNER, other=0.0).to(tl.float32)[:, None]
        up += tl.load(at + INNER, mask=row < INNER, other=0.0).to(tl.float32)[:, None]
    result = activated(gate, up, limit, alpha, ACTIVATION) * FACTOR
    tl.store(
        hidden + place.to(tl.int64)[None, :] * hidden_stride + place_of(row, KIND)[:, None],
        result.to(hidden.dtype.element_ty),
        mask=(row < hidden_stride)[:, None] & token_ok[None, :],
    )


@triton.jit
def few_gate_up(
    x, hidden, table, tee, order, starts, experts_per_token, x_stride, hidden_stride, limit, alpha,
    gate_up, gate_scales, up_scales, zeros, zero_offset, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr,
    ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPANS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, padded I], in their order, = FACTOR * act(gate @ x, up @ x)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    BYTES: tl.constexpr = WIDTH // 2 if KIND >= 2 else WIDTH
    CELLS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    WORDS: tl.constexpr = 16 * SPANS
    STEPS: tl.constexpr = (BYTES + 4 * WORDS - 1) // (4 * WORDS)
    apart = (up_scales - gate_scales) // 4
    first_tile = tl.program_id(1) * TILES
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        token = (tl.load(order + place, mask=token_ok, other=0) // experts_per_token).to(tl.int64)
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        target = tl.where(target != 0, target + gate_up, 0)
        x_rows = x + token[None, :] * x_stride
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        row, row_ok, cells = _gate_up_rows(first_tile, apart, INNER, KIND, SIDE, CELLS, ROWS)
        next_0, next_zero_0, next_1, next_zero_1 = step_scales(
            0, row_ok, base + gate_scales, cells, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS, SPANS,
        )  # fmt: skip
        for turn in range(0, TILES * STEPS):
            tile, step = _walked(turn, first_tile, STEPS, TILES)
            row, row_ok, cells = _gate_up_rows(tile, apart, INNER, KIND, SIDE, CELLS, ROWS)
            mask = words_inside(row_ok, step * WORDS, BYTES, WORDS)
            words = words_at(base + gate_up, step * WORDS, row, mask, BYTES, WORDS)
            if TEE:
                keep_words(target, words, step * WORDS, row, mask, BYTES, WORDS)
            scale_0, zero_0, scale_1, zero_1 = next_0, next_zero_0, next_1, next_zero_1
            next_tile, next_step = _walked(turn + AHEAD, first_tile, STEPS, TILES)
            row, row_ok, cells = _gate_up_rows(next_tile, apart, INNER, KIND, SIDE, CELLS, ROWS)
            next_0, next_zero_0, next_1, next_zero_1 = step_scales(
                next_step, row_ok, base + gate_scales, cells, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS,
                SPANS,
            )  # fmt: skip
            if not AHEAD:
                scale_0, zero_0, scale_1, zero_1 = next_0, next_zero_0, next_1, next_zero_1
            acc = _add_step(
                acc, words, x_rows, token_ok[None, :], step, scale_0, zero_0, scale_1, zero_1, x, KIND, ASM, ROWS,
                SPANS,
            )  # fmt: skip
            if TILES > 1:  # noqa: SIM102 (one is known when the kernel is compiled)
                if step == STEPS - 1:
                    _end_gate_up(
                        acc, tile, hidden, place, token_ok, hidden_stride, base + bias, limit, alpha, INNER, KIND,
                        HAS_BIAS, ACTIVATION, FACTOR, TOKENS, ROWS,
                    )  # fmt: skip
                    acc = tl.zeros([ROWS, TOKENS], tl.float32)
        if TILES == 1:
            _end_gate_up(
                acc, first_tile, hidden, place, token_ok, hidden_stride, base + bias, limit, alpha, INNER, KIND,
                HAS_BIAS, ACTIVATION, FACTOR, TOKENS, ROWS,
            )  # fmt: skip


@triton.jit
def _down_rows(
    tile, WIDTH: tl.constexpr, KIND: tl.constexpr, SIDE: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr
):
    """A tile's rows, which of them there are, and each one's first scale."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return row, row < WIDTH, (row // SIDE if KIND == 1 else row) * CELLS


@triton.jit
def _end_down(
    acc, tile, partial, pair, token_ok, biases,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)
    row_ok = row < WIDTH
    if HAS_BIAS:
        at = biases.to(tl.pointer_type(tl.bfloat16)) + row
        acc += tl.load(at, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    tl.store(partial + pair[None, :] * WIDTH + row[:, None], acc, mask=row_ok[:, None] & token_ok[None, :])


@triton.jit
def few_down(
    hidden, partial, table, tee, order, starts, hidden_stride, down, scales, zeros, zero_offset, bias, row_tiles,
    first_0, first_1, first_2, size_0, size_1, size_2,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """partial [pairs, H] = down @ hidden + bias. With TEE, programs behind ``row_tiles`` copy blocks' small parts."""
    if PDL:
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    # What was there for the launch ahead, which waited for it before it let this one go, need not be waited for again;
    # but this multiprocessor's own cache may be older.
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    expert = tl.program_id(0)
    first = tl.load(starts + expert, cache_modifier=CACHE)
    last = tl.load(starts + expert + 1, cache_modifier=CACHE)
    base = tl.load(table + expert, cache_modifier=CACHE)
    if PDL and AHEAD:
        gdc_wait()
    if TEE:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(1) >= row_tiles:
            kept = tl.load(tee + expert)
            if (kept != 0) & (tl.program_id(2) == 0):
                copy_words(
                    base,
                    kept,
                    tl.program_id(1) - row_tiles,
                    first_0,
                    first_1,
                    first_2,
                    size_0,
                    size_1,
                    size_2,
                    COPIED,
                )
            return
    if first == last:
        return
    BYTES: tl.constexpr = INNER // 2 if KIND >= 2 else INNER
    CELLS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    WORDS: tl.constexpr = 16 * SPANS
    STEPS: tl.constexpr = (BYTES + 4 * WORDS - 1) // (4 * WORDS)
    first_tile = tl.program_id(1) * TILES
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        target = tl.where(target != 0, target + down, 0)
        pair = tl.load(order + place, mask=token_ok, other=0).to(tl.int64)
        x_rows = hidden + place.to(tl.int64)[None, :] * hidden_stride
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        row, row_ok, cells = _down_rows(first_tile, WIDTH, KIND, SIDE, CELLS, ROWS)
        next_0, next_zero_0, next_1, next_zero_1 = step_scales(
            0, row_ok, base + scales, cells, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS, SPANS
        )
        for turn in range(0, TILES * STEPS):
            tile, step = _walked(turn, first_tile, STEPS, TILES)
            row, row_ok, cells = _down_rows(tile, WIDTH, KIND, SIDE, CELLS, ROWS)
            mask = words_inside(row_ok, step * WORDS, BYTES, WORDS)
            words = words_at(base + down, step * WORDS, row, mask, BYTES, WORDS)
            if TEE:
                keep_words(target, words, step * WORDS, row, mask, BYTES, WORDS)
            scale_0, zero_0, scale_1, zero_1 = next_0, next_zero_0, next_1, next_zero_1
            next_tile, next_step = _walked(turn + AHEAD, first_tile, STEPS, TILES)
            row, row_ok, cells = _down_rows(next_tile, WIDTH, KIND, SIDE, CELLS, ROWS)
            next_0, next_zero_0, next_1, next_zero_1 = step_scales(
                next_step, row_ok, base + scales, cells, base + zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS,
                SPANS,
            )  # fmt: skip
            if not AHEAD:
                scale_0, zero_0, scale_1, zero_1 = next_0, next_zero_0, next_1, next_zero_1
            acc = _add_step(
                acc, words, x_rows, token_ok[None, :], step, scale_0, zero_0, scale_1, zero_1, hidden, KIND, ASM, ROWS,
                SPANS,
            )  # fmt: skip
            if TILES > 1:  # noqa: SIM102 (one is known when the kernel is compiled)
                if step == STEPS - 1:
                    _end_down(acc, tile, partial, pair, token_ok, base + bias, WIDTH, HAS_BIAS, ROWS)
                    acc = tl.zeros([ROWS, TOKENS], tl.float32)
        if TILES == 1:
            _end_down(acc, first_tile, partial, pair, token_ok, base + bias, WIDTH, HAS_BIAS, ROWS)


def serves(x: torch.Tensor, block: BlockFormat, inner: int) -> bool:
    """Whether these kernels read such blocks: rows in whole lines of sixteen bytes, a span within one group of scales
    (in MXFP4 four groups to it, and an even number of them)."""
    if block.kind not in HALF_WAY or x.dtype not in (torch.bfloat16, torch.float32) or block.gate_order >= 0:
        return False
    for columns, group in ((x.shape[1], block.group), (inner, block.down_group or block.group)):
        if columns % {FP8_BLOCK: 16, INT4: 32, MXFP4: 64}[block.kind]:
            return False
        if block.kind == INT4 and group % 128 and group < columns:
            return False
    return True


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, table: torch.Tensor, block: BlockFormat, inner: int,
    activation: int, limit: float, alpha: float, tee: torch.Tensor | None, tiles: tuple[FewTiles, FewTiles],
    beside: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See :func:`kernels._triton.experts.run_experts`; ``beside`` as for ``group_pairs``."""
    tokens, width = x.shape
    per_token, num_experts = experts.shape[1], table.shape[0]
    factor = HALF_WAY[block.kind]
    order, starts, inputs = group_pairs(
        experts, num_experts, x, split=True, span_kind=block.kind, factor=factor, beside=beside
    )
    hidden = torch.empty(tokens * per_token, padded(inner), dtype=x.dtype, device=x.device)
    partial = torch.empty(tokens * per_token, width, dtype=torch.float32, device=x.device)
    up, down = tiles
    overlap = overlaps(x)
    shared = {
        "KIND": block.kind, "SIDE": FP8_BLOCK_SIZE, "TEE": tee is not None, "PDL": overlap, "launch_pdl": overlap,
        "ASM": x.dtype is torch.bfloat16 and not knobs.runtime.interpret, "INNER": inner, "WIDTH": width,
    }  # fmt: skip
    groups = [
        FP8_BLOCK_SIZE if block.kind == FP8_BLOCK else g
        for g in (block.group, block.down_group or block.group)
    ]
    copies = table if tee is None else tee
    row_tiles = triton.cdiv(hidden.shape[1], up.rows // 2 * up.tiles)
    few_gate_up[(num_experts, row_tiles, _sharing(tokens, up))](
        inputs, hidden, table, copies, order, starts, per_token, inputs.stride(0), hidden.stride(0), limit, alpha,
        block.gate_up, block.gate_scales, block.up_scales, block.gate_up_zeros, block.zero_offset, block.gate_up_bias,
        GROUP=groups[0], HAS_ZEROS=block.gate_up_zeros >= 0, HAS_BIAS=block.gate_up_bias >= 0,
        ACTIVATION=activation, FACTOR=factor, **_options(up), **shared,
    )  # fmt: skip
    row_tiles = triton.cdiv(width, down.rows * down.tiles)
    parts = small_parts(block, inner, width, x.element_size())
    pieces = triton.cdiv(sum(parts[3:]), COPIED_WORDS) if tee is not None else 0
    few_down[(num_experts, row_tiles + pieces, _sharing(tokens, down))](
        hidden, partial, table, copies, order, starts, hidden.stride(0), block.down, block.down_scales,
        block.down_zeros, block.zero_offset, block.down_bias, row_tiles, *parts, GROUP=groups[1],
        HAS_ZEROS=block.down_zeros >= 0, HAS_BIAS=block.down_bias >= 0, COPIED=COPIED_WORDS, **_options(down),
        **shared,
    )  # fmt: skip
    return combine(partial, weights, experts, x)


def _options(tiles: FewTiles) -> dict[str, int | bool]:
    return {
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "SPANS": tiles.spans,
        "AHEAD": int(tiles.ahead),
        "TILES": tiles.tiles,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _sharing(tokens: int, tiles: FewTiles) -> int:
    """Programs that share an expert's tokens: one while an expert has a tile of them as a rule, and not more than
    MAX_SHARING."""
    return min(triton.cdiv(tokens, 4 * tiles.tokens), MAX_SHARING)
