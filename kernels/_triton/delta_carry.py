"""Carries states of the gated delta rule over the chunks of long rows, from and to their pages in the arena.

Inside a chunk of 64 tokens the corrections are solved already: with the state S that enters it, its values become
``V = U - W S``, and ``S exp2(last) + K^T (V exp2(last - sums))`` enters the next one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64
_BLOCK_V = 32


@triton.jit
def _carry(
    key, written, removed, sums, states, page, query_start, first_chunk, values, entering,
    s_page, s_head, share, k_heads, v_heads,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    head = tl.program_id(1)
    number = tl.load(page + row)
    if number < 0:
        return
    start = tl.load(query_start + row)
    stop = tl.load(query_start + row + 1)
    chunk = tl.load(first_chunk + row)
    k = tl.arange(0, D_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = states + number * s_page + head * s_head + k[:, None] * D_V + v[None, :]
    state = tl.load(at)
    for first in range(start, stop, CHUNK):
        token = first + tl.arange(0, CHUNK)
        here = token < stop
        tl.store(
            entering + (chunk * v_heads + head) * (D_K * D_V) + k[:, None] * D_V + v[None, :],
            state.to(entering.dtype.element_ty),
        )
        place = token * v_heads + head
        w = tl.load(removed + place[:, None] * D_K + k[None, :], mask=here[:, None], other=0.0)
        u = tl.load(written + place[:, None] * D_V + v[None, :], mask=here[:, None], other=0.0)
        keys = tl.load(
            key + (token * k_heads + head // share)[None, :] * D_K + k[:, None], mask=here[None, :], other=0.0
        )
        total = tl.load(sums + place, mask=here, other=0.0)
        last = tl.load(sums + (tl.minimum(first + CHUNK, stop) - 1) * v_heads + head)
        value = u.to(tl.float32) - tl.dot(w, state.to(w.dtype))
        tl.store(
            values + place[:, None] * D_V + v[None, :], value.to(values.dtype.element_ty), mask=here[:, None]
        )
        value = value * tl.where(here, tl.exp2(last - total), 0.0)[:, None]
        state = tl.dot(keys, value.to(keys.dtype), state * tl.exp2(last))
        chunk += 1
    tl.store(at, state)


def carry_states(
    key: torch.Tensor,
    written: torch.Tensor,
    removed: torch.Tensor,
    sums: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    query_start: torch.Tensor,
    first_chunk: torch.Tensor,
    num_chunks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states that enter each chunk, and its tokens' values; ``state_pages`` comes to hold the states behind.

    Args:
        key: [tokens, k_heads, d_k]; written, removed: U [tokens, v_heads, d_v] and W [tokens, v_heads, d_k], all
            contiguous, d_k and d_v powers of two of at least 32.
        sums: [tokens, v_heads] float32, log2 of the decay from a chunk's beginning up to each token, contiguous.
        state_pages: [pages, v_heads, d_k, d_v] float32 strided view, contiguous below the head.
        page: [rows] int64, -1 for padding, which is not touched; query_start: [rows + 1] int64.
        first_chunk: [rows] int64, place of each row's first chunk among ``num_chunks``.

    Returns:
        [num_chunks, v_heads, d_k, d_v] and [tokens, v_heads, d_v] in key's dtype; those of padding undefined.
    """
    tokens, v_heads, d_v = written.shape
    k_heads, d_k = key.shape[1:]
    if not all(x.is_contiguous() for x in (key, written, removed, sums)) or state_pages.stride(2) != d_v:
        raise ValueError("keys, values and sums must be contiguous, and states below their head")
    entering = torch.empty(num_chunks, v_heads, d_k, d_v, dtype=key.dtype, device=key.device)
    values = torch.empty(tokens, v_heads, d_v, dtype=key.dtype, device=key.device)
    block = min(_BLOCK_V, d_v)
    _carry[(d_v // block, v_heads, page.shape[0])](
        key, written, removed, sums, state_pages, page, query_start, first_chunk, values, entering,
        state_pages.stride(0), state_pages.stride(1), v_heads // k_heads, k_heads, v_heads,
        D_K=d_k, D_V=d_v, BLOCK_V=block, CHUNK=CHUNK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return entering, values
