"""Planted faults of operations: endless waits, who may operate, what a dead Router leaves, text that is a mark."""

from __future__ import annotations

from tests.faults import Fault

_DEADLINES = "tests/serve_app/test_deadlines.py"
_ADMIN = "tests/serve_app/test_admin.py"
_CALLERS = "tests/serve_app/test_callers.py"
_LITERALS = "tests/serve_app/test_literals.py"
_WATCHING = "serve_app.deployments.watching"
_DISPATCH = "serve_app.deployments.dispatch"
_SERVER = "serve_app.deployments.engine_server"
_ACCESS = "serve_app.http.access"

FAULTS = [
    Fault(
        "operations: a deadline ends only what somebody waits for",
        _WATCHING,
        old="            await self._stream.aclose()\n\n    async def aclose",
        new="            pass\n\n    async def aclose",
        tests=(f"{_DEADLINES}::test_a_reader_that_does_not_read_loses_its_request_at_the_deadline",),
    ),
    Fault(
        "operations: a silent worker keeps its streams",
        _WATCHING,
        old="            elif watch.waits_s(now_s) > self._silence_s and",
        new="            elif False and",
        tests=(f"{_DEADLINES}::test_a_worker_that_falls_silent_ends_its_streams",),
    ),
    Fault(
        "operations: a Router that stood still takes its workers for dead",
        "serve_app.deployments.dispatch",
        old="            if now_s - due_s > TICK_S:",
        new="            if False:",
        tests=(f"{_DEADLINES}::test_a_router_that_stood_still_takes_no_worker_for_dead",),
    ),
    Fault(
        "operations: a Router that stood still fails its streams",
        "serve_app.deployments.dispatch",
        old="        self._watchers.pardon(stood_s)\n",
        new="",
        tests=(f"{_DEADLINES}::test_a_router_that_stood_still_takes_no_worker_for_dead",),
    ),
    Fault(
        "operations: a client that leaves is taken for a deadline",
        _WATCHING,
        old="and reader is not None and not reader.uncancel():",
        new="and reader is not None:",
        tests=(f"{_DEADLINES}::test_a_client_that_leaves_at_the_deadline_has_left",),
    ),
    Fault(
        "operations: a refused request holds up the queue",
        _DISPATCH,
        old="                if waiting.exclude:\n                    continue",
        new="                if False:\n                    continue",
        tests=(f"{_DEADLINES}::test_a_refused_request_that_waits_for_another_worker_stands_in_nobodys_way",),
    ),
    Fault(
        "operations: a worker that pushes nothing is not asked",
        _DISPATCH,
        old="            if now_s - at_s > ASK_AFTER_S and",
        new="            if False and",
        tests=(f"{_DEADLINES}::test_a_worker_whose_pushes_stopped_is_asked_and_serves_on",),
    ),
    Fault(
        "operations: Serve is asked for a worker again and again",
        _DISPATCH,
        old="        if self._waking is None or self._waking.done():",
        new="        if True:",
        tests=(f"{_DEADLINES}::test_with_no_worker_heard_of_a_request_asks_serve_for_one",),
    ),
    Fault(
        "operations: a grammar is blamed for an engine's death",
        _SERVER,
        old="        except EngineDead:\n            return False\n        return True",
        new="        except EngineDead:\n            return True\n        return True",
        tests=(f"{_DEADLINES}::test_only_a_living_engine_puts_the_blame_on_the_grammar",),
    ),
    Fault(
        "operations: a proxy on this machine passes for its clients",
        _ACCESS,
        old='    if any(name in headers for name in ("x-forwarded-for", "forwarded", "x-real-ip", "origin")):',
        new="    if False:",
        tests=(f"{_ADMIN}::test_operators_are_on_this_machine_or_have_an_admin_key",),
    ),
    Fault(
        "operations: a web page whose name leads here passes for this machine",
        _ACCESS,
        old='(asked_for == "localhost" or ip_address(asked_for).is_loopback)',
        new="True",
        tests=(f"{_ADMIN}::test_operators_are_on_this_machine_or_have_an_admin_key",),
    ),
    Fault(
        "operations: every key is an admin's",
        _ACCESS,
        old="(is_admin and entry is not None and not entry.admin)",
        new="False",
        tests=(f"{_ADMIN}::test_operators_are_on_this_machine_or_have_an_admin_key",),
    ),
    Fault(
        "operations: a drained worker stays",
        _SERVER,
        old="        if self._draining is not None and self._draining.done() and not self.num_streams:",
        new="        if False:",
        tests=(f"{_ADMIN}::test_a_drained_worker_ends_its_streams_takes_no_others_and_asks_to_be_replaced",),
    ),
    Fault(
        "operations: a Router is suspected when it misses one push",
        "serve_app.deployments.callers",
        old="now_s - at_s >= MISSING_S}",
        new="now_s - at_s >= 0.0}",
        tests=(f"{_CALLERS}::test_a_router_is_suspected_once_it_was_missing_for_some_time",),
    ),
    Fault(
        "operations: the trunk of a dead Router stays open",
        _SERVER,
        old="            if router_of(trunk_id) in gone:\n",
        new="            if False:\n",
        tests=(f"{_CALLERS}::test_what_a_dead_router_asked_for_ends_on_its_trunk_and_beside_it",),
    ),
    Fault(
        "operations: marks in messages are special",
        "serve_app.text.literals",
        old="        if not found:",
        new="        if True:",
        tests=(f"{_LITERALS}::test_marks_in_a_message_are_spelled_out",),
    ),
    Fault(
        "operations: placeholders can be guessed",
        "serve_app.text.literals",
        old='f"{secrets.randbelow(10**24):024}"',
        new='"0" * 24',
        tests=(f"{_LITERALS}::test_a_placeholder_cannot_be_forged",),
    ),
    Fault(
        "operations: unknown keys of a deployment pass the check",
        "serve_app.check",
        old="    found = _unknown(entry, DeploymentSchema, where)",
        new="    found: list[str] = []",
        tests=("tests/serve_app/test_check.py::test_what_is_wrong_is_named",),
    ),
    Fault(
        "operations: a new conversation forgets its tenant",
        "serve_app.policies.expert_affinity",
        old="for end in range(len(levels), 0, -1))",
        new="for end in range(len(levels), len(levels) - 1, -1))",
        tests=(
            "tests/serve_app/policies/test_expert_affinity.py"
            "::test_levels_come_back_as_keys_the_most_specific_first",
        ),
    ),
    Fault(
        "operations: an empty expert cache counts as one that lacks everything",
        "serve_app.policies.placement",
        old="missing.get(name, 0.0) - free)",
        new="missing.get(name, 0.0))",
        tests=(
            "tests/serve_app/policies/test_placement.py"
            "::test_an_expert_cache_that_is_not_full_is_no_reason_to_stay_away",
        ),
    ),
    Fault(
        "operations: a flush flushes nothing",
        "worker.engines.native",
        old="self._flushes[0].set_result(self._ledger.flush())",
        new="self._flushes[0].set_result(1)",
        tests=("tests/worker/test_prefix_flush.py::test_a_flush_frees_every_page_that_no_request_uses",),
    ),
    Fault(
        "operations: a flush outlives the engine",
        "worker.engines.native",
        old="        self._fail_flushes(error)\n",
        new="",
        tests=(
            "tests/worker/test_prefix_flush.py::test_who_waits_for_a_flush_hears_of_the_end_at_once[True]",
        ),
    ),
    Fault(
        "operations: a flush leaves the host tier",
        "memory.ledger.ledger",
        old="freed + (self._spill.clear() if self._spill is not None else 0)",
        new="freed",
        tests=("tests/memory/test_spill.py",),
    ),
]
