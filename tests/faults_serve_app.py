"""Planted faults of the service: queue, retries, aborts, text."""

from __future__ import annotations

from tests.faults import Fault

HTTP = "tests/serve_app/test_http.py"
TRUNK = "tests/serve_app/test_trunk.py"
TRUNK_MESSAGES = "tests/serve_app/test_trunk_messages.py"
DISPATCH = "tests/serve_app/test_dispatch.py"
TEXT = "tests/serve_app/test_text.py"

FAULTS = [
    Fault(
        "an answer that a stop string ends forgets what was cached",
        "serve_app.text.output",
        old="if event.timeline is not None:",
        new="if event.finish_reason is not None and event.timeline is not None:",
        tests=(f"{HTTP}::test_an_answer_that_a_stop_string_ends_says_what_was_cached",),
    ),
    Fault(
        "a refused request is not sent elsewhere",
        "serve_app.deployments.dispatch",
        old="                if num_lost == MOST_LOST or not self._others_than(refused_by):",
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
        old="        free = len(text) - self._possible_stop_length(text)",
        new="        free = len(text)",
        tests=(f"{TEXT}::test_what_could_become_a_stop_string_is_held_back",),
    ),
    Fault(
        "a character is decoded token by token",
        "serve_app.text.detokenizer",
        old="self._decoder.decode(self._bytes_of_all(token_ids))",
        new='"".join(self._bytes_of(token_id).decode(errors="replace") for token_id in token_ids)',
        tests=(f"{HTTP}::test_a_character_over_tokens_comes_whole",),
    ),
    Fault(
        "what is read twice in search of a stop string is decoded twice",
        "serve_app.text.detokenizer",
        old="            self._decoder.setstate(before)\n",
        new="",
        tests=(f"{TEXT}::test_any_split_of_the_tokens_gives_the_same_text",),
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
        "serve_app.deployments.trunk",
        old="            seat.due_s = next_s",
        new="            seat.due_s = 0.0",
        tests=(f"{TRUNK_MESSAGES}::test_a_stream_that_always_has_a_token_has_its_turn_once_an_interval",),
    ),
    Fault(
        "trunk: a call that ends early leaves its reader waiting",
        "serve_app.deployments.trunk",
        old="                entries.append((seat.number, GIVEN_UP, 0))\n",
        new="",
        tests=(f"{TRUNK_MESSAGES}::test_a_call_that_the_worker_ends_early_is_told_on_the_trunk",),
    ),
    Fault(
        "trunk: messages grow without bound behind a busy Router",
        "serve_app.deployments.trunk",
        old=" if num_tokens < MESSAGE_TOKENS else None",
        new="",
        tests=(f"{TRUNK_MESSAGES}::test_what_has_piled_up_leaves_in_messages_of_bounded_size",),
    ),
    Fault(
        "trunk: requests of a Router that is gone go on",
        "serve_app.deployments.trunk",
        old="        for seat in (*self._overdue, *self._turns):\n            seat.fail()\n",
        new="",
        tests=(f"{TRUNK}::test_a_router_that_is_gone_frees_its_requests",),
    ),
    Fault(
        "trunk: streams wait for a trunk that broke",
        "serve_app.deployments.trunk_reader",
        old="            trunk.fail(failure)\n",
        new="",
        tests=(f"{TRUNK}::test_a_broken_trunk_ends_its_streams_and_the_next_request_has_another_one",),
    ),
    Fault(
        "trunk: an idle one stays open",
        "serve_app.deployments.trunk_reader",
        old="            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle, self)\n",
        new="            pass\n",
        tests=(f"{TRUNK}::test_an_idle_trunk_is_closed_and_a_used_one_is_not",),
    ),
    Fault(
        "trunk: it ends with the request that opened it",
        "serve_app.deployments.trunk_reader",
        old="self._home.copy().run(asyncio.create_task, self._read(replica_id, trunk))",
        new="asyncio.create_task(self._read(replica_id, trunk))",
        tests=(f"{TRUNK}::test_a_trunk_is_no_part_of_the_request_that_opened_it",),
    ),
    Fault(
        "trunk: what comes while a client is slow is lost",
        "serve_app.deployments.trunk_reader",
        old="            self._items = _merged(self._items)\n\n    def fail",
        new="            self._items = self._items[-1:]\n\n    def fail",
        tests=(f"{TRUNK}::test_a_slow_reader_finds_one_event_and_little_is_kept_for_it",),
    ),
    Fault(
        "an event of a template is not escaped",
        "serve_app.http.streaming",
        old="_on_one_line(encode_basestring(text))",
        new="_on_one_line(f'\"{text}\"')",
        tests=("tests/serve_app/test_events.py::test_a_template_makes_the_event_that_encoding_it_would",),
    ),
    Fault(
        "an event of a template may be several lines",
        "serve_app.http.streaming",
        old="_on_one_line(encode_basestring(text))",
        new="encode_basestring(text)",
        tests=("tests/serve_app/test_events.py::test_a_template_makes_the_event_that_encoding_it_would",),
    ),
    Fault(
        "trunk: a Router that ends leaves its trunks open",
        "serve_app.deployments.trunk_reader",
        old="in list(self._open):",
        new="in list[_Trunk]():",
        tests=(f"{TRUNK}::test_a_router_that_ends_closes_its_trunks_at_once",),
    ),
    Fault(
        "trunk: the call of an ended stream is cancelled",
        "serve_app.deployments.trunk_reader",
        old="            self._seat.end_call(self._call)\n",
        new="            self._seat.leave()\n            await self._call.aclose()\n",
        tests=(f"{TRUNK}::test_the_call_of_an_ended_stream_is_read_to_its_end_and_not_cancelled",),
    ),
    Fault(
        "requests that wait for their first token slow the others down",
        "serve_app.deployments.engine_server",
        old="interval_s(len(self._flowing), self._coalescing)",
        new="interval_s(self.num_streams, self._coalescing)",
        tests=(f"{TRUNK}::test_requests_that_wait_for_their_first_token_slow_nobody_down",),
    ),
    Fault(
        "trunk: one of a busy worker lives for ever",
        "serve_app.deployments.trunk_reader",
        old="trunk is None or time.monotonic() - trunk.opened_s > LONGEST_LIFE_S",
        new="trunk is None",
        tests=(f"{TRUNK}::test_an_old_trunk_carries_its_streams_to_their_end_and_takes_no_new_ones",),
    ),
    Fault(
        "trunk: one that could not be opened is not tried again",
        "serve_app.deployments.trunk_reader",
        old="            self._forget(replica_id, trunk)\n            trunk.fail(failure)",
        new="            trunk.fail(failure)",
        tests=(f"{TRUNK}::test_a_trunk_that_cannot_be_opened_is_tried_again_with_the_next_request",),
    ),
    Fault(
        "what a request used is forgotten on the way to placement",
        "serve_app.deployments.dispatch",
        old="Outcome(True, cached, generated, last.used_expert_bits)",
        new="Outcome(True, cached, generated)",
        tests=(
            "tests/serve_app/test_dispatch.py"
            "::test_placement_learns_what_requests_used_and_not_what_was_resident",
        ),
    ),
    Fault(
        "a request is tried on every worker, however many it killed",
        "serve_app.deployments.dispatch",
        old="if num_lost == MOST_LOST or not",
        new="if not",
        tests=(
            "tests/serve_app/test_dispatch_losses.py"
            "::test_a_request_that_kills_every_worker_it_meets_is_given_up",
        ),
    ),
    Fault(
        "a call that could not be made stays booked",
        "serve_app.deployments.dispatch",
        old="        except BaseException:  # not even called\n            self._end(choice, VETOED)\n",
        new="        except BaseException:\n",
        tests=(
            "tests/serve_app/test_dispatch_losses.py::test_a_call_that_cannot_even_be_made_leaves_no_booking",
        ),
    ),
    Fault(
        "a worker's last words bring it back for ever",
        "serve_app.deployments.dispatch",
        old="if replica_id not in self._reports and view.is_dead(now_s):",
        new="if False:",
        tests=("tests/serve_app/test_dispatch_losses.py::test_workers_that_are_gone_for_good_are_forgotten",),
    ),
    Fault(
        "a dead engine looks idle",
        "worker.engines.desk",
        old="draining=self._draining or bool(self._error)",
        new="draining=self._draining",
        tests=(
            "tests/serve_app/test_dispatch_losses.py::test_a_worker_whose_engine_died_gets_no_more_requests",
        ),
    ),
]
