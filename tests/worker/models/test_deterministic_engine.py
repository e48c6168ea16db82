"""deterministic=true through the whole engine on a CPU: budgets, prefix hits and retractions change no bit."""

from __future__ import annotations

import random

import pytest

from benchmarks.cpu_engine import Answer, run_prompts
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import random_prompt
from worker.api import WorkerSnapshot
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

NUM_NEW = 60
RNG = random.Random(3)
PROMPTS = [random_prompt(RNG, n) for n in (20, 64, 90, 128, 200, 150, 131)]
PROMPTS.append([*PROMPTS[4], 50, 51, 52])


def answers(runs: int = 1, **settings: object) -> tuple[list[list[Answer]], WorkerSnapshot]:
    """All prompts at once, ``runs`` times; and the last snapshot."""
    folder = tiny_folder("qwen3_5_moe", window=48)
    config = WorkerConfig(
        model=str(folder),
        device="cpu",
        deterministic=True,
        num_threads=1,
        page_tokens=16,
        **settings,  # type: ignore[arg-type]
    )
    engine = NativeEngine(config, audit=True)
    try:
        found = [run_prompts(engine, PROMPTS, NUM_NEW, logprobs=2) for _ in range(runs)]
        return found, engine.snapshot()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    return answers(max_running=1, prefix_cache=False)[0][0]


def test_small_budgets_and_company(alone: list[Answer]) -> None:
    found, _ = answers(max_running=8, max_step_tokens=70, prefix_cache=False)
    assert found[0] == alone


def test_prefix_hits(alone: list[Answer]) -> None:
    found, snapshot = answers(2, max_running=8, max_step_tokens=300, prefix_cache=True)
    assert found == [alone, alone]
    assert snapshot.cached_tokens > 0


def test_retractions(alone: list[Answer]) -> None:
    found, snapshot = answers(max_running=8, max_step_tokens=128, prefix_cache=True, arena_bytes=340_000)
    assert found[0] == alone
    assert snapshot.num_retractions > 0
