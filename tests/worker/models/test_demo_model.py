"""The demonstration model against stock transformers on real text, across its window."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.cpu_reference import LOGPROB_TOLERANCE, compare, sample_prompts
from tests.helpers.plans import PlanDriver
from tests.worker.models.test_families import run_mixed
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner

FOLDER = Path(__file__).resolve().parents[3] / "demo" / "model"


def test_the_demo_model_agrees_with_the_reference() -> None:
    runner = ModelRunner(WorkerConfig(model=str(FOLDER), max_running=8))
    specs = {spec.name: (spec.window, len(spec.layers)) for spec in runner.page_specs}
    assert specs == {"window128": (128, 2), "full": (None, 2), "state": (None, 4)}
    driver = PlanDriver(runner, arena_bytes=1 << 25)
    runner.arena.buffer.fill_(0xFF)
    prompts = [list(prompt) for prompt in sample_prompts(FOLDER, [20, 127, 129, 400], seed=11)]
    found = run_mixed(driver, prompts, random.Random(4))
    for request, prompt in enumerate(prompts):
        generated = driver.rows[request].tokens[len(prompt) :]
        agreement = compare(FOLDER, prompt, generated, found[request])
        assert agreement.mismatches == 0, (len(prompt), agreement)
        assert agreement.behind_router_tie == 0, "another seed: behind a tie nothing is compared"
        assert agreement.max_logprob_diff < LOGPROB_TOLERANCE, (len(prompt), agreement)
