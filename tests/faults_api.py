"""Planted faults of the API: chat formats, grammars, keys, choices, errors."""

from __future__ import annotations

from tests.faults import Fault

FORMATS = "tests/serve_app/test_chat_formats.py"
TOOLS = "tests/serve_app/test_tools.py"
ACCESS = "tests/serve_app/test_access.py"
GRAMMAR = "tests/worker/test_grammar.py"

FAULTS = [
    Fault(
        "a mark of a call that is cut in two is text",
        "serve_app.text.chat_formats.marked_calls",
        old="                free = len(self._held) - possible_mark(self._held, (mark,))",
        new="                free = len(self._held)",
        tests=(f"{FORMATS}::test_no_split_changes_an_answer",),
    ),
    Fault(
        "the blanks behind a reasoning are text",
        "serve_app.text.chat_formats.reasoning",
        old="        if not self._behind:",
        new="        if True:",
        tests=(f"{FORMATS}::test_an_answer_means_what_it_says",),
    ),
    Fault(
        "text parameters are read as JSON",
        "serve_app.text.chat_formats.qwen3_xml",
        old="        if not is_text(schema):\n            try:",
        new="        if True:\n            try:",
        tests=(f"{FORMATS}::test_an_answer_means_what_it_says",),
    ),
    Fault(
        "a required call may be any text",
        "serve_app.http.tools",
        old="    if use.must_call:",
        new="    if False:",
        tests=(f"{TOOLS}::test_a_named_call_is_that_call_and_parallel_calls_can_be_forbidden",),
    ),
    Fault(
        "structure is enforced on the reasoning too",
        "serve_app.text.chat_formats.reasoning",
        old="    if not begins_inside(prompt):\n        return None",
        new="    if True:\n        return None",
        tests=(f"{TOOLS}::test_structure_begins_behind_the_reasoning",),
    ),
    Fault(
        "requests share one matcher",
        "worker.grammar",
        old="        matcher = self._compiled(grammar.kind, grammar.text).deep_copy()",
        new="        matcher = self._compiled(grammar.kind, grammar.text)",
        tests=(f"{GRAMMAR}::test_requests_do_not_share_a_state",),
    ),
    Fault(
        "ids behind the vocabulary are allowed",
        "worker.grammar",
        old="        if live.waits_for is not None:\n            return None\n",
        new="        if live.waits_for is not None:\n            return None\n        return self._ends_only - 1\n",
        tests=(f"{GRAMMAR}::test_ids_without_a_token_and_special_tokens_are_never_allowed",),
    ),
    Fault(
        "a key that ran its requests keeps their places",
        "serve_app.http.access",
        old="            keys.leave(entry)",
        new="            pass",
        tests=(f"{ACCESS}::test_running_requests_are_bounded_until_they_end",),
    ),
    Fault(
        "two keys share prefixes",
        "serve_app.http.access",
        old='        salt = f"{entry.sha256[:16]}/{salt}"',
        new="        pass",
        tests=(f"{ACCESS}::test_keys_share_no_prefixes_and_sessions_belong_together",),
    ),
    Fault(
        "texts that no encoding can carry are let in",
        "serve_app.http.schemas",
        old="        check_json(body)\n        return body",
        new="        return body",
        tests=(
            "tests/serve_app/test_robustness.py::test_a_corpus_of_malformed_bodies_brings_no_5xx_and_no_hang",
        ),
    ),
]
