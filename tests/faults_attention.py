"""Faults of the choice of attention for decode steps."""

from __future__ import annotations

from tests.faults import Fault

_CHOICE = "tests/worker/attention/test_decode_choice.py"
_SIZED = "tests/worker/execution/test_sized_attention.py"

FAULTS = [
    Fault(
        "deterministic mode's attention hangs on a clock",
        "worker.attention.choice",
        'if config.attention_backend != "auto" or config.deterministic or',
        'if config.attention_backend != "auto" or',
        (f"{_CHOICE}::test_nothing_is_measured_where_the_choice_is_fixed",),
    ),
    Fault(
        "attention that was asked for serves only some steps",
        "worker.attention.choice",
        'if config.attention_backend != "auto" or config.deterministic or',
        "if config.deterministic or",
        (f"{_CHOICE}::test_nothing_is_measured_where_the_choice_is_fixed",),
    ),
    Fault(
        "noise changes the backend from size to size",
        "worker.attention.decode_choice",
        "(0.0 if before == name else SWITCH)",
        "0.0",
        (f"{_CHOICE}::test_each_size_takes_the_fastest_unless_a_change_gains_too_little",),
    ),
    Fault(
        "a size between two takes the smaller one's backend",
        "worker.attention.decode_choice",
        "for known, name in sizes if known >= rows",
        "for known, name in reversed(sizes) if known <= rows",
        (f"{_CHOICE}::test_a_size_that_was_not_measured_takes_the_next_larger_one",),
    ),
    Fault(
        "decode steps have the attention of steps with chunks",
        "worker.execution.runner",
        "            self._decode_backend,\n",
        "            self._backend,\n",
        (f"{_SIZED}::test_a_runner_hands_decode_steps_to_the_backend_of_their_size",),
    ),
    Fault(
        "memory is measured without one backend's graphs",
        "worker.execution.graphs",
        "[*self.keys[:1], *most.values()]",
        "self.keys[:1]",
        (
            "tests/worker/execution/test_graph_keys.py::test_graphs_that_measure_memory_are_the_roomiest_of_each_backend",
        ),
    ),
    Fault(
        "a measured step finds its keys in the cache",
        "worker.attention.decode_times",
        "known[number % distinct]",
        "known[0]",
        (f"{_CHOICE}::test_measured_steps_read_what_a_step_does_and_no_more_than_there_is",),
    ),
]
