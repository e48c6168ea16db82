"""Weights of eight and four bits as a tensor core takes them: a thread's words become the thread's own operand.

A span is 64 bytes of a row, which four neighbouring threads read, sixteen bytes each. Which columns of the contraction
a thread multiplies is free as long as the inputs come in the same order; here the order is such that no weight passes
from one thread to another. The inputs are brought into it once, or as they are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels._reference.experts import FP8_BLOCK, INT4, MXFP4
from kernels._triton.expert_weights import scale_cells, zero_cells

HALF_WAY = {FP8_BLOCK: 2.0**60, INT4: 1.0, MXFP4: 2.0**60}
"""Inputs come times this, so that neither they nor the weights' bare bits leave the range of a bfloat16; the rest of
what the bits are too small by, 2^60 and 2^3, is made good in the sum."""


@triton.jit
def place_of(column, KIND: tl.constexpr):
    """Where a column of the inputs stands: thread, word of four, and the half and pair of a step of sixteen columns.
    Packed odd columns follow the even ones of their span."""
    if KIND == 1:
        within = column % 64
        return column - within + within // 4 % 4 * 16 + within // 2 % 2 * 8 + within // 16 * 2 + within % 2
    else:
        within = column % 128
        place = within // 8 % 4 * 16 + within // 2 % 2 * 8 + within // 32 * 2 + within // 4 % 2
        return column - within + within % 2 * 64 + place


@triton.jit
def words_inside(row_ok, first, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """[rows, WORDS]: which words from ``first`` on are a row's own."""
    word = tl.arange(0, WORDS)
    if BYTES % (4 * WORDS) == 0:
        inside = word >= 0
    else:
        inside = first + word < BYTES // 4
    return row_ok[:, None] & inside[None, :]


@triton.jit
def words_at(base, first, row, mask, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """[rows, WORDS] int32 of the rows of a matrix, from word ``first`` on; rows are whole lines of sixteen bytes."""
    pointer = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16)
    at = row[:, None] * (BYTES // 4) + (first + tl.arange(0, WORDS))[None, :]
    return tl.load(pointer + at, mask=mask, other=0)


@triton.jit
def keep_words(target, words, first, row, mask, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """Stores them at the same places behind ``target``; nothing where it is 0."""
    pointer = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    at = row[:, None] * (BYTES // 4) + (first + tl.arange(0, WORDS))[None, :]
    tl.store(pointer + at, words, mask=mask & (at * 0 + target != 0))


@triton.jit
def _four(a, b, c, d):
    """[rows, 16] each to [rows, 16, pair, half]."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _fp8(words, ROWS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr):
    """[ROWS, 64] e4m3 times 2^-120, which is where their bits fall in a bfloat16."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            prmt.b32 s, $4, 0, 0x9180;
            prmt.b32 t, $4, 0, 0xb3a2;
            shl.b32 s, s, 4;
            shl.b32 t, t, 4;
            and.b32 s, s, 0x87f087f0;
            and.b32 t, t, 0x87f087f0;
            mov.b32 {$0, $1}, s;
            mov.b32 {$2, $3}, t;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = _e4m3(words), _e4m3(words >> 8), _e4m3(words >> 16), _e4m3(words >> 24)
    value = tl.reshape(_four(a, b, c, d), [ROWS, 4, 4, 2, 2])
    value = tl.permute(value, (0, 2, 4, 1, 3)) if RUN == 2 else tl.permute(value, (0, 2, 1, 4, 3))
    return tl.reshape(value, [ROWS, 64])


@triton.jit
def _e4m3(word):
    return (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 7.52316384526264e-37


@triton.jit
def _packed(a, b, c, d, e, f, g, h, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Even columns a to d and odd ones e to h of each word to [ROWS, 128]."""
    value = tl.reshape(tl.join(_four(a, b, c, d), _four(e, f, g, h)), [ROWS, 4, 4, 2, 2, 2])
    value = tl.permute(value, (0, 5, 2, 4, 1, 3)) if RUN == 2 else tl.permute(value, (0, 5, 2, 1, 4, 3))
    return tl.reshape(value, [ROWS, 128])


@triton.jit
def _int4(words, zero, ROWS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr):
    """[ROWS, 128] whole numbers less ``zero`` (int32, as ``words``)."""
    if ASM:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, z;
            mad.lo.u32 z, $9, 0x00010001, 0x43004300;
            lop3.b32 t, $8, 0x000f000f, 0x43004300, 0xea;
            sub.bf16x2 t, t, z;
            mov.b32 {$0, $1}, t;
            shr.b32 t, $8, 8;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            sub.bf16x2 t, t, z;
            mov.b32 {$2, $3}, t;
            shr.b32 t, $8, 4;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            sub.bf16x2 t, t, z;
            mov.b32 {$4, $5}, t;
            shr.b32 t, $8, 12;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            sub.bf16x2 t, t, z;
            mov.b32 {$6, $7}, t;
            }""",
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
            [words, zero],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        a, b = ((words & 15) - zero).to(tl.float32), ((words >> 16 & 15) - zero).to(tl.float32)
        c, d = ((words >> 8 & 15) - zero).to(tl.float32), ((words >> 24 & 15) - zero).to(tl.float32)
        e, f = ((words >> 4 & 15) - zero).to(tl.float32), ((words >> 20 & 15) - zero).to(tl.float32)
        g, h = ((words >> 12 & 15) - zero).to(tl.float32), ((words >> 28 & 15) - zero).to(tl.float32)
    return _packed(a, b, c, d, e, f, g, h, ROWS, RUN)


@triton.jit
def _mxfp4(words, factor, ROWS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr):
    """[ROWS, 128] e2m1 times 2^-126 times ``factor``, the bits of a bfloat16 in both halves of an int32."""
    if ASM:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            shl.b32 t, $8, 6;
            shl.b32 s, $8, 12;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 t, s, 0x80008000, t, 0xea;
            mul.bf16x2 t, t, $9;
            mov.b32 {$0, $1}, t;
            shr.b32 t, $8, 2;
            shl.b32 s, $8, 4;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 t, s, 0x80008000, t, 0xea;
            mul.bf16x2 t, t, $9;
            mov.b32 {$2, $3}, t;
            shl.b32 t, $8, 2;
            shl.b32 s, $8, 8;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 t, s, 0x80008000, t, 0xea;
            mul.bf16x2 t, t, $9;
            mov.b32 {$4, $5}, t;
            shr.b32 t, $8, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 t, $8, 0x80008000, t, 0xea;
            mul.bf16x2 t, t, $9;
            mov.b32 {$6, $7}, t;
            }""",
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
            [words, factor],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        scale = (factor & -65536).to(tl.float32, bitcast=True)
        a, b = _e2m1(words) * scale, _e2m1(words >> 16) * scale
        c, d = _e2m1(words >> 8) * scale, _e2m1(words >> 24) * scale
        e, f = _e2m1(words >> 4) * scale, _e2m1(words >> 20) * scale
        g, h = _e2m1(words >> 12) * scale, _e2m1(words >> 28) * scale
    return _packed(a, b, c, d, e, f, g, h, ROWS, RUN)


@triton.jit
def _e2m1(word):
    size = word & 7
    # A size of one half would be a subnormal number here, which may be lost on the way.
    value = tl.where(size == 1, 5.877471754111438e-39, (size << 22).to(tl.float32, bitcast=True))
    return tl.where(word & 8 != 0, -value, value)


@triton.jit
def span_scales(
    span, row_ok, scales, cell_first, zeros, zero_offset,
    KIND: tl.constexpr, GROUP: tl.constexpr, CELLS: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """What a span's weights are scaled by and lessened by, one each per row: as float32 and int32 for FP8 and INT4; for
    MXFP4 the four scales' bytes in an int32, twice. ``cell_first`` is the first scale of each row, which has CELLS (an
    even number in MXFP4); a span behind the last column has none."""
    if KIND == 1:
        cell = cell_first + span * 64 // GROUP
        scale = scale_cells(scales, cell, row_ok & (cell - cell_first < CELLS), KIND)
        return scale, cell
    elif KIND == 2:
        cell = cell_first + span * 128 // GROUP
        scaled = row_ok & (cell - cell_first < CELLS)
        zero = zero_cells(zeros, zero_offset, cell, scaled, HAS_ZEROS).to(tl.int32)
        return scale_cells(scales, cell, scaled, KIND), zero
    else:
        at = scales + cell_first + span * 4
        left = CELLS - span * 4 + cell_first * 0
        if CELLS % 4 == 0:
            four = tl.load(at.to(tl.pointer_type(tl.int32)), mask=row_ok & (left > 0), other=0)
        else:
            low = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=row_ok & (left > 0), other=0)
            high = tl.load((at + 2).to(tl.pointer_type(tl.uint16)), mask=row_ok & (left > 2), other=0)
            four = low.to(tl.int32) | (high.to(tl.int32) << 16)
        return four, four


@triton.jit
def step_scales(
    step, row_ok, scales, cell_first, zeros, zero_offset,
    KIND: tl.constexpr, GROUP: tl.constexpr, CELLS: tl.constexpr, HAS_ZEROS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points, as :func:`span_scales` answers them, of a step's first span and of its last."""
    first, first_zero = span_scales(
        SPANS * step, row_ok, scales, cell_first, zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS
    )
    if SPANS == 1:
        return first, first_zero, first, first_zero
    else:
        last, last_zero = span_scales(
            SPANS * step + 1, row_ok, scales, cell_first, zeros, zero_offset, KIND, GROUP, CELLS, HAS_ZEROS
        )
        return first, first_zero, last, last_zero


@triton.jit
def weigh_span(
    acc, words, inputs, scale, zero, like,
    KIND: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, tokens] += a span's weights, of words [ROWS, 16], times its inputs [64 or 128, tokens] in their order.
    ``scale`` and ``zero`` are :func:`span_scales`' of the span. RUN: how many neighbours of a step a thread has, two
    for a warpgroup's tensor core instruction, four for a warp's (so the compiler lays out joined values)."""
    if KIND == 1:
        weight = _fp8(words, ROWS, RUN, ASM).to(like.dtype.element_ty)
        part = tl.dot(weight, inputs, input_precision="ieee")
        acc += part * (scale * 1.152921504606847e18)[:, None]
    elif KIND == 2:
        weight = _int4(words, tl.broadcast_to(zero[:, None], words.shape), ROWS, RUN, ASM)
        part = tl.dot(weight.to(like.dtype.element_ty), inputs, input_precision="ieee")
        acc += part * scale[:, None]
    else:
        # Sixteen bytes are one group: a thread has one scale, and a power of two scales a weight exactly.
        exponent = (scale[:, None] >> (tl.arange(0, 16) // 4 * 8)[None, :]) & 0xFF
        factor = (tl.minimum(exponent, 191) + 63) * 0x00800080
        weight = _mxfp4(words, factor, ROWS, RUN, ASM)
        acc += tl.dot(weight.to(like.dtype.element_ty), inputs, input_precision="ieee") * 8.0
    return acc
