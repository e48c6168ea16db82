"""Takes a step's result in: counts, stop checks, events, and the ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from worker.api import FinishReason, TokenEvent
from worker.errors import GrammarFailed
from worker.scheduling.grammars import Grammars
from worker.scheduling.request import Request
from worker.scheduling.rows import IN_FLIGHT, RowTable
from worker.scheduling.running import RunningSet
from worker.scheduling.statistics import Statistics
from worker.scheduling.step import BoolArray, IntArray, StepPlan, StepResult
from worker.scheduling.stops import check_stops

Ended = Callable[[Request, FinishReason, int], None]


@dataclass(frozen=True, slots=True)
class Taken:
    """What each row took of its new tokens: how many, its output so far, and whether that ended it."""

    count: IntArray
    generated: IntArray
    stopped: BoolArray
    full: BoolArray


class Applier:
    """Results in, events out. ``ended`` is told of each request that is over, with its number of output tokens."""

    def __init__(
        self,
        running: RunningSet,
        statistics: Statistics,
        grammars: Grammars | None,
        clock: Callable[[], float],
        ended: Ended,
    ) -> None:
        self._running = running
        self._rows: RowTable = running.rows
        self._statistics = statistics
        self._grammars = grammars
        self._clock = clock
        self._ended = ended
        self._aborted: set[int] = set()
        """slots of rows that leave because they were aborted"""

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """The step's tokens, for rows whose request still runs; the others' are dropped."""
        if result.step != plan.step:
            raise RuntimeError(f"the result of step {result.step} came for the plan of step {plan.step}")
        rows = self._rows
        now = self._clock()
        if not plan.staged:  # many steps run beside a pass
            self._statistics.step_times.add(now, result.seconds)
        self._note_cost(plan, result)
        alive = rows.requests[plan.slots] == plan.requests
        rows.steps_in_flight[plan.slots[alive]] -= 1
        taken = np.flatnonzero(alive & plan.samples)
        events = self._take_tokens(plan.slots[taken], taken, result, now)
        for slot in plan.slots[alive & rows.leaving[plan.slots]].tolist():
            events.extend(self._leave(slot, now))
        return events

    def _note_cost(self, plan: StepPlan, result: StepResult) -> None:
        cost = self._statistics.prompt_cost
        if plan.staged:
            cost.end_pass(plan.num_tokens, result.seconds)
        else:
            decoding = plan.num_decode_rows
            cost.note(plan.num_tokens - decoding, decoding, result.seconds)

    def _take_tokens(self, slots: IntArray, at: IntArray, result: StepResult, now: float) -> list[TokenEvent]:
        """``at``: the rows in the result that the slots stand for."""
        rows = self._rows
        num_new = result.num_new[at].astype(np.int64)
        if len(at) and num_new.min() < 1:
            raise RuntimeError(f"step {result.step}: a row that samples brought no token")
        before = rows.num_generated(slots)
        rows.samples_in_flight[slots] -= 1
        # One token was counted when the step was planned; more than one means that drafts were accepted.
        rows.num_known[slots] += num_new - 1
        rows.num_computed[slots] += num_new - 1
        tokens = result.token_ids[at]
        taken = self._append(slots, tokens, num_new, before)
        latest = tokens[np.arange(len(at)), taken.count - 1]
        rows.last_token[slots] = np.where(rows.samples_in_flight[slots] > 0, IN_FLIGHT, latest)
        self._statistics.generated_tokens += int(taken.count.sum())
        failed = self._advance_grammars(slots, tokens, taken.count)
        events = self._events(slots, at, tokens, taken, result, now)
        for row, error in failed.items():
            if events[row].finish_reason is None:
                events[row] = self._finish(int(slots[row]), FinishReason.ERROR, events[row], now, error)
        return events

    def _append(self, slots: IntArray, tokens: IntArray, num_new: IntArray, before: IntArray) -> Taken:
        """Appends each row's tokens up to its first stop; ``before``: how many it had generated."""
        stopped = np.zeros(len(slots), dtype=np.bool_)
        full = np.zeros(len(slots), dtype=np.bool_)
        count = np.zeros(len(slots), dtype=np.int64)
        known = self._rows.num_prompt[slots] + before
        for column in range(int(num_new.max(initial=0))):
            on = np.flatnonzero((num_new > column) & ~stopped & ~full)
            fresh = tokens[on, column]
            self._rows.append(slots[on], fresh)
            count[on] += 1
            stops = check_stops(self._rows, slots[on], fresh, known[on] + count[on])
            stopped[on], full[on] = stops.by_token, stops.by_length
        return Taken(count, before + count, stopped, full)

    def _advance_grammars(self, slots: IntArray, tokens: IntArray, taken: IntArray) -> dict[int, str]:
        """Tells grammars what came; by row, why one of them cannot go on."""
        failed: dict[int, str] = {}
        if self._grammars is None:
            return failed
        for row in np.flatnonzero(self._rows.has_grammar[slots]).tolist():
            number = int(self._rows.requests[slots[row]])
            try:
                self._grammars.advance(number, tokens[row, : taken[row]].tolist())
            except GrammarFailed as error:
                failed[row] = str(error)
        return failed

    def _events(
        self, slots: IntArray, at: IntArray, tokens: IntArray, taken: Taken, result: StepResult, now: float
    ) -> list[TokenEvent]:
        rows = self._rows
        began = np.flatnonzero(taken.generated == taken.count).tolist()
        for row in began:
            rows.occupant(int(slots[row])).first_token_s = now
        ids = rows.request_ids
        fresh: Iterable[tuple[int, ...]]
        if (taken.count == 1).all():
            fresh = zip(tokens[:, 0].tolist(), strict=True)
        else:
            fresh = (
                tuple(row[:count]) for row, count in zip(tokens.tolist(), taken.count.tolist(), strict=True)
            )
        events = list(
            map(TokenEvent, [ids[slot] for slot in slots.tolist()], fresh, taken.generated.tolist())
        )
        if result.logprobs:
            for row, source in enumerate(at.tolist()):
                if result.logprobs[source]:
                    count = int(taken.count[row])
                    events[row] = replace(events[row], logprobs=result.logprobs[source][:count])
        for row in began:
            # Early, too: a reader that ends the request itself never sees its last event.
            line = rows.occupant(int(slots[row])).timeline(int(taken.count[row]))
            events[row] = replace(events[row], timeline=line)
        for row in np.flatnonzero(taken.stopped | taken.full).tolist():
            reason = FinishReason.STOP if taken.stopped[row] else FinishReason.LENGTH
            last = replace(events[row], used_expert_bits=_used_bits(result, int(at[row])))
            events[row] = self._finish(int(slots[row]), reason, last, now)
        return events

    def _finish(
        self, slot: int, reason: FinishReason, last: TokenEvent, now: float, error: str = ""
    ) -> TokenEvent:
        """Ends a request with the event that carries its last tokens."""
        self._aborted.discard(slot)
        request = self._running.release(slot)
        self._statistics.retractions.finished(now)
        self._ended(request, reason, last.num_generated)
        return replace(
            last,
            finish_reason=reason,
            stop_token_id=last.token_ids[-1] if reason is FinishReason.STOP else None,
            error=error,
            timeline=request.timeline(last.num_generated, now),
        )

    def _leave(self, slot: int, now: float) -> list[TokenEvent]:
        """What was to take effect after the step in flight: an abort, else a retraction."""
        if self._rows.steps_in_flight[slot]:
            return []
        if slot in self._aborted:
            self._aborted.discard(slot)
            return [self._abort_now(slot, now)]
        self._rows.leaving[slot] = False
        self._running.send_back(slot)
        return []

    def abort(self, slot: int) -> list[TokenEvent]:
        """Ends a running request: now, or when the step in flight is applied."""
        if not self._rows.steps_in_flight[slot]:
            return [self._abort_now(slot, self._clock())]
        self._rows.leaving[slot] = True
        self._aborted.add(slot)
        return []

    def _abort_now(self, slot: int, now: float) -> TokenEvent:
        return self._aborted_event(self._running.release(slot), now)

    def abort_waiting(self, request: Request) -> TokenEvent:
        """Ends a request that has no slot."""
        return self._aborted_event(request, self._clock())

    def _aborted_event(self, request: Request, now: float) -> TokenEvent:
        num_generated = len(request.generated)
        self._statistics.num_aborted += 1
        self._ended(request, FinishReason.ABORT, num_generated)
        timeline = request.timeline(num_generated, now)
        return TokenEvent(
            request.asked.request_id,
            num_generated=num_generated,
            finish_reason=FinishReason.ABORT,
            timeline=timeline,
        )


def _used_bits(result: StepResult, row: int) -> bytes | None:
    """The experts that a row's request used; None where that is not counted, and for one that ends with its prompt."""
    used = result.used_experts
    return used[row].tobytes() if used is not None and row < len(used) else None
