"""The fake engine: scripts, pace, limits, the simulated arena, and failures."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from demo.tiny import write_tokenizer
from tests.helpers.eventually import eventually, soon
from worker.api import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines import ENGINES
from worker.engines.fake import FakeEngine
from worker.engines.fake_script import FakeScript
from worker.errors import ConfigError, EngineDead, ModelLoadError, Overloaded, PromptTooLong


def fake(options: dict[str, Any] | None = None, **script: Any) -> Any:
    return closing(FakeEngine(WorkerConfig(**{"model": "fake", **(options or {})}), FakeScript(**script)))


async def read(
    engine: FakeEngine, name: str, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any
) -> TokenEvent:
    engine.submit(GenerateRequest(name, prompt, SamplingParams(**sampling)))
    merged = TokenEvent(name)
    async for event in engine.stream(name):
        merged = merged.merged_with(event)
    return merged


def answer(engine: FakeEngine, **sampling: Any) -> tuple[int, ...]:
    return asyncio.run(read(engine, "a", **sampling)).token_ids


def test_each_output_follows_its_rule() -> None:
    for script, expected in (
        (FakeScript(output="echo"), (5, 6, 7, 5, 6)),
        (FakeScript(output="count", vocab_size=10), (8, 9, 0, 1, 2)),
        (FakeScript(output="script", token_ids=(3, 1)), (3, 1, 3, 1, 3)),
    ):
        with closing(FakeEngine(WorkerConfig(model="fake"), script)) as engine:
            assert answer(engine, max_tokens=5) == expected


def test_an_answer_of_scripted_length_ends_with_the_models_end_token() -> None:
    with fake(answer_tokens=2, eos_token_ids=(9,)) as engine:
        event = asyncio.run(read(engine, "a", max_tokens=10))
        assert (event.token_ids, event.finish_reason, event.stop_token_id) == (
            (5, 6, 9),
            FinishReason.STOP,
            9,
        )
        assert answer(engine, max_tokens=4, ignore_eos=True) == (5, 6, 7, 5)


def test_the_folder_brings_the_script_and_the_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "fake.json").write_text(json.dumps({"output": "script", "token_ids": [266, 12]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    with closing(
        ENGINES.load("fake")(WorkerConfig(model=str(tmp_path), engine="fake", max_model_len=99))
    ) as engine:
        assert answer(engine, max_tokens=3) == (266, 12, 266)
        model = engine.model
        assert (model.name, model.vocab_size, model.eos_token_ids) == (tmp_path.name, 267, (4, 2))
        assert model.max_model_len == 99


def test_a_script_with_mistakes_is_refused_with_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text('{"output": "sing", "tokens_per_s": -1, "first_token_s": "soon"}')
    with pytest.raises(ConfigError) as caught:
        FakeEngine(WorkerConfig(model=str(tmp_path)))
    assert all(
        word in str(caught.value) for word in ("output='sing'", "tokens_per_s=-1", "first_token_s='soon'")
    )
    (tmp_path / "fake.json").write_text('{"tokens_per_second": 3}')
    with pytest.raises(ConfigError, match="unknown field 'tokens_per_second'"):
        FakeEngine(WorkerConfig(model=str(tmp_path)))
    (tmp_path / "fake.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"fake\.json"):
        FakeEngine(WorkerConfig(model=str(tmp_path)))


def test_the_first_token_and_the_pace_are_as_scripted() -> None:
    async def stamps(engine: FakeEngine) -> list[float]:
        started = time.monotonic()
        engine.submit(GenerateRequest("a", (1,) * 100, SamplingParams(max_tokens=5)))
        return [time.monotonic() - started async for _ in engine.stream("a")]

    def is_as_scripted() -> bool:
        with fake(first_token_s=0.1, prefill_tokens_per_s=1000.0, tokens_per_s=20.0) as engine:
            first, *_, last = asyncio.run(stamps(engine))
        assert first >= 0.2  # 0.1 s and 100 tokens at 1,000 a second
        assert last >= 0.4  # four more at 20 a second, without drift
        return first < 0.3 and last < 0.5

    assert any(is_as_scripted() for _ in range(8)), "a busy machine is late, but not always"


def test_requests_beyond_the_batch_wait_their_turn() -> None:
    async def both(engine: FakeEngine) -> tuple[TokenEvent, TokenEvent]:
        reads = [
            asyncio.create_task(read(engine, name, max_tokens=m)) for name, m in (("a", 3000), ("b", 10))
        ]
        await soon(lambda: (engine.snapshot().num_running, engine.snapshot().num_waiting) == (1, 1))
        await asyncio.sleep(0.1)
        assert engine.snapshot().num_waiting == 1
        engine.abort("a")
        return tuple(await asyncio.gather(*reads))  # type: ignore[return-value]

    with fake({"max_running": 1}, tokens_per_s=100.0) as engine:
        first, second = asyncio.run(both(engine))
        assert first.timeline is not None
        assert second.timeline is not None
        assert second.timeline.scheduled_s >= first.timeline.finished_s - 0.01
        assert engine.snapshot().queue_wait_s > 0.02


def test_a_full_arena_sends_the_latest_back_and_changes_no_token() -> None:
    async def three(engine: FakeEngine) -> list[TokenEvent]:
        reads = [read(engine, name, prompt=(1, 2, 3, int(name)), max_tokens=16) for name in "456"]
        return list(await asyncio.gather(*reads))

    with fake(tokens_per_s=500.0, bytes_per_token=10, arena_bytes=400) as engine:
        events = asyncio.run(three(engine))
        snapshot = engine.snapshot()
    for event, number in zip(events, (4, 5, 6), strict=True):
        assert event.token_ids == (1, 2, 3, number) * 4
    assert snapshot.num_retractions >= 1
    assert snapshot.retraction_rate > 0
    retractions = [event.timeline.num_retractions for event in events if event.timeline]
    assert sum(retractions) == snapshot.num_retractions
    assert retractions[0] == 0, "the oldest request keeps its pages"
    assert (snapshot.headroom.arena_bytes, snapshot.headroom.available_bytes) == (400, 400)


def test_headroom_shrinks_while_a_request_runs_and_what_never_fits_is_refused() -> None:
    async def running(engine: FakeEngine) -> None:
        engine.submit(GenerateRequest("a", (1,) * 10, SamplingParams(max_tokens=20)))
        events = engine.stream("a")
        first = await anext(events)
        headroom = engine.snapshot().headroom
        assert headroom.kinds["full"].used_bytes >= 10 * (10 + first.num_generated)
        assert headroom.available_bytes == 400 - headroom.kinds["full"].used_bytes
        await events.aclose()

    with fake(tokens_per_s=100.0, bytes_per_token=10, arena_bytes=400) as engine:
        asyncio.run(running(engine))
        with pytest.raises(PromptTooLong, match="needs 41 tokens, but the arena holds 40"):
            engine.submit(GenerateRequest("b", (1,) * 30, SamplingParams(max_tokens=11)))


def test_a_stall_is_noticed_and_a_slow_first_token_is_not_one() -> None:
    def complaint(engine: FakeEngine) -> str:
        try:
            engine.check_health()
        except EngineDead as dead:
            return str(dead)
        return ""

    asked = GenerateRequest("a", (1,), SamplingParams(max_tokens=9))
    with fake({"stall_timeout_s": 0.5}, stall_after_tokens=3) as engine:
        engine.submit(asked)
        assert "not advanced" in eventually(lambda: complaint(engine))
        assert engine.snapshot().generated_tokens == 3
        engine.abort("a")
        engine.check_health()  # no work, no stall
    with fake({"stall_timeout_s": 0.5}, first_token_s=60.0) as engine:
        engine.submit(asked)
        time.sleep(0.7)
        # A loop that had no turn on a busy machine looks like one that stands still, until it turns again.
        eventually(lambda: not complaint(engine), within_s=10.0)


def test_what_was_said_before_a_scripted_death_is_heard() -> None:
    # All tokens are due at once, so that the loop dies within the step that says them.
    with fake(die_after_tokens=3, tokens_per_s=1e6) as engine:
        event = asyncio.run(read(engine, "a", max_tokens=10))
    assert (event.token_ids, event.num_generated, event.finish_reason) == ((5, 6, 7), 3, FinishReason.ERROR)
    assert "scripted death after 3 tokens" in event.error


def test_a_full_queue_is_refused_by_number() -> None:
    with fake({"max_running": 1, "max_waiting": 1}, first_token_s=60.0) as engine:
        engine.submit(GenerateRequest("a", (1,)))
        eventually(lambda: engine.snapshot().num_running)
        engine.submit(GenerateRequest("b", (1,)))
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            engine.submit(GenerateRequest("c", (1,)))


def test_a_thousand_streams_cost_little_and_keep_their_pace() -> None:
    async def all_of_them(engine: FakeEngine) -> float:
        started = time.monotonic()
        await asyncio.gather(*(read(engine, f"r{n}", max_tokens=20) for n in range(1000)))
        return time.monotonic() - started

    def took_s() -> float:
        with fake({"max_running": 1000}, tokens_per_s=20.0) as engine:
            before = time.process_time()
            took = asyncio.run(all_of_them(engine))
            assert time.process_time() - before < 2.5, "20,000 tokens cost about 0.3 s here"
        return took

    assert any(took_s() < 4.0 for _ in range(10))  # 19 gaps of 50 ms are 0.95 s


def test_the_fake_engine_loads_no_torch() -> None:
    code = "import sys, worker.engines.fake; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cached_prefixes_shorten_the_first_token_and_are_counted() -> None:
    prompt = tuple(range(200))

    with fake(prefix_blocks=8, prefill_tokens_per_s=1000.0, vocab_size=256) as engine:
        first = asyncio.run(read(engine, "a", prompt, max_tokens=1)).timeline
        second = asyncio.run(read(engine, "b", prompt, max_tokens=1)).timeline
        assert first is not None
        assert second is not None
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
        assert second.first_token_s - second.scheduled_s < first.first_token_s - first.scheduled_s - 0.1
        assert engine.snapshot().cached_tokens == 192
        salted = GenerateRequest("c", prompt, SamplingParams(max_tokens=1), cache_salt="other")
        engine.submit(salted)
        (event,) = asyncio.run(_all(engine, "c"))
        assert event.timeline is not None
        assert event.timeline.num_cached_tokens == 0
        for number in range(4):  # 3 blocks each: the first prompt's are given up
            asyncio.run(read(engine, "d", tuple((7 * n + number) % 256 for n in range(200)), max_tokens=1))
        again = asyncio.run(read(engine, "e", prompt, max_tokens=1)).timeline
        assert again is not None
        assert again.num_cached_tokens == 0


async def _all(engine: FakeEngine, name: str) -> list[TokenEvent]:
    return [event async for event in engine.stream(name)]


def test_resident_experts_are_reported_and_misses_counted() -> None:
    experts = {
        "num_layers": 3,
        "num_experts": 10,
        "experts_per_token": 2,
        "resident_experts": 4,
        "expert_bytes": 100,
    }
    with fake(output="script", token_ids=(1, 1, 1, 2, 3, 1), vocab_size=16, **experts) as engine:
        assert engine.snapshot().experts is not None
        answer(engine, max_tokens=3)
        snapshot = engine.snapshot()
        assert (snapshot.expert_misses, snapshot.expert_hits) == (6, 12), "one token: its experts miss once"
        assert snapshot.expert_bytes_paged == 600
        residency = snapshot.experts
        assert residency is not None
        bits = int.from_bytes(residency.bits, "little")
        assert bits.bit_count() == 6
        assert [(bits >> (10 * layer) & 0x3FF).bit_count() for layer in range(3)] == [2, 2, 2]
        assert len(residency.bits) == 4
        answer(engine, max_tokens=6)
        later = engine.snapshot()
        assert later.experts is not None
        assert later.experts.generation > residency.generation
        assert int.from_bytes(later.experts.bits, "little").bit_count() == 12, (
            "never more than the cache holds"
        )
        assert later.expert_misses + later.expert_hits == 9 * 6
    with fake() as engine:
        assert engine.snapshot().experts is None
