"""Faults of the scheduler, the loop and the native engine that the suite must notice."""

from __future__ import annotations

from tests.faults import Fault

ANSWERS = "tests/worker/scheduling/test_scheduler_answers.py"
EDGES = "tests/worker/scheduling/test_scheduler_edges.py"
MEMORY = "tests/worker/scheduling/test_scheduler_memory.py"
PLANS = "tests/worker/scheduling/test_scheduler_plans.py"
PREFIXES = "tests/worker/scheduling/test_scheduler_prefixes.py"
LOOP = "tests/worker/test_loop.py"
NATIVE = "tests/worker/test_native_engine.py"
CONTRACT = "tests/worker/test_engine_contract.py"
LIFECYCLE = "tests/worker/test_engine_lifecycle.py"
SURVIVES = "tests/worker/test_engine_survives.py"
FORMATS = "tests/worker/quantization/test_formats.py"
SAMPLING = "tests/worker/test_plain_sampling.py"

FAULTS = [
    Fault(
        "scheduler: computed count off by one",
        "worker.scheduling.planning",
        old="rows.num_computed[slots] += query_len",
        new="rows.num_computed[slots] += np.where(query_len > 1, query_len - 1, 1)",
        tests=(f"{PLANS}::test_a_prompt_is_computed_in_chunks_of_the_step_budget",),
    ),
    Fault(
        "scheduler: an abort forgets the pages",
        "worker.scheduling.applying",
        old="self._aborted_event(self._running.release(slot), now)",
        new="self._aborted_event(self._rows.vacate(slot), now)",
        tests=(f"{MEMORY}::test_an_abort_gives_everything_back[arena-lock-step]",),
    ),
    Fault(
        "scheduler: a result is applied to whoever has the slot now",
        "worker.scheduling.applying",
        old="alive = rows.requests[plan.slots] == plan.requests",
        new="alive = rows.requests[plan.slots] >= 0",
        tests=(f"{ANSWERS}::test_answers_are_right_for_every_kind_of_memory[all-overlap]",),
    ),
    Fault(
        "scheduler: a step's tokens are applied twice",
        "worker.scheduling.applying",
        old="            self._rows.append(slots[on], fresh)\n",
        new="            self._rows.append(slots[on], fresh)\n            self._rows.append(slots[on], fresh)\n",
        tests=(f"{ANSWERS}::test_a_request_sent_back_goes_on_where_it_was[recurrent-lock-step]",),
    ),
    Fault(
        "scheduler: a row is sent back while its step is half applied",
        "worker.scheduling.running",
        old="if self.rows.steps_in_flight[slot]:",
        new="if self.rows.steps_in_flight[slot] > 9:",
        tests=(f"{ANSWERS}::test_a_request_sent_back_goes_on_where_it_was[hybrid-overlap]",),
    ),
    Fault(
        "scheduler: running answers wait for whole prompts",
        "worker.scheduling.scheduler",
        old="min(most - len(decode), self.limits.chunk_tokens) if len(decode) else most",
        new="most - len(decode)",
        tests=(f"{PLANS}::test_running_answers_are_not_held_up_by_whole_prompts",),
    ),
    Fault(
        "scheduler: running answers starve prompts",
        "worker.scheduling.budget",
        old="return min(max(least, max_step_tokens // PREFILL_SHARE), max_step_tokens)",
        new="return 0",
        tests=(f"{PLANS}::test_running_answers_leave_room_for_a_prompt_and_take_turns",),
    ),
    Fault(
        "scheduler: the same decode rows are left out every step",
        "worker.scheduling.budget",
        old="return np.sort(turn), int(turn[-1])",
        new="return np.sort(turn), -1",
        tests=(f"{PLANS}::test_decode_rows_that_do_not_all_fit_take_turns",),
    ),
    Fault(
        "scheduler: whoever was sent back goes to the end of the queue",
        "worker.scheduling.waiting",
        old="heapq.heappush(self._returned, (request.number, request))",
        new="self._fresh.append(request)",
        tests=(f"{MEMORY}::test_whoever_was_sent_back_is_first_in_the_queue[arena]",),
    ),
    Fault(
        "scheduler: pending frees are not waited for",
        "worker.scheduling.running",
        old="self._claimed_bytes + missing <= answer.pending_bytes + self._coming_bytes",
        new="self._claimed_bytes + missing <= self._coming_bytes",
        tests=(f"{MEMORY}::test_frees_on_their_way_are_waited_for_before_anybody_is_sent_back",),
    ),
    Fault(
        "scheduler: pages of rows that leave already are not counted",
        "worker.scheduling.running",
        old="self._claimed_bytes + missing <= answer.pending_bytes + self._coming_bytes",
        new="self._claimed_bytes + missing <= answer.pending_bytes",
        tests=(f"{MEMORY}::test_one_shortage_sends_one_back_although_it_takes_effect_a_step_later",),
    ),
    Fault(
        "scheduler: nobody proves at the door that a request can end",
        "worker.scheduling.admission",
        old="    if shortage is None:\n        return\n",
        new="    return\n",
        tests=(f"{MEMORY}::test_a_request_that_could_never_end_is_refused_with_the_bytes[arena]",),
    ),
    Fault(
        "scheduler: admission forgets what running requests will still need",
        "worker.scheduling.admission",
        old="return peak * self._token_bytes <= self._spare_bytes(headroom, num_cached)",
        new="return True",
        tests=(f"{MEMORY}::test_admission_counts_the_output_that_is_sure_to_come",),
    ),
    Fault(
        "scheduler: window pages that were let go stay in the table",
        "worker.scheduling.tables",
        old="        self.refresh(slot, request, ledger, PageKind.WINDOW)\n",
        new="",
        tests=(f"{ANSWERS}::test_answers_are_right_for_every_kind_of_memory[windowed-lock-step]",),
    ),
    Fault(
        "scheduler: an end token counts before min_tokens",
        "worker.scheduling.stops",
        old="ended &= totals > rows.min_total[slots]",
        new="ended &= totals > 0",
        tests=(f"{EDGES}::test_end_tokens_before_min_tokens_do_not_end_the_output",),
    ),
    Fault(
        "scheduler: the newest tokens are lost when a row leaves",
        "worker.scheduling.rows",
        old="        self.flush(slot)\n        request = self.occupant(slot)",
        new="        request = self.occupant(slot)",
        tests=(f"{ANSWERS}::test_a_request_sent_back_goes_on_where_it_was[recurrent-lock-step]",),
    ),
    Fault(
        "scheduler: a state past the last kept token is kept",
        "worker.scheduling.running",
        old="if self._recurrent and kept != num_computed:",
        new="if self._recurrent and kept > num_computed:",
        tests=(f"{PREFIXES}::test_a_state_carried_past_the_end_is_not_kept[at the end-overlap]",),
    ),
    Fault(
        "scheduler: a row bound by a grammar runs ahead of its mask",
        "worker.scheduling.rows",
        old="ready &= ~(self.has_grammar & (self.samples_in_flight > 0))",
        new="ready &= True",
        tests=(f"{EDGES}::test_rows_bound_by_a_grammar_get_its_tokens_and_do_not_stop_the_others[overlap]",),
    ),
    Fault(
        "scheduler: deterministic requests share outputs",
        "worker.scheduling.running",
        old="if not self._keep_outputs:",
        new="if self._keep_outputs is None:",
        tests=(f"{PREFIXES}::test_deterministic_requests_never_start_from_another_ones_output[full]",),
    ),
    Fault(
        "scheduler: deterministic requests compute their output again in one chunk",
        "worker.scheduling.scheduler",
        old="one |= self.rows.num_computed[slots] >= self.rows.num_prompt[slots]",
        new="one |= False",
        tests=(
            f"{PLANS}::test_deterministic_steps_cut_prompts_at_fixed_places_and_recompute_output_one_by_one",
        ),
    ),
    Fault(
        "scheduler: prompts are not cut where they part from earlier ones",
        "worker.scheduling.prefixes",
        old="cuts += [last_checkpoint(known, self._align), request.branch_tokens]",
        new="cuts += [last_checkpoint(known, self._align)]",
        tests=(f"{PREFIXES}::test_prompts_that_begin_alike_share_from_the_third_on[hybrid]",),
    ),
    Fault(
        "loop: a step counts as completed while it is in flight",
        "worker.loop",
        old="self._ledger.begin_step(step, self._completed)",
        new="self._ledger.begin_step(step, step - 1)",
        tests=(f"{LOOP}::test_overlapped_the_next_step_is_launched_before_the_last_is_collected",),
    ),
    Fault(
        "loop: the last frees are never settled",
        "worker.loop",
        old="            self.step()\n            if self._ledger.headroom() == before and",
        new="            if self._ledger.headroom() == before and",
        tests=(f"{LOOP}::test_steps_count_only_where_something_was_computed[False]",),
    ),
    Fault(
        "loop: copies to the host are left undone when nobody has work",
        "worker.loop",
        old="if self._ledger.headroom() == before and not self._carries:",
        new="if self._ledger.headroom() == before:",
        tests=(f"{LOOP}::test_an_idle_loop_lets_copies_to_the_host_finish",),
    ),
    Fault(
        "trading: the market's decisions are not carried out",
        "worker.scheduling.trading",
        old="        self._ledger.follow(decision)\n",
        new="",
        tests=(
            "tests/worker/scheduling/test_scheduler_trading.py"
            "::test_experts_that_miss_get_their_places_back_after_a_burst",
        ),
    ),
    Fault(
        "native engine: a dead loop leaves its streams open",
        "worker.engines.native",
        old="        self._streams.finish_all(FinishReason.ERROR, error)\n",
        new="",
        tests=(f"{LIFECYCLE}::test_a_dead_engine_ends_every_stream_with_its_error[native on a fake runner]",),
    ),
    Fault(
        "native engine: a stall looks healthy",
        "worker.engines.native",
        old="if working and idle_s > self._config.stall_timeout_s:",
        new="if working and idle_s < 0:",
        tests=(f"{NATIVE}::test_a_step_that_stands_still_is_reported_and_idling_is_not",),
    ),
    Fault(
        "native engine: a reader that leaves does not abort",
        "worker.engines.native",
        old="            self._aborted.append(request_id)\n",
        new="",
        tests=(
            f"{CONTRACT}::test_a_cancelled_or_forgotten_reader_aborts_its_request[native on a fake runner]",
        ),
    ),
    Fault(
        "free lists: a page in use is free at once",
        "tests.helpers.free_lists",
        old="if last_step > completed or page in pinned:",
        new="if page in pinned:",
        tests=(f"{MEMORY}::test_the_free_lists_hold_to_their_books",),
    ),
    Fault(
        "free lists: a double release passes",
        "tests.helpers.free_lists",
        old='raise LedgerError(f"request {request} was released twice or never granted")',
        new="return",
        tests=(f"{MEMORY}::test_the_free_lists_hold_to_their_books",),
    ),
    Fault(
        "engine: an id is taken again while its earlier request is being ended",
        "worker.engines.native",
        old="if self._in_use(request.request_id):",
        new="if request.request_id in self._streams:",
        tests=(f"{SURVIVES}::test_the_id_of_a_request_whose_reader_left_is_free_only_when_it_has_ended",),
    ),
    Fault(
        "scheduler: a grammar that gives up stops the loop for all",
        "worker.scheduling.applying",
        old="except GrammarFailed as error:",
        new="except KeyError as error:",
        tests=(f"{SURVIVES}::test_a_grammar_that_gives_up_ends_its_own_request_with_the_reason",),
    ),
    Fault(
        "scheduler: a grammar and a least length leave no token to draw",
        "worker.scheduling.scheduler",
        old="if asked.sampling.min_tokens:",
        new="if False:",
        tests=(f"{SURVIVES}::test_a_least_length_beside_a_grammar_is_refused",),
    ),
    Fault(
        "scheduler: who was given up behind a head that waits is kept",
        "worker.scheduling.waiting",
        old="if self._num_ended > max(MOST_ENDED, self._count):",
        new="if False:",
        tests=(f"{EDGES}::test_requests_given_up_behind_one_that_waits_are_let_go",),
    ),
    Fault(
        "deterministic: rows of one paged expert are multiplied together on a CPU",
        "kernels._reference.experts",
        old="multiply = _by_row if deterministic else torch.mm",
        new="multiply = torch.mm",
        tests=(f"{FORMATS}::test_on_a_cpu_no_bit_of_a_token_depends_on_those_beside_it[unquantized]",),
    ),
    Fault(
        "sampling: logits are divided by next to nothing",
        "worker.engines.plain_sampling",
        old="if sampling.temperature < LEAST_TEMPERATURE:",
        new="if sampling.temperature == 0.0:",
        tests=(f"{SAMPLING}::test_a_temperature_too_small_to_divide_by_is_greedy[1e-45]",),
    ),
]
