"""Turns a step plan into tensors: positions, token slots, page geometry, states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kernels.recurrent import chunk_layout
from memory.api import PageKind, PageSpec
from memory.device.arena import Arena
from worker.attention.base import AttentionBackend, AttentionShape, PagedGeometry
from worker.execution.context import ForwardContext, StateGroup, TokenGroup
from worker.scheduling.step import IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step on the device: its [tokens] ids, the flat index of the last token of each row that samples, and what
    layers read."""

    token_ids: torch.Tensor
    sample_index: torch.Tensor
    context: ForwardContext


class BatchBuilder:
    """Builds device batches for one model and one arena."""

    def __init__(
        self,
        arena: Arena,
        shapes: Mapping[str, AttentionShape],
        backend: AttentionBackend,
        conv_width: int,
    ) -> None:
        """``shapes`` by token-paged group; ``conv_width`` of the recurrent layers' convolution."""
        self._arena = arena
        self._shapes = shapes
        self._backend = backend
        self._conv_width = conv_width
        self._state = next((s.name for s in arena.specs.values() if s.kind is PageKind.STATE), None)

    def build(self, plan: StepPlan, last_tokens: torch.Tensor) -> DeviceBatch:
        """Tensors of ``plan``; ``last_tokens`` [slots] int64 stands in for ids of -1. States of rows that start from
        nothing are zeroed. LookupError where the plan has a token without a page."""
        query_start = np.concatenate([[0], np.cumsum(plan.query_len)])
        token_row = np.repeat(np.arange(plan.num_rows), plan.query_len)
        positions = np.arange(plan.num_tokens) + (plan.num_computed - query_start[:-1])[token_row]
        groups = {
            name: self._token_group(plan, self._arena.specs[name], query_start, token_row, positions)
            for name in self._shapes
        }
        context = ForwardContext(
            positions=self._tensor(positions),
            num_decode_rows=plan.num_decode_rows,
            groups=groups,
            state=self._state_group(plan),
            views=self._arena.views,
            backend=self._backend,
        )
        sample_index = self._tensor((query_start[1:] - 1)[plan.samples])
        return DeviceBatch(self._token_ids(plan, token_row, last_tokens), sample_index, context)

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._arena.device)

    def _token_ids(self, plan: StepPlan, token_row: IntArray, last_tokens: torch.Tensor) -> torch.Tensor:
        token_ids = self._tensor(plan.token_ids)
        pending = np.flatnonzero(plan.token_ids < 0)
        if len(pending) == 0:
            return token_ids
        slots = self._tensor(plan.slots[token_row[pending]])
        return token_ids.index_copy(0, self._tensor(pending), last_tokens.index_select(0, slots))

    def _token_group(
        self, plan: StepPlan, spec: PageSpec, query_start: IntArray, token_row: IntArray, positions: IntArray
    ) -> TokenGroup:
        tables = plan.groups[spec.name]
        physical = self._arena.tables.physical(spec.name, tables.tables)
        column = positions // spec.page_tokens - tables.first_page[token_row]
        page = physical[token_row, column]
        if page.size and (int(page.min()) < 0 or int(column.min()) < 0):
            row = int(token_row[np.flatnonzero((page < 0) | (column < 0))[0]])
            raise LookupError(f"step {plan.step}, group {spec.name!r}: row {row} has a token without a page")
        kv_len = plan.num_computed + plan.query_len
        geometry = PagedGeometry(
            query_start=torch.from_numpy(query_start.astype(np.int32)).to(self._arena.device),
            kv_len=torch.from_numpy(kv_len.astype(np.int32)).to(self._arena.device),
            tables=self._tensor(physical),
            first_page=torch.from_numpy(tables.first_page.astype(np.int32)).to(self._arena.device),
            page_tokens=spec.page_tokens,
            max_query_len=int(plan.query_len.max()),
            max_kv_len=int(kv_len.max()),
            num_decode_rows=plan.num_decode_rows,
        )
        attention = self._backend.plan(geometry, self._shapes[spec.name])
        return TokenGroup(self._tensor(page), self._tensor(positions % spec.page_tokens), attention)

    def _state_group(self, plan: StepPlan) -> StateGroup | None:
        if self._state is None:
            return None
        pages = self._arena.tables.physical(self._state, plan.groups[self._state].tables)[:, 0]
        if len(pages) and int(pages.min()) < 0:
            raise LookupError(f"step {plan.step}: row {int(pages.argmin())} has no state page")
        fresh = pages[plan.num_computed == 0]
        if len(fresh):
            self._arena.zero(self._state, self._tensor(fresh))
        decode = plan.num_decode_rows
        longer = plan.query_len[decode:].tolist()
        return StateGroup(
            decode_page=self._tensor(pages[:decode]),
            chunk_page=self._tensor(pages[decode:]),
            layout=chunk_layout(longer, self._conv_width, self._arena.device) if longer else None,
        )
