"""Hand-built step plans: drives a ModelRunner without a scheduler or a ledger."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from memory.api import PageKind, PageSpec, StepCommands
from worker.api import SamplingParams
from worker.execution.runner import ModelRunner
from worker.scheduling.step import GroupTables, StartedRow, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)


@dataclass
class DrivenRow:
    """One request as the driver knows it."""

    request: int
    slot: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    num_computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    first_page: dict[str, int] = field(default_factory=dict)
    started: bool = False

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.num_computed


class PlanDriver:
    """Builds plans over shuffled pages and keeps rows up to date with what the runner answers."""

    def __init__(self, runner: ModelRunner, *, arena_bytes: int = 1 << 26, seed: int = 0) -> None:
        self._runner = runner
        runner.attach_memory(runner.page_specs, arena_bytes)
        self._random = random.Random(seed)
        self._specs = {spec.name: spec for spec in runner.page_specs}
        self._free = self._split_pages(arena_bytes)
        self._slots = list(range(1024))
        self._step = 0
        self._next_request = 0
        self.rows: dict[int, DrivenRow] = {}

    def _split_pages(self, arena_bytes: int) -> dict[str, list[int]]:
        """Shuffled pages of disjoint byte ranges, since the grids of all kinds overlap."""
        share = arena_bytes // len(self._specs)
        free = {}
        for place, spec in enumerate(self._specs.values()):
            anchor = arena_bytes % spec.page_bytes if spec.kind is PageKind.FULL else 0
            first = -(-(place * share - anchor) // spec.page_bytes)
            last = ((place + 1) * share - anchor) // spec.page_bytes
            free[spec.name] = list(range(max(first, 0), last))
            self._random.shuffle(free[spec.name])
        return free

    def add(self, tokens: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> int:
        """A new request with a prompt; answers its number."""
        request = self._next_request
        self._next_request += 1
        slot = self._slots.pop(0)
        self.rows[request] = DrivenRow(request, slot, list(tokens), len(tokens), sampling, seed)
        return request

    def remove(self, request: int) -> None:
        """Ends a request: its pages and its slot are free."""
        row = self.rows.pop(request)
        self._slots.insert(0, row.slot)
        for group, pages in row.pages.items():
            self._free[group].extend(pages)

    def step(
        self, chunks: Mapping[int, int], masks: Mapping[int, np.ndarray] | None = None
    ) -> tuple[StepPlan, StepResult]:
        """Computes ``chunks[request]`` tokens of each named request in one step; sampled tokens are appended."""
        rows = [self.rows[r] for r in sorted(chunks, key=lambda r: chunks[r] > 1)]
        plan = self._plan(rows, [chunks[row.request] for row in rows], masks or {})
        result = self._runner.run(plan)
        for i, row in enumerate(rows):
            row.num_computed += int(plan.query_len[i])
            row.tokens.extend(result.token_ids[i, : result.num_new[i]].tolist())
        return plan, result

    def _plan(
        self, rows: Sequence[DrivenRow], lengths: Sequence[int], masks: Mapping[int, np.ndarray]
    ) -> StepPlan:
        self._step += 1
        token_ids: list[int] = []
        started = []
        for row, length in zip(rows, lengths, strict=True):
            assert 1 <= length <= row.num_pending
            token_ids += row.tokens[row.num_computed : row.num_computed + length]
            if not row.started:
                known = tuple(row.tokens)
                started.append(
                    StartedRow(row.slot, row.request, row.sampling, row.seed, known, row.num_prompt)
                )
                row.started = True
            for spec in self._specs.values():
                self._grow(row, spec, row.num_computed + length)
        return StepPlan(
            step=self._step,
            requests=np.array([row.request for row in rows], dtype=np.int64),
            slots=np.array([row.slot for row in rows], dtype=np.int64),
            query_len=np.array(lengths, dtype=np.int64),
            num_computed=np.array([row.num_computed for row in rows], dtype=np.int64),
            token_ids=np.array(token_ids, dtype=np.int64),
            samples=np.array([row.num_pending == n for row, n in zip(rows, lengths, strict=True)]),
            num_decode_rows=sum(n == 1 for n in lengths),
            groups={name: self._tables(name, rows) for name in self._specs},
            commands=StepCommands(self._step),
            started=tuple(started),
            token_masks={i: masks[row.request] for i, row in enumerate(rows) if row.request in masks},
        )

    def _grow(self, row: DrivenRow, spec: PageSpec, num_tokens: int) -> None:
        pages = row.pages.setdefault(spec.name, [])
        if spec.kind is PageKind.STATE:
            if not pages:
                pages.append(self._free[spec.name].pop())
            return
        first = row.first_page.setdefault(spec.name, 0)
        if spec.window is not None:
            # Pages that the next query, at num_computed, cannot see any more are let go.
            unseen = max(0, row.num_computed - spec.window + 1) // spec.page_tokens - first
            for _ in range(min(unseen, len(pages))):
                self._free[spec.name].insert(0, pages.pop(0))
                row.first_page[spec.name] += 1
        wanted = -(-num_tokens // spec.page_tokens) - row.first_page[spec.name]
        while len(pages) < wanted:
            pages.append(self._free[spec.name].pop())

    def _tables(self, group: str, rows: Sequence[DrivenRow]) -> GroupTables:
        width = max(len(row.pages[group]) for row in rows)
        tables = np.full((len(rows), width), -1, dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row.pages[group])] = row.pages[group]
        first = np.array([row.first_page.get(group, 0) for row in rows], dtype=np.int64)
        return GroupTables(tables, first)
