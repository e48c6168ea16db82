"""The runner on a GPU: families against transformers, graphs against eager, padding that leaves no trace, no waits."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cpu_reference import compare, reference_model
from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import CASES, random_prompt, run_mixed
from worker.api import SamplingParams, TokenLogprobs
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import ModelRunner

pytestmark = pytest.mark.gpu

LOGPROB_TOLERANCE = 1e-3
"""In float32 on a GPU, whose exponentials and sums are not the CPU's."""
SAMPLING = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)


def open_driver(
    folder: Path, captured: bool = False, arena_bytes: int = 1 << 24, **settings: object
) -> PlanDriver:
    given = {"device": "cuda", "dtype": "float32", "page_tokens": 16, "max_running": 16, **settings}
    runner = ModelRunner(WorkerConfig(model=str(folder), **given))  # type: ignore[arg-type]
    driver = PlanDriver(runner, arena_bytes=arena_bytes)
    # Bytes that nobody wrote are NaN in every dtype.
    runner.arena.buffer.fill_(0xFF)
    if captured:
        runner.capture_graphs()
    return driver


def graph_steps(driver: PlanDriver) -> tuple[float, float]:
    """(replayed, eager) decode steps so far."""
    figures = driver._runner.figures
    return figures["graph.replayed_decode_steps"], figures["graph.eager_decode_steps"]


@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
@pytest.mark.parametrize(("family", "window"), CASES)
def test_a_family_agrees_with_the_reference_in_float32(family: str, window: int, backend: str) -> None:
    folder = tiny_folder(family, window=window)
    rng = random.Random(window + len(family))
    driver = open_driver(folder, attention_backend=backend)
    prompts = [random_prompt(rng, n) for n in (1, 15, 17, 64, 65, 130, 300)]
    found = run_mixed(driver, prompts, rng)
    worst = 0.0
    for request, prompt in enumerate(prompts):
        agreement = compare(folder, prompt, driver.rows[request].tokens[len(prompt) :], found[request])
        assert agreement.mismatches == 0, (len(prompt), agreement)
        worst = max(worst, agreement.max_logprob_diff)
    print(
        f"\n{family} window={window} float32 {backend}: log-probabilities within {worst:.1e} of transformers"
    )
    assert worst < LOGPROB_TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_moe", "gpt_oss"])
def test_bfloat16_errs_no_more_than_the_reference_in_bfloat16(family: str) -> None:
    folder = tiny_folder(family)
    driver = open_driver(folder, dtype="bfloat16")
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
    print(f"\n{family} bfloat16: mean error {sum(ours) / 6:.4f}, transformers' own {sum(theirs) / 6:.4f}")
    assert sum(ours) < 2 * sum(theirs) + 0.05, (ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "window"), CASES)
def test_a_replayed_step_gives_the_bits_of_an_eager_one(family: str, window: int, dtype: str) -> None:
    folder = tiny_folder(family, window=window)
    prompts = [random_prompt(random.Random(n), n) for n in (1, 2, 15, 17, 64, 130, 300)]
    answers = []
    for replaying in (True, False):
        driver = open_driver(folder, captured=True, dtype=dtype)
        graphs = driver._runner.graphs
        assert graphs is not None
        graphs.replaying = replaying
        answers.append(run_mixed(driver, prompts, random.Random(5)))
        replayed, eager = graph_steps(driver)
        assert (replayed > 5, eager > 5) == (replaying, not replaying)
    assert answers[0] == answers[1]


def test_padding_rows_write_nothing() -> None:
    driver = open_driver(tiny_folder("qwen3_5_moe", window=48), captured=True)
    prompts = [random_prompt(random.Random(n), n) for n in (20, 30, 41)]
    requests = [driver.add(prompt, SAMPLING) for prompt in prompts]
    driver.step({request: len(prompts[i]) for i, request in enumerate(requests)})
    arena = driver._runner.arena
    before = arena.buffer.clone()
    driver.step(dict.fromkeys(requests, 1))  # three rows, padded to four
    assert graph_steps(driver)[0] > 0
    changed = arena.buffer != before
    for name, grid in arena.grids.items():
        pages = [page for request in requests for page in driver.rows[request].pages[name]]
        first = grid.data_ptr() - arena.buffer.data_ptr()
        for page in pages:
            changed[first + page * grid.shape[1] : first + (page + 1) * grid.shape[1]] = False
    assert not changed.any()


def test_collecting_a_step_does_not_wait_for_the_next() -> None:
    driver = open_driver(tiny_folder("qwen3_moe"))
    runner = driver._runner
    request = driver.add(random_prompt(random.Random(0), 20), SAMPLING)
    driver.step({request: 20})
    row = driver.rows[request]
    plan = driver._plan([row], [1], {})
    runner.run(plan)  # compiled and loaded
    handle = runner.launch(plan)
    torch.cuda._sleep(int(2e9))  # about a second of the stream behind the step
    started = time.perf_counter()
    result = runner.collect(handle)
    waited = time.perf_counter() - started
    torch.cuda.synchronize()
    slept = time.perf_counter() - started
    assert result.num_new.tolist() == [1]
    assert slept > 0.4
    assert waited < slept / 4


def test_launching_does_not_wait_for_the_device() -> None:
    driver = open_driver(tiny_folder("qwen3_5_moe", window=48), captured=True)
    runner = driver._runner
    sampling = SamplingParams(
        max_tokens=64, temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.2, logprobs=3,
        logit_bias=((5, 1.0),), min_tokens=3,
    )  # fmt: skip
    requests = [driver.add(random_prompt(random.Random(n), n), sampling) for n in (20, 33)]
    driver.step(dict.fromkeys(requests, 20))
    rows = [driver.rows[request] for request in requests]
    mixed = driver._plan(rows, [1, 13], {1: np.full(9, -1, dtype=np.int32)})
    runner.run(mixed)
    decode = replace(mixed, query_len=np.array([1, 1]), token_ids=np.array([7, 8]), num_decode_rows=2)
    runner.run(decode)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))
    started = time.perf_counter()
    handles = [runner.launch(mixed), runner.launch(decode)]
    launched = time.perf_counter() - started
    for handle in handles:
        runner.collect(handle)
    took = time.perf_counter() - started
    assert took > 0.4
    assert launched < took / 2


def first_answers(driver: PlanDriver, prompts: list[list[int]], num_new: int) -> list[list[TokenLogprobs]]:
    """All prompts at once, each whole, then decoded together."""
    requests = [driver.add(prompt, SAMPLING) for prompt in prompts]
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    for _ in range(num_new):
        plan, result = driver.step({r: driver.rows[r].num_pending for r in requests})
        for place, request in enumerate(plan.requests.tolist()):
            found[requests.index(request)].append(result.logprobs[place][0])
    for request in requests:
        driver.remove(request)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "window"), CASES)
def test_deterministic_mode_gives_the_same_bits_in_any_company(family: str, window: int, dtype: str) -> None:
    driver = open_driver(
        tiny_folder(family, window=window),
        captured=True,
        arena_bytes=1 << 26,
        dtype=dtype,
        deterministic=True,
        max_running=64,
    )
    prompts = [random_prompt(random.Random(n), n) for n in [1, 15, 17, 64, 65, 140, 300, *range(20, 77)]]
    alone = [first_answers(driver, [prompt], 6)[0] for prompt in prompts[:7]]
    for batch in (2, 7, 64):
        assert first_answers(driver, prompts[:batch], 6)[:7] == alone[:batch], batch
    rng = random.Random(3)
    for _ in range(3):  # other chunks, another order of arrival
        found = run_mixed(driver, prompts[:7], rng)
        assert [answer[:6] for answer in found.values()] == alone
        for request in found:
            driver.remove(request)
    print(
        f"\n{family} window={window} {dtype}: batch 1, 2, 7, 64, chunks and order of arrival give the same bits"
    )


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4", "mxfp4"])
def test_random_weights_of_every_format_answer(format: str, tmp_path: Path) -> None:
    import json

    from benchmarks.shapes import shape_config

    model = "gpt-oss-20b" if format == "mxfp4" else "qwen3.5-35b-a3b"
    facts = {**shape_config(model, format), "num_hidden_layers": 4, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    driver = open_driver(
        tmp_path, captured=True, arena_bytes=1 << 30, dtype="bfloat16", load="random", page_tokens=64
    )
    found = first_answers(driver, [random_prompt(random.Random(n), n) for n in (3, 70)], 4)
    for answer in found:
        for said in answer:
            assert np.isfinite([said.logprob, *(value for _, value in said.top)]).all()


def test_the_arena_takes_what_the_largest_step_leaves() -> None:
    config = WorkerConfig(
        model=str(tiny_folder("qwen3_5_moe")), device="cuda", max_running=8, max_step_tokens=512
    )
    free, _ = torch.cuda.mem_get_info()
    engine = NativeEngine(config)
    try:
        arena_bytes = engine.snapshot().headroom.arena_bytes
        left, _ = torch.cuda.mem_get_info()
        assert arena_bytes > 0.9 * free
        assert left > 100 << 20
        extra = engine.snapshot().extra
        assert extra["graph.eager_decode_steps"] == 0
    finally:
        engine.close()
