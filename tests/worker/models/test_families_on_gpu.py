"""Every family on a GPU: against transformers, with FP8 keys and values, and bit for bit in deterministic mode."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.cpu_reference import compare, reference_model
from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import CASES, SAMPLING, random_prompt, run_mixed
from worker.api import SamplingParams, TokenLogprobs
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner

pytestmark = pytest.mark.gpu

FAMILIES = ["qwen3_5_moe", "qwen3_5", "qwen3_moe", "gpt_oss"]
LOGPROB_TOLERANCE = 5e-4
"""float32 sums in another order than the reference's."""
LENGTHS = (1, 2, 15, 17, 64, 65, 130, 300)


def open_driver(folder: Path, arena_bytes: int = 1 << 25, **settings: object) -> PlanDriver:
    config = WorkerConfig(
        model=str(folder), device="cuda", page_tokens=16, max_running=128, max_step_tokens=4096, **settings
    )
    runner = ModelRunner(config)
    driver = PlanDriver(runner, arena_bytes=arena_bytes)
    # Bytes that nobody wrote are NaN in every dtype.
    runner.arena.buffer.fill_(0xFF)
    return driver


@pytest.mark.parametrize(("family", "window"), CASES)
def test_float32_agrees_with_transformers(
    family: str, window: int, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_folder(family, window=window)
    rng = random.Random(window + len(family))
    driver = open_driver(folder, dtype="float32")
    prompts = [random_prompt(rng, n) for n in LENGTHS]
    found = run_mixed(driver, prompts, rng)
    worst = 0.0
    for request, prompt in enumerate(prompts):
        agreement = compare(folder, prompt, driver.rows[request].tokens[len(prompt) :], found[request])
        assert agreement.mismatches == 0, (len(prompt), agreement)
        worst = max(worst, agreement.max_logprob_diff)
    record_property(
        "figure", f"{family}, window {window}, float32: largest difference of a log-probability {worst:.1e}"
    )
    assert worst < LOGPROB_TOLERANCE


def first_scores(driver: PlanDriver, prompt: list[int]) -> dict[int, float]:
    request = driver.add(prompt, SamplingParams(max_tokens=2, temperature=0.0, logprobs=20))
    return dict(driver.step({request: len(prompt)})[1].logprobs[0][0].top)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errs_no_more_than_transformers_in_bfloat16(
    family: str, kv_dtype: str, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_folder(family)
    driver = open_driver(folder, dtype="bfloat16", kv_dtype=kv_dtype)
    exact, rounded = reference_model(folder), reference_model(folder, torch.bfloat16)
    ours, theirs = [], []
    for n in (3, 31, 64, 77, 130, 200):
        prompt = random_prompt(random.Random(n), n)
        said = first_scores(driver, prompt)
        with torch.inference_mode():
            right, near = (
                m(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)[list(said)]
                for m in (exact, rounded)
            )
        ours.append((torch.tensor(list(said.values())) - right).abs().mean().item())
        theirs.append((near - right).abs().mean().item())
    # All but the worst: a prompt may stand at a near tie of its router, where any rounding decides.
    mine, other = (sum(sorted(errors)[:-1]) / 5 for errors in (ours, theirs))
    record_property(
        "figure", f"{family}, bfloat16, KV {kv_dtype}: mean error {mine:.4f}, transformers' {other:.4f}"
    )
    # FP8 keys and values have 16 times bfloat16's rounding, which is one of many in a layer.
    assert mine < (2 if kv_dtype == "auto" else 6) * other + 0.01, (ours, theirs)


@pytest.mark.parametrize("name", ["flash", "triton", "torch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_backends_agree_through_a_model(family: str, name: str) -> None:
    folder = tiny_folder(family)
    driver = open_driver(folder, dtype="bfloat16", attention_backend=name)
    exact = reference_model(folder)
    prompt = random_prompt(random.Random(5), 190)
    said = first_scores(driver, prompt)
    with torch.inference_mode():
        right = exact(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)[list(said)]
    assert (torch.tensor(list(said.values())) - right).abs().mean() < 0.1


def wide_folder(family: str, tmp_path: Path) -> Path:
    """A configuration for random weights: the tiny one's, at sizes of a real layer."""
    raw = json.loads((tiny_folder(family) / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    text |= {"vocab_size": 4096, "initializer_range": 0.02}
    if "num_local_experts" in text:
        text |= {"intermediate_size": 352}
    if "moe_intermediate_size" in text:
        text |= {"moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4}
    if "linear_key_head_dim" in text:
        text |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        text |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def alone(driver: PlanDriver, prompt: list[int], num_new: int) -> list[TokenLogprobs]:
    request = driver.add(prompt, SAMPLING)
    row = driver.rows[request]
    found = [driver.step({request: row.num_pending})[1].logprobs[0][0] for _ in range(num_new)]
    driver.remove(request)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_answers_depend_on_nothing_beside_them(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    num_new = 6
    folder = wide_folder(family, tmp_path)
    driver = open_driver(
        folder, 1 << 29, dtype="bfloat16", load="random", deterministic=True, max_model_len=1024
    )
    rng = random.Random(3)
    prompts = [random_prompt(rng, n) for n in (1, 17, 63, 64, 65, 128, 300)]
    expected = [alone(driver, prompt, num_new) for prompt in prompts]
    for batch in (1, 2, 7, 64):
        # The watched prompts among others, in another order each time, in chunks of other sizes.
        watched = rng.sample(range(len(prompts)), min(batch, len(prompts)))
        others = [random_prompt(rng, rng.randrange(1, 200)) for _ in range(batch - len(watched))]
        mixed = [*(prompts[i] for i in watched), *others]
        order = rng.sample(range(batch), batch)
        found = run_in_chunks(driver, [mixed[i] for i in order], rng, num_new)
        for place, number in enumerate(order):
            if number < len(watched):
                assert found[place] == expected[watched[number]], (batch, len(mixed[number]))
    record_property(
        "figure",
        f"{family}, bfloat16, deterministic: equal bits in batches of 1, 2, 7, 64, any chunks and order",
    )


def run_in_chunks(
    driver: PlanDriver, prompts: list[list[int]], rng: random.Random, num_new: int
) -> list[list[TokenLogprobs]]:
    """All rows at once, each in random chunks, until each has ``num_new`` tokens."""
    requests = [driver.add(prompt, SAMPLING) for prompt in prompts]
    found: dict[int, list[TokenLogprobs]] = {request: [] for request in requests}
    while running := [r for r in requests if len(found[r]) < num_new]:
        chosen = [r for r in running if rng.random() < 0.9] or running[:1]
        chunks = {r: min(driver.rows[r].num_pending, rng.choice([1, 5, 64, 200])) for r in chosen}
        plan, result = driver.step(chunks)
        for place, request in enumerate(plan.requests.tolist()):
            if result.num_new[place]:
                found[request].append(result.logprobs[place][0])
    for request in requests:
        driver.remove(request)
    return [found[request] for request in requests]
