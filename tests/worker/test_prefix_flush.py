"""Emptying the prefix cache of a running engine: everything unused goes, what is in use stays, nothing else changes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import pytest

from tests.helpers.eventually import PATIENCE_S, eventually
from tests.helpers.fake_runner import FakeRunner, full_spec
from tests.worker.test_native_engine import on_fake_runner, read
from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines import native
from worker.engines.native import NativeEngine
from worker.errors import EngineDead
from worker.scheduling.step import StepPlan, StepResult

PROMPT = tuple(range(1, 200))


def run(engine: NativeEngine, name: str) -> Any:
    """One request; its last event."""

    async def one() -> Any:
        engine.submit(GenerateRequest(name, PROMPT, SamplingParams(max_tokens=4)))
        return await read(engine, name)

    return asyncio.run(one())


def held_bytes(engine: NativeEngine) -> int:
    """Bytes of pages that requests or the prefix cache hold."""
    kinds = engine.snapshot().headroom.kinds.values()
    return sum(kind.used_bytes + kind.reclaimable_bytes + kind.pending_bytes for kind in kinds)


def test_a_flush_frees_every_page_that_no_request_uses() -> None:
    with closing(on_fake_runner()) as engine:
        assert run(engine, "a").timeline.num_cached_tokens == 0
        assert run(engine, "b").timeline.num_cached_tokens > 0
        assert held_bytes(engine) > 0
        assert engine.flush_prefix_cache() > 0
        assert held_bytes(engine) == 0
        assert engine.flush_prefix_cache() == 0
        assert run(engine, "c").timeline.num_cached_tokens == 0


def test_a_flush_beside_a_running_request_changes_none_of_its_tokens() -> None:
    with closing(on_fake_runner()) as engine:
        asked = GenerateRequest(
            "long", PROMPT, SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        )

        async def flushed(times: int) -> tuple[int, ...]:
            engine.submit(asked)
            reading = asyncio.ensure_future(read(engine, "long"))
            for _ in range(times):
                await asyncio.to_thread(engine.flush_prefix_cache)
            return (await reading).token_ids

        assert asyncio.run(flushed(0)) == asyncio.run(flushed(5))


def test_a_closed_engine_flushes_nothing() -> None:
    engine = on_fake_runner()
    engine.close()
    with pytest.raises(EngineDead):
        engine.flush_prefix_cache()


class _SlowEnd(FakeRunner):
    """Works on its first step until it may end, and then fails or not."""

    def __init__(self, fails: bool) -> None:
        super().__init__((full_spec(),))
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._fails = fails

    def launch(self, plan: StepPlan) -> StepResult:
        if plan.num_rows and not self.begun.is_set():
            self.begun.set()
            assert self.may_end.wait(60)
            if self._fails:
                raise RuntimeError("planted failure")
        return super().launch(plan)


@pytest.mark.parametrize("fails", [True, False])
def test_who_waits_for_a_flush_hears_of_the_end_at_once(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLUSH_TIMEOUT_S", PATIENCE_S)
    runner = _SlowEnd(fails)
    config = WorkerConfig(model="fake", arena_bytes=1 << 20, max_model_len=8192)
    engine = NativeEngine(config, lambda _: runner)
    engine.submit(GenerateRequest("r", (1, 2, 3)))
    assert runner.begun.wait(60)

    def end_it() -> None:
        eventually(lambda: engine._flushes)
        closing = threading.Thread(target=engine.close)
        if not fails:
            closing.start()
            eventually(lambda: engine._closed)
        runner.may_end.set()
        if not fails:
            closing.join()

    ending = threading.Thread(target=end_it)
    ending.start()
    with pytest.raises(EngineDead, match="planted failure" if fails else "closed"):
        engine.flush_prefix_cache()
    ending.join()
    engine.close()
