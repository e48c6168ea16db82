"""Logits to tokens: keeps each slot's sampling rules, applies what a row asks for, and skips the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import allow_only, draw, greedy, noise_keys, penalise
from worker.api import SamplingParams, TokenLogprobs
from worker.execution.staging import HostUploads, Uploads, fetch
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

    def fetched(self) -> DrawnLogprobs:
        """The same on its way to the host."""
        sent = (fetch(t) for t in (self.token_ids, self.chosen, self.top_values, self.top_ids))
        return DrawnLogprobs(self.rows, self.wanted, *sent)

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

    def fetched(self) -> SampledRows:
        """The same on its way to the host: whole when an event recorded behind this call is done."""
        return SampledRows(fetch(self.token_ids), None if self.drawn is None else self.drawn.fetched())

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


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows with penalties: [n] places among the sampling rows, their slots, [3, n] strengths."""

    index: torch.Tensor
    slots: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """[n] values to add to single logits: rows, token ids, values."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that are not greedy: [n] places (None: all rows), [3, n] temperature, top_p and min_p, and the rest of what
    :func:`kernels.sampling.draw` asks for."""

    index: torch.Tensor | None
    values: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Rows that want log-probabilities: [n] places, their plan rows, and how many alternatives each wants."""

    index: torch.Tensor
    rows: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """What the sampling rows of one step are drawn with; None for rules that no row has. ``fresh``: slots whose counts
    for penalties begin anew, with [vocabulary] bool seen and int32 counts."""

    fresh: list[tuple[int, torch.Tensor, torch.Tensor]]
    penalties: PenalisedRows | None
    edits: LogitEdits | None
    masks: tuple[torch.Tensor, torch.Tensor] | None
    random: RandomRows | None
    asked: AskedRows | None

    @property
    def is_plain(self) -> bool:
        """Whether every row takes its likeliest token, and nothing else is asked."""
        rules = (self.penalties, self.edits, self.masks, self.random, self.asked)
        return all(rule is None for rule in rules)


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
        self._waiting: list[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int32]]] = []
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
        known = np.array(row.known_token_ids, dtype=np.int64)
        prompt, produced = known[: row.num_prompt_tokens], known[row.num_prompt_tokens :]
        seen = np.bincount(prompt, minlength=self._vocab_size) > 0
        counts = np.bincount(produced, minlength=self._vocab_size).astype(np.int32)
        self._waiting.append((row.slot, seen, counts))

    def prepare(self, plan: StepPlan, uploads: Uploads) -> SamplingStep:
        """Puts what the rows of ``plan`` that sample are drawn with; once per step, behind :meth:`start`. The caller
        flushes before :meth:`draw`."""
        rows = np.flatnonzero(plan.samples)
        slots = plan.slots[rows]
        fresh = [(slot, uploads.put(seen), uploads.put(counts)) for slot, seen, counts in self._waiting]
        self._waiting.clear()
        penalised = np.flatnonzero(self._penalised[slots])
        random = np.flatnonzero(~self._greedy[slots])
        asked = np.flatnonzero(self._logprobs[slots] >= 0)
        return SamplingStep(
            fresh=fresh,
            penalties=self._put_penalties(penalised, slots, uploads) if len(penalised) else None,
            edits=self._put_edits(plan, rows, slots, uploads),
            masks=_put_masks(plan, rows, uploads),
            random=self._put_random(random, slots, plan, rows, uploads) if len(random) else None,
            asked=self._put_asked(asked, rows, slots, uploads) if len(asked) else None,
        )

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> SampledRows:
        """Draws for the rows of ``plan`` that sample; ``logits`` [sampling rows, vocabulary] float32, in row order, on
        a CPU."""
        return self.draw(self.prepare(plan, HostUploads()), logits)

    def draw(self, step: SamplingStep, logits: torch.Tensor) -> SampledRows:
        """Draws what :meth:`prepare` was asked for; ``logits`` [sampling rows, vocabulary], in float32 or as the model
        computes them: the likeliest token is the same in both."""
        for slot, seen, counts in step.fresh:
            assert self._seen is not None
            assert self._counts is not None
            self._seen[slot].copy_(seen)
            self._counts[slot].copy_(counts)
        if not step.is_plain:
            logits = logits.float()
        changed = logits
        if step.penalties is not None or step.edits is not None or step.masks is not None:
            changed = self._apply_rules(step, logits.clone())
        random = step.random
        if random is None:
            token_ids = greedy(changed)
        elif random.index is None:
            token_ids = _draw(changed, random)
        else:
            drawn = _draw(changed.index_select(0, random.index), random)
            token_ids = greedy(changed).index_copy(0, random.index, drawn)
        if step.penalties is not None and self._counts is not None:
            places = (step.penalties.slots, token_ids.index_select(0, step.penalties.index))
            one = torch.ones(len(step.penalties.index), dtype=torch.int32, device=self._device)
            self._counts.index_put_(places, one, accumulate=True)
        return SampledRows(token_ids, _log_probabilities(step.asked, logits, token_ids))

    def _apply_rules(self, step: SamplingStep, logits: torch.Tensor) -> torch.Tensor:
        if step.penalties is not None and self._seen is not None and self._counts is not None:
            index, held = step.penalties.index, step.penalties.slots
            presence, frequency, repetition = step.penalties.values.unbind(0)
            seen, counts = self._seen.index_select(0, held), self._counts.index_select(0, held)
            part = logits.index_select(0, index)
            logits.index_copy_(0, index, penalise(part, seen, counts, presence, frequency, repetition))
        if step.edits is not None:
            # Added: a token that is impossible stays so whatever its bias.
            logits.index_put_((step.edits.rows, step.edits.ids), step.edits.values, accumulate=True)
        if step.masks is not None:
            index, masks = step.masks
            logits.index_copy_(0, index, allow_only(logits.index_select(0, index), masks))
        return logits

    def _put_penalties(self, places: IntArray, slots: IntArray, uploads: Uploads) -> PenalisedRows:
        held = slots[places]
        return PenalisedRows(uploads.put(places), uploads.put(held), uploads.put(self._values[held, 3:].T))

    def _put_edits(
        self, plan: StepPlan, rows: IntArray, slots: IntArray, uploads: Uploads
    ) -> LogitEdits | None:
        """Biases and tokens that are impossible so early, of all rows."""
        places: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for place in np.flatnonzero(~self._plain[slots]).tolist():
            rules, row = self._rules[int(slots[place])], rows[place]
            ids += rules.bias_ids
            values += rules.bias_values
            num_generated = plan.num_computed[row] + plan.query_len[row] - rules.num_prompt_tokens
            if rules.banned_early and num_generated < rules.sampling.min_tokens:
                ids += rules.banned_early
                values += [-np.inf] * len(rules.banned_early)
            places += [place] * (len(ids) - len(places))
        if not ids:
            return None
        return LogitEdits(
            uploads.put(np.array(places, dtype=np.int64)),
            uploads.put(np.array(ids, dtype=np.int64)),
            uploads.put(np.array(values, dtype=np.float32)),
        )

    def _put_random(
        self, places: IntArray, slots: IntArray, plan: StepPlan, rows: IntArray, uploads: Uploads
    ) -> RandomRows:
        held, row = slots[places], rows[places]
        return RandomRows(
            index=None if len(places) == len(slots) else uploads.put(places),
            values=uploads.put(self._values[held, :3].T),
            top_k=uploads.put(self._top_k[held]),
            seeds=uploads.put(self._seeds[held]),
            positions=uploads.put((plan.num_computed + plan.query_len)[row]),
        )

    def _put_asked(self, places: IntArray, rows: IntArray, slots: IntArray, uploads: Uploads) -> AskedRows:
        wanted = self._logprobs[slots[places]]
        return AskedRows(uploads.put(places), tuple(rows[places].tolist()), tuple(wanted.tolist()))


def _put_masks(plan: StepPlan, rows: IntArray, uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not plan.token_masks:
        return None
    bound = [place for place, row in enumerate(rows.tolist()) if row in plan.token_masks]
    if not bound:
        return None
    masks = np.stack([plan.token_masks[int(rows[place])] for place in bound])
    return uploads.put(np.array(bound, dtype=np.int64)), uploads.put(masks)


def _draw(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    temperature, top_p, min_p = rows.values.unbind(0)
    keys = noise_keys(rows.seeds, rows.positions)
    return draw(logits, temperature, rows.top_k, top_p, min_p, keys)


def _log_probabilities(
    asked: AskedRows | None, logits: torch.Tensor, token_ids: torch.Tensor
) -> DrawnLogprobs | None:
    if asked is None:
        return None
    scores = torch.log_softmax(logits.index_select(0, asked.index), -1)
    drawn = token_ids.index_select(0, asked.index)
    best = torch.topk(scores, max(asked.wanted), dim=-1)
    chosen = scores.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return DrawnLogprobs(asked.rows, asked.wanted, drawn, chosen, best.values, best.indices)
