"""Engines on a CUDA device answer as they do on the CPU: the shipped demo model, greedy, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module

import pytest

from benchmarks.cpu_reference import use_plain_functions
from worker.api import Engine, GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines import ENGINES

pytestmark = pytest.mark.gpu

MODEL = "demo/model"
PROMPTS = [
    tuple(3 + (7 * i + j * j) % 3800 for j in range(length)) for i, length in enumerate((5, 40, 200, 300))
]
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


async def answers(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, float, float]]]:
    """Per prompt (token, its log-probability, its lead over the runner-up) of each generated token."""

    async def one(number: int, prompt: tuple[int, ...]) -> list[tuple[int, float, float]]:
        engine.submit(GenerateRequest(str(number), prompt, SAMPLING))
        found = []
        async for event in engine.stream(str(number)):
            for entry in event.logprobs:
                found.append((entry.token_id, entry.logprob, entry.top[0][1] - entry.top[1][1]))
        return found

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def run(name: str, device: str) -> list[list[tuple[int, float, float]]]:
    if name == "transformers":
        # A package for GPUs would be tuned for a minute, and is not what is compared.
        use_plain_functions(import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"))
    engine = ENGINES.load(name)(
        WorkerConfig(model=MODEL, engine=name, device=device, dtype="float32", arena_bytes=1 << 28)
    )
    try:
        return asyncio.run(answers(engine, PROMPTS))
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["native", "transformers"])
def test_an_engine_answers_on_the_gpu_as_on_the_cpu(name: str) -> None:
    there, here = run(name, "cuda"), run("native", "cpu")
    num_compared = 0
    for on_gpu, on_cpu in zip(there, here, strict=True):
        assert len(on_gpu) == len(on_cpu) == SAMPLING.max_tokens
        for got, want in zip(on_gpu, on_cpu, strict=True):
            if want[2] < 1e-3:
                break  # a near tie may fall either way, and all behind it differs
            assert got[0] == want[0]
            assert got[1] == pytest.approx(want[1], abs=2e-3)
            num_compared += 1
    assert num_compared >= SAMPLING.max_tokens * len(PROMPTS) // 2
