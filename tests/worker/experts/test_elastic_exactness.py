"""Places taken and given back at random steps, bytes overwritten, experts rescued: the bits stay those of residency."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from memory.device.residency import Lane
from tests.helpers.paging import (
    ARENA_BYTES,
    force_places,
    record_steps,
    replay_poisoned,
    replay_steps,
    same_results,
    with_places,
)
from tests.helpers.quantized import converted_folder
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.models.paged import table_experts
from worker.quantization.convert import convert

FORMATS = ("unquantized", "fp8_block", "int4", "mxfp4")


def forced(config: WorkerConfig, batches: tuple[int, ...], floor: int, most: int, seeds: range) -> None:
    """Records once with ``most`` places; replays with ``most`` usable at most, ``floor`` at least."""
    runner = ModelRunner(with_places(config, 1 << 20, 1))
    assert runner.pager is not None
    size = runner.pager.host.place_bytes
    steps = record_steps(with_places(config, size, most), batches, prompt_tokens=6, new_tokens=6)
    want = replay_steps(ModelRunner(config, table_experts), steps, config.arena_bytes)
    assert same_results(want, [step.result for step in steps])
    for seed in seeds:
        runner = ModelRunner(replace(config, experts="paged"))
        pulled = force_places(steps, floor, most, seed)
        found, places = replay_poisoned(runner, pulled, config.arena_bytes)
        assert same_results(found, want), f"seed {seed}"
        assert runner.pager is not None
        counts = runner.pager.residency.counts.sum(1)
        assert floor <= min(places) < max(places) <= most, "nothing was taken"
        assert any(now > before for before, now in pairwise(places)), "nothing came back"
        assert counts[Lane.HIT] > 0
        assert counts[Lane.RESCUED] > 0, "nothing was rescued"


@pytest.mark.parametrize("format", FORMATS)
def test_forced_growth_and_shrinking_leave_the_bits(format: str) -> None:
    folder = converted_folder("qwen3_5_moe", format)
    config = WorkerConfig(
        model=str(folder), device="cpu", arena_bytes=ARENA_BYTES >> 2, max_running=64, num_threads=1
    )
    forced(config, (1, 7, 24), floor=2, most=24, seeds=range(2))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_forced_growth_and_shrinking_leave_the_bits_on_a_gpu(format: str) -> None:
    """Recorded with a step in flight and graphs, replayed eagerly from wherever the experts are."""
    folder = converted_folder("qwen3_5_moe", format)
    config = WorkerConfig(
        model=str(folder), device="cuda", dtype="bfloat16", arena_bytes=ARENA_BYTES >> 2, max_running=8
    )
    forced(config, (1, 7, 8), floor=2, most=24, seeds=range(3))


@pytest.mark.parametrize("format", FORMATS)
def test_the_demonstration_model_under_forced_growth_and_shrinking(format: str, tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "demo" / "model"
    folder = demo if format == "unquantized" else convert(demo, tmp_path, format)
    config = WorkerConfig(model=str(folder), device="cpu", arena_bytes=1 << 26, max_running=64, num_threads=1)
    forced(config, (2, 8), floor=20, most=200, seeds=range(1))
