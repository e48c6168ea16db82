"""Paged attention in plain torch, for the CPU and as the others' measure: decode rows together, chunks row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import (
    DecodePages,
    PagedRows,
    paged_decode,
    paged_prefill_row,
    plain_paged_attention,
)
from worker.attention.base import AttentionPlan, AttentionShape, KvPages, PagedGeometry
from worker.attention.rows import paged_rows


@dataclass(frozen=True, slots=True)
class _ChunkRow:
    start: int
    stop: int
    table: torch.Tensor
    first_page: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Decode rows as pages to read, and each longer row by itself; ``rows`` for FP8 pages, row by row."""

    shape: AttentionShape
    rows: PagedRows
    num_decode_rows: int
    decode: DecodePages | None
    chunks: tuple[_ChunkRow, ...]


class TorchAttention:
    """Works on any device that torch does; reads lengths on the host, so it cannot be captured in a graph."""

    name = "torch"
    capturable = False

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """None: every shape and device will do."""
        return None

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """Lists the pages of the decode rows and the bounds of the longer ones."""
        decode_rows = geometry.num_decode_rows
        decode = None
        if decode_rows:
            decode = DecodePages(
                geometry.tables[:decode_rows],
                geometry.first_page[:decode_rows],
                geometry.kv_len[:decode_rows],
                geometry.max_kv_len,
                geometry.page_tokens,
                shape.window,
            )
        start = geometry.query_start[decode_rows:].tolist()
        first_page = geometry.first_page[decode_rows:].tolist()
        kv_len = geometry.kv_len[decode_rows:].tolist()
        chunks = tuple(
            _ChunkRow(start[i], start[i + 1], geometry.tables[decode_rows + i], first_page[i], kv_len[i])
            for i in range(len(kv_len))
        )
        return TorchPlan(shape, paged_rows(geometry, shape), decode_rows, decode, chunks)

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`worker.attention.base.AttentionBackend`."""
        assert isinstance(plan, TorchPlan)
        scale, window = plan.shape.scale, plan.shape.window
        key_pages, value_pages = pages.key, pages.value
        if pages.key_scale is not None:
            plain_paged_attention(
                query,
                key_pages,
                value_pages,
                plan.rows,
                scale,
                sinks,
                out,
                pages.key_scale,
                pages.value_scale,
            )
            return out
        rows = plan.num_decode_rows
        if plan.decode is not None:
            paged_decode(query[:rows], key_pages, value_pages, plan.decode, scale, sinks, out[:rows])
        for row in plan.chunks:
            span = slice(row.start, row.stop)
            paged_prefill_row(
                query[span],
                key_pages,
                value_pages,
                row.table,
                row.first_page,
                row.kv_len,
                window,
                scale,
                sinks,
                out[span],
            )
        return out
