"""Steps with prompt tokens over device memory that stays where it is: decode rows and chunks, padded to few sizes.

The tokens of decode rows come first, padded to a number of rows, then those of chunks, padded to a number of tokens:

    [decode rows | padding][chunk, chunk, ... | padding]

Eager or captured, the same function runs over the same padded inputs, so that both give the same bits. Padding rows
have no pages (-1), no tokens of chunks and nothing to see (kv_len 0); padding tokens have no pages and are not live.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.recurrent import CHUNK_TOKENS, PaddedLayout
from memory.api import PageKind
from memory.device.arena import Arena
from worker.attention.base import AttentionBackend, AttentionShape, PagedGeometry
from worker.execution.batch import state_pages, token_pages
from worker.execution.context import ForwardContext, StateGroup, TokenGroup
from worker.execution.staging import Uploads
from worker.layers.decoder import Decoder
from worker.scheduling.step import IntArray, StepPlan

ALONE = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
BESIDE = (64, 192, 320, 448, 704, 960, 1472, 1984)
"""Padded numbers of chunk tokens, of steps without decode rows and beside them: with 64 rows whole tiles of products.
Above the last ones the device is busy for longer than the host launches."""
MANY_ROWS = 64
"""Up to so many tokens any number of rows may bring them: linear attention takes them one by one."""
SPARE_CHUNKS = 4
"""Above, it takes chunks of 64, and those that are not there cost as much as others: so many beside whole ones."""
FIRST_BOUND = 16384
TOKEN_FIELDS = ("token", "slot", "position", "live")
MixedKey = tuple[int, int, int]
"""Decode rows, chunk tokens, longest context: all padded."""


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """The sizes that steps are padded to, each ascending.

    Attributes:
        rows: numbers of decode rows, 0 first.
        alone: numbers of chunk tokens of steps without decode rows.
        beside: the same beside decode rows.
        bounds: longest contexts.
        max_running: most rows of a step.
        recurrent: whether rows have recurrent states.
    """

    rows: tuple[int, ...]
    alone: tuple[int, ...]
    beside: tuple[int, ...]
    bounds: tuple[int, ...]
    max_running: int
    recurrent: bool

    @classmethod
    def of(cls, max_running: int, max_step_tokens: int, max_model_len: int, recurrent: bool) -> MixedSizes:
        """Sizes for an engine's limits and a model with or without recurrent states."""
        rows, size = [0], 64
        while size < max_running:
            rows.append(size)
            size *= 4
        bounds = [bound for bound in (FIRST_BOUND,) if 2 * bound < max_model_len]
        return cls(
            (*rows, max_running),
            _up_to(ALONE, max_step_tokens),
            _up_to(BESIDE, max_step_tokens - 1),
            (*bounds, max_model_len),
            max_running,
            recurrent,
        )

    def tokens(self, rows: int) -> tuple[int, ...]:
        """Numbers of chunk tokens beside so many decode rows."""
        return self.beside if rows else self.alone

    def chunk_rows(self, tokens: int) -> int:
        """Most rows that may bring so many chunk tokens."""
        if tokens <= MANY_ROWS or not self.recurrent:
            return min(self.max_running, tokens)
        return min(self.max_running, tokens // CHUNK_TOKENS + SPARE_CHUNKS)

    def num_chunks(self, tokens: int) -> int:
        """Most chunks of linear attention that they may make."""
        whole = tokens // CHUNK_TOKENS
        return whole + (SPARE_CHUNKS if tokens > MANY_ROWS and self.recurrent else self.chunk_rows(tokens))

    @property
    def keys(self) -> list[MixedKey]:
        """All keys, largest first: later ones fit in the memory of the first."""
        return [
            (rows, tokens, bound)
            for rows in reversed(self.rows)
            for tokens in reversed(self.tokens(rows))
            for bound in reversed(self.bounds)
        ]

    def find(self, plan: StepPlan) -> MixedKey | None:
        """The key that a plan with chunks fits; None where its tokens or a context are more than any has."""
        decode = plan.num_decode_rows
        lengths = plan.query_len[decode:]
        if not len(lengths):
            return None
        total, chunks = int(lengths.sum()), int((-(-lengths // CHUNK_TOKENS)).sum())
        rows = self.rows[bisect_left(self.rows, decode)]
        fitting = [
            tokens for tokens in self.tokens(rows) if tokens >= total and self.num_chunks(tokens) >= chunks
        ]
        longest = int((plan.num_computed + plan.query_len).max())
        # Memory is measured by a whole step of one row, which a short context does not hold.
        if not fitting or longest > self.bounds[-1]:
            return None
        return rows, fitting[0], self.bounds[bisect_left(self.bounds, longest)]


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Of ``sizes`` those below ``most``, and one that holds it, if that is not above all of them."""
    small = tuple(size for size in sizes if size < most)
    return (*small, max(1, -(-most // 16)) * 16) if most <= sizes[-1] else small


class _Fields:
    """Where the parts of a step's int64 inputs lie, one behind the other in one buffer."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._parts: list[tuple[str, slice, tuple[int, ...]]] = []
        self.size = 0
        for name, shape in shapes.items():
            first, self.size = self.size, self.size + math.prod(shape)
            self._parts.append((name, slice(first, self.size), shape))

    def on_host(self, values: IntArray) -> dict[str, IntArray]:
        """Views of an array."""
        return {name: values[span].reshape(shape) for name, span, shape in self._parts}

    def on_device(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """New views of a tensor."""
        return {name: values[span].view(shape) for name, span, shape in self._parts}


def _enter_chunks(plan: StepPlan, parts: dict[str, IntArray]) -> None:
    """Enters how the chunks' tokens are shared out among rows and among the pieces of linear attention."""
    lengths = plan.query_len[plan.num_decode_rows :]
    count, total = len(lengths), int(lengths.sum())
    parts["start"][count:] = total
    parts["start"][:count] = np.cumsum(lengths) - lengths
    parts["token_row"][:] = -1
    parts["token_row"][:total] = np.repeat(np.arange(count), lengths)
    pieces = -(-lengths // CHUNK_TOKENS)
    index = parts["chunk_index"]
    index[:, 1] = len(index)  # past any row's end
    used = int(pieces.sum())
    index[:used, 0] = np.repeat(np.arange(count), pieces)
    index[:used, 1] = np.arange(used) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    parts["first_chunk"][:count] = np.cumsum(pieces) - pieces


class MixedSteps:
    """The inputs and outputs of steps with chunks, and the pass between them.

    Attributes:
        sizes: what steps are padded to.
        hidden: [max rows, H], behind the final norm: of each row that samples, in row order, its last token's, filled
            by :meth:`forward`.
    """

    def __init__(
        self,
        decoder: Decoder,
        arena: Arena,
        shapes: Mapping[str, AttentionShape],
        backend: AttentionBackend,
        last_tokens: torch.Tensor,
        sizes: MixedSizes,
    ) -> None:
        """``shapes`` by token-paged group; ``last_tokens`` [slots] int64."""
        device = last_tokens.device
        self.sizes = sizes
        self._decoder, self._arena, self._backend = decoder, arena, backend
        self._shapes = dict(shapes)
        self._last_tokens = last_tokens
        self._state = next((s.name for s in arena.specs.values() if s.kind is PageKind.STATE), None)
        self._known = {key: self._make_fields(key) for key in sizes.keys}
        rows, _, bound = sizes.keys[0]
        most_rows = max(rows + sizes.chunk_rows(tokens) for rows, tokens, _ in sizes.keys)
        largest = max(fields.size for fields in self._known.values())
        self._values = torch.zeros(largest, dtype=torch.int64, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tables = {
            name: torch.full((most_rows, self._columns(name, bound)), -1, device=device) for name in shapes
        }
        self.hidden = torch.zeros(sizes.max_running, decoder.hidden_size, dtype=decoder.dtype, device=device)

    def _columns(self, name: str, bound: int) -> int:
        """Columns of a table that a context of ``bound`` tokens can need, one more for a window's cut page."""
        return -(-bound // self._arena.specs[name].page_tokens) + 1

    def _num_sampled(self, key: MixedKey) -> int:
        return min(self.sizes.max_running, key[0] + self.sizes.chunk_rows(key[1]))

    def _make_fields(self, key: MixedKey) -> _Fields:
        rows, tokens, _ = key
        chunks = self.sizes.chunk_rows(tokens)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_FIELDS, (rows + tokens,))
        for name in self._shapes:
            shapes[f"{name} page"] = shapes[f"{name} offset"] = (rows + tokens,)
            shapes[f"{name} first_page"] = shapes[f"{name} kv_len"] = (rows + chunks,)
        return _Fields(
            {
                **shapes,
                "state": (rows + chunks,),
                "start": (chunks + 1,),
                "token_row": (tokens,),
                "first_chunk": (chunks,),
                "chunk_index": (self.sizes.num_chunks(tokens), 2),
                "sample": (self._num_sampled(key),),
            }
        )

    def fill(self, plan: StepPlan, key: MixedKey, uploads: Uploads) -> torch.Tensor:
        """Sends the inputs of a plan that fits ``key``; answers the slots [sampling rows] int64. LookupError where a
        token has no page."""
        rows, _, bound = key
        decode = plan.num_decode_rows
        fields = self._known[key]
        values = np.zeros(fields.size, dtype=np.int64)
        parts = fields.on_host(values)
        token_row = np.repeat(np.arange(plan.num_rows), plan.query_len)
        first = np.cumsum(plan.query_len) - plan.query_len
        position = np.arange(plan.num_tokens) + (plan.num_computed - first)[token_row]
        # Padding of the decode rows pushes what is behind them back.
        place = np.arange(plan.num_tokens)
        place[decode:] += rows - decode
        parts["token"][place], parts["slot"][place] = plan.token_ids, plan.slots[token_row]
        parts["position"][place], parts["live"][place] = position, 1
        last = place[first + plan.query_len - 1][plan.samples]
        parts["sample"][: len(last)] = last
        _enter_chunks(plan, parts)
        row_place = np.arange(plan.num_rows)
        row_place[decode:] += rows - decode
        fresh = self._fill_states(plan, parts, row_place, uploads)
        tables = {
            name: self._fill_group(plan, name, parts, (token_row, position, place, row_place), uploads)
            for name in self._shapes
        }
        sent, slots = uploads.put(values), uploads.put(plan.slots[plan.samples])
        uploads.flush()
        if self._state is not None and fresh is not None:
            self._arena.zero(self._state, fresh)
        self._values[: fields.size].copy_(sent)
        for name, table in tables.items():
            width = min(table.shape[1], self._columns(name, bound))
            held = self._tables[name]
            held[:decode, :width].copy_(table[:decode, :width])
            held[rows : rows + plan.num_rows - decode, :width].copy_(table[decode:, :width])
        return slots

    def _fill_states(
        self, plan: StepPlan, parts: dict[str, IntArray], row_place: IntArray, uploads: Uploads
    ) -> torch.Tensor | None:
        """Enters the rows' states; answers those that begin from nothing."""
        parts["state"][:] = -1
        if self._state is None:
            return None
        tables = self._arena.tables.physical(self._state, plan.groups[self._state].tables)
        pages = state_pages(plan, tables)
        parts["state"][row_place] = pages
        fresh = pages[plan.num_computed == 0]
        return uploads.put(fresh) if len(fresh) else None

    def _fill_group(
        self,
        plan: StepPlan,
        name: str,
        parts: dict[str, IntArray],
        places: tuple[IntArray, IntArray, IntArray, IntArray],
        uploads: Uploads,
    ) -> torch.Tensor:
        """Enters a group's tokens and rows; answers its table, put. ``places``: each token's row and position, and
        where tokens and rows are entered."""
        token_row, position, place, row_place = places
        spec, tables = self._arena.specs[name], plan.groups[name]
        physical = self._arena.tables.physical(name, tables.tables)
        parts[f"{name} page"][:] = -1
        parts[f"{name} page"][place] = token_pages(plan, spec, physical, token_row, position)
        parts[f"{name} offset"][place] = position % spec.page_tokens
        parts[f"{name} first_page"][row_place] = tables.first_page
        parts[f"{name} kv_len"][row_place] = plan.num_computed + plan.query_len
        return uploads.put(physical)

    def rehearse(self, key: MixedKey) -> None:
        """Sends the inputs of a step that does as much as one of these sizes can, and writes to no page: its chunk
        tokens are one row's, which has none. Kernels that are tuned on it are tuned on work."""
        _, tokens, _ = key
        fields = self._known[key]
        values = np.zeros(fields.size, dtype=np.int64)
        parts = fields.on_host(values)
        for name in ("state", *(f"{name} page" for name in self._shapes)):
            parts[name][:] = -1
        parts["start"][1:] = tokens
        index = parts["chunk_index"]
        index[:, 1] = len(index)
        index[: -(-tokens // CHUNK_TOKENS), 1] = np.arange(-(-tokens // CHUNK_TOKENS))
        self._values[: fields.size].copy_(torch.from_numpy(values))

    def context(self, key: MixedKey) -> tuple[dict[str, torch.Tensor], ForwardContext]:
        """The filled inputs by name, and what layers read; only launches work on the device."""
        rows, tokens, bound = key
        parts = self._known[key].on_device(self._values)
        groups = {}
        for name, shape in self._shapes.items():
            spec = self._arena.specs[name]
            whole = PagedGeometry(
                query_start=parts["start"].to(torch.int32),
                kv_len=parts[f"{name} kv_len"].to(torch.int32),
                tables=self._tables[name][: parts["state"].shape[0], : self._columns(name, bound)],
                first_page=parts[f"{name} first_page"].to(torch.int32),
                page_tokens=spec.page_tokens,
                max_query_len=tokens,
                max_kv_len=bound,
                num_decode_rows=0,
            )
            plans = [self._backend.plan(geometry, shape) for geometry in self._split(whole, rows)]
            groups[name] = TokenGroup(parts[f"{name} page"], parts[f"{name} offset"], *plans)
        state = None
        if self._state is not None:
            layout = PaddedLayout(
                parts["token_row"], parts["start"], parts["chunk_index"], parts["first_chunk"]
            )
            state = StateGroup(parts["state"][:rows], parts["state"][rows:], layout, longest=tokens)
        return parts, ForwardContext(
            positions=parts["position"],
            num_decode_rows=rows,
            groups=groups,
            state=state,
            views=self._arena.views,
            backend=self._backend,
            live=parts["live"] > 0,
            side=self._side if rows else None,
        )

    def _split(self, whole: PagedGeometry, rows: int) -> list[PagedGeometry]:
        """The geometry of decode rows, if there are any, and that of the others, which ``whole.query_start`` counts."""
        kv_len, tables, first = whole.kv_len, whole.tables, whole.first_page
        others = replace(whole, kv_len=kv_len[rows:], tables=tables[rows:], first_page=first[rows:])
        if not rows:
            return [others]
        ones = replace(
            whole,
            query_start=self._starts[: rows + 1],
            kv_len=kv_len[:rows],
            tables=tables[:rows],
            first_page=first[:rows],
            max_query_len=1,
            num_decode_rows=rows,
        )
        return [ones, others]

    def forward(self, key: MixedKey) -> None:
        """Computes what was filled: states advance, keys and values are stored, ``hidden`` is written. Reads no value
        on the host, so that it can be captured."""
        parts, context = self.context(key)
        held = self._last_tokens.index_select(0, parts["slot"])
        token_ids = torch.where(parts["token"] < 0, held, parts["token"])
        hidden = self._decoder.forward(token_ids, context)
        sampled = self.hidden[: self._num_sampled(key)]
        torch.index_select(hidden.final, 0, parts["sample"], out=sampled)
