"""Calls the compiled kernels on float32 CPU tensors; each function is the twin of one in ``_reference``."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch

from kernels._native.library import Attention, Bank, library

MANY_TOKENS = 64
MANY_THREADS = 4
"""The compiled kernels run on one thread: with more threads than this, torch is faster at more tokens than that."""

VISIBLE_TOKENS = 256
"""So many keys and values are about as much work as the rest of a layer for one token."""


def serves(x: torch.Tensor) -> bool:
    """Whether the compiled kernels can take tensors like ``x``."""
    return x.dtype is torch.float32 and x.is_cpu and library() is not None


def _kernels(num_tokens: int) -> ctypes.CDLL:
    """The kernels for a call over so many tokens."""
    loaded = library()
    assert loaded is not None
    return loaded.quick if num_tokens <= MANY_TOKENS else loaded.long


def serves_tokens(x: torch.Tensor) -> bool:
    """Whether they should take a whole step's tokens, the rows of ``x``."""
    return serves(x) and (x.shape[0] <= MANY_TOKENS or torch.get_num_threads() <= MANY_THREADS)


PANEL = 16
"""Columns of a packed weight that lie together."""


def compact(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bfloat16 if every value is one, as in bfloat16 checkpoints: half the bytes to read, and products
    in float32 are the same."""
    short = weight.to(torch.bfloat16)
    return short if torch.equal(short.to(weight.dtype), weight) else weight


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] to what :func:`linear` reads: [ceil(N / 16), K, 16], or in bfloat16, where that loses nothing,
    [ceil(N / 16), ceil(K / 2), 16, 2]; zeros behind the last column and an odd depth."""
    columns, depth = weight.shape
    panels = -(-columns // PANEL)
    short = compact(weight)
    pair = 2 if short.dtype is torch.bfloat16 else 1
    padded = short.new_zeros(panels * PANEL, -(-depth // pair) * pair)
    padded[:columns, :depth] = short
    packed = padded.view(panels, PANEL, -1, pair).transpose(1, 2).contiguous()
    return packed if pair == 2 else packed.squeeze(-1)


def linear(x: torch.Tensor, packed: torch.Tensor, columns: int, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` for a packed weight; rows of x [rows, K] may lie apart, their elements not."""
    loaded = _kernels(x.shape[0])
    rows, depth = x.shape
    out = torch.empty(rows, columns)
    loaded.linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        depth,
        packed.data_ptr(),
        packed.dtype is torch.bfloat16,
        columns,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    return out


def _normalise(x: torch.Tensor, weight: torch.Tensor | None, eps: float, mean: bool) -> torch.Tensor:
    dim = x.shape[-1]
    heads = x.shape[-2] if x.dim() == 3 else 1
    out = torch.empty(*x.shape)
    loaded = _kernels(x.shape[0])
    loaded.normalise(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        heads,
        dim,
        None if weight is None else weight.data_ptr(),
        1 if weight is None else weight.numel() // dim,
        eps,
        mean,
        out.data_ptr(),
    )
    return out


def can_normalise(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Rows, or rows of heads that lie side by side; weights per dim, or per head and dim."""
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != x.shape[2]):
        return False
    if weight is None:
        return True
    rows = weight.numel() // x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    return weight.dtype is torch.float32 and weight.is_contiguous() and rows in (1, heads)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.rms_norm`."""
    return _normalise(x, weight, eps, True)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.l2_norm`."""
    return _normalise(x, None, eps, False)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.pointwise.rotate`; heads lie side by side, cos and sin are contiguous."""
    loaded = _kernels(x.shape[0])
    rows, heads, dim = x.shape
    loaded.rotate(x.data_ptr(), x.stride(0), rows, heads, dim, cos.data_ptr(), sin.data_ptr(), cos.shape[1])
    return x


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor:
    """See :func:`kernels.pointwise.silu_and_mul`; gate, up and share have one stride between rows."""
    loaded = _kernels(gate.shape[0])
    rows, columns = gate.shape
    out = torch.empty(rows, columns)
    loaded.silu_and_mul(
        gate.data_ptr(),
        up.data_ptr(),
        gate.stride(0),
        rows,
        columns,
        None if share is None else share.data_ptr(),
        out.data_ptr(),
    )
    return out


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.pointwise.mul_sigmoid`; x is contiguous."""
    loaded = _kernels(x.shape[0])
    loaded.mul_sigmoid(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape)
    return x


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.gated_norm`; x is contiguous."""
    loaded = _kernels(x.shape[0])
    loaded.gated_norm(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, weight.data_ptr(), eps)
    return x


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`kernels.pointwise.add_norm`; x and y are contiguous."""
    loaded = _kernels(x.shape[0])
    out = torch.empty(*x.shape)
    loaded.add_norm(x.data_ptr(), y.data_ptr(), *x.shape, weight.data_ptr(), eps, out.data_ptr())
    return out


def write_rows(rows: torch.Tensor, pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """``pages[page[t], offset[t]] = rows[t]``; a row's and an entry's elements lie densely."""
    loaded = _kernels(rows.shape[0])
    loaded.write_rows(
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        rows[0].numel(),
        pages.data_ptr(),
        pages.stride(0),
        pages.stride(1),
        page.data_ptr(),
        offset.data_ptr(),
    )


def route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`kernels.moe.route`."""
    loaded = _kernels(logits.shape[0])
    rows, experts = logits.shape
    weights, chosen = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    loaded.route(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        experts,
        k,
        renormalise,
        weights.data_ptr(),
        chosen.data_ptr(),
    )
    return weights, chosen


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.sampling.greedy`; a row's logits lie side by side."""
    loaded = _kernels(logits.shape[0])
    chosen = torch.empty(logits.shape[0], dtype=torch.int64)
    loaded.greedy(logits.data_ptr(), logits.stride(0), *logits.shape, chosen.data_ptr())
    return chosen


def make_bank(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float,
    alpha: float,
) -> Bank:
    """Experts as C sees them: contiguous [E, H, 2I] and [E, I, H], and biases. The tensors must outlive it."""
    experts, inner, hidden = down.shape
    return Bank(
        hidden,
        inner,
        experts,
        gate_up.data_ptr(),
        down.data_ptr(),
        None if gate_up_bias is None else gate_up_bias.data_ptr(),
        None if down_bias is None else down_bias.data_ptr(),
        limit,
        alpha,
        down.dtype is torch.bfloat16,
    )


def run_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: Bank) -> torch.Tensor:
    """See :func:`kernels.moe.run_experts`; all tensors contiguous."""
    loaded = _kernels(x.shape[0])
    out = torch.empty(*x.shape)
    loaded.experts(
        byref(bank),
        x.data_ptr(),
        x.shape[0],
        experts.shape[1],
        weights.data_ptr(),
        experts.data_ptr(),
        out.data_ptr(),
    )
    return out


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`kernels.recurrent.causal_conv_rows`; without ``query_len`` [rows] int64 one token per row."""
    loaded = _kernels(x.shape[0])
    out = torch.empty(*x.shape)
    loaded.conv_rows(
        x.data_ptr(),
        x.stride(0),
        page.shape[0],
        None if query_len is None else query_len.data_ptr(),
        x.shape[1],
        weight.shape[0],
        weight.data_ptr(),
        state_pages.data_ptr(),
        state_pages.stride(0),
        page.data_ptr(),
        out.data_ptr(),
    )
    return out


def delta_gates(
    strength: torch.Tensor, decay_bias: torch.Tensor, decay_rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`kernels.recurrent.delta_gates`."""
    loaded = _kernels(strength.shape[0])
    rows, heads = strength.shape[0], decay_rate.shape[0]
    log_decay, decay, beta = torch.empty(3, rows, heads).unbind(0)
    loaded.delta_gates(
        strength.data_ptr(),
        strength.stride(0),
        rows,
        heads,
        decay_bias.data_ptr(),
        decay_rate.data_ptr(),
        log_decay.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
    )
    return log_decay, decay, beta


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_len: torch.Tensor | None = None,
    logarithmic: bool = False,
) -> torch.Tensor:
    """The recurrence token by token (a state stays in the nearest cache, which beats the chunked form there); heads
    lie side by side. Without ``query_len`` [rows] int64 one token per row; ``logarithmic``: decay is log decay."""
    loaded = _kernels(query.shape[0])
    num_tokens, k_heads, d_k = key.shape
    v_heads, d_v = value.shape[1:]
    out = torch.empty(num_tokens, v_heads, d_v)
    loaded.delta_rows(
        query.data_ptr(),
        query.stride(0),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        decay.data_ptr(),
        logarithmic,
        decay.stride(0),
        beta.data_ptr(),
        beta.stride(0),
        page.shape[0],
        None if query_len is None else query_len.data_ptr(),
        k_heads,
        v_heads,
        d_k,
        d_v,
        state_pages.data_ptr(),
        state_pages.stride(0),
        page.data_ptr(),
        out.data_ptr(),
    )
    return out


def paged_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    first_page: torch.Tensor,
    kv_len: torch.Tensor,
    most_visible: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See :func:`kernels.attention.paged_decode`; heads and dims of a row lie side by side, ``out`` is contiguous."""
    loaded = _kernels(query.shape[0] * most_visible // VISIBLE_TOKENS)
    rows, heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    shape = Attention(
        rows,
        heads,
        kv_heads,
        dim,
        key_pages.shape[1],
        tables.shape[1],
        window or 0,
        tables.data_ptr(),
        first_page.data_ptr(),
        kv_len.data_ptr(),
        query.stride(0),
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        scale,
    )
    scratch = torch.empty(heads * -(-most_visible // PANEL) * PANEL)
    loaded.paged_decode(
        byref(shape),
        query.data_ptr(),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        scratch.data_ptr(),
        out.data_ptr(),
    )
