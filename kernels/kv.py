"""Writes new key and value rows into the token slots of their pages."""

from __future__ import annotations

import torch

from kernels._native import ops as native
from kernels._reference import pages as reference


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Stores token t's rows at ``[page[t], offset[t]]``, cast to the pages' dtype.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        key_pages, value_pages: [pages, page_tokens, kv_heads, head_dim] strided views of one layer.
        page: [tokens] int64 physical page of each token.
        offset: [tokens] int64 entry inside the page.
    """
    dense = all(rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] for rows in (key, value))
    if native.serves(key) and native.serves(key_pages) and dense:
        native.write_rows(key, key_pages, page, offset)
        native.write_rows(value, value_pages, page, offset)
        return
    reference.write_kv(key, value, key_pages, value_pages, page, offset)
