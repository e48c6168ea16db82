"""Faults of the advisor and of the limits that the suite must notice."""

from __future__ import annotations

from tests.faults import Fault

GEOMETRY = "tests/worker/advise/test_geometry.py"
PLAN = "tests/worker/advise/test_plan.py"
LIMITS = "tests/benchmarks/test_limits.py"
STREAMED = "tests/worker/experts/test_streamed_reference.py"

FAULTS = [
    Fault(
        "advisor: scales of FP8 keys and values left out",
        "worker.advise.geometry",
        old='(4 * sum(layer.token_scales for layer in layers) if kv_dtype == "fp8_e4m3" else 0)',
        new="0",
        tests=("tests/worker/advise/test_formats_agree.py",),
    ),
    Fault(
        "limits: distinct experts counted with repeats",
        "worker.advise.limits",
        old="num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens)",
        new="min(num_experts, experts_per_token * num_tokens)",
        tests=(f"{LIMITS}::test_distinct_experts",),
    ),
    Fault(
        "limits: hits credited beyond the link's time",
        "worker.advise.limits",
        old="max(0.0, link.seconds(count) - hit_s)",
        new="link.seconds(count) - hit_s",
        tests=(f"{LIMITS}::test_the_in_layer_limit_counts_what_hits_do_not_hide",),
    ),
    Fault(
        "advisor: zero points left out",
        "worker.advise.formats",
        old="(8 * self.scale_bytes + self.zero_bits)\n        return",
        new="(8 * self.scale_bytes)\n        return",
        tests=(f"{GEOMETRY}::test_an_expert_has_its_bytes_in_every_format",),
    ),
    Fault(
        "advisor: convolution columns left out of the state",
        "worker.advise.config_json",
        old="return matrices, others, state + 2 * channels * (kernel - 1)",
        new="return matrices, others, state",
        tests=(f"{GEOMETRY}::test_named_models_have_their_published_sizes",),
    ),
    Fault(
        "advisor: requests left out of what must fit",
        "worker.advise.plan",
        old="left = arena_bytes - requests_bytes\n",
        new="left = arena_bytes\n",
        tests=(f"{PLAN}::test_places_requests_and_dense_weights_share_the_gpu",),
    ),
    Fault(
        "verifier: the streamed reference reads all layers at once",
        "worker.verify.streamed",
        old="if number == self._number or behind:",
        new="if True:",
        tests=(f"{STREAMED}::test_one_layer_is_in_memory_at_a_time",),
    ),
    Fault(
        "verifier: a model that does not fit is held whole",
        "worker.verify.fitting",
        old='"resident" if need.fits(free) else "streamed"',
        new='"resident"',
        tests=(f"{STREAMED}::test_what_does_not_fit_is_streamed",),
    ),
    Fault(
        "verifier: streamed steps share one layer's input",
        "worker.verify.streamed",
        old="stream.normed = model.decoder.advance(number,",
        new="model.decoder.advance(number,",
        tests=(f"{STREAMED}::test_streamed_equals_resident_bit_for_bit",),
    ),
]
