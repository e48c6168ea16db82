"""Attention of decode steps by the backend that was chosen for their size; a step of one size always has the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from worker.attention.base import AttentionBackend, AttentionPlan, AttentionShape, KvPages, PagedGeometry
from worker.attention.decode_choice import DecodeChoice


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """The plan of the backend that a step's size has."""

    backend: AttentionBackend
    plan: AttentionPlan


class SizedAttention:
    """Hands each step on. Sizes are host numbers, so that eager and captured steps of one size take one path."""

    name = "sized"
    capturable = True

    def __init__(
        self, backends: Mapping[str, AttentionBackend], choices: Mapping[AttentionShape, DecodeChoice]
    ) -> None:
        """``backends`` by the names that ``choices`` use, all of them capturable."""
        self._backends, self._choices = dict(backends), dict(choices)

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> str | None:
        """Serves the shapes that it was measured for."""
        return None if shape in self._choices else f"{shape} was not measured"

    def names(self, rows: int, bound: int) -> tuple[str, ...]:
        """The backends of a step padded to ``rows`` and ``bound``, a group's each."""
        return tuple(choice.name(rows, bound) for choice in self._choices.values())

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        """See :class:`worker.attention.base.AttentionBackend`."""
        rows = geometry.kv_len.shape[0]
        backend = self._backends[self._choices[shape].name(rows, geometry.max_kv_len)]
        return SizedPlan(backend, backend.plan(geometry, shape))

    def run(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: KvPages,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`worker.attention.base.AttentionBackend`."""
        assert isinstance(plan, SizedPlan)
        return plan.backend.run(plan.plan, query, pages, sinks, out)
