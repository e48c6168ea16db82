"""The face of attention: host work once per step in ``plan``, the layers' work in ``run``.

A backend sees one group of pages (FULL or WINDOW) through a geometry, so that latent and sparse attention fit by
bringing another geometry, not another face.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention layer: what a backend needs to know to say whether it is usable.

    ``window`` counts visible tokens including the query's own (None: all); ``has_sinks``: one learned logit per
    query head joins the softmax denominator.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    has_sinks: bool = False
    kv_dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class PagedGeometry:
    """Rows of a step in one group of pages, as device tensors; padding rows and slots hold -1.

    Attributes:
        query_start: [rows + 1] int32, first query token of each row in the flat token dimension.
        kv_len: [rows] int32, tokens visible to the row's last query, itself included.
        tables: [rows, max_pages] int64 *physical* page ids; column j is logical page ``first_page[row] + j``.
        first_page: [rows] int32, above 0 where window pages were let go.
        page_tokens: entries per page.
        max_query_len, max_kv_len: host ints, upper bounds over the rows.
        num_decode_rows: the leading rows have exactly one query token.
    """

    query_start: torch.Tensor
    kv_len: torch.Tensor
    tables: torch.Tensor
    first_page: torch.Tensor
    page_tokens: int
    max_query_len: int
    max_kv_len: int
    num_decode_rows: int


@dataclass(frozen=True, slots=True)
class KvPages:
    """One layer's pages: ``key``, ``value`` [pages, page_tokens, kv_heads, head_dim] strided views; ``key_scale``,
    ``value_scale`` [pages, page_tokens, kv_heads] float32 where they are FP8, else None."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both scales, or None."""
        if self.key_scale is None or self.value_scale is None:
            return None
        return self.key_scale, self.value_scale


class AttentionPlan(Protocol):
    """What ``plan`` prepared for one geometry; opaque to everybody but its backend."""


class AttentionBackend(Protocol):
    """One way to compute paged attention. ``capturable``: whether ``plan`` and ``run`` may be part of a CUDA graph."""

    name: str
    capturable: bool

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """None where this backend can serve ``shape`` on ``device``, else a sentence."""
        ...

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """Prepares one group of pages for one step. Backends that serve in CUDA graphs only launch work on the device
        here, so that a graph in which ``plan`` was called reads the geometry's tensors anew at every replay."""
        ...

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of [tokens, heads, head_dim] queries over one layer's pages, whose newest rows are written already;
        fills and returns ``out`` [tokens, heads, head_dim]."""
        ...
