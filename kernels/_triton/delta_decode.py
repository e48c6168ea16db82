"""A Gated DeltaNet layer between its products at decode, in two launches: heads are prepared, then states advance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

_LARGEST_TILE = 128 * 128
"""Values of a head's state that one program holds in registers."""
_EARLY_ROWS = 32


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """A layer's tensors: ``conv`` [width, channels]; ``decay_rate``, ``decay_bias`` [v_heads] float32; ``norm`` [d]
    float32; and its sizes."""

    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    num_key_heads: int
    num_value_heads: int
    head_dim: int
    eps: float
    l2_eps: float


@triton.jit
def _prepare(
    inner, conv, columns, page, heads_out, in_row, s_page, channels, key_units, query_units, l2_eps, scale,
    WIDTH: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head's channels of one row: convolution, SiLU, and for queries and keys the norm."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    number = tl.load(page + row)
    if number < 0:
        return
    channel = unit * DIM + tl.arange(0, DIM)
    newest = tl.load(inner + row * in_row + channel)
    total = newest.to(tl.float32) * tl.load(conv + (WIDTH - 1) * channels + channel).to(tl.float32)
    first = columns + number * s_page + channel
    for tap in tl.static_range(WIDTH - 1):
        old = tl.load(first + tap * channels)
        total += old.to(tl.float32) * tl.load(conv + tap * channels + channel).to(tl.float32)
        if tap > 0:
            tl.store(first + (tap - 1) * channels, old)
    tl.store(first + (WIDTH - 2) * channels, newest)
    value = (total * tl.sigmoid(total)).to(inner.dtype.element_ty).to(tl.float32)
    if unit < key_units:
        value = value * tl.rsqrt(tl.sum(value * value, 0) + l2_eps)
        if unit < query_units:
            value = value * scale
    tl.store(heads_out + row * channels + channel, value)


@triton.jit
def _advance(
    heads_in, inner, decay_bias, decay_rate, norm, states, page, out,
    channels, in_row, s_page, s_head, share, k_heads, v_heads, eps,
    DIM: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One value head of one row: gates, delta rule, gated norm. ``EARLY``: the state, which none of the launches just
    before writes, comes while they end; with many rows that would only take the memory from them."""
    if OVERLAP and not EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    number = tl.load(page + row)
    target = out + (row * v_heads + head) * DIM + column
    at = states + number * s_page + head * s_head + column[:, None] * DIM + column[None, :]
    real = (tl.zeros([DIM], tl.int64) + number >= 0)[:, None]  # a padding row's state is nowhere
    state = tl.load(at, mask=real, other=0.0)
    if OVERLAP and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if number < 0:
        tl.store(target, tl.zeros([DIM], out.dtype.element_ty))
        return
    own = heads_in + row * channels
    q = tl.load(own + (head // share) * DIM + column)
    k = tl.load(own + (k_heads + head // share) * DIM + column)
    v = tl.load(own + (2 * k_heads + head) * DIM + column)
    gate = inner + row * in_row + channels
    z = tl.load(gate + head * DIM + column).to(tl.float32)
    strength = tl.sigmoid(tl.load(gate + v_heads * DIM + head).to(tl.float32))
    fade = tl.load(gate + v_heads * DIM + v_heads + head).to(tl.float32) + tl.load(decay_bias + head)
    soft = tl.where(fade > 20.0, fade, tl.log(1.0 + tl.exp(tl.minimum(fade, 20.0))))
    state = state * tl.exp(soft * tl.load(decay_rate + head))
    delta = (v - tl.sum(state * k[:, None], 0)) * strength
    state = state + k[:, None] * delta[None, :]
    tl.store(at, state)
    read = tl.sum(state * q[:, None], 0)
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / DIM + eps) * tl.load(norm + column)
    tl.store(target, (normed * z * tl.sigmoid(z)).to(out.dtype.element_ty))


def fits(parameters: DeltaParameters) -> bool:
    """Whether heads are of a size that the kernels take."""
    dim = parameters.head_dim
    return dim & (dim - 1) == 0 and dim >= 16 and dim * dim <= _LARGEST_TILE


def delta_net_decode(
    inner: torch.Tensor,
    parameters: DeltaParameters,
    conv_pages: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advances states by one token per row.

    Args:
        inner: [rows, channels + values + 2 * v_heads]: q, k, v before the convolution, z, b, a; rows may lie apart.
        conv_pages: [pages, width - 1, channels] strided view; state_pages: [pages, v_heads, d, d] strided view, both
            contiguous below the page (the head). page: [rows] int64, -1 in padding rows.
        out: [rows, v_heads * d] to be filled, contiguous, or None.

    Returns:
        [rows, v_heads * d] in inner's dtype: what the layer's last product takes; zero in padding rows.
    """
    sizes, dim = parameters, parameters.head_dim
    units = 2 * sizes.num_key_heads + sizes.num_value_heads
    channels, rows = units * dim, inner.shape[0]
    if inner.stride(1) != 1 or conv_pages.stride(1) != channels or state_pages.stride(2) != dim:
        raise ValueError("rows of inner, columns and states must be contiguous")
    overlap = overlaps(inner)
    heads = torch.empty(rows, channels, dtype=torch.float32, device=inner.device)
    if out is None:
        out = torch.empty(rows, sizes.num_value_heads * dim, dtype=inner.dtype, device=inner.device)
    _prepare[(rows, units)](
        inner, sizes.conv, conv_pages, page, heads, inner.stride(0), conv_pages.stride(0), channels,
        2 * sizes.num_key_heads, sizes.num_key_heads, sizes.l2_eps, dim**-0.5,
        WIDTH=sizes.conv.shape[0], DIM=dim, OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
    _advance[(rows, sizes.num_value_heads)](
        heads, inner, sizes.decay_bias, sizes.decay_rate, sizes.norm, state_pages, page, out,
        channels, inner.stride(0), state_pages.stride(0), state_pages.stride(1),
        sizes.num_value_heads // sizes.num_key_heads, sizes.num_key_heads, sizes.num_value_heads, sizes.eps,
        DIM=dim, EARLY=rows <= _EARLY_ROWS, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out
