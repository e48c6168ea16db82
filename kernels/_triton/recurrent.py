"""The gated delta rule and the short convolution at decode in Triton: states are changed in place, in the arena."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _delta_step(
    query, key, value, decay, beta, states, page, out,
    share, q_row, q_head, k_row, k_head, v_row, v_head, s_page, s_head, o_row, o_head, heads,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.load(page + row)
    if number < 0:
        return
    k_index = head // share
    rows_k = tl.arange(0, D_K)
    rows_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = rows_v < D_V
    q = tl.load(query + row * q_row + k_index * q_head + rows_k).to(tl.float32)
    k = tl.load(key + row * k_row + k_index * k_head + rows_k).to(tl.float32)
    v = tl.load(value + row * v_row + head * v_head + rows_v, mask=real, other=0.0).to(tl.float32)
    fade = tl.load(decay + row * heads + head).to(tl.float32)
    strength = tl.load(beta + row * heads + head).to(tl.float32)
    at = states + number * s_page + head * s_head + rows_k[:, None] * D_V + rows_v[None, :]
    state = tl.load(at, mask=real[None, :], other=0.0) * fade
    delta = (v - tl.sum(state * k[:, None], 0)) * strength
    state += k[:, None] * delta[None, :]
    tl.store(at, state, mask=real[None, :])
    read = tl.sum(state * q[:, None], 0)
    tl.store(out + row * o_row + head * o_head + rows_v, read.to(out.dtype.element_ty), mask=real)


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
) -> torch.Tensor:
    """Advances every row's float32 state by one token and reads it; rows with page -1 are padding and stay untouched.

    Args:
        query, key: [rows, k_heads, d_k], d_k a power of two; value: [rows, v_heads, d_v].
        decay, beta: [rows, v_heads] contiguous.
        state_pages: [pages, v_heads, d_k, d_v] strided view, contiguous below the head.
        page: [rows] int64, distinct where not -1.

    Returns:
        [rows, v_heads, d_v] float32; padding rows undefined.
    """
    rows, k_heads, d_k = key.shape
    v_heads, d_v = value.shape[1:]
    if state_pages.stride(3) != 1 or state_pages.stride(2) != d_v:
        raise ValueError("a state must be contiguous below its head")
    out = torch.empty(rows, v_heads, d_v, dtype=torch.float32, device=value.device)
    block_v = min(32, triton.next_power_of_2(d_v))
    _delta_step[(rows, v_heads, triton.cdiv(d_v, block_v))](
        query, key, value, decay, beta, state_pages, page, out,
        v_heads // k_heads, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), state_pages.stride(0), state_pages.stride(1),
        out.stride(0), out.stride(1), v_heads,
        D_K=d_k, D_V=d_v, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _conv_step(
    x, weight, states, page, out, channels, x_row, s_page, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(page + row)
    if number < 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    newest = tl.load(x + row * x_row + channel, mask=real, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + channel, mask=real, other=0.0)
    for tap in tl.static_range(WIDTH - 1):
        column = states + number * s_page + tap * channels + channel
        old = tl.load(column, mask=real, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + tap * channels + channel, mask=real, other=0.0)
        if tap > 0:
            # Shifted by one: this program owns the channel in every column, so no other can see it half done.
            tl.store(column - channels, old, mask=real)
    tl.store(states + number * s_page + (WIDTH - 2) * channels + channel, newest, mask=real)
    result = total * tl.sigmoid(total)
    tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=real)


def causal_conv_step(
    x: torch.Tensor, weight: torch.Tensor, state_pages: torch.Tensor, page: torch.Tensor
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU for one token per row, in float32; shifts the state in place.

    Args:
        x: [rows, channels]; weight: [width, channels] contiguous, width >= 2, the last column meets the newest token.
        state_pages: [pages, width - 1, channels] strided view, contiguous below the page; page: [rows], -1 is padding.

    Returns:
        [rows, channels] in x's dtype; padding rows undefined.
    """
    rows, channels = x.shape
    if state_pages.stride(2) != 1 or state_pages.stride(1) != channels:
        raise ValueError("convolution columns must be contiguous below the page")
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    block = 256
    _conv_step[(rows, triton.cdiv(channels, block))](
        x, weight, state_pages, page, out, channels, x.stride(0), state_pages.stride(0),
        WIDTH=weight.shape[0], BLOCK=block,
    )  # fmt: skip
    return out
