"""Writes new key and value rows into the token slots of their pages."""

from __future__ import annotations

import torch

from kernels._native import ops as native
from kernels._reference import pages as reference
from kernels._reference.pages import FP8_LARGEST, FP8_RELATIVE_ERROR
from kernels.pointwise import norm_rotate

__all__ = ["FP8_LARGEST", "FP8_RELATIVE_ERROR", "store_heads", "write_kv"]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Stores token t's rows at ``[page[t], offset[t]]``, cast to the pages' dtype.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        key_pages, value_pages: [pages, page_tokens, kv_heads, head_dim] strided views of one layer.
        page: [tokens] int64 physical page of each token; on a GPU tokens with -1 are padding and skipped.
        offset: [tokens] int64 entry inside the page.
        key_scales, value_scales: [pages, page_tokens, kv_heads] float32 views for pages in FP8: each row is divided by
            its largest magnitude over :data:`FP8_LARGEST`, which is stored there. None: plain cast.
    """
    if key.is_cuda:
        from kernels._triton import pages as on_gpu

        on_gpu.write_kv(key, value, key_pages, value_pages, page, offset, key_scales, value_scales)
        return
    if key_scales is not None and value_scales is not None:
        reference.write_scaled(key, key_pages, key_scales, page, offset)
        reference.write_scaled(value, value_pages, value_scales, page, offset)
        return
    dense = all(rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] for rows in (key, value))
    if native.serves(key) and native.serves(key_pages) and dense:
        native.write_rows(key, key_pages, page, offset)
        native.write_rows(value, value_pages, page, offset)
        return
    reference.write_kv(key, value, key_pages, value_pages, page, offset)


def store_heads(
    heads: torch.Tensor,
    num_heads: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """:func:`kernels.pointwise.norm_rotate` of queries and keys, and :func:`write_kv`, in one launch on a GPU.

    Args:
        heads: [tokens, num_heads + 2 kv_heads, dim], queries before keys before values, a token's heads one behind the
            other; may be changed in place.
        weight: [num_heads + kv_heads, dim] float32 of the head norms, or None for none.
        cos, sin: [tokens, n].
        scales: of keys and values where the pages are FP8.
        Others as in :func:`write_kv`.

    Returns:
        the queries, [tokens, num_heads, dim].
    """
    if heads.is_cuda:
        from kernels._triton import heads as on_gpu

        return on_gpu.store_heads(
            heads, num_heads, weight, eps, cos, sin, key_pages, value_pages, page, offset, scales
        )
    turned = (heads.shape[1] + num_heads) // 2
    query_key = norm_rotate(heads[:, :turned], weight, eps, cos, sin)
    key_scales, value_scales = (None, None) if scales is None else scales
    key, value = query_key[:, num_heads:], heads[:, turned:]
    write_kv(key, value, key_pages, value_pages, page, offset, key_scales, value_scales)
    return query_key[:, :num_heads]
