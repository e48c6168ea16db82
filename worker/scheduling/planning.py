"""Puts the rows chosen for a step in order and writes the plan down."""

from __future__ import annotations

import numpy as np

from memory.api import StepCommands
from worker.scheduling.grammars import Grammars
from worker.scheduling.rows import IN_FLIGHT
from worker.scheduling.running import RunningSet
from worker.scheduling.step import IntArray, StartedRow, StepPlan


class PlanBuilder:
    """Builds plans from the running set; every array in a plan is a copy."""

    def __init__(self, running: RunningSet, grammars: Grammars | None) -> None:
        self._running = running
        self._rows = running.rows
        self._grammars = grammars

    def build(
        self, step: int, decode: IntArray, chunks: list[tuple[int, int]], started: list[int]
    ) -> StepPlan:
        """The plan of a step, its memory commands left empty; the rows' counts run ahead by it.

        Args:
            decode: slots that compute their one unknown token.
            chunks: (slot, tokens) of the others.
            started: slots among those of ``chunks`` that begin with this step.
        """
        rows = self._rows
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        slots = np.concatenate([decode, np.array([slot for slot, _ in chunks], dtype=np.int64)])
        query_len = np.ones(len(slots), dtype=np.int64)
        query_len[len(decode) :] = [length for _, length in chunks]
        num_computed = rows.num_computed[slots]
        known = rows.num_known[slots]
        samples = num_computed + query_len == known
        plan = StepPlan(
            step=step,
            requests=rows.requests[slots],
            slots=slots,
            query_len=query_len,
            num_computed=num_computed,
            token_ids=self._token_ids(slots, query_len, known - num_computed),
            samples=samples,
            num_decode_rows=int((query_len == 1).sum()),
            groups=self._running.tables.gather(slots),
            commands=StepCommands(step),
            started=tuple(self._started_row(slot) for slot in started),
            token_masks=self._masks(slots, samples),
        )
        rows.num_computed[slots] += query_len
        rows.steps_in_flight[slots] += 1
        sampling = slots[samples]
        rows.num_known[sampling] += 1
        rows.samples_in_flight[sampling] += 1
        rows.last_token[sampling] = IN_FLIGHT
        return plan

    def _token_ids(self, slots: IntArray, query_len: IntArray, need: IntArray) -> IntArray:
        """[sum of query_len] the rows' tokens: the last one where only that is missing, else from the prefill."""
        simple = need == 1
        if simple.all():
            found: IntArray = self._rows.last_token[slots]
            return found
        starts = np.cumsum(query_len) - query_len
        tokens = np.empty(int(query_len.sum()), dtype=np.int64)
        tokens[starts[simple]] = self._rows.last_token[slots[simple]]
        for row in np.flatnonzero(~simple).tolist():
            slot, start, length = int(slots[row]), int(starts[row]), int(query_len[row])
            computed = int(self._rows.num_computed[slot])
            tokens[start : start + length] = self._rows.occupant(slot).prefill[computed : computed + length]
        return tokens

    def _started_row(self, slot: int) -> StartedRow:
        request = self._rows.occupant(slot)
        return StartedRow(
            slot,
            request.number,
            request.asked.sampling,
            request.seed,
            request.known_token_ids(),
            request.num_prompt,
        )

    def _masks(self, slots: IntArray, samples: np.ndarray) -> dict[int, np.ndarray]:
        if self._grammars is None:
            return {}
        bound = np.flatnonzero(samples & self._rows.has_grammar[slots])
        masks = {int(row): self._grammars.mask(int(self._rows.requests[slots[row]])) for row in bound}
        return {row: mask for row, mask in masks.items() if mask is not None}
