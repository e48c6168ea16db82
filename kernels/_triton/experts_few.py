"""Expert products of a few tokens with weights of eight or four bits, through the address table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.experts import FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, BlockFormat
from kernels._triton.expert_spans import HALF_WAY, keep_words, place_of, weigh_span, words_at, words_inside
from kernels._triton.experts_group import COPIED_WORDS, combine, copy_words, group_pairs, padded, small_parts
from kernels._triton.overlap import overlaps

MAX_SHARING = 8
"""Programs that share an expert's tokens at most; each loops over the rest."""


@triton.jit
def _add_step(
    acc, words, x_rows, x_ok, step, row_ok, scales, cell_first, zeros, zero_offset, like,
    KIND: tl.constexpr, GROUP: tl.constexpr, CELLS: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """acc += a step's weights, one span or two, times its inputs, which lie in their order at pointers [1, tokens]."""
    COLUMNS: tl.constexpr = 128 if KIND >= 2 else 64
    column = tl.arange(0, COLUMNS)[:, None]
    if SPANS == 1:
        value = tl.load(x_rows + step * COLUMNS + column, mask=x_ok, other=0.0)
        return weigh_span(
            acc, words, value, step, row_ok, scales, cell_first, zeros, zero_offset, like, KIND, GROUP, CELLS,
            HAS_ZEROS, ASM, ROWS,
        )  # fmt: skip
    else:
        first, second = tl.split(tl.permute(tl.reshape(words, [ROWS, 2, 16]), (0, 2, 1)))
        value = tl.load(x_rows + 2 * step * COLUMNS + column, mask=x_ok, other=0.0)
        acc = weigh_span(
            acc, first, value, 2 * step, row_ok, scales, cell_first, zeros, zero_offset, like, KIND, GROUP, CELLS,
            HAS_ZEROS, ASM, ROWS,
        )  # fmt: skip
        value = tl.load(x_rows + (2 * step + 1) * COLUMNS + column, mask=x_ok, other=0.0)
        return weigh_span(
            acc, second, value, 2 * step + 1, row_ok, scales, cell_first, zeros, zero_offset, like, KIND, GROUP, CELLS,
            HAS_ZEROS, ASM, ROWS,
        )  # fmt: skip


@triton.jit
def few_gate_up(
    x, hidden, table, tee, order, starts, experts_per_token, x_stride, hidden_stride, limit, alpha,
    gate_up, gate_scales, up_scales, zeros, zero_offset, bias,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr,
    ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, padded I], in their order, = FACTOR * act(gate @ x, up @ x). A tile has ROWS / 2 rows of gate and
    of up, by eights: a thread has both of a pair."""
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
    index = tl.arange(0, ROWS)
    is_up = index // 8 % 2
    row = tl.program_id(1) * (ROWS // 2) + index // 16 * 8 + index % 8
    row_ok = row < INNER
    if KIND == 1:
        cell_first = row // SIDE * CELLS + is_up * ((up_scales - gate_scales) // 4)
    else:
        cell_first = (is_up * INNER + row) * CELLS
    row += is_up * INNER
    out_row = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        token = (tl.load(order + place, mask=token_ok, other=0) // experts_per_token).to(tl.int64)
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        target = tl.where(target != 0, target + gate_up, 0)
        x_rows = x + token[None, :] * x_stride
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in range(0, (BYTES + 4 * WORDS - 1) // (4 * WORDS)):
            mask = words_inside(row_ok, step * WORDS, BYTES, WORDS)
            words = words_at(base + gate_up, step * WORDS, row, mask, BYTES, WORDS)
            if TEE:
                keep_words(target, words, step * WORDS, row, mask, BYTES, WORDS)
            acc = _add_step(
                acc, words, x_rows, token_ok[None, :], step, row_ok, base + gate_scales, cell_first,
                base + zeros, zero_offset, x, KIND, GROUP, CELLS, HAS_ZEROS, ASM, ROWS, SPANS,
            )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(acc, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1)))
        gate = tl.reshape(gate, [ROWS // 2, TOKENS])
        up = tl.reshape(up, [ROWS // 2, TOKENS])
        if HAS_BIAS:
            biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            gate += tl.load(biases + out_row, mask=out_row < INNER, other=0.0).to(tl.float32)[:, None]
            up += tl.load(biases + INNER + out_row, mask=out_row < INNER, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION == 0:
            result = gate * tl.sigmoid(gate) * up
        else:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
        result *= FACTOR
        tl.store(
            hidden + place.to(tl.int64)[None, :] * hidden_stride + place_of(out_row, KIND)[:, None],
            result.to(hidden.dtype.element_ty),
            mask=(out_row < hidden_stride)[:, None] & token_ok[None, :],
        )


@triton.jit
def few_down(
    hidden, partial, table, tee, order, starts, hidden_stride, down, scales, zeros, zero_offset, bias, row_tiles,
    first_0, first_1, first_2, size_0, size_1, size_2,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr, TEE: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """partial [pairs, H] = down @ hidden + bias. With TEE, programs behind ``row_tiles`` copy blocks' small parts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    if TEE:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(1) >= row_tiles:
            kept = tl.load(tee + expert)
            if (kept != 0) & (tl.program_id(2) == 0):
                copy_words(
                    tl.load(table + expert), kept, tl.program_id(1) - row_tiles, first_0, first_1, first_2, size_0,
                    size_1, size_2, COPIED,
                )  # fmt: skip
            return
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first == last:
        return
    base = tl.load(table + expert)
    BYTES: tl.constexpr = INNER // 2 if KIND >= 2 else INNER
    CELLS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    WORDS: tl.constexpr = 16 * SPANS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = row < WIDTH
    cell_first = (row // SIDE if KIND == 1 else row) * CELLS
    for chunk in range(tl.program_id(2), tl.cdiv(last - first, TOKENS), tl.num_programs(2)):
        place = first + chunk * TOKENS + tl.arange(0, TOKENS)
        token_ok = place < last
        target = tl.where(chunk == 0, tl.load(tee + expert), 0) if TEE else base * 0
        target = tl.where(target != 0, target + down, 0)
        x_rows = hidden + place.to(tl.int64)[None, :] * hidden_stride
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in range(0, (BYTES + 4 * WORDS - 1) // (4 * WORDS)):
            mask = words_inside(row_ok, step * WORDS, BYTES, WORDS)
            words = words_at(base + down, step * WORDS, row, mask, BYTES, WORDS)
            if TEE:
                keep_words(target, words, step * WORDS, row, mask, BYTES, WORDS)
            acc = _add_step(
                acc, words, x_rows, token_ok[None, :], step, row_ok, base + scales, cell_first,
                base + zeros, zero_offset, hidden, KIND, GROUP, CELLS, HAS_ZEROS, ASM, ROWS, SPANS,
            )  # fmt: skip
        if HAS_BIAS:
            biases = (base + bias).to(tl.pointer_type(tl.bfloat16))
            acc += tl.load(biases + row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        pair = tl.load(order + place, mask=token_ok, other=0).to(tl.int64)
        tl.store(
            partial + pair[None, :] * WIDTH + row[:, None], acc, mask=row_ok[:, None] & token_ok[None, :]
        )


@dataclass(frozen=True, slots=True)
class FewTiles:
    """A program's tile: output rows (half of them gate's, half up's, in the first launch), tokens, spans of a step; and
    how many programs share an expert's tokens."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    spans: int = 1


TILES = {
    FP8_BLOCK: (FewTiles(128, 16, 4, 6), FewTiles(64, 16, 4, 6)),
    INT4: (FewTiles(128, 16, 4, 6), FewTiles(64, 16, 4, 4)),
    MXFP4: (FewTiles(64, 16, 4, 4, 2), FewTiles(64, 16, 4, 4, 2)),
}
"""For gate and up, and for down: the same for any number of tokens, so that a token's bits do not depend on others."""


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
    activation: int, limit: float, alpha: float, tee: torch.Tensor | None = None,
    tiles: tuple[FewTiles, FewTiles] | None = None, beside: bool = False,
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
    up, down = tiles or TILES[block.kind]
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
    few_gate_up[(num_experts, triton.cdiv(hidden.shape[1], up.rows // 2), _sharing(tokens, up))](
        inputs, hidden, table, copies, order, starts, per_token, inputs.stride(0), hidden.stride(0), limit, alpha,
        block.gate_up, block.gate_scales, block.up_scales, block.gate_up_zeros, block.zero_offset, block.gate_up_bias,
        GROUP=groups[0], HAS_ZEROS=block.gate_up_zeros >= 0, HAS_BIAS=block.gate_up_bias >= 0,
        ACTIVATION=activation, FACTOR=factor, TOKENS=up.tokens, ROWS=up.rows, SPANS=up.spans, num_warps=up.num_warps,
        num_stages=up.num_stages, **shared,
    )  # fmt: skip
    row_tiles = triton.cdiv(width, down.rows)
    parts = small_parts(block, inner, width, x.element_size())
    pieces = triton.cdiv(sum(parts[3:]), COPIED_WORDS) if tee is not None else 0
    few_down[(num_experts, row_tiles + pieces, _sharing(tokens, down))](
        hidden, partial, table, copies, order, starts, hidden.stride(0), block.down, block.down_scales,
        block.down_zeros, block.zero_offset, block.down_bias, row_tiles, *parts, GROUP=groups[1],
        HAS_ZEROS=block.down_zeros >= 0, HAS_BIAS=block.down_bias >= 0, TOKENS=down.tokens, ROWS=down.rows,
        SPANS=down.spans, COPIED=COPIED_WORDS, num_warps=down.num_warps, num_stages=down.num_stages, **shared,
    )  # fmt: skip
    return combine(partial, weights, experts, x)


def _sharing(tokens: int, tiles: FewTiles) -> int:
    """Programs that share an expert's tokens: one while an expert has a tile of them as a rule, and not more than
    MAX_SHARING."""
    return min(triton.cdiv(tokens, 4 * tiles.tokens), MAX_SHARING)
