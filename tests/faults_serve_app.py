"""Planted faults of the service: queue, retries, aborts, text."""

from __future__ import annotations

from tests.faults import Fault

HTTP = "tests/serve_app/test_http.py"
DISPATCH = "tests/serve_app/test_dispatch.py"
TEXT = "tests/serve_app/test_text.py"

FAULTS = [
    Fault(
        "a refused request is not sent elsewhere",
        "serve_app.deployments.dispatch",
        old="                if not self._others_than(refused_by):",
        new="                if True:",
        tests=(f"{DISPATCH}::test_a_veto_sends_the_request_elsewhere",),
    ),
    Fault(
        "a refused request is sent to the same replica",
        "serve_app.deployments.dispatch",
        old="                refused_by.add(choice.replica_id)",
        new="                pass",
        tests=(f"{DISPATCH}::test_the_veto_of_an_only_worker_is_a_429_with_its_retry_after",),
    ),
    Fault(
        "a request whose client just left is placed",
        "serve_app.deployments.dispatch",
        old="            if waiting.placed.done():  # its",
        new="            if False:  # its",
        tests=(f"{DISPATCH}::test_a_crowd_that_leaves_at_random_moments_leaves_nothing_behind",),
    ),
    Fault(
        "a worker that is too new to be routed to fails its request",
        "serve_app.deployments.dispatch",
        old="            raise _NotRouted from error",
        new='            raise WorkerLost("gone") from error',
        tests=(f"{DISPATCH}::test_a_worker_that_is_too_new_to_be_routed_to_costs_no_request",),
    ),
    Fault(
        "a request that nobody is left for stands in everybody's way",
        "serve_app.deployments.dispatch",
        old="            if isinstance(choice, Busy) and waiting.exclude and",
        new="            if False and",
        tests=(f"{DISPATCH}::test_a_request_that_nobody_is_left_for_blocks_no_other",),
    ),
    Fault(
        "the response begins before the first token",
        "serve_app.http.streaming",
        old="    first = await anext(chunks)",
        new="    first: Mapping[str, Any] = {}",
        tests=(f"{HTTP}::test_chat_stream_has_role_text_reason_usage_and_end",),
    ),
    Fault(
        "a broken stream just stops",
        "serve_app.http.streaming",
        old='            yield encode_event(answer.body(), "error" if named else None)',
        new="            pass",
        tests=(f"{HTTP}::test_an_engine_that_dies_later_ends_the_stream_with_an_error_event",),
    ),
    Fault(
        "the possible start of a stop string is sent",
        "serve_app.text.detokenizer",
        old="            free = len(self._held) - self._possible_stop_length()",
        new="            free = len(self._held)",
        tests=(f"{TEXT}::test_what_could_become_a_stop_string_is_held_back",),
    ),
    Fault(
        "a character is decoded token by token",
        "serve_app.text.detokenizer",
        old="        return self._decoder.decode(self.model.bytes_of(token_id))",
        new='        return self.model.bytes_of(token_id).decode(errors="replace")',
        tests=(f"{HTTP}::test_a_character_over_tokens_comes_whole",),
    ),
    Fault(
        "tokens behind a stop string are counted",
        "serve_app.text.output",
        old="                num_generated += step.num_tokens",
        new="                num_generated += len(shown) + 1",
        tests=(f"{HTTP}::test_a_stop_string_over_tokens_is_cut_and_counted",),
    ),
    Fault(
        "every choice of a request has the same seed",
        "serve_app.http.choices",
        old="    if sampling.seed is not None and choice:",
        new="    if False:",
        tests=(f"{HTTP}::test_choices_of_one_seed_differ_and_repeat",),
    ),
    Fault(
        "a long prompt is tokenised on the event loop",
        "serve_app.http.routes",
        old="    if len(await request.body()) < LONG_BODY_BYTES:",
        new="    if True:",
        tests=(f"{HTTP}::test_a_long_prompt_does_not_hold_up_the_event_loop[/tokenize]",),
    ),
    Fault(
        "tokenising keeps Python's lock",
        "serve_app.text.tokenizer",
        old="        [found] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)",
        new="        found = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)",
        tests=(f"{HTTP}::test_a_long_prompt_does_not_hold_up_the_event_loop[/tokenize]",),
    ),
    Fault(
        "choices: an answer keeps its place unread until all are open",
        "serve_app.http.choices",
        old="            async for piece in read_output(events, model.text, plan.stop, plan.keep_special):\n",
        new="            while not joined._holds_back:\n"
        "                await asyncio.sleep(0.01)\n"
        "            async for piece in read_output(events, model.text, plan.stop, plan.keep_special):\n",
        tests=(f"{DISPATCH}::test_choices_for_which_there_is_no_room_at_once_follow_one_another[False]",),
    ),
    Fault(
        "every token is a message",
        "serve_app.deployments.engine_server",
        old="                    await asyncio.sleep(interval_s(self.num_streams, self._coalescing))",
        new="                    pass",
        tests=(f"{DISPATCH}::test_later_tokens_come_gathered_the_first_at_once",),
    ),
]
