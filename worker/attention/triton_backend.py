"""Paged attention by our own Triton kernels: every shape, FP8 pages, the same bits in any batch and chunking."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import PagedRows, paged_attention
from worker.attention.base import AttentionPlan, AttentionShape, KvPages, PagedGeometry
from worker.attention.rows import paged_rows

FEW_ROWS_SPLIT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The rows as the kernels read them; nothing is prepared."""

    shape: AttentionShape
    rows: PagedRows


class TritonAttention:
    """Runs wherever Triton compiles; in CUDA graphs too."""

    name = "triton"
    capturable = True
    split_tokens: int | None = None

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """Its tiles are powers of two, and it is compiled for GPUs."""
        if device.type != "cuda":
            return f"Triton's kernels run on a GPU, not on {device}"
        if shape.head_dim & (shape.head_dim - 1) or not 16 <= shape.head_dim <= 256:
            return f"head_dim={shape.head_dim} is not 16, 32, 64, 128 or 256"
        return None

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """See :class:`worker.attention.base.AttentionBackend`."""
        return TritonPlan(shape, paged_rows(geometry, shape))

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`worker.attention.base.AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        paged_attention(
            query,
            pages.key,
            pages.value,
            plan.rows,
            plan.shape.scale,
            sinks,
            out,
            pages.key_scale,
            pages.value_scale,
            self.split_tokens,
        )
        return out


class TritonFewRowsAttention(TritonAttention):
    """The same for a few rows of one token: twice as many programs read half as many keys each, so that more of the
    card is at work; adding their results up costs more with longer contexts and more rows. Its bits are not those of
    :class:`TritonAttention`."""

    name = "triton_few"
    split_tokens = FEW_ROWS_SPLIT_TOKENS
