"""On a GPU, at the size of Qwen3-30B-A3B's layers and on the demo model: recorded plans give the same bits wherever the
experts are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shapes import cut_folder, shape_folder
from memory.device.residency import Lane
from tests.helpers.paging import record_steps, same_results, with_places
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.experts.pager import PagerOptions
from worker.models.paged import PagedFactory, table_experts
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepResult

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 7, 64)


def replay(
    runner: ModelRunner, steps: list[RecordedStep], arena_bytes: int, graphs: bool
) -> list[StepResult]:
    """The results over fresh memory, decode steps of the recorded sizes captured or all steps eager."""
    runner.attach_memory(runner.page_specs, arena_bytes)
    if graphs:
        assert runner.graphs is not None
        keys = [key for key in runner.graphs.keys if key[0] in (1, 2, 8, 64)]
        runner.capture_graphs(keys, [])
    return [runner.run(step.plan) for step in steps]


def check_exact(config: WorkerConfig, shares: tuple[tuple[float, str, bool], ...]) -> None:
    """Recorded with 31 % of the experts resident, a step in flight and graphs; replayed resident, and for each of
    ``shares`` (of the experts, lane of the misses, whether graphs)."""
    host = ModelRunner(replace(config, experts="paged")).pager.host  # type: ignore[union-attr]
    size, every = host.place_bytes, len(host.layers) * host.num_experts
    config = replace(config, arena_bytes=size * every + config.arena_bytes)
    steps = record_steps(
        with_places(config, size, int(0.31 * every)), BATCHES, prompt_tokens=9, new_tokens=16
    )
    assert {step.plan.num_rows for step in steps} >= set(BATCHES)
    want = replay(ModelRunner(config, table_experts), steps, config.arena_bytes, graphs=False)
    assert same_results(want, [step.result for step in steps]), "as it was recorded"
    for share, lane, graphs in shares:
        options = PagerOptions(size * int(share * every), miss_lane=lane)
        runner = ModelRunner(with_places(config, size, int(share * every)), PagedFactory(options))
        found = replay(runner, steps, config.arena_bytes, graphs)
        assert same_results(found, want), f"{share:.0%}, {lane}, {'graphs' if graphs else 'eager'}"
        assert runner.pager is not None
        runner.pager.raise_if_corrupt()
        assert runner.pager.residency.audit() == []
        assert int(runner.pager.residency.counts[Lane.TEE].sum()) > 0
        runner.close()


@pytest.mark.parametrize(("format", "layers"), [("fp8", 12), ("int4", 2)])
def test_paged_equals_resident_at_the_size_of_a_30b_model(format: str, layers: int) -> None:
    config = WorkerConfig(
        model=str(cut_folder("qwen3-30b-a3b", format, layers)), device="cuda", dtype="bfloat16", load="random",
        max_running=64, max_model_len=512, max_step_tokens=1024, prefix_cache=False, arena_bytes=1 << 30,
    )  # fmt: skip
    check_exact(config, ((0.1, "tee", False), (0.72, "gather", True)))


def test_the_demonstration_model_is_exact_at_every_share() -> None:
    config = WorkerConfig(
        model=str(shape_folder("demo", "bf16")), device="cuda", dtype="bfloat16", max_running=64, max_model_len=512,
        max_step_tokens=1024, prefix_cache=False, arena_bytes=1 << 28,
    )  # fmt: skip
    check_exact(
        config, ((0.1, "gather", False), (0.31, "tee", False), (0.72, "tee", True), (1.0, "gather", True))
    )
