"""Faults of the engines, their streams and their sampling that the suite must notice."""

from __future__ import annotations

from tests.faults import Fault

CONTRACT = "tests/worker/test_engine_contract.py"
LIFECYCLE = "tests/worker/test_engine_lifecycle.py"
FAKE = "tests/worker/test_fake_engine.py"
STREAMS = "tests/worker/test_streams.py"

FAULTS = [
    Fault(
        "streams: a reader that leaves early aborts nothing",
        "worker.engines.streams",
        old="    streams.discard(request_id)\n    abort(request_id)\n",
        new="    streams.discard(request_id)\n",
        tests=(STREAMS, f"{CONTRACT}::test_a_reader_that_closes_early_aborts_its_request"),
    ),
    Fault(
        "streams: a late reader loses all but the latest event",
        "worker.engines.streams",
        old="box.events = [merged_events(box.events)]",
        new="box.events = [event]",
        tests=(STREAMS,),
    ),
    Fault(
        "streams: every event wakes a reader that polls",
        "worker.engines.streams",
        old="wakes=False)",
        new="wakes=True)",
        tests=(f"{STREAMS}::test_polling_takes_what_is_there_and_no_event_wakes_a_reader_that_polls",),
    ),
    Fault(
        "fake engine: a retracted request begins anew",
        "worker.engines.fake",
        old="            victim.num_retractions += 1\n",
        new="            victim.num_retractions += 1\n            victim.generated = 0\n",
        tests=(f"{FAKE}::test_a_full_arena_sends_the_latest_back_and_changes_no_token",),
    ),
    Fault(
        "plain engines: a dead loop leaves its streams open",
        "worker.engines.desk",
        old="self.streams.finish_all(FinishReason.ERROR, error)",
        new="pass",
        tests=(f"{LIFECYCLE}::test_a_dead_engine_ends_every_stream_with_its_error[fake]",),
    ),
    Fault(
        "transformers engine: end tokens are heeded although ignore_eos",
        "worker.engines.transformers",
        old="if not sampling.ignore_eos:",
        new="if True:",
        tests=(f"{CONTRACT}::test_ignore_eos_goes_on_to_max_tokens[transformers]",),
    ),
    Fault(
        "transformers engine: windows past their length are not applied",
        "worker.engines.transformers",
        old="    apply_attention_windows(model)\n",
        new="",
        tests=(
            "tests/worker/test_transformers_engine.py::test_windowed_layers_see_their_window_and_no_more",
        ),
    ),
    Fault(
        "plain sampling: noise does not depend on the position",
        "worker.engines.plain_sampling",
        old='blake2b(f"{seed} {position}".encode()',
        new='blake2b(f"{seed}".encode()',
        tests=("tests/worker/test_plain_sampling.py::test_noise_depends_on_seed_and_position",),
    ),
    Fault(
        "plain sampling: top-p looks at what top-k dropped",
        "worker.engines.plain_sampling",
        old="    probabilities = _renormalised(ordered, kept)\n    if sampling.top_p",
        new="    probabilities = torch.softmax(ordered, dim=0)\n    if sampling.top_p",
        tests=("tests/worker/test_plain_sampling.py::test_filters_keep_what_they_say",),
    ),
]
