"""Drives a runner over given tokens: a first chunk as a prompt, then one token a step, as in generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memory.api import Grant, Ledger, PageAsk, PageKind
from worker.errors import ConfigError
from worker.scheduling.step import GroupTables, StepPlan


class TeacherForced:
    """Plans the steps of several prompts, all of them rows of the same steps, over a ledger of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._groups = [spec for spec in ledger.specs.values() if spec.kind is not PageKind.EXPERT]
        self._step = 0
        self._next_request = 0

    def plans(self, prompts: Sequence[Sequence[int]], prompt_share: float = 0.5) -> Iterator[StepPlan]:
        """Steps that compute every token of every prompt once: the first ``prompt_share`` of each in one chunk, the
        rest together, token by token. A plan must have been carried out when the next is asked for."""
        requests = list(range(self._next_request, self._next_request + len(prompts)))
        self._next_request += len(prompts)
        done = [0] * len(prompts)
        first = [max(2, int(len(tokens) * prompt_share)) for tokens in prompts]
        for row, tokens in enumerate(prompts):
            yield self._plan([requests[row]], [done[row]], [tokens[: first[row]]])
            done[row] = min(first[row], len(tokens))
        while any(n < len(tokens) for n, tokens in zip(done, prompts, strict=True)):
            rows = [row for row, tokens in enumerate(prompts) if done[row] < len(tokens)]
            yield self._plan(
                [requests[row] for row in rows],
                [done[row] for row in rows],
                [prompts[row][done[row] : done[row] + 1] for row in rows],
            )
            for row in rows:
                done[row] += 1
        for request in requests:
            self._ledger.release(request)

    def _plan(
        self, requests: Sequence[int], computed: Sequence[int], chunks: Sequence[Sequence[int]]
    ) -> StepPlan:
        step = self._step
        self._step += 1
        self._ledger.begin_step(step, step - 1)
        for request, done, chunk in zip(requests, computed, chunks, strict=True):
            answer = self._ledger.grant(PageAsk(request, done + len(chunk), done))
            if not isinstance(answer, Grant):
                raise ConfigError([f"arena_bytes is too small for {len(requests)} prompts at once: {answer}"])
        groups = {spec.name: self._tables(spec.name, requests) for spec in self._groups}
        commands = self._ledger.commit_step(step)
        lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
        return StepPlan(
            step=step,
            requests=np.array(requests, dtype=np.int64),
            slots=np.arange(len(requests), dtype=np.int64),
            query_len=lengths,
            num_computed=np.array(computed, dtype=np.int64),
            token_ids=np.array([token for chunk in chunks for token in chunk], dtype=np.int64),
            samples=np.zeros(len(requests), dtype=np.bool_),
            num_decode_rows=int((lengths == 1).sum()),
            groups=groups,
            commands=commands,
        )

    def _tables(self, group: str, requests: Sequence[int]) -> GroupTables:
        runs = [self._ledger.pages(request, group) for request in requests]
        tables = np.full((len(runs), max(len(run.pages) for run in runs)), -1, dtype=np.int64)
        for row, run in enumerate(runs):
            tables[row, : len(run.pages)] = run.pages
        return GroupTables(tables, np.array([run.first for run in runs], dtype=np.int64))
