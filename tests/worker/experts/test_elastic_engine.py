"""Elastic expert places in the whole engine: bursts take them, the end gives them back, the floor stays, bits stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from memory.device.residency import Lane
from tests.helpers.paging import replay_steps, same_results
from tests.helpers.quantized import converted_folder
from tests.helpers.scheduling import optimist
from worker.api import GenerateRequest, SamplingParams, WorkerSnapshot
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.runner import ModelRunner
from worker.models.paged import table_experts
from worker.scheduling.recording import RecordedStep

DEMO = Path(__file__).parents[3] / "demo" / "model"
ARENA = 14_000_000


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 37 + i * 11) % 3000 + 20 for i in range(length))


class Stage:
    """One engine under waves of requests; remembers its steps, and the usable places after each wave."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.steps: list[RecordedStep] = []
        self.places: list[int] = []
        self.snapshot: WorkerSnapshot | None = None
        self.engine = NativeEngine(config, audit=True, record=self._note)
        pager = self.engine._runner.pager
        assert pager is not None
        self.pager = pager
        assert self.engine._experts is not None
        self.floor = self.engine._experts.floor_places

    def _note(self, plan, result) -> None:
        self.steps.append(RecordedStep(plan, result))
        self.places.append(self.pager.num_places)

    async def wave(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        async def one(number: int, tokens_of: tuple[int, ...]) -> None:
            name = f"{len(self.steps)}.{number}"
            sampling = SamplingParams(
                max_tokens=tokens, temperature=0.6, seed=number, logprobs=2, ignore_eos=True
            )
            self.engine.submit(GenerateRequest(name, tokens_of, sampling))
            async for event in self.engine.stream(name):
                assert not event.error

        await asyncio.gather(*(one(n, p) for n, p in enumerate(prompts)))

    def check_bits(self) -> None:
        """Every recorded step gives the same with all experts resident."""
        steps = sorted(self.steps, key=lambda step: step.plan.step)
        runner = ModelRunner(replace(self.config, experts="resident", pass_tokens=0), table_experts)
        want = replay_steps(runner, steps, self.config.arena_bytes)
        assert same_results(want, [step.result for step in steps])


def settings(**options: int | bool | str) -> WorkerConfig:
    base = WorkerConfig(
        model=str(DEMO),
        device="cpu",
        arena_bytes=ARENA,
        num_threads=1,
        experts="paged",
        max_step_tokens=128,
        max_running=16,
    )
    return replace(base, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_tokens", [0, 256])
def test_a_burst_takes_places_and_its_end_gives_them_back(pass_tokens: int) -> None:
    """Chats, long prompts in a memory too short for all, chats: with prefix cache, host tier and chunked prefill."""
    stage = Stage(settings(pass_tokens=pass_tokens, host_tier_bytes=4_000_000))

    async def phases() -> list[int]:
        marks = []
        for _ in range(2):
            await stage.wave([prompt(n, 20) for n in range(2)], 12)
        marks.append(len(stage.places))
        await stage.wave([prompt(10 + n, 700 + 40 * n) for n in range(5)], 6)
        marks.append(len(stage.places))
        for _ in range(2):
            await stage.wave([prompt(n, 20) for n in range(2)], 12)
        return marks

    marks = asyncio.run(phases())
    stage.engine._ledger.audit()
    stage.engine.close()
    before = max(stage.places[: marks[0]])
    least = min(stage.places[marks[0] : marks[1]])
    after = max(stage.places[marks[1] :])
    assert stage.floor <= least < 0.7 * before, "the burst took no places"
    assert after > 1.2 * least, "nothing came back"
    assert stage.pager.residency.audit() == []
    counts = stage.pager.residency.counts.sum(1)
    assert counts[Lane.HIT] > 0
    assert (counts[Lane.STAGED] > 0) == bool(pass_tokens)
    stage.check_bits()


def test_requests_that_do_not_fit_are_sent_back_and_the_floor_stays() -> None:
    """Outputs far longer than forecast: retractions beside paging, down to the floor of places and never below."""
    stage = Stage(settings(arena_bytes=9_000_000, prefix_cache=False))

    async def phases() -> None:
        await stage.wave([prompt(n, 20) for n in range(4)], 2)
        await stage.wave([prompt(n, 60 + n) for n in range(8)], 220)

    asyncio.run(phases())
    snapshot = stage.engine.snapshot()
    stage.engine.close()
    assert snapshot.num_retractions > 0, "memory was never short"
    assert min(stage.places) >= stage.floor > 0
    stage.check_bits()


def test_deterministic_answers_do_not_depend_on_places_or_passes() -> None:
    """The same requests with everything resident, with a handful of places, and through passes: the same tokens."""
    answers = []
    folder = str(converted_folder("qwen3_5_moe", "int4"))
    for options in (
        {"experts": "resident"},
        {"experts": "paged", "expert_bytes": 24576 * 4},
        {"experts": "paged", "pass_tokens": 192},
    ):
        config = WorkerConfig(
            model=folder,
            device="cpu",
            arena_bytes=1 << 21,
            num_threads=1,
            max_step_tokens=128,
            deterministic=True,
            **options,  # type: ignore[arg-type]
        )
        make = (
            (lambda given: ModelRunner(given, table_experts)) if config.experts == "resident" else ModelRunner
        )
        engine = NativeEngine(config, make, audit=True)

        async def ask(engine: NativeEngine) -> list[list[int]]:
            async def one(n: int) -> list[int]:
                sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=n, ignore_eos=True)
                tokens = tuple((n * 37 + i * 11) % 230 + 20 for i in range(70 + 9 * n))
                engine.submit(GenerateRequest(f"{n}", tokens, sampling))
                return [t async for event in engine.stream(f"{n}") for t in event.token_ids]

            return await asyncio.gather(*(one(n) for n in range(4)))

        answers.append(asyncio.run(ask(engine)))
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def test_deterministic_answers_survive_a_memory_that_is_too_small() -> None:
    """Places that requests take, prompts by passes, prefixes found again, requests sent back, a host tier, all at once:
    the tokens of everything resident in a memory for all."""
    folder = str(converted_folder("qwen3_5_moe", "int4"))
    answers, retractions, found = [], [], []
    crowded = {"experts": "paged", "pass_tokens": 192, "arena_bytes": 150_000, "host_tier_bytes": 1 << 19}
    for options in ({"experts": "resident", "arena_bytes": 1 << 22}, crowded):
        config = WorkerConfig(
            model=folder,
            device="cpu",
            num_threads=1,
            max_step_tokens=128,
            max_running=6,
            deterministic=True,
            **options,  # type: ignore[arg-type]
        )
        make = (
            (lambda given: ModelRunner(given, table_experts)) if config.experts == "resident" else ModelRunner
        )
        engine = NativeEngine(config, make, audit=True)
        engine._scheduler._admission.forecast = optimist()

        async def ask(engine: NativeEngine) -> list[list[int]]:
            async def one(wave: int, n: int) -> list[int]:
                sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=n)
                tokens = tuple((n % 3 * 37 + i * 11) % 230 + 20 for i in range(100 + 9 * n))
                engine.submit(GenerateRequest(f"{wave}.{n}", tokens, sampling))
                return [t async for event in engine.stream(f"{wave}.{n}") for t in event.token_ids]

            waves = [
                await asyncio.gather(*(one(wave, n) for n in range(most))) for wave, most in enumerate((3, 1))
            ]
            return [tokens for wave in waves for tokens in wave]

        answers.append(asyncio.run(ask(engine)))
        retractions.append(engine.snapshot().num_retractions)
        found.append(engine.snapshot().cached_tokens)
        engine.close()
    assert answers[0] == answers[1]
    assert retractions[0] == 0 < retractions[1], "memory was never short"
    assert found[1] > 0, "no prefix was found again"
