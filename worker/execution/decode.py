"""One token per row over device memory that stays where it is: the forward pass of decode steps, padded to few sizes.

A step's rows are padded to the next of a few batch sizes, and its longest context to the next of a few bounds, so that
a handful of captured graphs serves every step. Eager or captured, the same function runs over the same padded inputs,
so that both give the same bits. Padding rows have no pages (-1), no tokens to see (kv_len 0) and are not live.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from memory.api import PageKind
from memory.device.arena import Arena
from worker.attention.base import AttentionBackend, AttentionShape, PagedGeometry
from worker.attention.sized import SizedAttention
from worker.execution.batch import state_pages, token_pages
from worker.execution.context import ForwardContext, StateGroup, TokenGroup
from worker.execution.staging import Uploads
from worker.layers.decoder import Decoder
from worker.scheduling.step import IntArray, StepPlan

TOKEN, SLOT, POSITION, LIVE, STATE = range(5)
PAGE, OFFSET, FIRST_PAGE, KV_LEN = range(4)
"""Fields of a group, behind the common ones."""
COMMON, PER_GROUP = 5, 4
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FIRST_BOUND, BOUND_FACTOR = 4096, 8


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """Padded numbers of rows: dense where a step is short."""
    return (*(size for size in SIZES if size < max_running), max_running)


def context_bounds(max_model_len: int) -> tuple[int, ...]:
    """Padded lengths of the longest context, up to the model's."""
    found, bound = [], FIRST_BOUND
    while 2 * bound < max_model_len:
        found.append(bound)
        bound *= BOUND_FACTOR
    return (*found, max_model_len)


class DecodeSteps:
    """The inputs and outputs of decode steps, and the pass between them.

    Attributes:
        logits: [max rows, vocabulary] in activations' dtype, filled by :meth:`forward`.
    """

    def __init__(
        self,
        decoder: Decoder,
        arena: Arena,
        shapes: Mapping[str, AttentionShape],
        backend: AttentionBackend,
        last_tokens: torch.Tensor,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        """``shapes`` by token-paged group; ``last_tokens`` [slots] int64: one row per slot is room for all."""
        device, max_rows = last_tokens.device, len(last_tokens)
        self._decoder, self._arena, self._backend = decoder, arena, backend
        self._shapes = dict(shapes)
        self._last_tokens = last_tokens
        self._state = next((s.name for s in arena.specs.values() if s.kind is PageKind.STATE), None)
        num_fields = COMMON + PER_GROUP * len(shapes)
        self._fields = torch.zeros(num_fields, max_rows, dtype=torch.int64, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._tables = {
            name: torch.full((max_rows, self._columns(name, max_model_len)), -1, device=device)
            for name in shapes
        }
        self.logits = torch.zeros(max_rows, vocab_size, dtype=decoder.dtype, device=device)

    def attention_names(self, rows: int, bound: int) -> tuple[str, ...]:
        """The backends that serve attention in steps of this size."""
        backend = self._backend
        return backend.names(rows, bound) if isinstance(backend, SizedAttention) else (backend.name,)

    def _columns(self, name: str, bound: int) -> int:
        """Columns of a table that a context of ``bound`` tokens can need, one more for a window's cut page."""
        return -(-bound // self._arena.specs[name].page_tokens) + 1

    def fill(self, plan: StepPlan, rows: int, bound: int, uploads: Uploads) -> torch.Tensor:
        """Sends the inputs of a plan whose rows all have one token, padded to ``rows`` rows and ``bound`` tokens;
        answers the slots [plan rows] int64. LookupError where a token has no page."""
        count = plan.num_rows
        values = np.zeros((len(self._fields), rows), dtype=np.int64)
        values[TOKEN, :count], values[SLOT, :count] = plan.token_ids, plan.slots
        values[POSITION, :count], values[LIVE, :count] = plan.num_computed, 1
        values[STATE] = -1
        fresh = self._fill_states(plan, values, uploads)
        tables = {
            name: self._fill_group(plan, name, values[COMMON + PER_GROUP * number :], bound, uploads)
            for number, name in enumerate(self._shapes)
        }
        sent = uploads.put(values)
        uploads.flush()
        if self._state is not None and fresh is not None:
            self._arena.zero(self._state, fresh)
        self._fields[:, :rows].copy_(sent)
        for name, table in tables.items():
            self._tables[name][:count, : table.shape[1]].copy_(table)
        return sent[SLOT, :count]

    def _fill_states(self, plan: StepPlan, values: IntArray, uploads: Uploads) -> torch.Tensor | None:
        """Enters the rows' states; answers those that begin from nothing."""
        if self._state is None:
            return None
        tables = self._arena.tables.physical(self._state, plan.groups[self._state].tables)
        pages = state_pages(plan, tables)
        values[STATE, : plan.num_rows] = pages
        fresh = pages[plan.num_computed == 0]
        return uploads.put(fresh) if len(fresh) else None

    def _fill_group(
        self, plan: StepPlan, name: str, values: IntArray, bound: int, uploads: Uploads
    ) -> torch.Tensor:
        """Enters a group's rows into its fields; answers its table, put."""
        spec, count = self._arena.specs[name], plan.num_rows
        tables = plan.groups[name]
        physical = self._arena.tables.physical(name, tables.tables)
        position = plan.num_computed
        values[PAGE] = -1
        values[PAGE, :count] = token_pages(plan, spec, physical, np.arange(count), position)
        values[OFFSET, :count] = position % spec.page_tokens
        values[FIRST_PAGE, :count], values[KV_LEN, :count] = tables.first_page, position + 1
        return uploads.put(physical[:, : self._columns(name, bound)])

    def forward(self, rows: int, bound: int) -> None:
        """Computes what was filled: states advance, keys and values are stored, ``logits[:rows]`` is written. Reads no
        value on the host, so that it can be captured."""
        fields = self._fields[:, :rows]
        token_ids = torch.where(
            fields[TOKEN] < 0, self._last_tokens.index_select(0, fields[SLOT]), fields[TOKEN]
        )
        narrow = fields[COMMON:].to(torch.int32)
        groups = {}
        for number, name in enumerate(self._shapes):
            wide, short = fields[COMMON + PER_GROUP * number :], narrow[PER_GROUP * number :]
            geometry = PagedGeometry(
                query_start=self._starts[: rows + 1],
                kv_len=short[KV_LEN],
                tables=self._tables[name][:rows, : self._columns(name, bound)],
                first_page=short[FIRST_PAGE],
                page_tokens=self._arena.specs[name].page_tokens,
                max_query_len=1,
                max_kv_len=bound,
                num_decode_rows=rows,
            )
            plan = self._backend.plan(geometry, self._shapes[name])
            groups[name] = TokenGroup(wide[PAGE], wide[OFFSET], plan)
        state = None
        if self._state is not None:
            state = StateGroup(decode_page=fields[STATE], chunk_page=fields[STATE][:0], layout=None)
        context = ForwardContext(
            positions=fields[POSITION],
            num_decode_rows=rows,
            groups=groups,
            state=state,
            views=self._arena.views,
            backend=self._backend,
            live=fields[LIVE] > 0,
        )
        hidden = self._decoder.forward(token_ids, context)
        self._decoder.logits(hidden.final, out=self.logits[:rows])
