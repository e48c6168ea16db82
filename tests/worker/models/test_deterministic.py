"""With deterministic=true on a CPU no bit of an answer depends on chunks, company or order."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import NUM_NEW, SAMPLING, random_prompt, run_mixed
from worker.api import TokenLogprobs
from worker.attention.choice import choose_backend
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.execution.runner import ModelRunner


def open_driver(family: str, window: int) -> PlanDriver:
    config = WorkerConfig(
        model=str(tiny_folder(family, window=window)),
        deterministic=True,
        page_tokens=16,
        max_running=32,
        num_threads=1,
    )
    runner = ModelRunner(config)
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    runner.arena.buffer.fill_(0xFF)
    return driver


def alone(driver: PlanDriver, prompt: list[int]) -> list[TokenLogprobs]:
    request = driver.add(prompt, SAMPLING)
    row = driver.rows[request]
    found = [driver.step({request: row.num_pending})[1].logprobs[0][0] for _ in range(NUM_NEW)]
    driver.remove(request)
    return found


@pytest.mark.parametrize(
    ("family", "window"), [("qwen3_5_moe", 48), ("qwen3_5", 0), ("qwen3_moe", 0), ("gpt_oss", 0)]
)
def test_no_bit_depends_on_chunks_or_company(family: str, window: int) -> None:
    rng = random.Random(7)
    driver = open_driver(family, window)
    prompts = [random_prompt(rng, n) for n in (1, 15, 17, 64, 65, 140, 300)]
    expected = [alone(driver, prompt) for prompt in prompts]
    for _ in range(3):
        found = run_mixed(driver, prompts, rng)
        assert list(found.values()) == expected
        for request in found:
            driver.remove(request)


def test_a_retracted_row_goes_on_as_if_nothing_had_been() -> None:
    driver = open_driver("qwen3_5_moe", 48)
    prompt = random_prompt(random.Random(1), 90)
    expected = alone(driver, prompt)
    tokens = [said.token_id for said in expected]
    # Sent back after three tokens: prompt and output are computed again as one chunk.
    request = driver.add([*prompt, *tokens[:3]], SAMPLING)
    again = [
        driver.step({request: driver.rows[request].num_pending})[1].logprobs[0][0] for _ in range(NUM_NEW - 3)
    ]
    assert again == expected[3:]


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"attention_backend": "torch"}])
def test_what_cannot_be_deterministic_is_refused(settings: dict[str, str]) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"float32 on a CPU|attention_backend='rowwise'"):
        ModelRunner(WorkerConfig(model=folder, deterministic=True, num_threads=1, **settings))


@pytest.mark.parametrize("name", ["torch", "flash"])
def test_a_gpu_is_deterministic_by_the_kernels_that_are(name: str) -> None:
    config = WorkerConfig(model="any", deterministic=True, attention_backend=name)
    with pytest.raises(ConfigError, match="needs attention_backend='triton'"):
        choose_backend(config, (), torch.device("cuda:0"))
    asked = WorkerConfig(model="any", deterministic=True)
    assert choose_backend(asked, (), torch.device("cuda:0")).name == "triton"
