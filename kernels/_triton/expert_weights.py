"""Reads tiles of an expert's weights, in every format, out of a block at an address, and turns them into numbers; and
what else all products share: biases and the activation.

Addresses come out of a table, so their alignment is told to the compiler: without it no load is vectorised. Weights
of eight and four bits become bfloat16 four bytes at a time in inline assembly where the activations are bfloat16 (ASM);
the plain path beside it serves other dtypes and the interpreter. Both are exact: scales are applied to sums, not to
weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

DENSE: tl.constexpr = tl.constexpr(0)
FP8_BLOCK: tl.constexpr = tl.constexpr(1)
INT4: tl.constexpr = tl.constexpr(2)
MXFP4: tl.constexpr = tl.constexpr(3)


@triton.jit
def raw_tile(base, at, mask, like, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Weights as they lie in the block: elements of ``at`` for DENSE, bytes for the rest."""
    if KIND == 0:
        pointer = tl.multiple_of(base.to(tl.pointer_type(like.dtype.element_ty)), ALIGN)
        return tl.load(pointer + at, mask=mask, other=0.0)
    else:
        pointer = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), ALIGN)
        return tl.load(pointer + at, mask=mask, other=0)


@triton.jit
def keep_tile(target, at, mask, raw, like, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Stores a raw tile at the same offsets from ``target``; nothing where it is 0."""
    kept = mask & (at * 0 + target != 0)
    if KIND == 0:
        pointer = tl.multiple_of(target.to(tl.pointer_type(like.dtype.element_ty)), ALIGN)
        tl.store(pointer + at, raw, mask=kept)
    else:
        pointer = tl.multiple_of(target.to(tl.pointer_type(tl.uint8)), ALIGN)
        tl.store(pointer + at, raw, mask=kept)


@triton.jit
def from_fp8(raw, ASM: tl.constexpr):
    """e4m3 bytes as numbers: bfloat16 with ASM, else float32. Sign, exponent and mantissa slide into a bfloat16 whose
    exponent is 120 too small; the product with 2^120 is exact, subnormals included."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, c;
            mov.b32 c, 0x7b807b80;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000;
            shr.b32 t, a, 4;
            and.b32 t, t, 0x07f007f0;
            or.b32 t, t, s;
            mul.bf16x2 $0, t, c;
            and.b32 s, b, 0x80008000;
            shr.b32 t, b, 4;
            and.b32 t, t, 0x07f007f0;
            or.b32 t, t, s;
            mul.bf16x2 $1, t, c;
            }""",
            "=r,=r,r",
            [raw],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def from_fp8_shrunk(raw, ASM: tl.constexpr):
    """e4m3 bytes as float32 times 2^-120, which costs no multiplication: the bits slide to where a float32 has them."""
    if ASM:
        bits = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, 0, 0x0444;
            prmt.b32 $1, $4, 0, 0x1444;
            prmt.b32 $2, $4, 0, 0x2444;
            prmt.b32 $3, $4, 0, 0x3444;
            shr.s32 $0, $0, 4;
            shr.s32 $1, $1, 4;
            shr.s32 $2, $2, 4;
            shr.s32 $3, $3, 4;
            and.b32 $0, $0, 0x87f00000;
            and.b32 $1, $1, 0x87f00000;
            and.b32 $2, $2, 0x87f00000;
            and.b32 $3, $3, 0x87f00000;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [raw],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 7.52316384526264e-37


@triton.jit
def from_int4(raw, zero, ASM: tl.constexpr):
    """(even, odd) columns of packed bytes less ``zero`` (uint8, same shape, at most 16), whole numbers."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, y, z;
            prmt.b32 y, $5, 0, 0x4140;
            prmt.b32 z, $5, 0, 0x4342;
            or.b32 y, y, 0x43004300;
            or.b32 z, z, 0x43004300;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 $0, a, 0x000f000f;
            or.b32 $0, $0, 0x43004300;
            sub.bf16x2 $0, $0, y;
            and.b32 $1, b, 0x000f000f;
            or.b32 $1, $1, 0x43004300;
            sub.bf16x2 $1, $1, z;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            and.b32 $2, a, 0x000f000f;
            or.b32 $2, $2, 0x43004300;
            sub.bf16x2 $2, $2, y;
            and.b32 $3, b, 0x000f000f;
            or.b32 $3, $3, 0x43004300;
            sub.bf16x2 $3, $3, z;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [raw, zero],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        shift = zero.to(tl.int32)
        even = ((raw & 0x0F).to(tl.int32) - shift).to(tl.float32)
        odd = ((raw >> 4).to(tl.int32) - shift).to(tl.float32)
        return even, odd


@triton.jit
def from_e2m1(raw, ASM: tl.constexpr):
    """(even, odd) columns of packed e2m1 bytes. The bits slide into a float whose exponent is 126 too small."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, c;
            mov.b32 c, 0x7e807e80;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 t, a, 6;
            and.b32 t, t, 0x01c001c0;
            shl.b32 s, a, 12;
            and.b32 s, s, 0x80008000;
            or.b32 t, t, s;
            mul.bf16x2 $0, t, c;
            shl.b32 t, b, 6;
            and.b32 t, t, 0x01c001c0;
            shl.b32 s, b, 12;
            and.b32 s, s, 0x80008000;
            or.b32 t, t, s;
            mul.bf16x2 $1, t, c;
            shl.b32 t, a, 2;
            and.b32 t, t, 0x01c001c0;
            shl.b32 s, a, 8;
            and.b32 s, s, 0x80008000;
            or.b32 t, t, s;
            mul.bf16x2 $2, t, c;
            shl.b32 t, b, 2;
            and.b32 t, t, 0x01c001c0;
            shl.b32 s, b, 8;
            and.b32 s, s, 0x80008000;
            or.b32 t, t, s;
            mul.bf16x2 $3, t, c;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [raw],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        return _e2m1(raw & 0x0F), _e2m1(raw >> 4)


@triton.jit
def _e2m1(code):
    # In halves the sizes are 0 1 2 3 4 6 8 12: (2 + mantissa) << (exponent - 1), or the mantissa alone.
    size = (code & 7).to(tl.int32)
    exponent = size >> 1
    halves = tl.where(exponent == 0, size, (2 + (size & 1)) << tl.maximum(exponent - 1, 0))
    magnitude = halves.to(tl.float32) * 0.5
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def scale_cells(scales, cell, mask, KIND: tl.constexpr):
    """Scales of the cells as float32: float32 for FP8_BLOCK, float16 for INT4, 2^(byte - 127) for MXFP4."""
    if KIND == 1:
        return tl.load(scales.to(tl.pointer_type(tl.float32)) + cell, mask=mask, other=0.0)
    elif KIND == 2:
        return tl.load(scales.to(tl.pointer_type(tl.float16)) + cell, mask=mask, other=0.0).to(tl.float32)
    else:
        exponent = tl.load(scales.to(tl.pointer_type(tl.uint8)) + cell, mask=mask, other=127).to(tl.int32)
        # A byte of 0 stands for 2^-127, half the smallest normal number.
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def zero_cells(zeros, zero_offset, cell, mask, HAS_ZEROS: tl.constexpr):
    """Zero points of the cells, uint8: nibbles, low one first, to which ``zero_offset`` is added; 8 without any."""
    if HAS_ZEROS:
        pair = tl.load(zeros.to(tl.pointer_type(tl.uint8)) + cell // 2, mask=mask, other=0).to(tl.int32)
        return (((pair >> ((cell % 2) * 4).to(tl.int32)) & 0x0F) + zero_offset).to(tl.uint8)
    else:
        return tl.full(cell.shape, 8, tl.uint8)


@triton.jit
def biases_at(at, like, LIKE: tl.constexpr):
    """Pointer to the biases at an address: of the dtype of ``like``, or bfloat16."""
    if LIKE:
        return at.to(tl.pointer_type(like.dtype.element_ty))
    else:
        return at.to(tl.pointer_type(tl.bfloat16))


@triton.jit
def activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """What stands between the projections, in float32: SwiGLU (0), or GPT-OSS's clamped one."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(alpha * gate)
