"""Decides each step: who computes how many tokens, who is admitted, who is sent back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from memory.api import Ledger, PageKind, Shortage
from worker.api import FinishReason, GenerateRequest, TokenEvent
from worker.errors import InvalidRequest
from worker.scheduling.admission import AdmissionControl, OutputForecast, check_can_finish, has_fixed_shares
from worker.scheduling.applying import Applier
from worker.scheduling.budget import ChunkRule, StepBudget, choose_decode_rows
from worker.scheduling.grammars import Grammars
from worker.scheduling.limits import Limits
from worker.scheduling.passes import PassKeeper
from worker.scheduling.planning import PlanBuilder
from worker.scheduling.prefixes import PrefixPolicy
from worker.scheduling.request import MAX_RETRACTION_STAMPS, Request, Status
from worker.scheduling.rows import RowTable
from worker.scheduling.running import RunningSet
from worker.scheduling.statistics import Statistics
from worker.scheduling.step import IntArray, StepPlan, StepResult
from worker.scheduling.waiting import WaitingQueue

RECHECK_STEPS = 16
"""A head of the queue that did not fit is looked at again when memory was given back, or after so many steps."""


class Scheduler:
    """Continuous batching over one counter per request: tokens computed against tokens known.

    Prefill in chunks, decode, prefix hits and resumption are the same thing: known minus computed. All methods but
    ``check`` belong to the loop's thread. ``schedule`` may run ahead of ``apply`` by one step.

    Args:
        ledger: the book of pages; the caller opens, commits and ends its steps.
        limits: sizes.
        forecast: how much output is expected at admission.
        grammars: matchers, None where no grammar can be enforced.
        clock: Unix seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        forecast: OutputForecast | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.statistics = Statistics()
        self.rows = RowTable(limits.max_running, limits.end_token_ids)
        self.waiting = WaitingQueue()
        self.running = RunningSet(
            ledger, self.rows, limits.prefix_cache, not limits.deterministic, self._sent_back
        )
        self._ledger = ledger
        self._grammars = grammars
        self._clock = clock
        empty = ledger.headroom()
        self._arena_bytes = empty.arena_bytes
        self._admission = AdmissionControl(
            ledger.specs, forecast or OutputForecast(), has_fixed_shares(empty)
        )
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._blocked = (-1, -1, -1)
        self._cursor = -1
        self._whole_asks = all(spec.kind is not PageKind.WINDOW for spec in ledger.specs.values())
        self._prefixes = PrefixPolicy(self.running, limits)
        self._passes = PassKeeper(ledger, self.rows, limits)
        self._rule = ChunkRule(self._prefixes.chunk_align, limits.deterministic)
        self._builder = PlanBuilder(self.running, grammars)
        self._applier = Applier(self.running, self.statistics, grammars, clock, self._ended)

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._requests)

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def live_ids(self) -> list[str]:
        """Their ids, in order of arrival."""
        return list(self._requests)

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs; may be called from any thread."""
        return request_id in self._requests

    def forget_all(self) -> None:
        """The loop died: nobody waits or runs any more, and the ledger is not to be used again."""
        self._requests.clear()

    def check(self, asked: GenerateRequest) -> None:
        """Raises InvalidRequest or PromptTooLong for a request that this worker can never finish. May be called from
        any thread."""
        if asked.grammar is not None:
            if self._grammars is None:
                raise InvalidRequest(
                    "response_format", "This engine cannot enforce a grammar; use plain text output."
                )
            self._grammars.check(asked.grammar)
            if asked.sampling.min_tokens:
                # A complete output can only end: forbidding that as well would leave no token at all.
                raise InvalidRequest(
                    "min_tokens",
                    "min_tokens cannot be kept beside response_format or a tool call that is required: the grammar"
                    " says where the output ends. Leave it out.",
                )
        check_can_finish(asked, self._ledger, self.limits.max_model_len, self._arena_bytes)

    def submit(self, asked: GenerateRequest) -> None:
        """Queues a checked request."""
        if asked.request_id in self._requests:
            raise InvalidRequest("request_id", f"Request id {asked.request_id!r} is in use.")
        number = self._num_requests
        self._num_requests += 1
        seed = asked.sampling.seed
        # Requests without a seed differ from each other; the multiplier spreads neighbours over 63 bits.
        own = (self.limits.seed + (number + 1) * 0x9E3779B97F4A7C15) & (2**63 - 1) if seed is None else seed
        request = Request(number, asked, own, self._clock())
        if asked.grammar is not None and self._grammars is not None:
            self._grammars.open(number, asked.grammar)
        self._prefixes.note(request)
        self._requests[asked.request_id] = request
        self.waiting.append(request)
        self.statistics.num_submitted += 1

    def abort(self, request_id: str) -> list[TokenEvent]:
        """Ends a request, after the step in flight if it takes part in one; its last event comes now or then."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            return [self._applier.abort_waiting(request)]
        slot = self.rows.slot_of(request.number)
        if slot is None:
            raise RuntimeError(f"request {request.number} runs without a slot")
        return self._applier.abort(slot)

    def _ended(self, request: Request, reason: FinishReason, num_generated: int) -> None:
        request.status = Status.ENDED
        del self._requests[request.asked.request_id]
        if self._grammars is not None and request.asked.grammar is not None:
            self._grammars.close(request.number)
        if reason is not FinishReason.ABORT:
            self._admission.forecast.ended(num_generated, request.max_total - request.num_prompt)

    def _sent_back(self, request: Request) -> None:
        now = self._clock()
        request.waiting_since_s = now
        request.retracted_s = (*request.retracted_s, now)[:MAX_RETRACTION_STAMPS]
        self.statistics.retractions.retracted(now)
        self._admission.forecast.retracted()
        self.waiting.put_back(request)

    def note_resident(self, num_experts: int) -> None:
        """So many experts have places now: the ring of the next pass is made for the others."""
        self._passes.num_resident = num_experts

    # ---- a step

    def schedule(self, step: int) -> StepPlan:
        """The plan of step ``step``, its memory commands left empty: they are known when the ledger commits."""
        self.running.begin()
        self._prefixes.offer()
        slots = self.rows.runnable()
        need = self.rows.num_known[slots] - self.rows.num_computed[slots]
        one = need == 1
        if self.limits.deterministic:
            one |= self.rows.num_computed[slots] >= self.rows.num_prompt[slots]
        prefill = slots[~one]
        most = self.limits.max_step_tokens
        by_pass = self.limits.pass_tokens > 0
        waits = len(prefill) > 0 or self._may_admit(step)
        kept = (
            min(self._rule.kept_tokens(most), self.limits.mixed_tokens if by_pass else most) if waits else 0
        )
        decode, self._cursor = choose_decode_rows(slots[one], max(1, most - kept), self._cursor)
        decode = self._with_room(decode)
        chunks: list[tuple[int, int]] = []
        started: list[tuple[int, int]] = []
        if not self._passes.is_open:
            beside = min(most - len(decode), self.limits.chunk_tokens) if len(decode) else most
            num_rows = self.limits.max_running - len(decode)
            budget = self._passes.budget(num_rows) if by_pass else StepBudget(beside, num_rows)
            chunks = self._choose_chunks(prefill, budget)
            started = self._admit(step, budget)
        # A row chosen early may have been sent back for a later one.
        decode = decode[(self.rows.requests[decode] >= 0) & ~self.rows.leaving[decode]]
        chunks = [(slot, length) for slot, length in chunks if self._stays(slot)] + started
        fresh = [slot for slot, _ in started]
        if by_pass and sum(length for _, length in chunks) > self.limits.mixed_tokens:
            return self._build_pass(step, chunks, fresh)
        return self._builder.build(step, decode, chunks, fresh)

    def _build_pass(self, step: int, chunks: list[tuple[int, int]], fresh: list[int]) -> StepPlan:
        """The chunks as a pass of their own; decode rows go on with the steps behind it."""
        plan = self._builder.build(step, np.zeros(0, dtype=np.int64), chunks, fresh)
        self.statistics.prompt_cost.begin_pass()
        return replace(plan, staged=True, ring=self._passes.open(plan.slots, plan.num_tokens))

    def _stays(self, slot: int) -> bool:
        return bool(self.rows.requests[slot] >= 0 and not self.rows.leaving[slot])

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes a step's tokens in; answers an event for each row that got some or ended."""
        if plan.staged:
            self._passes.close(plan)
        return self._applier.apply(plan, result)

    def _with_room(self, slots: IntArray) -> IntArray:
        """Those of the decode rows that have room for one more token, asked for in order of arrival."""
        rows = self.rows
        short = slots[rows.capacity[slots] <= rows.num_computed[slots]]
        stuck = []
        for slot in short[np.argsort(rows.requests[short])].tolist():
            if self._stays(slot) and not self.running.ensure_room(slot, int(rows.num_computed[slot]) + 1):
                stuck.append(slot)
        return slots[(rows.requests[slots] >= 0) & ~rows.leaving[slots] & ~np.isin(slots, stuck)]

    def _choose_chunks(self, slots: IntArray, budget: StepBudget) -> list[tuple[int, int]]:
        """(slot, tokens) of the prefills that go on, first come first served."""
        rows = self.rows
        chosen = []
        for slot in slots[np.argsort(rows.requests[slots])].tolist():
            if budget.tokens < 1:
                break
            if not self._stays(slot):
                continue
            computed, known = int(rows.num_computed[slot]), int(rows.num_known[slot])
            length = self._chunk(rows.occupant(slot), computed, known, budget)
            end = computed + length
            if length and (end <= rows.capacity[slot] or self.running.ensure_room(slot, end)):
                chosen.append((slot, length))
                budget.take(length, self._passes.cost(computed, length))
        return chosen

    def _chunk(self, request: Request, computed: int, known: int, budget: StepBudget) -> int:
        """Tokens of the next chunk of a prefill."""
        if self.limits.deterministic:
            known = min(known, request.num_prompt)  # the output is computed again one by one
        cut = self._prefixes.next_cut(request, computed, known)
        tokens = budget.tokens
        if self.limits.pass_tokens:
            tokens = self._passes.most_tokens(computed, known, budget)
        return self._rule.length(computed, known, tokens, cut)

    def _may_admit(self, step: int) -> bool:
        head = self.waiting.peek() if self.rows.num_free else None
        return head is not None and not self._still_blocked(head, step)

    def _admit(self, step: int, budget: StepBudget) -> list[tuple[int, int]]:
        """(slot, tokens) of the first chunks of newly admitted requests."""
        started: list[tuple[int, int]] = []
        while budget.tokens > 0 and budget.rows > 0 and self.rows.num_free and not self.running.disturbed:
            request = self.waiting.peek()
            if request is None or self._still_blocked(request, step):
                break
            admitted = self._admit_one(request, step, budget)
            if admitted is None:
                break
            slot, length = admitted
            budget.take(length, self._passes.cost(int(self.rows.num_computed[slot]), length))
            started.append(admitted)
        return started

    def _still_blocked(self, request: Request, step: int) -> bool:
        number, releases, since = self._blocked
        return (
            number == request.number
            and releases == self.running.num_releases
            and step < since + RECHECK_STEPS
        )

    def _admit_one(self, request: Request, step: int, budget: StepBudget) -> tuple[int, int] | None:
        known = request.known_token_ids()
        match = self._prefixes.match(known, request.asked.cache_salt)
        length = self._chunk(request, match.num_tokens, len(known), budget)
        if self.limits.deterministic and match.num_tokens >= request.num_prompt:
            length = 1
        if not length:
            return None
        now_blocked = (request.number, self.running.num_releases, step)
        if not self._admission.expects_room(request, self.rows, self._ledger.headroom(), match):
            self._blocked = now_blocked
            return None
        # Window pages are let go as a prompt is computed, so a windowed model asks chunk by chunk.
        slot = self.running.admit(
            request, match, len(known) if self._whole_asks else match.num_tokens + length
        )
        if isinstance(slot, Shortage):
            if not slot.pending_bytes:
                self._blocked = now_blocked
            return None
        self.waiting.pop()
        request.prefill = np.asarray(known, dtype=np.int64)
        self.rows.last_token[slot] = request.prefill[-1]
        self._prefixes.start(slot, match)
        self._count_admission(request, match.num_tokens)
        return slot, length

    def _count_admission(self, request: Request, num_cached: int) -> None:
        now = self._clock()
        self.statistics.queue_waits.add(now, now - request.waiting_since_s)
        if not request.scheduled_s:
            request.scheduled_s = now
            request.num_cached_tokens = num_cached
            self.statistics.prompt_tokens += request.num_prompt
            self.statistics.cached_tokens += num_cached
