"""Logits to tokens: keeps each slot's sampling rules, applies what a row asks for, and skips the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import allow_only, draw, greedy, noise_keys, penalise
from worker.api import SamplingParams, TokenLogprobs
from worker.scheduling.step import IntArray, StartedRow, StepPlan

LEAST_TEMPERATURE = 1e-6
"""Below it a row is greedy: dividing float32 logits by less overflows, and noise could not change the choice anyway."""


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Log-probabilities of some rows, still on the device.

    Attributes:
        rows: plan rows that asked, in order; wanted: how many alternatives each asked for.
        token_ids, chosen: [rows] the drawn tokens and their log-probabilities.
        top_values, top_ids: [rows, most wanted], best first.
    """

    rows: tuple[int, ...]
    wanted: tuple[int, ...]
    token_ids: torch.Tensor
    chosen: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def by_row(self) -> dict[int, TokenLogprobs]:
        """Plain values by plan row; waits for the device."""
        columns = (self.token_ids, self.chosen, self.top_ids, self.top_values)
        lines = zip(self.rows, self.wanted, *(column.tolist() for column in columns), strict=True)
        return {
            row: TokenLogprobs(token, chosen, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
            for row, wanted, token, chosen, ids, values in lines
        }


@dataclass(frozen=True, slots=True)
class SampledRows:
    """[rows] int64 tokens drawn, and log-probabilities of the rows that asked, None if no row did."""

    token_ids: torch.Tensor
    drawn: DrawnLogprobs | None

    @property
    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Log-probabilities by plan row; waits for the device."""
        return {} if self.drawn is None else self.drawn.by_row()


@dataclass(frozen=True, slots=True)
class _Rules:
    """One slot's rules beyond temperature and filters."""

    sampling: SamplingParams
    num_prompt_tokens: int
    banned_early: tuple[int, ...]
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]


class Sampler:
    """Draws the next token of each sampling row of a step."""

    def __init__(
        self, num_slots: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._rules: dict[int, _Rules] = {}
        self._greedy = np.ones(num_slots, dtype=bool)
        self._plain = np.ones(num_slots, dtype=bool)
        self._penalised = np.zeros(num_slots, dtype=bool)
        self._logprobs = np.full(num_slots, -1, dtype=np.int64)
        # temperature, top_p, min_p, presence, frequency, repetition
        self._values = np.zeros((num_slots, 6), dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.int64)
        self._num_slots = num_slots
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def start(self, rows: Iterable[StartedRow]) -> None:
        """Takes over the rules of rows whose slot begins."""
        for row in rows:
            self._start(row)

    def _start(self, row: StartedRow) -> None:
        params, slot = row.sampling, row.slot
        early: tuple[int, ...] = ()
        if params.min_tokens:
            ends = () if params.ignore_eos else self._eos_token_ids
            early = tuple(sorted({*ends, *params.stop_token_ids}))
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < self._vocab_size]
        self._rules[slot] = _Rules(
            params, row.num_prompt_tokens, early, tuple(t for t, _ in bias), tuple(v for _, v in bias)
        )
        penalised = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self._greedy[slot] = params.temperature < LEAST_TEMPERATURE
        self._penalised[slot] = penalised
        self._plain[slot] = not (penalised or bias or early)
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._values[slot] = (
            params.temperature or 1.0,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self._top_k[slot] = min(params.top_k, self._vocab_size)  # a client's number may exceed 64 bits
        self._seeds[slot] = row.seed
        if penalised:
            self._count_known(row)

    def _count_known(self, row: StartedRow) -> None:
        if self._seen is None or self._counts is None:
            size = (self._num_slots, self._vocab_size)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(size, dtype=torch.int32, device=self._device)
        known = torch.tensor(row.known_token_ids, dtype=torch.int64)
        prompt, produced = known[: row.num_prompt_tokens], known[row.num_prompt_tokens :]
        self._seen[row.slot].zero_()[prompt.to(self._device)] = True
        self._counts[row.slot] = torch.bincount(produced, minlength=self._vocab_size).to(self._device)

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> SampledRows:
        """Draws for the rows of ``plan`` that sample; ``logits`` [sampling rows, vocabulary] float32, in row order."""
        rows = np.flatnonzero(plan.samples)
        slots = plan.slots[rows]
        all_greedy = bool(self._greedy[slots].all())
        changed = logits
        if not self._plain[slots].all() or plan.token_masks:
            changed = self._apply_rules(plan, rows, slots, logits.clone())
        if all_greedy:
            token_ids = greedy(changed)
        else:
            token_ids = self._draw(changed, slots, (plan.num_computed + plan.query_len)[rows])
        self._count(slots, token_ids)
        return SampledRows(token_ids, self._log_probabilities(rows, slots, logits, token_ids))

    def _tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _apply_rules(
        self, plan: StepPlan, rows: IntArray, slots: IntArray, logits: torch.Tensor
    ) -> torch.Tensor:
        penalised = np.flatnonzero(self._penalised[slots])
        if len(penalised) and self._seen is not None and self._counts is not None:
            index, held = self._tensor(penalised), self._tensor(slots[penalised])
            presence, frequency, repetition = self._tensor(self._values[slots[penalised], 3:]).unbind(1)
            seen, counts = self._seen.index_select(0, held), self._counts.index_select(0, held)
            part = logits.index_select(0, index)
            logits.index_copy_(0, index, penalise(part, seen, counts, presence, frequency, repetition))
        for place in np.flatnonzero(~self._plain[slots]).tolist():
            rules = self._rules[int(slots[place])]
            if rules.bias_ids:
                ids = torch.tensor(rules.bias_ids, device=self._device)
                logits[place].index_add_(0, ids, torch.tensor(rules.bias_values, device=self._device))
            row = rows[place]
            num_generated = plan.num_computed[row] + plan.query_len[row] - rules.num_prompt_tokens
            if rules.banned_early and num_generated < rules.sampling.min_tokens:
                logits[place, list(rules.banned_early)] = -torch.inf
        self._apply_masks(plan, rows, logits)
        return logits

    def _apply_masks(self, plan: StepPlan, rows: IntArray, logits: torch.Tensor) -> None:
        bound = [place for place, row in enumerate(rows.tolist()) if row in plan.token_masks]
        if bound:
            masks = np.stack([plan.token_masks[int(rows[place])] for place in bound])
            index = torch.tensor(bound, device=self._device)
            part = allow_only(logits.index_select(0, index), self._tensor(masks))
            logits.index_copy_(0, index, part)

    def _draw(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> torch.Tensor:
        random = np.flatnonzero(~self._greedy[slots])
        index, held = self._tensor(random), slots[random]
        keys = noise_keys(self._tensor(self._seeds[held]), self._tensor(positions[random]))
        temperature, top_p, min_p = self._tensor(self._values[held, :3]).unbind(1)
        part = logits if len(random) == len(slots) else logits.index_select(0, index)
        drawn = draw(part, temperature, self._tensor(self._top_k[held]), top_p, min_p, keys)
        if len(random) == len(slots):
            return drawn
        return greedy(logits).index_copy(0, index, drawn)

    def _count(self, slots: IntArray, token_ids: torch.Tensor) -> None:
        penalised = np.flatnonzero(self._penalised[slots])
        if len(penalised) and self._counts is not None:
            places = (self._tensor(slots[penalised]), token_ids.index_select(0, self._tensor(penalised)))
            one = torch.ones(len(penalised), dtype=torch.int32, device=self._device)
            self._counts.index_put_(places, one, accumulate=True)

    def _log_probabilities(
        self, rows: IntArray, slots: IntArray, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> DrawnLogprobs | None:
        asked = np.flatnonzero(self._logprobs[slots] >= 0)
        if len(asked) == 0:
            return None
        index = self._tensor(asked)
        wanted = self._logprobs[slots[asked]]
        scores = torch.log_softmax(logits.index_select(0, index), -1)
        drawn = token_ids.index_select(0, index)
        best = torch.topk(scores, int(wanted.max()), dim=-1)
        chosen = scores.gather(1, drawn.unsqueeze(1)).squeeze(1)
        rows_asked, counts = tuple(rows[asked].tolist()), tuple(wanted.tolist())
        return DrawnLogprobs(rows_asked, counts, drawn, chosen, best.values, best.indices)
