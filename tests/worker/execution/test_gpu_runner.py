"""The runner on a GPU: graphs against eager steps, padding that leaves no trace, no waits, random weights, memory."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import random_prompt, run_mixed
from worker.api import SamplingParams, TokenLogprobs
from worker.config import WorkerConfig
from worker.execution.runner import ModelRunner
from worker.execution.warm_up import MARGIN_BYTES

pytestmark = pytest.mark.gpu

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


def graph_steps(driver: PlanDriver, kind: str = "decode") -> tuple[float, float]:
    """(replayed, eager) steps of a kind so far."""
    figures = driver._runner.figures
    return figures[f"graph.replayed_{kind}_steps"], figures[f"graph.eager_{kind}_steps"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "window"), [("qwen3_5_moe", 48), ("qwen3_moe", 0), ("gpt_oss", 0)])
def test_a_replayed_step_gives_the_bits_of_an_eager_one(
    family: str, window: int, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    folder = tiny_folder(family, window=window)
    prompts = [random_prompt(random.Random(n), n) for n in (1, 2, 15, 17, 64, 130, 300)]
    answers = []
    for replaying in (True, False):
        driver = open_driver(folder, captured=True, dtype=dtype)
        set_replaying(driver, replaying)
        answers.append(run_mixed(driver, prompts, random.Random(5)))
        counts = graph_steps(driver) + graph_steps(driver, "mixed")
        assert [count > 5 for count in counts] == [replaying, not replaying] * 2
    assert answers[0] == answers[1]
    record_property(
        "figure",
        f"{family}, {dtype}: {counts[1]:.0f} decode steps and {counts[3]:.0f} with chunks, captured or eager, have the"
        " same bits",
    )


def set_replaying(driver: PlanDriver, replaying: bool) -> None:
    graphs, mixed = driver._runner.graphs, driver._runner.mixed
    assert graphs is not None
    assert mixed is not None
    graphs.replaying = mixed.replaying = replaying


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_a_padded_step_answers_what_one_built_freshly_does(family: str) -> None:
    """Float32, where a row's own sums do not care for padding but for the library's products: nearly the same bits."""
    folder = tiny_folder(family, window=48 if family == "qwen3_5_moe" else 0)
    prompts = [random_prompt(random.Random(n), n) for n in (1, 15, 64, 130, 300)]
    answers = []
    for padded in (True, False):
        driver = open_driver(folder, captured=padded)
        if not padded:
            driver._runner.graphs = driver._runner.mixed = None
        answers.append(run_mixed(driver, prompts, random.Random(5)))
    for request, found in answers[0].items():
        for ours, theirs in zip(found, answers[1][request], strict=True):
            assert ours.token_id == theirs.token_id
            assert abs(ours.logprob - theirs.logprob) < 1e-3


def test_padding_rows_write_nothing() -> None:
    driver = open_driver(tiny_folder("qwen3_5_moe", window=48), captured=True)
    prompts = [random_prompt(random.Random(n), n) for n in (20, 30, 41)]
    requests = [driver.add(prompt, SAMPLING) for prompt in prompts]
    driver.step({request: len(prompts[i]) for i, request in enumerate(requests)})
    arena = driver._runner.arena
    before = arena.buffer.clone()
    driver.step(dict.fromkeys(requests, 1))  # three rows, padded to four
    assert graph_steps(driver)[0] > 0
    check_only_their_pages_changed(driver, requests, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_of_a_step_with_chunks_writes_nothing(dtype: str) -> None:
    driver = open_driver(tiny_folder("qwen3_5_moe", window=48), captured=True, dtype=dtype)
    requests = [driver.add(random_prompt(random.Random(n), n), SAMPLING) for n in (20, 31, 130, 260)]
    driver.step({requests[0]: 20, requests[1]: 30})
    before = driver._runner.arena.buffer.clone()
    # Two decode rows of 16, two rows with chunks of more, and 220 of 320 tokens.
    driver.step({requests[0]: 1, requests[1]: 1, requests[2]: 100, requests[3]: 120})
    assert graph_steps(driver, "mixed") == (2, 0)
    check_only_their_pages_changed(driver, requests, before)


def check_only_their_pages_changed(driver: PlanDriver, requests: list[int], before: torch.Tensor) -> None:
    arena = driver._runner.arena
    changed = arena.buffer != before
    for name, grid in arena.grids.items():
        pages = [page for request in requests for page in driver.rows[request].pages[name]]
        first = grid.data_ptr() - arena.buffer.data_ptr()
        for page in pages:
            changed[first + page * grid.shape[1] : first + (page + 1) * grid.shape[1]] = False
    assert not changed.any()


def test_collecting_a_step_does_not_wait_for_the_next(record_property: Callable[[str, object], None]) -> None:
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
    record_property(
        "figure", f"collecting a step beside {1e3 * slept:.0f} ms of later work took {1e3 * waited:.1f} ms"
    )


def test_launching_does_not_wait_for_the_device(record_property: Callable[[str, object], None]) -> None:
    # In bfloat16 and longer than what goes token by token: the library's chunked kernels are among the launches.
    driver = open_driver(tiny_folder("qwen3_5_moe", window=48), captured=True, dtype="bfloat16")
    runner = driver._runner
    sampling = SamplingParams(
        max_tokens=64, temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.2, logprobs=3,
        logit_bias=((5, 1.0),), min_tokens=3,
    )  # fmt: skip
    requests = [driver.add(random_prompt(random.Random(n), n), sampling) for n in (20, 160)]
    driver.step(dict.fromkeys(requests, 20))
    rows = [driver.rows[request] for request in requests]
    mixed = driver._plan(rows, [1, 140], {1: np.full(9, -1, dtype=np.int32)})
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
    record_property(
        "figure", f"launching two steps behind {1e3 * took:.0f} ms of work took {1e3 * launched:.1f} ms"
    )


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
    found = first_answers(driver, [random_prompt(random.Random(n), n) for n in (3, 60)], 4)
    for answer in found:
        for said in answer:
            assert np.isfinite([said.logprob, *(value for _, value in said.top)]).all()


def measured(**settings: object) -> tuple[int, int]:
    """Free bytes of the device behind a model, and those that an arena would get."""
    config = WorkerConfig(model=str(tiny_folder("qwen3_5_moe")), device="cuda", **settings)  # type: ignore[arg-type]
    runner = ModelRunner(config)
    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests left
    free, _ = torch.cuda.mem_get_info()
    found = runner.measure_arena_bytes()
    runner.attach_memory(runner.page_specs, 1 << 24)
    runner.capture_graphs()
    assert runner.graphs is not None
    return free, found


def test_the_arena_gets_what_the_largest_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    # What this process takes of the device; others may be at work on it.
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - torch.cuda.memory_reserved(), total))
    free, small = measured(max_running=8, max_step_tokens=512)
    assert MARGIN_BYTES < free - small < 8 << 30
    free, large = measured(max_running=256, max_step_tokens=32768)
    # The hidden states of 32,768 tokens are not for nothing.
    assert large < small - (64 << 20)
