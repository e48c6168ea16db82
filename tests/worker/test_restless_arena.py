"""The demo model in a small, restless arena: forced moves, retractions, lost prefixes, host round trips, aborts."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from memory.device.watch import ArenaWatch
from tests.helpers.disturb import LateLanes, disturb
from worker.api import GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
NUM_REQUESTS, NUM_ABORTED = 64, 8
Answers = dict[str, tuple[tuple[int, ...], Any]]


def config(device: str, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        **{
            "model": str(DEMO), "device": device, "page_tokens": 16, "max_step_tokens": 256, "max_model_len": 1024,
            "deterministic": True, "num_threads": 1, "arena_bytes": 64 << 20, **options,
        }
    )  # fmt: skip


@cache
def requests() -> tuple[GenerateRequest, ...]:
    """Eight beginnings shared by eight requests each; greedy and drawn by seed."""
    dice = random.Random(7)
    starts = [[dice.randrange(300, 4000) for _ in range(dice.choice((64, 130, 200)))] for _ in range(8)]
    found = []
    for number in range(NUM_REQUESTS):
        tail = [dice.randrange(300, 4000) for _ in range(dice.randrange(1, 70))]
        sampling = SamplingParams(
            max_tokens=dice.randrange(6, 22),
            temperature=number % 2 * 0.8,
            seed=number,
            logprobs=1,
            ignore_eos=True,
        )
        found.append(GenerateRequest(f"r{number}", (*starts[number % 8], *tail), sampling))
    return tuple(found)


def answers(engine: NativeEngine, aborted: int = 0) -> Answers:
    """All requests at once; the last ``aborted`` ones are given up after a few tokens."""

    async def read(request: GenerateRequest, most: int) -> TokenEvent:
        merged: TokenEvent | None = None
        async for event in engine.stream(request.request_id):
            merged = event if merged is None else merged.merged_with(event)
            if merged.num_generated >= most:
                engine.abort(request.request_id)
        assert merged is not None
        return merged

    async def all_of_them() -> list[TokenEvent]:
        for request in requests():
            engine.submit(request)
        limits = [99] * (NUM_REQUESTS - aborted) + [3] * aborted
        return await asyncio.gather(*map(read, requests(), limits))

    return {event.request_id: (event.token_ids, event.logprobs) for event in asyncio.run(all_of_them())}


@cache
def undisturbed(device: str) -> Answers:
    """One at a time in ample memory, nothing shared."""
    with closing(NativeEngine(config(device, max_running=1, prefix_cache=False))) as engine:
        return answers(engine)


def check(found: Answers, expected: Answers) -> None:
    """Bit for bit; those given up have a beginning of the right answer."""
    for number, name in enumerate(expected):
        tokens, logprobs = found[name]
        right, right_logprobs = expected[name]
        if number < NUM_REQUESTS - NUM_ABORTED:
            assert len(tokens) == len(right), name
        assert tokens == right[: len(tokens)], name
        assert logprobs == right_logprobs[: len(tokens)], name


def run_disturbed(device: str, case: str) -> None:
    options = {"arena_bytes": 12 << 20, "host_tier_bytes": 16 << 20, "max_running": 12}
    lanes = LateLanes() if case == "late" else None
    with closing(NativeEngine(config(device, **options), audit=True)) as engine:
        arena = engine._runner.arena  # type: ignore[attr-defined]
        disturb(engine, seed=3, lanes=lanes)
        if case == "watched":
            arena.watch = ArenaWatch(arena)
        found = answers(engine, aborted=NUM_ABORTED)
        seen, report = engine.snapshot(), engine.arena_report()
        engine.check_health()
    check(found, undisturbed(device))
    assert seen.num_aborted == NUM_ABORTED
    assert seen.num_retractions > 5
    assert seen.cached_tokens > 500
    assert min(report["moves"]["num_beside"], report["moves"]["num_between"]) > 50
    assert report["host_tier"]["brought_back_bytes"] > 1 << 20
    if case == "watched":
        assert min(arena.watch.num_moves, arena.watch.num_copies, arena.watch.num_poisoned) > 100
    if lanes is not None:
        assert lanes.num_late > 50, "no lane was late"


@pytest.mark.parametrize("case", ["watched", "late"])
def test_no_disturbance_of_memory_changes_a_bit(case: str) -> None:
    run_disturbed("cpu", case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["watched", "beside"])
def test_no_disturbance_of_memory_changes_a_bit_on_a_gpu(case: str) -> None:
    run_disturbed("cuda", case)
