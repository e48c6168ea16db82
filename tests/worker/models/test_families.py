"""Every family against stock transformers: greedy tokens and log-probabilities, alone and mixed, in random chunks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.cpu_reference import LOGPROB_TOLERANCE, compare, reference_model
from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from worker.api import SamplingParams, TokenLogprobs
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner

CASES = [
    ("qwen3_5_moe", 0),
    ("qwen3_5_moe", 48),
    ("qwen3_5", 0),
    ("qwen3_5", 24),
    ("qwen3_moe", 0),
    ("gpt_oss", 0),
]
SAMPLING = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)
NUM_NEW = 8
GROUPS = {"window48": [2], "full": [3], "state": [0, 1]}


def open_driver(folder: Path, page_tokens: int = 16, seed: int = 0) -> PlanDriver:
    config = WorkerConfig(model=str(folder), page_tokens=page_tokens, max_running=32)
    runner = ModelRunner(config)
    driver = PlanDriver(runner, arena_bytes=1 << 24, seed=seed)
    # Bytes that nobody wrote are NaN in every dtype.
    runner.arena.buffer.fill_(0xFF)
    return driver


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(11, 267) for _ in range(length)]


def run_mixed(
    driver: PlanDriver, prompts: list[list[int]], rng: random.Random
) -> dict[int, list[TokenLogprobs]]:
    """Lets rows arrive one by one and computes a random part of a random set of rows in each step."""
    waiting = [driver.add(prompt, SAMPLING) for prompt in prompts]
    running: list[int] = []
    found: dict[int, list[TokenLogprobs]] = {request: [] for request in waiting}
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            running.append(waiting.pop(rng.randrange(len(waiting))))
        chosen = [r for r in running if rng.random() < 0.7] or running[:1]
        chunks = {r: min(driver.rows[r].num_pending, rng.choice([1, 3, 17, 64, 200])) for r in chosen}
        plan, result = driver.step(chunks)
        for i, request in enumerate(plan.requests.tolist()):
            if result.num_new[i]:
                found[request].append(result.logprobs[i][0])
        running = [r for r in running if len(found[r]) < NUM_NEW]
    return found


@pytest.mark.parametrize(("family", "window"), CASES)
def test_mixed_rows_in_random_chunks_agree_with_the_reference(family: str, window: int) -> None:
    folder = tiny_folder(family, window=window)
    rng = random.Random(window + len(family))
    driver = open_driver(folder)
    prompts = [random_prompt(rng, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 130, 300)]
    found = run_mixed(driver, prompts, rng)
    for request, prompt in enumerate(prompts):
        row = driver.rows[request]
        agreement = compare(folder, prompt, row.tokens[len(prompt) :], found[request])
        assert agreement.mismatches == 0, (len(prompt), agreement)
        assert agreement.behind_router_tie == 0, "another seed: behind a tie nothing is compared"
        assert agreement.max_logprob_diff < LOGPROB_TOLERANCE, (len(prompt), agreement)


@pytest.mark.parametrize(("family", "window"), CASES[1:2] + CASES[5:])
def test_a_row_alone_in_one_chunk_agrees_with_the_reference(family: str, window: int) -> None:
    folder = tiny_folder(family, window=window)
    driver = open_driver(folder, page_tokens=64)
    prompt = random_prompt(random.Random(1), 333)
    request = driver.add(prompt, SAMPLING)
    found = []
    for _ in range(24):
        _, result = driver.step({request: driver.rows[request].num_pending})
        found.append(result.logprobs[0][0])
    agreement = compare(folder, prompt, driver.rows[request].tokens[333:], found)
    assert agreement.mismatches == 0
    assert agreement.behind_router_tie == 0
    assert agreement.max_logprob_diff < LOGPROB_TOLERANCE


def test_page_groups_follow_the_layers() -> None:
    config = WorkerConfig(model=str(tiny_folder("qwen3_5_moe", window=48)), page_tokens=64)
    specs = {spec.name: spec for spec in ModelRunner(config).page_specs}
    assert {name: [part.layer for part in spec.layers] for name, spec in specs.items()} == GROUPS
    assert specs["window48"].window == 48
    assert specs["window48"].page_tokens == 8


def test_model_info_is_read_from_the_folder() -> None:
    info = ModelRunner(WorkerConfig(model=str(tiny_folder("gpt_oss")), served_name="small")).model_info
    assert (info.name, info.architecture, info.vocab_size) == ("small", "GptOssForCausalLM", 288)
    assert (info.num_layers, info.num_experts, info.experts_per_token) == (4, 8, 2)
    assert set(info.eos_token_ids) == {2, 4}
    assert (info.dtype, info.device, info.max_model_len) == ("float32", "cpu", 4096)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_moe", "gpt_oss"])
def test_bfloat16_errs_no_more_than_the_reference_in_bfloat16(family: str) -> None:
    folder = tiny_folder(family)
    config = WorkerConfig(model=str(folder), dtype="bfloat16", page_tokens=16, max_running=32)
    runner = ModelRunner(config)
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    runner.arena.buffer.fill_(0xFF)
    dtypes = {row.dtype for spec in runner.page_specs for part in spec.layers for row in part.rows}
    assert dtypes <= {"bfloat16", "float32"}
    exact, rounded = reference_model(folder), reference_model(folder, torch.bfloat16)
    ours, theirs = [], []
    for n in (3, 31, 64, 77, 130, 200):
        prompt = random_prompt(random.Random(n), n)
        request = driver.add(prompt, SamplingParams(max_tokens=2, temperature=0.0, logprobs=20))
        ids, values = zip(*driver.step({request: n})[1].logprobs[0][0].top, strict=True)
        with torch.inference_mode():
            right, near = (
                m(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)[list(ids)]
                for m in (exact, rounded)
            )
        ours.append((torch.tensor(values) - right).abs().mean().item())
        theirs.append((near - right).abs().mean().item())
    assert sum(ours) < 2 * sum(theirs) + 0.05, (ours, theirs)


def mean_error(folder: Path, kv_dtype: str) -> float:
    """Of first tokens' log-probabilities in float32 but for keys and values."""
    runner = ModelRunner(WorkerConfig(model=str(folder), kv_dtype=kv_dtype, page_tokens=16))
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    runner.arena.buffer.fill_(0xFF)
    errors = []
    for n in (31, 90, 130):
        prompt = random_prompt(random.Random(n), n)
        request = driver.add(prompt, SamplingParams(max_tokens=2, temperature=0.0, logprobs=20))
        driver.step({request: n - 12})
        ids, values = zip(*driver.step({request: 12})[1].logprobs[0][0].top, strict=True)
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor([prompt])).logits[0, -1]
        errors.append((torch.tensor(values) - logits.log_softmax(-1)[list(ids)]).abs().mean().item())
    return sum(errors) / len(errors)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_fp8_keys_and_values_err_as_their_mantissa_says(family: str) -> None:
    folder = tiny_folder(family)
    specs = ModelRunner(WorkerConfig(model=str(folder), kv_dtype="fp8_e4m3")).page_specs
    rows = {row.name: row.dtype for spec in specs for part in spec.layers for row in part.rows}
    assert (rows["k"], rows["v"], rows["k_scale"]) == ("float8_e4m3fn", "float8_e4m3fn", "float32")
    # Three bits of mantissa against bfloat16's seven: 16 times its error, with room for what few numbers tell.
    ratio = mean_error(folder, "fp8_e4m3") / mean_error(folder, "bf16")
    assert 4 < ratio < 48
