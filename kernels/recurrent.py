"""Linear attention with a recurrent state: the gated delta rule and the short causal convolution before it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from kernels._native import ops as native
from kernels._reference import recurrent as reference
from kernels._reference.recurrent import CHUNK_TOKENS, ChunkLayout, PaddedLayout

__all__ = [
    "CHUNK_TOKENS",
    "ChunkLayout",
    "PaddedLayout",
    "causal_conv_rows",
    "causal_conv_step",
    "chunk_layout",
    "chunked_problem",
    "delta_gates",
    "delta_rule_chunks",
    "delta_rule_step",
]


def chunk_layout(query_len: Sequence[int], conv_width: int, device: torch.device) -> ChunkLayout:
    """How rows of ``query_len`` tokens, flat one behind the other, are cut into chunks; prepared once per step."""
    order = sorted(range(len(query_len)), key=lambda row: -query_len[row])
    chunks = [-(-length // CHUNK_TOKENS) for length in query_len]
    active = tuple(sum(n > j for n in chunks) for j in range(max(chunks)))
    starts = [0]
    for count in active:
        starts.append(starts[-1] + count)
    rank = {row: place for place, row in enumerate(order)}
    slots, conv_slots, state_slots, columns = [], [], [], 0
    for row, length in enumerate(query_len):
        for j in range(chunks[row]):
            first = (starts[j] + rank[row]) * CHUNK_TOKENS
            slots.append(torch.arange(first, first + min(CHUNK_TOKENS, length - j * CHUNK_TOKENS)))
        state_slots.append(torch.arange(columns, columns + conv_width - 1))
        conv_slots.append(torch.arange(columns + conv_width - 1, columns + conv_width - 1 + length))
        columns += conv_width - 1 + length
    lengths = torch.tensor(list(query_len))
    query_start = torch.zeros(len(query_len) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=query_start[1:])
    chunk_index = torch.tensor([(row, j) for row, count in enumerate(chunks) for j in range(count)])
    return ChunkLayout(
        slot=torch.cat(slots).to(device),
        order=torch.tensor(order, device=device),
        active=active,
        query_len=lengths.to(device),
        conv_slot=torch.cat(conv_slots).to(device),
        state_slot=torch.stack(state_slots).to(device),
        token_row=torch.arange(len(query_len)).repeat_interleave(lengths).to(device),
        query_start=query_start.to(device),
        chunk_index=chunk_index.to(device),
        first_chunk=(torch.tensor(chunks).cumsum(0) - torch.tensor(chunks)).to(device),
    )


def _on_gpu() -> ModuleType:
    """The Triton kernels; loaded where there is a GPU, since Triton need not be installed elsewhere."""
    from kernels._triton import recurrent as on_gpu

    return on_gpu


def chunked_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why :func:`delta_rule_chunks` goes token by token on ``device`` for activations in ``dtype``; None where it goes
    chunk by chunk."""
    if device.type != "cuda":
        return None
    if dtype is torch.float32:
        return "fla-core computes chunks in bfloat16, not in float32"
    from kernels._triton import delta_chunks

    return delta_chunks.problem()


def delta_gates(
    strength: torch.Tensor, decay_bias: torch.Tensor, decay_rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log decay ``decay_rate * softplus(a + decay_bias)``, its exp, and write strength ``sigmoid(b)``, float32.

    Args:
        strength: [tokens, 2 * v_heads], b before a.
        decay_bias, decay_rate: [v_heads] float32; the rate is negative.

    Returns:
        log decay, decay, beta: [tokens, v_heads] each.
    """
    if native.serves(strength) and strength.stride(1) == 1:
        return native.delta_gates(strength, decay_bias, decay_rate)
    if strength.is_cuda:
        return _on_gpu().delta_gates(strength, decay_bias, decay_rate)
    return reference.delta_gates(strength, decay_bias, decay_rate)


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
) -> torch.Tensor:
    """Advances every row's state by one token and reads it; all float32.

    Args:
        query, key: [rows, k_heads, d_k], L2-normed, query scaled. Value head h uses key head h // (v_heads / k_heads).
        value: [rows, v_heads, d_v].
        decay: [rows, v_heads], exp of the log decay; beta: [rows, v_heads].
        state_pages: [pages, v_heads, d_k, d_v] strided view; row r's state is page[r], changed in place.
        page: [rows] int64 physical state pages, distinct; on a GPU rows with -1 are padding, and what they answer is
            undefined.

    Returns:
        [rows, v_heads, d_v].
    """
    if query.is_cuda:
        return _on_gpu().delta_rule_step(query, key, value, decay, beta, state_pages, page)
    if native.serves(query) and _side_by_side(query, key, value, decay, beta, state_pages):
        return native.delta_rule(query, key, value, decay, beta, state_pages, page)
    return reference.delta_rule_step(query, key, value, decay, beta, state_pages, page)


def delta_rule_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    layout: ChunkLayout | PaddedLayout,
    decay: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same recurrence over many tokens per row, in chunks: within a chunk the corrections are one triangular
    solve (Yang et al., "Parallelizing linear transformers with the delta rule", with decay as in "Gated delta
    networks"), between chunks the state is carried.

    Args:
        query, key: [tokens, k_heads, d_k]; value: [tokens, v_heads, d_v]; log_decay, beta: [tokens, v_heads].
        state_pages, page: as in :func:`delta_rule_step`; padding, on a GPU, with a padded layout only.
        decay: matters on a GPU. None: fla-core computes chunks in bfloat16 (see :func:`chunked_problem`). The exp of
            log_decay as :func:`delta_gates` answers it: tokens follow one another in float32, with the bits of
            :func:`delta_rule_step`, however a row is cut into steps.

    Returns:
        [tokens, v_heads, d_v] float32; by fla-core bfloat16.
    """
    if query.is_cuda and decay is None:
        from kernels._triton import delta_chunks

        return delta_chunks.delta_rule_chunks(
            query,
            key,
            value,
            log_decay,
            beta,
            state_pages,
            page,
            layout.query_start,
            layout.first_chunk,
            layout.chunk_index,
        )
    if query.is_cuda:
        return _on_gpu().delta_rule_rows(
            query, key, value, decay, beta, state_pages, page, layout.query_start
        )
    assert isinstance(layout, ChunkLayout)
    if native.serves_tokens(query) and _side_by_side(query, key, value, log_decay, beta, state_pages):
        return native.delta_rule(
            query, key, value, log_decay, beta, state_pages, page, layout.query_len, logarithmic=True
        )
    return reference.delta_rule_chunks(query, key, value, log_decay, beta, state_pages, page, layout)


def causal_conv_step(
    x: torch.Tensor, weight: torch.Tensor, state_pages: torch.Tensor, page: torch.Tensor
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU for one token per row.

    Args:
        x: [rows, channels]; weight: [width, channels], the last column meets the newest token.
        state_pages: [pages, width - 1, channels] strided view; page[r] holds row r's columns before x, and is shifted.
            On a GPU rows with page -1 are padding, and what they answer is undefined.
    """
    if x.is_cuda:
        return _on_gpu().causal_conv_step(x, weight, state_pages, page)
    if native.serves(x) and native.serves(state_pages) and _side_by_side(x, weight, state_pages):
        return native.causal_conv(x, weight, state_pages, page)
    return reference.causal_conv_step(x, weight, state_pages, page)


def causal_conv_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    layout: ChunkLayout | PaddedLayout,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU for rows of several tokens: x [tokens, channels]; each row's page of
    ``state_pages`` comes to hold its last columns."""
    if x.is_cuda:
        return _on_gpu().causal_conv_rows(x, weight, state_pages, page, layout.token_row, layout.query_start)
    assert isinstance(layout, ChunkLayout)
    if native.serves_tokens(x) and native.serves(state_pages) and _side_by_side(x, weight, state_pages):
        return native.causal_conv(x, weight, state_pages, page, layout.query_len)
    return reference.causal_conv_rows(x, weight, state_pages, page, layout)


def _side_by_side(*tensors: torch.Tensor) -> bool:
    """Whether each tensor's dims behind the first lie densely, so that a row or page is one run of memory."""
    return all(x.stride(-1) == 1 and (x.dim() < 3 or x[0].is_contiguous()) for x in tensors)
