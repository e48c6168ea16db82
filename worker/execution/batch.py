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
from worker.execution.staging import Uploads, put_fields
from worker.scheduling.step import IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step on the device: its [tokens] ids, of each row that samples the flat index of its last token and its slot,
    and what layers read."""

    token_ids: torch.Tensor
    sample_index: torch.Tensor
    sample_slots: torch.Tensor
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

    def build(self, plan: StepPlan, last_tokens: torch.Tensor, uploads: Uploads) -> DeviceBatch:
        """Tensors of ``plan``, sent with all that was put before; ``last_tokens`` [slots] int64 stands in for ids of
        -1. States of rows that start from nothing are zeroed. LookupError where the plan has a token without a page."""
        query_start = np.concatenate([[0], np.cumsum(plan.query_len)])
        token_row = np.repeat(np.arange(plan.num_rows), plan.query_len)
        positions = np.arange(plan.num_tokens) + (plan.num_computed - query_start[:-1])[token_row]
        rows = {
            name: self._token_rows(plan, self._arena.specs[name], query_start, token_row, positions, uploads)
            for name in self._shapes
        }
        state, fresh = self._state_group(plan, uploads)
        token_ids, pending = uploads.put(plan.token_ids), self._pending(plan, token_row, uploads)
        sample_index = uploads.put((query_start[1:] - 1)[plan.samples])
        slots = uploads.put(plan.slots[plan.samples])
        at = uploads.put(positions)
        uploads.flush()
        if self._state is not None and fresh is not None:
            self._arena.zero(self._state, fresh)
        if pending is not None:
            places, held = pending
            token_ids = token_ids.index_copy(0, places, last_tokens.index_select(0, held))
        context = ForwardContext(
            positions=at,
            num_decode_rows=plan.num_decode_rows,
            groups={name: self._token_group(name, *found) for name, found in rows.items()},
            state=state,
            views=self._arena.views,
            backend=self._backend,
        )
        return DeviceBatch(token_ids, sample_index, slots, context)

    def _pending(
        self, plan: StepPlan, token_row: IntArray, uploads: Uploads
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where ids are still on the device, and in which slots."""
        pending = np.flatnonzero(plan.token_ids < 0)
        if len(pending) == 0:
            return None
        return uploads.put(pending), uploads.put(plan.slots[token_row[pending]])

    def _token_rows(
        self,
        plan: StepPlan,
        spec: PageSpec,
        query_start: IntArray,
        token_row: IntArray,
        positions: IntArray,
        uploads: Uploads,
    ) -> tuple[torch.Tensor, torch.Tensor, PagedGeometry]:
        """[tokens] page and offset of each token, and the rows' geometry, put."""
        tables = plan.groups[spec.name]
        physical = self._arena.tables.physical(spec.name, tables.tables)
        page = token_pages(plan, spec, physical, token_row, positions)
        kv_len = plan.num_computed + plan.query_len
        geometry = PagedGeometry(
            query_start=uploads.put(query_start.astype(np.int32)),
            kv_len=uploads.put(kv_len.astype(np.int32)),
            tables=uploads.put(physical),
            first_page=uploads.put(tables.first_page.astype(np.int32)),
            page_tokens=spec.page_tokens,
            max_query_len=int(plan.query_len.max()),
            max_kv_len=int(kv_len.max()),
            num_decode_rows=plan.num_decode_rows,
        )
        return uploads.put(page), uploads.put(positions % spec.page_tokens), geometry

    def _token_group(
        self, name: str, page: torch.Tensor, offset: torch.Tensor, geometry: PagedGeometry
    ) -> TokenGroup:
        return TokenGroup(page, offset, self._backend.plan(geometry, self._shapes[name]))

    def _state_group(self, plan: StepPlan, uploads: Uploads) -> tuple[StateGroup | None, torch.Tensor | None]:
        """The rows' states, and the pages among them that begin from nothing."""
        if self._state is None:
            return None, None
        pages = state_pages(plan, self._arena.tables.physical(self._state, plan.groups[self._state].tables))
        fresh = pages[plan.num_computed == 0]
        decode = plan.num_decode_rows
        longer = plan.query_len[decode:].tolist()
        layout = chunk_layout(longer, self._conv_width, torch.device("cpu")) if longer else None
        group = StateGroup(
            decode_page=uploads.put(pages[:decode]),
            chunk_page=uploads.put(pages[decode:]),
            layout=None if layout is None else put_fields(layout, uploads),
            longest=max(longer, default=0),
        )
        return group, uploads.put(fresh) if len(fresh) else None


def token_pages(
    plan: StepPlan, spec: PageSpec, physical: IntArray, token_row: IntArray, positions: IntArray
) -> IntArray:
    """[tokens] physical page of each token; LookupError where one has none."""
    column = positions // spec.page_tokens - plan.groups[spec.name].first_page[token_row]
    page: IntArray = physical[token_row, column]
    if page.size and (int(page.min()) < 0 or int(column.min()) < 0):
        row = int(token_row[np.flatnonzero((page < 0) | (column < 0))[0]])
        raise LookupError(f"step {plan.step}, group {spec.name!r}: row {row} has a token without a page")
    return page


def state_pages(plan: StepPlan, physical: IntArray) -> IntArray:
    """[rows] physical state page of each row; LookupError where one has none."""
    pages: IntArray = physical[:, 0]
    if len(pages) and int(pages.min()) < 0:
        raise LookupError(f"step {plan.step}: row {int(pages.argmin())} has no state page")
    return pages
