"""Norms, rotary embedding and gated activations in Triton: one launch each, float32 inside, rounded once.

A program owns a row (of a head) or a piece of one, so no result depends on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

_BLOCK = 1024


@triton.jit
def _norm(
    x, weight, out, x_row, x_head, w_head, o_row, o_head, eps, divisor,
    HAS_WEIGHT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_PAD)
    real = column < DIM
    value = tl.load(x + row * x_row + head * x_head + column, mask=real, other=0.0).to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / divisor + eps)
    if HAS_WEIGHT:
        value *= tl.load(weight + head * w_head + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * o_row + head * o_head + column, value.to(out.dtype.element_ty), mask=real)


def _warps(dim_pad: int) -> int:
    return min(8, max(1, dim_pad // 256))


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] view of [rows, dim] or [rows, heads, dim]."""
    return x.unsqueeze(1) if x.dim() == 2 else x


def _normalise(x: torch.Tensor, weight: torch.Tensor | None, eps: float, divisor: int) -> torch.Tensor:
    if x.stride(-1) != 1 or (weight is not None and weight.stride(-1) != 1):
        raise ValueError("rows and weights must be contiguous in their last dimension")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    held, filled = _heads(x), _heads(out)
    rows, heads, dim = held.shape
    pad = triton.next_power_of_2(dim)
    per_head = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    _norm[(rows, heads)](
        held, held if weight is None else weight, filled, held.stride(0), held.stride(1), per_head,
        filled.stride(0), filled.stride(1), eps, divisor,
        HAS_WEIGHT=weight is not None, DIM=dim, DIM_PAD=pad, num_warps=_warps(pad),
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.rms_norm`; x [rows, dim] or [rows, heads, dim], contiguous in the last dim."""
    return _normalise(x, weight, eps, x.shape[-1])


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.l2_norm`."""
    return _normalise(x, None, eps, 1)


@triton.jit
def _add_norm(
    x,
    y,
    weight,
    out,
    x_row,
    y_row,
    o_row,
    eps,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM_PAD)
    real = column < DIM
    value = tl.load(x + row * x_row + column, mask=real, other=0.0).to(tl.float32)
    value += tl.load(y + row * y_row + column, mask=real, other=0.0).to(tl.float32)
    stream = value.to(x.dtype.element_ty)
    tl.store(x + row * x_row + column, stream, mask=real)
    value = stream.to(tl.float32)  # what later layers will read is what is normed
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
    value *= tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * o_row + column, value.to(out.dtype.element_ty), mask=real)


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.add_norm`."""
    rows, dim = x.shape
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    pad, overlap = triton.next_power_of_2(dim), overlaps(x)
    _add_norm[(rows,)](
        x,
        y,
        weight,
        out,
        x.stride(0),
        y.stride(0),
        out.stride(0),
        eps,
        DIM=dim,
        DIM_PAD=pad,
        OVERLAP=overlap,
        num_warps=_warps(pad),
        launch_pdl=overlap,
    )
    return out


@triton.jit
def _gated_norm(
    x, gate, weight, out, heads, x_row, x_head, g_row, o_row, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, DIM_PAD)
    real = (head < heads)[:, None] & (column < DIM)[None, :]
    at = head[:, None] * DIM + column[None, :]
    value = tl.load(x + row * x_row + head[:, None] * x_head + column[None, :], mask=real, other=0.0).to(
        tl.float32
    )
    opened = tl.load(gate + row * g_row + at, mask=real, other=0.0).to(tl.float32)
    value *= (1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps))[:, None]
    value *= tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    value *= opened * tl.sigmoid(opened)
    tl.store(out + row * o_row + at, value.to(out.dtype.element_ty), mask=real)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`kernels.pointwise.gated_norm`."""
    rows, heads, dim = x.shape
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=gate.dtype, device=x.device)
    if x.stride(2) != 1 or gate.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    pad = triton.next_power_of_2(dim)
    block = max(1, min(_BLOCK // pad, triton.next_power_of_2(heads)))
    _gated_norm[(rows, triton.cdiv(heads, block))](
        x, gate, weight, out, heads, x.stride(0), x.stride(1), gate.stride(0), out.stride(0), eps,
        DIM=dim, DIM_PAD=pad, HEADS=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x, cos, sin, x_row, x_head, c_row, s_row, heads,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_PAD)
    turned = column < HALF
    real = (head < heads)[:, None] & turned[None, :]
    c = tl.load(cos + row * c_row + column, mask=turned, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * s_row + column, mask=turned, other=0.0).to(tl.float32)[None, :]
    at = x + row * x_row + head[:, None] * x_head + column[None, :]
    low = tl.load(at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(at, (low * c - high * s).to(x.dtype.element_ty), mask=real)
    tl.store(at + HALF, (high * c + low * s).to(x.dtype.element_ty), mask=real)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.pointwise.rotate`; in place."""
    rows, heads, _ = x.shape
    half = cos.shape[1]
    if x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("rows must be contiguous in their last dimension")
    block = 8
    _rotate[(rows, triton.cdiv(heads, block))](
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), heads,
        HALF=half, HALF_PAD=triton.next_power_of_2(half), HEADS=block, num_warps=2,
    )  # fmt: skip
    return x


@triton.jit
def _norm_rotate(
    x, weight, cos, sin, out, x_row, x_head, w_head, c_row, s_row, o_row, o_head, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_PAD)
    real = column < DIM
    at = x + row * x_row + head * x_head
    # A dim's partner in its plane of rotation is loaded beside it: the same row again, from the cache.
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    value = tl.load(at + column, mask=real, other=0.0).to(tl.float32)
    other = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
        scale = weight + head * w_head
        value *= factor * tl.load(scale + column, mask=real, other=0.0).to(tl.float32)
        other *= factor * tl.load(scale + partner, mask=real, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty).to(tl.float32)  # as a norm that stands alone would answer
        other = other.to(out.dtype.element_ty).to(tl.float32)
    turned = column < 2 * HALF
    angle = column % HALF
    c = tl.load(cos + row * c_row + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + row * s_row + angle, mask=turned, other=0.0).to(tl.float32)
    result = value * c + tl.where(column < HALF, -other, other) * s
    tl.store(out + row * o_row + head * o_head + column, result.to(out.dtype.element_ty), mask=real)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """See :func:`kernels.pointwise.norm_rotate`."""
    rows, heads, dim = x.shape
    if x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("rows must be contiguous in their last dimension")
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    pad = triton.next_power_of_2(dim)
    per_head = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    _norm_rotate[(rows, heads)](
        x, x if weight is None else weight, cos, sin, out, x.stride(0), x.stride(1), per_head,
        cos.stride(0), sin.stride(0), out.stride(0), out.stride(1), eps,
        DIM=dim, DIM_PAD=pad, HALF=cos.shape[1], NORMED=weight is not None, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _gate_mul(
    gate, up, share, out, columns, g_row, u_row, s_row, o_row, limit, alpha,
    KIND: tl.constexpr, HAS_SHARE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    g = tl.load(gate + row * g_row + column, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + row * u_row + column, mask=real, other=0.0).to(tl.float32)
    if KIND == 0:
        value = g * tl.sigmoid(g) * u
    elif KIND == 1:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        value = (u + 1.0) * g * tl.sigmoid(alpha * g)
    else:
        value = u * tl.sigmoid(g)
    if HAS_SHARE:
        value *= tl.sigmoid(tl.load(share + row * s_row).to(tl.float32))
    tl.store(out + row * o_row + column, value.to(out.dtype.element_ty), mask=real)


def _run_gate(
    kind: int, gate: torch.Tensor, up: torch.Tensor, share: torch.Tensor | None, out: torch.Tensor, limit: float,
    alpha: float,
) -> torch.Tensor:  # fmt: skip
    if gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    rows, columns = gate.shape
    overlap = overlaps(gate)
    _gate_mul[(rows, triton.cdiv(columns, _BLOCK))](
        gate, up, gate if share is None else share, out, columns, gate.stride(0), up.stride(0),
        0 if share is None else share.stride(0), out.stride(0), limit, alpha,
        KIND=kind, HAS_SHARE=share is not None, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor:
    """See :func:`kernels.pointwise.silu_and_mul`; [rows, n]."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _run_gate(0, gate, up, share, out, 0.0, 0.0)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``; [rows, n]."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _run_gate(1, gate, up, None, out, limit, alpha)


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.pointwise.mul_sigmoid`; in place of x [rows, n]."""
    return _run_gate(2, gate, x, None, x, 0.0, 0.0)
