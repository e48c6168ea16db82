"""Hands a step's geometry to the kernels that take all of its rows at once."""

from __future__ import annotations

from kernels.attention import PagedRows
from worker.attention.base import AttentionShape, PagedGeometry


def paged_rows(geometry: PagedGeometry, shape: AttentionShape) -> PagedRows:
    """The geometry's own tensors, not copies: what they hold when a kernel runs is what counts."""
    return PagedRows(
        tables=geometry.tables,
        first_page=geometry.first_page,
        kv_len=geometry.kv_len,
        query_start=geometry.query_start,
        num_decode_rows=geometry.num_decode_rows,
        max_kv_len=geometry.max_kv_len,
        window=shape.window,
    )
