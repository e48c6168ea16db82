"""Recorded plans give the same bits however many experts are resident: four formats, batches of 1, 2, 7 and 64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memory.device.residency import Lane
from tests.helpers.paging import ARENA_BYTES, record_steps, replay_steps, same_results, with_places
from tests.helpers.quantized import converted_folder
from tests.helpers.tiny import tiny_folder
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.experts.pager import PagerOptions
from worker.models.paged import PagedFactory, table_experts
from worker.quantization.convert import convert
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepResult

BATCHES = (1, 2, 7, 64)
SHARES = (0.1, 0.31, 0.72, 1.0)


def place_bytes(config: WorkerConfig) -> int:
    runner = ModelRunner(with_places(config, 1 << 20, 1))
    assert runner.pager is not None
    return runner.pager.host.place_bytes


def replay_by_gather(config: WorkerConfig, steps: list[RecordedStep]) -> list[StepResult]:
    """The results where missing experts are copied into their places ahead of the products, as often as by tee."""
    counts = []
    for lane in ("tee", "gather"):
        factory = PagedFactory(PagerOptions(config.expert_bytes, miss_lane=lane))
        runner = ModelRunner(config, factory)
        found = replay_steps(runner, steps, ARENA_BYTES)
        assert runner.pager is not None
        assert runner.pager.residency.audit() == []
        runner.pager.raise_if_corrupt()
        counts.append(runner.pager.residency.counts)
    assert torch.equal(*counts)
    assert counts[1][Lane.TEE].sum() > 0
    return found


@pytest.mark.parametrize("format", ["unquantized", "fp8_block", "int4", "mxfp4"])
def test_paged_equals_resident_bit_for_bit(format: str) -> None:
    folder = converted_folder("qwen3_5_moe", format)
    config = WorkerConfig(
        model=str(folder), device="cpu", arena_bytes=ARENA_BYTES, max_running=64, num_threads=1
    )
    size, experts = place_bytes(config), 4 * 8
    steps = record_steps(with_places(config, size, 3), BATCHES, prompt_tokens=6, new_tokens=4)
    assert {step.plan.num_rows for step in steps} >= set(BATCHES)
    resident = ModelRunner(config, table_experts)
    want = replay_steps(resident, steps, ARENA_BYTES)
    assert same_results(want, [step.result for step in steps]), "the recording engine's own paging"
    lanes = []
    for share in SHARES:
        runner = ModelRunner(with_places(config, size, max(1, int(share * experts))))
        found = replay_steps(runner, steps, ARENA_BYTES)
        assert same_results(found, want), f"{share:.0%} of the experts"
        assert runner.pager is not None
        assert runner.pager.num_places == max(1, int(share * experts))
        assert runner.pager.residency.audit() == []
        lanes.append(runner.pager.residency.counts.sum(1).tolist())
    gathered = replay_by_gather(with_places(config, size, int(SHARES[1] * experts)), steps)
    assert same_results(gathered, want), "gathered ahead of the products"
    hits = [counts[Lane.HIT] for counts in lanes]
    assert hits == sorted(hits), "more places, fewer hits"
    assert hits[0] < hits[-1]
    assert lanes[0][Lane.EVICTED] > 0, "nothing was ever evicted: paging was not tried"
    assert lanes[0][Lane.IN_PLACE] > 0
    assert lanes[-1][Lane.EVICTED] == 0
    assert lanes[-1][Lane.TEE] <= experts, "with room for all, an expert is paged at most once"


def test_gpt_oss_with_biases_and_clamped_activation() -> None:
    config = WorkerConfig(
        model=str(tiny_folder("gpt_oss")), device="cpu", arena_bytes=ARENA_BYTES, num_threads=1
    )
    size = place_bytes(config)
    steps = record_steps(with_places(config, size, 4), (3,))
    want = replay_steps(ModelRunner(config, table_experts), steps, ARENA_BYTES)
    assert same_results(want, [step.result for step in steps])


def test_the_kernel_through_the_table_is_the_model() -> None:
    """Not the same bits as the dequantised bank, but the same model: greedy tokens and near log-probabilities."""
    config = WorkerConfig(
        model=str(converted_folder("qwen3_moe", "int4")), device="cpu", arena_bytes=ARENA_BYTES, num_threads=1
    )
    steps = record_steps(config, (2,))
    found = replay_steps(ModelRunner(config, table_experts), steps, ARENA_BYTES)
    for step, result in zip(steps, found, strict=True):
        assert (step.result.token_ids == result.token_ids).all()
        for was, now in zip(step.result.logprobs, result.logprobs, strict=True):
            for left, right in zip(was, now, strict=True):
                assert abs(left.logprob - right.logprob) < 2e-4


def test_bands_take_places_and_give_them_back() -> None:
    """Without ``expert_bytes`` every free byte is a place: requests' pages ban some, and the tokens stay the same."""
    config = WorkerConfig(
        model=str(converted_folder("qwen3_5_moe", "int4")),
        device="cpu",
        arena_bytes=1 << 21,
        num_threads=1,
        experts="paged",
        prefix_cache=False,
    )
    steps = record_steps(config, (1, 8), prompt_tokens=90)
    banned = sum(r.last - r.first for step in steps for r in step.plan.commands.ban)
    allowed = sum(r.last - r.first for step in steps[1:] for r in step.plan.commands.allow)
    assert banned > 0
    assert allowed > 0
    want = replay_steps(ModelRunner(config, table_experts), steps, config.arena_bytes)
    assert same_results(want, [step.result for step in steps])


@pytest.mark.parametrize("format", ["unquantized", "fp8_block", "int4", "mxfp4"])
def test_the_demonstration_model_is_exact_at_every_share(format: str, tmp_path: Path) -> None:
    """The same on trained weights: 8 layers of 32 experts, linear, sliding and full attention."""
    demo = Path(__file__).parents[3] / "demo" / "model"
    folder = demo if format == "unquantized" else convert(demo, tmp_path, format)
    arena_bytes, experts = 1 << 26, 8 * 32
    config = WorkerConfig(
        model=str(folder), device="cpu", arena_bytes=arena_bytes, max_running=64, num_threads=1
    )
    size = place_bytes(config)
    steps = record_steps(with_places(config, size, 25), BATCHES, prompt_tokens=6, new_tokens=4)
    want = replay_steps(ModelRunner(config, table_experts), steps, arena_bytes)
    assert same_results(want, [step.result for step in steps])
    for share in SHARES:
        runner = ModelRunner(with_places(config, size, int(share * experts)))
        assert same_results(replay_steps(runner, steps, arena_bytes), want), f"{share:.0%} of the experts"
        assert runner.pager is not None
        assert runner.pager.num_places == int(share * experts)
