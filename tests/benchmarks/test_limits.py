"""The limits reproduce the published arithmetic."""

from __future__ import annotations

import pytest

import benchmarks.limits as named_place
import worker.advise.limits as limits
from worker.advise.formats import find_format
from worker.advise.geometry import ModelGeometry
from worker.advise.named import find_geometry

H200 = 4.2e12


def step_s(geometry: ModelGeometry, name: str, batch: int, context: int) -> float:
    weights = find_format(name)
    distinct = limits.distinct_experts(geometry.num_experts, geometry.experts_per_token, batch)
    read = limits.step_read_bytes(
        geometry.dense_read_bytes(weights),
        geometry.num_moe_layers,
        distinct,
        geometry.expert_bytes(weights),
        batch * geometry.request_bytes(context),
    )
    return limits.resident_step_s(read, H200)


@pytest.fixture(scope="module")
def qwen() -> ModelGeometry:
    return find_geometry("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, 8), (2, 15.5), (4, 29), (8, 52), (16, 82), (32, 112), (64, 126)]
)
def test_distinct_experts(batch: int, expected: float) -> None:
    assert limits.distinct_experts(128, 8, batch) == pytest.approx(expected, abs=0.5 if batch > 2 else 1e-9)


def test_dense_weights(qwen: ModelGeometry) -> None:
    # 2.43 GB are attention and head; routers and norms bring it to 2.46.
    attention = sum(layer.matrix_params for layer in qwen.layers)
    assert 2 * (attention + qwen.head_params) == pytest.approx(2.43e9, rel=2e-3)
    assert qwen.dense_read_bytes(find_format("bf16")) == pytest.approx(2.46e9, rel=2e-3)


@pytest.mark.parametrize(("name", "tokens_per_s"), [("bf16", 679), ("fp8", 1213)])
def test_the_limit_at_batch_1_on_an_h200(qwen: ModelGeometry, name: str, tokens_per_s: float) -> None:
    assert 1 / step_s(qwen, name, 1, 1024) == pytest.approx(tokens_per_s, rel=2e-3)


@pytest.mark.parametrize(("name", "tokens_per_s"), [("bf16", 4076), ("fp8", 7360)])
def test_the_limit_at_batch_64_on_an_h200(qwen: ModelGeometry, name: str, tokens_per_s: float) -> None:
    assert 64 / step_s(qwen, name, 64, 1024) == pytest.approx(tokens_per_s, rel=1e-3)


def test_a_step_of_64_reads_66_gigabytes(qwen: ModelGeometry) -> None:
    assert step_s(qwen, "bf16", 64, 1024) * H200 == pytest.approx(65.9e9, rel=1e-3)


def test_a_token_that_misses_everything(qwen: ModelGeometry) -> None:
    assert qwen.all_miss_bytes(find_format("int4")) == pytest.approx(0.93e9, abs=0.005e9)
    assert qwen.all_miss_bytes(find_format("fp8")) == pytest.approx(1.81e9, abs=0.005e9)
    fp8 = qwen.expert_bytes(find_format("fp8"))
    assert limits.token_link_bytes(48, 8, 1.0, fp8) == qwen.all_miss_bytes(find_format("fp8"))
    assert limits.token_link_bytes(48, 8, 0.25, fp8) == qwen.all_miss_bytes(find_format("fp8")) / 4


def test_what_87_tokens_a_second_imply(qwen: ModelGeometry) -> None:
    all_miss = qwen.all_miss_bytes(find_format("fp8"))
    assert limits.link_rate_needed(87.7, all_miss) == pytest.approx(159e9, abs=0.5e9)
    assert limits.implied_miss_rate(87.7, 50e9, all_miss) == pytest.approx(0.31, abs=0.005)
    assert limits.uniform_miss_rate(40, 128) == pytest.approx(0.69, abs=0.005)


def test_what_the_laptops_speed_implies(qwen: ModelGeometry) -> None:
    all_miss = qwen.all_miss_bytes(find_format("int4"))
    assert limits.implied_miss_rate(32.6, 16e9, all_miss) == pytest.approx(0.52, abs=0.01)
    assert limits.uniform_miss_rate(26, 128) == pytest.approx(0.80, abs=0.005)


def test_rates_stay_within_their_bounds() -> None:
    assert limits.implied_miss_rate(1.0, 50e9, 1e9) == 1.0
    assert limits.uniform_miss_rate(200, 128) == 0.0
    assert limits.distinct_experts(128, 8, 1e6) == pytest.approx(128)


def test_the_old_rule() -> None:
    assert [limits.batch_limit_by_slots(resident, 8) for resident in (24, 40)] == [3, 5]
    # Batch 4 needs 32: more than 24 slots, less than 40.
    assert limits.batch_limit_by_slots(24, 8) < 4 <= limits.batch_limit_by_slots(40, 8)


def test_a_link_curve_goes_through_its_points_and_on() -> None:
    curve = limits.LinkCurve(((1, 0.1), (2, 0.15), (4, 0.25)))
    assert [curve.seconds(count) for count in (0, 0.5, 1, 1.5, 2, 3, 4, 6)] == pytest.approx(
        [0.0, 0.05, 0.1, 0.125, 0.15, 0.2, 0.25, 0.35]
    )
    for bad in ((), ((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0))):
        with pytest.raises(ValueError, match="rising"):
            limits.LinkCurve(bad)


def test_the_in_layer_limit_counts_what_hits_do_not_hide() -> None:
    link = limits.LinkCurve.at_rate(10, 100.0)  # 0.1 s an expert
    misses = [(0, 0.05), (1, 0.05), (2, 0.05), (1, 0.4)]
    assert limits.in_layer_step_s(1.0, misses, link) == pytest.approx(1.0 + 0 + 0.05 + 0.15 + 0)
    assert limits.in_layer_step_s(1.0, [], link) == 1.0


def test_foresight_is_bound_by_the_slower_of_both() -> None:
    assert limits.foresight_step_s(1.0, 50.0, 100.0) == 1.0
    assert limits.foresight_step_s(1.0, 300.0, 100.0) == 3.0


def test_a_share_is_of_the_least_time() -> None:
    assert limits.share_of_limit(1.0, 4.0) == 0.25
    with pytest.raises(ValueError, match="above 0"):
        limits.share_of_limit(1.0, 0.0)


def test_benchmarks_limits_hands_on_every_limit_itself() -> None:
    public = {
        name for name, value in vars(limits).items() if getattr(value, "__module__", "") == limits.__name__
    }
    assert set(named_place.__all__) == public
    assert all(getattr(named_place, name) is getattr(limits, name) for name in public)


def test_mixed_steps_hide_the_shorter_of_weights_and_prompts() -> None:
    # Qwen3.5-4B, 1,024 in, 256 out, 64 rows: weights 9.3 GB, KV and states 9.0 GB, prompts 8.4 TFLOP at 740 TFLOP/s.
    weights_s, state_s, prompt_s = 9.3e9 / H200, 9.0e9 / H200, 8.4e12 / 740e12
    mixed = limits.mixed_steps_tokens_per_s(weights_s, state_s, prompt_s, 64, 256)
    assert mixed == pytest.approx(1 / (prompt_s / 256 + state_s / 64))
    assert 12_500 < mixed < 13_500
    assert limits.mixed_steps_tokens_per_s(weights_s, state_s, 0.0, 64, 256) == pytest.approx(
        64 / (weights_s + state_s)
    )
