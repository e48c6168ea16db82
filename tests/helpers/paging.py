"""Records an engine's steps and gives them to other runners, which may keep their experts elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import ModelRunner
from worker.scheduling.recording import RecordedStep
from worker.scheduling.step import StepResult

ARENA_BYTES = 1 << 23


def record_steps(
    config: WorkerConfig, batches: Sequence[int], prompt_tokens: int = 12, new_tokens: int = 6
) -> list[RecordedStep]:
    """Runs waves of so many requests at once, half of them sampled with noise; answers every step."""
    steps: list[RecordedStep] = []
    engine = NativeEngine(
        config, audit=True, record=lambda plan, result: steps.append(RecordedStep(plan, result))
    )

    async def one(number: int) -> None:
        prompt = tuple((number * 31 + i * 7) % 230 + 20 for i in range(prompt_tokens + number % 5))
        temperature = 0.0 if number % 2 else 0.9
        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=temperature, seed=number, logprobs=5, ignore_eos=True
        )
        engine.submit(GenerateRequest(str(number), prompt, sampling))
        async for _ in engine.stream(str(number)):
            pass

    async def waves() -> None:
        first = 0
        for size in batches:
            await asyncio.gather(*(one(n) for n in range(first, first + size)))
            first += size

    try:
        asyncio.run(waves())
    finally:
        engine.close()
    return steps


def replay_steps(runner: ModelRunner, steps: Sequence[RecordedStep], arena_bytes: int) -> list[StepResult]:
    """A runner's results for recorded plans; its memory is fresh and of the size that was recorded."""
    runner.attach_memory(runner.page_specs, arena_bytes)
    return [runner.run(step.plan) for step in steps]


def same_results(left: Sequence[StepResult], right: Sequence[StepResult]) -> bool:
    """Whether tokens and log-probabilities are equal bit for bit."""
    return all(
        (a.token_ids == b.token_ids).all() and a.logprobs == b.logprobs
        for a, b in zip(left, right, strict=True)
    )


def with_places(config: WorkerConfig, place_bytes: int, num_places: int) -> WorkerConfig:
    """``config`` with experts paged into a fixed number of places."""
    return replace(config, experts="paged", expert_bytes=place_bytes * num_places)
