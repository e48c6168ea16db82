"""The gated delta rule and the short convolution in Triton: states are changed in place, in the arena.

One kernel advances rows of one token and rows of many, token by token with the state in registers, without fused
multiply-adds that a compiler might place differently: however a sequence is cut into steps, every bit is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_V = 32
_CHANNELS = 256
_CONV_TOKENS, _CONV_CHANNELS = 16, 128


@triton.jit
def _delta_gates(
    strength, decay_bias, decay_rate, log_decay, decay, beta, row_stride, heads, PAD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PAD)
    real = head < heads
    write = tl.load(strength + token * row_stride + head, mask=real, other=0.0).to(tl.float32)
    fade = tl.load(strength + token * row_stride + heads + head, mask=real, other=0.0).to(tl.float32)
    fade += tl.load(decay_bias + head, mask=real, other=0.0)
    # softplus; log(1 + e) without losing a small e
    grown = tl.exp(tl.minimum(fade, 20.0))
    more = 1.0 + grown
    gained = more - 1.0
    soft = tl.where(gained == 0.0, grown, tl.log(more) * (grown / tl.where(gained == 0.0, 1.0, gained)))
    soft = tl.where(fade > 20.0, fade, soft)
    logarithm = soft * tl.load(decay_rate + head, mask=real, other=0.0)
    at = token * heads + head
    tl.store(log_decay + at, logarithm, mask=real)
    tl.store(decay + at, tl.exp(logarithm), mask=real)
    tl.store(beta + at, tl.sigmoid(write), mask=real)


def delta_gates(
    strength: torch.Tensor, decay_bias: torch.Tensor, decay_rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`kernels.recurrent.delta_gates`."""
    tokens, heads = strength.shape[0], decay_rate.shape[0]
    if strength.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    found = [torch.empty(tokens, heads, dtype=torch.float32, device=strength.device) for _ in range(3)]
    if tokens:
        _delta_gates[(tokens,)](
            strength, decay_bias, decay_rate, *found, strength.stride(0), heads,
            PAD=triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
    return found[0], found[1], found[2]


@triton.jit(do_not_specialize=["many"])
def _delta_rule(
    query, key, value, decay, beta, states, page, query_start, out,
    many, share, q_row, q_head, k_row, k_head, v_row, v_head, s_page, s_head, o_row, o_head, heads,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.load(page + row)
    if number < 0:
        return
    start = row
    stop = row + 1
    if many != 0:
        start = tl.load(query_start + row)
        stop = tl.load(query_start + row + 1)
    k_index = head // share
    rows_k = tl.arange(0, D_K)
    rows_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = rows_v < D_V
    at = states + number * s_page + head * s_head + rows_k[:, None] * D_V + rows_v[None, :]
    state = tl.load(at, mask=real[None, :], other=0.0)
    for token in range(start, stop):
        q = tl.load(query + token * q_row + k_index * q_head + rows_k).to(tl.float32)
        k = tl.load(key + token * k_row + k_index * k_head + rows_k).to(tl.float32)
        v = tl.load(value + token * v_row + head * v_head + rows_v, mask=real, other=0.0).to(tl.float32)
        fade = tl.load(decay + token * heads + head)
        strength = tl.load(beta + token * heads + head)
        state = state * fade
        delta = (v - tl.sum(state * k[:, None], 0)) * strength
        state = state + k[:, None] * delta[None, :]
        read = tl.sum(state * q[:, None], 0)
        tl.store(out + token * o_row + head * o_head + rows_v, read, mask=real)
    tl.store(at, state, mask=real[None, :])


def _run_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_start: torch.Tensor | None,
) -> torch.Tensor:
    k_heads, d_k = key.shape[1:]
    v_heads, d_v = value.shape[1:]
    if state_pages.stride(3) != 1 or state_pages.stride(2) != d_v:
        raise ValueError("a state must be contiguous below its head")
    out = torch.empty(value.shape[0], v_heads, d_v, dtype=torch.float32, device=value.device)
    block_v = min(_BLOCK_V, triton.next_power_of_2(d_v))
    _delta_rule[(page.shape[0], v_heads, triton.cdiv(d_v, block_v))](
        query, key, value, decay, beta, state_pages, page, page if query_start is None else query_start, out,
        int(query_start is not None), v_heads // k_heads,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        state_pages.stride(0), state_pages.stride(1), out.stride(0), out.stride(1), v_heads,
        D_K=d_k, D_V=d_v, BLOCK_V=block_v, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


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
        decay, beta: [rows, v_heads] float32 contiguous.
        state_pages: [pages, v_heads, d_k, d_v] strided view, contiguous below the head.
        page: [rows] int64, distinct where not -1.

    Returns:
        [rows, v_heads, d_v] float32; padding rows undefined.
    """
    return _run_delta_rule(query, key, value, decay, beta, state_pages, page, None)


def delta_rule_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_start: torch.Tensor,
) -> torch.Tensor:
    """The same for rows of many tokens, one after the other: row r's are query_start[r] .. query_start[r + 1].

    Args:
        query_start: [rows + 1] int64. Others as in :func:`delta_rule_step`, by token.
    """
    return _run_delta_rule(query, key, value, decay, beta, state_pages, page, query_start)


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
    factor = tl.load(weight + (WIDTH - 1) * channels + channel, mask=real, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * factor
    for tap in tl.static_range(WIDTH - 1):
        column = states + number * s_page + tap * channels + channel
        old = tl.load(column, mask=real, other=0.0)
        factor = tl.load(weight + tap * channels + channel, mask=real, other=0.0).to(tl.float32)
        total += old.to(tl.float32) * factor
        if tap > 0:
            # Shifted by one: this program owns the channel in every column, so no other can see it half done.
            tl.store(column - channels, old, mask=real)
    tl.store(states + number * s_page + (WIDTH - 2) * channels + channel, newest, mask=real)
    result = total * tl.sigmoid(total)
    tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=real)


def _check_columns(state_pages: torch.Tensor, channels: int) -> None:
    if state_pages.stride(2) != 1 or state_pages.stride(1) != channels:
        raise ValueError("convolution columns must be contiguous below the page")


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
    _check_columns(state_pages, channels)
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    _conv_step[(rows, triton.cdiv(channels, _CHANNELS))](
        x, weight, state_pages, page, out, channels, x.stride(0), state_pages.stride(0),
        WIDTH=weight.shape[0], BLOCK=_CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _conv_rows(
    x, weight, states, page, token_row, query_start, out, tokens, channels, x_row, s_page,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = tl.load(token_row + token, mask=token < tokens, other=-1)
    number = tl.load(page + row, mask=row >= 0, other=-1)
    mine = number >= 0
    place = token - tl.load(query_start + row, mask=mine, other=0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = channel < channels
    real = mine[:, None] & held[None, :]
    at = x + token[:, None] * x_row + channel[None, :]
    columns = states + number[:, None] * s_page + channel[None, :]
    factor = tl.load(weight + (WIDTH - 1) * channels + channel, mask=held, other=0.0).to(tl.float32)
    total = tl.load(at, mask=real, other=0.0).to(tl.float32) * factor[None, :]
    # Tokens before the chunk lie in the state: its last column is the one just before the chunk's first. Few programs
    # have such tokens at all.
    begins = tl.min(tl.where(mine, place, WIDTH), 0) < WIDTH - 1
    for tap in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - tap
        inside = (place >= back)[:, None]
        value = tl.load(at - back * x_row, mask=real & inside, other=0.0).to(tl.float32)
        if begins:
            before = columns + (WIDTH - 1 + place - back)[:, None] * channels
            far = tl.load(before, mask=real & (place < back)[:, None], other=0.0).to(tl.float32)
            value = tl.where(inside, value, far)
        factor = tl.load(weight + tap * channels + channel, mask=held, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    result = total * tl.sigmoid(total)
    tl.store(out + token[:, None] * channels + channel[None, :], result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _keep_columns(
    x, states, page, query_start, channels, x_row, s_page, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    number = tl.load(page + row)
    if number < 0:
        return
    start = tl.load(query_start + row)
    stop = tl.load(query_start + row + 1)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    for tap in tl.static_range(WIDTH - 1):
        # A row shorter than the state keeps old columns; reading goes ahead of writing.
        token = stop - (WIDTH - 1) + tap + tl.zeros([BLOCK], tl.int64)
        old = states + number * s_page + (tap + stop - start) * channels + channel
        kept = tl.load(old, mask=real & (token < start), other=0.0)
        fresh = tl.load(x + token * x_row + channel, mask=real & (token >= start), other=0.0)
        tl.store(
            states + number * s_page + tap * channels + channel,
            tl.where(token < start, kept, fresh),
            mask=real,
        )


def causal_conv_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    token_row: torch.Tensor,
    query_start: torch.Tensor,
) -> torch.Tensor:
    """The same for rows of many tokens: x [tokens, channels]; token_row [tokens], -1 for padding, query_start
    [rows + 1] int64."""
    tokens, channels = x.shape
    _check_columns(state_pages, channels)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    blocks, width = triton.cdiv(channels, _CHANNELS), weight.shape[0]
    _conv_rows[(triton.cdiv(tokens, _CONV_TOKENS), triton.cdiv(channels, _CONV_CHANNELS))](
        x, weight, state_pages, page, token_row, query_start, out, tokens, channels, x.stride(0), state_pages.stride(0),
        WIDTH=width, TOKENS=_CONV_TOKENS, BLOCK=_CONV_CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
    _keep_columns[(page.shape[0], blocks)](
        x,
        state_pages,
        page,
        query_start,
        channels,
        x.stride(0),
        state_pages.stride(0),
        WIDTH=width,
        BLOCK=_CHANNELS,
    )
    return out
