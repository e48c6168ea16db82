"""Attention on the CPU whose every query is computed alone, so that chunks and company change no bit of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import DecodePages, paged_decode, row_by_row_problem
from worker.attention.base import AttentionPlan, AttentionShape, KvPages, PagedGeometry


@dataclass(frozen=True, slots=True)
class RowwisePlan:
    """All tokens of a step as rows of one query each."""

    shape: AttentionShape
    pages: DecodePages


class RowwiseAttention:
    """For ``deterministic=true``: slower than products over a chunk's queries, and the same for all batches."""

    name = "rowwise"
    capturable = False

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """Only the compiled float32 kernels compute each query alone."""
        return row_by_row_problem(device, getattr(torch, shape.kv_dtype))

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """Gives each token its row's pages and its own length."""
        query_len = geometry.query_start.diff().long()
        behind = geometry.query_start[1:].repeat_interleave(query_len)
        token = torch.arange(len(behind), device=behind.device)
        kv_len = geometry.kv_len.repeat_interleave(query_len) - (behind - 1 - token)
        pages = DecodePages(
            geometry.tables.repeat_interleave(query_len, 0),
            geometry.first_page.repeat_interleave(query_len),
            kv_len.to(torch.int32),
            geometry.max_kv_len,
            geometry.page_tokens,
            shape.window,
        )
        return RowwisePlan(shape, pages)

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`worker.attention.base.AttentionBackend`."""
        assert isinstance(plan, RowwisePlan)
        paged_decode(query, pages.key, pages.value, plan.pages, plan.shape.scale, sinks, out)
        return out
