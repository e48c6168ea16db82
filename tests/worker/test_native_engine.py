"""The native engine with real tiny models, and what only a whole engine can show: stalls, departures, recordings."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
import weakref
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo.tiny import FAMILIES
from memory.api import PageSpec
from tests.helpers.eventually import eventually
from tests.helpers.fake_runner import FakeRunner, full_spec, state_spec, window_spec
from tests.helpers.tiny import tiny_folder
from worker.api import Engine, FinishReason, GenerateRequest, Grammar, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.engines.transformers import TransformersEngine
from worker.errors import ConfigError, EngineDead, PromptTooLong
from worker.loop import EngineLoop
from worker.scheduling.ledgers import make_ledger
from worker.scheduling.limits import Limits
from worker.scheduling.recording import StepRecorder, read_steps, replay
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import StepPlan, StepResult

LENGTHS = (1, 2, 17, 64, 65, 130, 200)
SEEDS = {"qwen3_5_moe": 4, "qwen3_5": 0, "qwen3_moe": 7, "gpt_oss": 2}
"""Prompts with which no router and no greedy choice of these weights is nearer than 1e-4: at a nearer tie two correct
computations may take different experts."""
FAKE_SPECS = (full_spec(), window_spec(40), state_spec())


def config(folder: Path | None = None, **options: Any) -> WorkerConfig:
    """A small engine on a CPU."""
    model = str(folder or tiny_folder())
    return WorkerConfig(
        **{"model": model, "device": "cpu", "arena_bytes": 1 << 26, "page_tokens": 16, **options}
    )


def on_fake_runner(arena_bytes: int = 1 << 20, **options: Any) -> NativeEngine:
    """The engine without a model."""
    settings = WorkerConfig(model="fake", arena_bytes=arena_bytes, **options)
    return NativeEngine(settings, lambda _: FakeRunner(FAKE_SPECS), audit=True)


async def read(engine: Engine, request_id: str) -> TokenEvent:
    """All events of a request as one."""
    merged: TokenEvent | None = None
    async for event in engine.stream(request_id):
        merged = event if merged is None else merged.merged_with(event)
    assert merged is not None
    return merged


def answers(engine: Engine, requests: list[GenerateRequest]) -> list[TokenEvent]:
    """Submits all at once."""

    async def all_of_them() -> list[TokenEvent]:
        for request in requests:
            engine.submit(request)
        return await asyncio.gather(*(read(engine, request.request_id) for request in requests))

    return asyncio.run(all_of_them())


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    """One of each length."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(11, 267) for _ in range(length)) for length in LENGTHS]


def greedy(name: str, prompt: tuple[int, ...], **more: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **more})
    return GenerateRequest(name, prompt, sampling)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_the_oracles_however_prompts_are_cut_and_batched(family: str) -> None:
    folder = tiny_folder(family, window=24 if family == "qwen3_5" else 0)
    requests = [greedy(f"r{n}", prompt, logprobs=1) for n, prompt in enumerate(prompts(SEEDS[family]))]
    with closing(TransformersEngine(config(folder))) as oracle:
        right = answers(oracle, requests)
    for options in ({"max_step_tokens": 40, "max_running": 4}, {"max_step_tokens": 2048}):
        with closing(NativeEngine(config(folder, **options), audit=True)) as engine:
            found = answers(engine, requests)
        for have, want in zip(found, right, strict=True):
            assert have.token_ids == want.token_ids
            gaps = [abs(a.logprob - b.logprob) for a, b in zip(have.logprobs, want.logprobs, strict=True)]
            assert max(gaps) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_short_memory_shared_prefixes_and_retractions_change_no_token(family: str) -> None:
    folder = tiny_folder(family)
    start = prompts(5)[-1]
    requests = [
        greedy(f"r{n}", (*start[: 40 * n], *prompt), max_tokens=60) for n, prompt in enumerate(prompts(1)[:5])
    ]
    with closing(NativeEngine(config(folder, prefix_cache=False, max_running=1), audit=True)) as engine:
        alone = [event.token_ids for event in answers(engine, requests)]
        specs = tuple(engine._ledger.specs.values())
    with closing(NativeEngine(config(folder), audit=True)) as engine:
        assert [[event.token_ids for event in answers(engine, requests)] for _ in range(2)] == [alone, alone]
        assert engine.snapshot().cached_tokens >= 256
    small = {"max_step_tokens": 64}
    tight = next(b for b in range(1 << 16, 1 << 24, 1 << 14) if _fits(specs, config(folder, **small), b, 300))
    with closing(NativeEngine(config(folder, arena_bytes=int(1.3 * tight), **small), audit=True)) as engine:
        engine._scheduler._admission.forecast.fraction = 0.0
        unsure = [
            GenerateRequest(r.request_id, r.prompt_token_ids, SamplingParams(
                temperature=0.0, max_tokens=60, logit_bias=((4, -100.0), (2, -100.0))
            )) for r in requests
        ]  # fmt: skip
        first = answers(engine, unsure)
        again = answers(engine, requests)
        counts = engine.snapshot()
    assert [event.token_ids for event in again] == alone
    assert counts.num_retractions > 0
    assert all(event.finish_reason is FinishReason.LENGTH for event in first)


def _fits(specs: tuple[PageSpec, ...], settings: WorkerConfig, arena_bytes: int, num_tokens: int) -> bool:
    return make_ledger(settings, specs, arena_bytes).can_ever_grant(num_tokens) is None


def _send_back_now_and_then(engine: NativeEngine) -> None:
    """Retracts the latest row every fifth step."""
    scheduler, steps = engine._scheduler, iter(range(1, 1 << 30))
    schedule = scheduler.schedule

    def disturbed(step: int) -> StepPlan:
        taken = scheduler.rows.taken()
        if next(steps) % 5 == 0 and len(taken) > 1:
            scheduler.running.send_back(int(taken[-1]))
        return schedule(step)

    scheduler.schedule = disturbed  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_deterministic_answers_are_the_same_bits_however_they_came_about(family: str) -> None:
    """Alone; batched in small chunks; behind cached prefixes; sent back now and then."""
    folder, start = tiny_folder(family), prompts(3)[-1]
    requests = [
        greedy(f"r{n}", (*start[: 30 * n], *prompt), logprobs=2) for n, prompt in enumerate(prompts(3)[2:])
    ]
    found = {}
    for case, options in {
        "alone": {"max_running": 1, "prefix_cache": False},
        "chunks": {"max_step_tokens": 100},
        "cached": {},
        "sent back": {"prefix_cache": False},
    }.items():
        settings = config(folder, deterministic=True, num_threads=1, **options)
        with closing(NativeEngine(settings, audit=True)) as engine:
            if case == "sent back":
                _send_back_now_and_then(engine)
            events = answers(engine, requests)
            if case == "cached":
                events = answers(engine, requests)
            seen = engine.snapshot()
        found[case] = [(event.token_ids, event.logprobs) for event in events]
        assert (seen.num_retractions > 3) == (case == "sent back")
        assert (seen.cached_tokens > 500) == (case == "cached")
    assert all(answer == found["alone"] for answer in found.values())


def test_recorded_steps_replay_bit_for_bit_on_a_fresh_runner(tmp_path: Path) -> None:
    from worker.execution.runner import ModelRunner

    settings = config(max_step_tokens=64)
    path = tmp_path / "steps"
    with StepRecorder(path) as record:
        engine = NativeEngine(settings, record=record)
        with closing(engine):
            answers(engine, [greedy(f"r{n}", prompt, logprobs=2) for n, prompt in enumerate(prompts())])
    runner = ModelRunner(settings)
    runner.attach_memory(runner.page_specs, settings.arena_bytes)
    count = 0
    for then, now in replay(read_steps(path), runner):
        assert (then.result.token_ids == now.token_ids).all()
        assert then.result.logprobs == now.logprobs
        count += 1
    assert count > 24


def test_a_real_runner_gives_the_same_tokens_one_step_ahead() -> None:
    """Overlapped, as on a GPU: a plan's newest tokens are still with the runner (-1), rows end a step late."""
    from worker.execution.runner import ModelRunner

    settings = config(max_step_tokens=64, max_running=4)
    requests = [greedy(f"r{n}", prompt, max_tokens=12 + n) for n, prompt in enumerate(prompts())]
    with closing(NativeEngine(settings)) as engine:
        right = {event.request_id: event.token_ids for event in answers(engine, requests)}
    runner = ModelRunner(settings)
    runner.attach_memory(runner.page_specs, settings.arena_bytes)
    ledger = make_ledger(settings, runner.page_specs, settings.arena_bytes)
    scheduler = Scheduler(ledger, Limits(4, 64, 4096, runner.model_info.eos_token_ids))
    loop = EngineLoop(scheduler, ledger, runner, overlap=True, audit=True)
    found: dict[str, list[int]] = {}
    for request in requests:
        # A stop only the host sees: the step in flight carries the row past it.
        cut = right[request.request_id][8]
        scheduler.submit(replace(request, sampling=replace(request.sampling, stop_token_ids=(cut,))))
        found[request.request_id] = []
    while loop.has_work:
        for event in loop.step():
            found[event.request_id] += event.token_ids
    for name, tokens in found.items():
        want = list(right[name])
        assert tokens == want[: want.index(want[8]) + 1]
    loop.settle()
    assert all(kind.used_bytes == kind.pending_bytes == 0 for kind in ledger.headroom().kinds.values())


def test_paged_experts_trade_with_kept_prefixes_unless_their_bytes_are_fixed() -> None:
    requests = [greedy(f"r{n}", prompt) for n, prompt in enumerate(prompts(SEEDS["qwen3_5_moe"])[:4])]
    for options, trades in (
        ({}, True),
        ({"expert_bytes": 1 << 16}, False),
        ({"memory_mode": "split"}, False),
    ):
        with closing(NativeEngine(config(experts="paged", **options), audit=True)) as engine:
            answers(engine, requests)
            assert engine._experts is not None
            assert (engine._experts._trader is not None) == trades


def test_a_grammar_holds_the_output() -> None:
    with closing(NativeEngine(config(), audit=True)) as engine:
        bound = GenerateRequest(
            "a", (20, 30), SamplingParams(max_tokens=30), grammar=Grammar("regex", "[ab]{3}x")
        )
        free = greedy("b", (20, 30))
        found, other = answers(engine, [bound, free])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    assert re.fullmatch("[ab]{3}x", tokenizer.decode(list(found.token_ids), skip_special_tokens=True))
    assert found.finish_reason is FinishReason.STOP
    assert len(other.token_ids) == 24


def test_an_arena_smaller_than_the_context_is_said_and_held() -> None:
    with closing(on_fake_runner(arena_bytes=12_000, max_step_tokens=64)) as engine:
        limit = engine.model.max_model_len
        assert 100 < limit < 8192
        (last,) = answers(engine, [greedy("a", tuple(range(20, 120)), max_tokens=limit - 100)])
        assert len(last.token_ids) == limit - 100
        with pytest.raises(PromptTooLong, match=f"arena of .* holds {limit}"):
            engine.submit(greedy("b", tuple(range(20, 120)), max_tokens=limit - 99))


def test_an_arena_for_nothing_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="arena_bytes"):
        on_fake_runner(arena_bytes=512)


@pytest.mark.parametrize("experts", ["resident", "paged"])
def test_a_closed_engine_holds_no_weights_and_no_arena(experts: str) -> None:
    engine = NativeEngine(config(experts=experts))
    runner: Any = engine._runner
    held = {
        "arena": weakref.ref(runner.arena.buffer),
        "embedding": weakref.ref(runner._model.decoder._embedding),
        "pager": weakref.ref(runner.pager) if runner.pager is not None else lambda: None,
    }
    assert held["arena"]() is not None
    del runner
    engine.close()
    engine.close()
    gc.collect()
    assert [name for name, find in held.items() if find() is not None] == []
    assert engine.model.vocab_size
    assert engine.snapshot().num_running == 0
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(GenerateRequest("late", (1, 2), SamplingParams()))


class _Stalling(FakeRunner):
    def launch(self, plan: StepPlan) -> StepResult:
        if self.stalled.is_set():
            self.go_on.wait()
        return super().launch(plan)

    def __init__(self, stalled: Any, go_on: Any) -> None:
        super().__init__(FAKE_SPECS)
        self.stalled, self.go_on = stalled, go_on


def test_a_step_that_stands_still_is_reported_and_idling_is_not() -> None:
    import threading

    stalled, go_on = threading.Event(), threading.Event()
    settings = WorkerConfig(model="fake", arena_bytes=1 << 20, stall_timeout_s=0.5)
    with closing(NativeEngine(settings, lambda _: _Stalling(stalled, go_on))) as engine:
        time.sleep(0.7)
        engine.check_health()  # idle
        stalled.set()
        try:
            began = time.monotonic()
            engine.submit(greedy("a", (1, 2, 3)))

            def is_dead() -> bool:
                try:
                    engine.check_health()
                except EngineDead as dead:
                    return "has not advanced" in str(dead)
                return False

            eventually(is_dead)
            assert time.monotonic() - began >= 0.5, "no sooner than it may"
            assert engine.snapshot().num_running + engine.snapshot().num_waiting == 1, (
                "a stalled step blocks nobody"
            )
        finally:
            go_on.set()
        asyncio.run(read(engine, "a"))
        engine.check_health()


def test_a_long_run_with_readers_that_leave_ends_with_an_empty_ledger() -> None:
    rng = random.Random(3)

    async def client(engine: NativeEngine, number: int) -> None:
        turn = 0
        while engine.snapshot().num_steps < 800:
            turn += 1
            name, leave = f"c{number}.{turn}", rng.random()
            prompt = tuple(rng.randrange(250) for _ in range(rng.choice((1, 20, 130))))
            engine.submit(
                greedy(name, prompt, max_tokens=rng.choice((1, 30, 90)), ignore_eos=rng.random() < 0.5)
            )
            async with aclosing(engine.stream(name)) as stream:  # type: ignore[type-var]
                if leave < 0.1:
                    continue
                async for event in stream:
                    if leave < 0.4 and event.num_generated > 5:
                        break
                    if leave > 0.9:
                        engine.abort(name)

    async def all_of_them(engine: NativeEngine) -> None:
        await asyncio.gather(*(client(engine, number) for number in range(12)))

    with closing(on_fake_runner(arena_bytes=60_000, max_running=6, max_step_tokens=64)) as engine:
        asyncio.run(all_of_them(engine))
        snapshot = eventually(engine.snapshot, lambda seen: not seen.num_running + seen.num_waiting)
    kinds = snapshot.headroom.kinds.values()
    assert all(kind.used_bytes == kind.pending_bytes == 0 for kind in kinds), snapshot.headroom
    assert snapshot.num_submitted == snapshot.num_finished + snapshot.num_aborted
    assert min(snapshot.num_finished, snapshot.num_aborted) > 20
