"""Queries, keys and values of a Gated DeltaNet layer behind its convolution, in one launch, for chunked kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

_TOKENS = 8


@triton.jit(do_not_specialize=["tokens"])
def _split_heads(
    mixed, query, key, value, tokens, row_stride, key_heads, value_heads, eps, scale,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    unit = tl.program_id(1)
    column = tl.arange(0, DIM)
    here = token < tokens
    source = mixed + token[:, None] * row_stride
    if unit < 2 * key_heads:
        real = here[:, None] & (column < KEY_DIM)[None, :]
        row = tl.load(source + unit * KEY_DIM + column[None, :], mask=real, other=0.0).to(tl.float32)
        row = row * tl.rsqrt(tl.sum(row * row, 1) + eps)[:, None]
        head = unit % key_heads
        at = (token[:, None] * key_heads + head) * KEY_DIM + column[None, :]
        if unit < key_heads:
            tl.store(query + at, (row * scale).to(query.dtype.element_ty), mask=real)
        else:
            tl.store(key + at, row.to(key.dtype.element_ty), mask=real)
    else:
        real = here[:, None] & (column < VALUE_DIM)[None, :]
        head = unit - 2 * key_heads
        first = 2 * key_heads * KEY_DIM + head * VALUE_DIM
        row = tl.load(source + first + column[None, :], mask=real, other=0.0).to(tl.float32)
        at = (token[:, None] * value_heads + head) * VALUE_DIM + column[None, :]
        tl.store(value + at, row.to(value.dtype.element_ty), mask=real)


def split_heads(
    mixed: torch.Tensor, heads: tuple[int, int, int, int], eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`kernels.delta_net.split_heads`."""
    key_heads, value_heads, key_dim, value_dim = heads
    tokens = mixed.shape[0]
    if mixed.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    query, key = (torch.empty(tokens, key_heads, key_dim, dtype=dtype, device=mixed.device) for _ in range(2))
    value = torch.empty(tokens, value_heads, value_dim, dtype=dtype, device=mixed.device)
    overlap = overlaps(mixed)
    if tokens:
        _split_heads[(triton.cdiv(tokens, _TOKENS), 2 * key_heads + value_heads)](
            mixed, query, key, value, tokens, mixed.stride(0), key_heads, value_heads, eps, key_dim**-0.5,
            KEY_DIM=key_dim, VALUE_DIM=value_dim, DIM=triton.next_power_of_2(max(key_dim, value_dim)), TOKENS=_TOKENS,
            OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return query, key, value
