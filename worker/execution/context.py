"""What a layer may read during one forward pass: where tokens stand, and where their pages lie."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kernels.recurrent import ChunkLayout, PaddedLayout
from worker.attention.base import AttentionBackend, AttentionPlan, KvPages


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """One token-paged group in a step: ``page``, ``offset`` [tokens] int64 say where each token's rows go; ``plan``
    is the attention backend's; with ``chunk_plan`` only for the decode rows, and that one for the others."""

    page: torch.Tensor
    offset: torch.Tensor
    plan: AttentionPlan
    chunk_plan: AttentionPlan | None = None


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The recurrent states of a step's rows: physical pages of the decode rows and of the longer ones, how the longer
    rows are cut into chunks (None without any), and the tokens of the longest."""

    decode_page: torch.Tensor
    chunk_page: torch.Tensor
    layout: ChunkLayout | PaddedLayout | None
    longest: int = 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step as layers see it. The first ``num_decode_rows`` tokens belong to rows of one token each.

    Attributes:
        positions: [tokens] int64.
        num_decode_rows: rows, and so tokens, at the front that are advanced by one.
        groups: token-paged groups by name.
        state: the recurrent states, None for models without.
        views: arena views by (layer, row name).
        backend: the attention backend.
        live: [tokens] bool, False for padding; None where all tokens are real.
        side: a second stream: what decode rows do by themselves reads memory, and what chunks do by themselves
            computes, so that both are done at once. None: one behind the other.
    """

    positions: torch.Tensor
    num_decode_rows: int
    groups: Mapping[str, TokenGroup]
    state: StateGroup | None
    views: Mapping[tuple[int, str], torch.Tensor]
    backend: AttentionBackend
    live: torch.Tensor | None = None
    side: torch.cuda.Stream | None = None

    def beside(self) -> AbstractContextManager[object]:
        """Within it work is launched beside what comes behind it, up to :meth:`join`; it answers in tensors made
        before."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.side)

    def join(self) -> None:
        """What comes from here on waits for what was launched beside."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def pages(self, layer: int) -> KvPages:
        """One layer's keys and values."""
        views = self.views
        return KvPages(
            views[layer, "k"], views[layer, "v"], views.get((layer, "k_scale")), views.get((layer, "v_scale"))
        )

    def read(
        self, group: str, pages: KvPages, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention over ``pages`` that hold the new keys and values already, [tokens, heads, head_dim]."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        held, rows = self.groups[group], self.num_decode_rows
        if held.chunk_plan is None:
            return self.backend.run(held.plan, query, pages, sinks, out)
        with self.beside():
            self.backend.run(held.plan, query[:rows], pages, sinks, out[:rows])
        self.backend.run(held.chunk_plan, query[rows:], pages, sinks, out[rows:])
        self.join()
        return out
