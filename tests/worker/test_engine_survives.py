"""What one request may do to the native engine: end itself, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.eventually import soon
from tests.helpers.fake_runner import FakeRunner, full_spec, state_spec, window_spec
from worker.api import (
    Engine,
    FinishReason,
    GenerateRequest,
    Grammar,
    SamplingParams,
    TokenEvent,
    WorkerSnapshot,
)
from worker.config import WorkerConfig
from worker.engines import native
from worker.engines.native import NativeEngine
from worker.errors import GrammarFailed, InvalidRequest

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


class _Gives:
    """A "grammar" that allows everything and cannot be followed beyond ``most`` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_live = 0

    def check(self, grammar: Grammar) -> None:
        """Anything goes."""

    def open(self, request: int, grammar: Grammar) -> None:
        self.num_live += 1

    def mask(self, request: int) -> npt.NDArray[np.int32] | None:
        return None

    def advance(self, request: int, token_ids: Sequence[int]) -> None:
        self._most -= len(token_ids)
        if self._most < 0:
            raise GrammarFailed("too many states")

    def close(self, request: int) -> None:
        self.num_live -= 1


def engine(grammars: _Gives | None = None) -> NativeEngine:
    settings = WorkerConfig(model="fake", arena_bytes=1 << 20)
    specs = (full_spec(), window_spec(40), state_spec())
    return NativeEngine(settings, lambda _: FakeRunner(specs), grammars=grammars, audit=True)


async def last_event(served: Engine, request_id: str) -> TokenEvent:
    async for event in served.stream(request_id):
        last = event
    return last


def test_a_grammar_that_gives_up_ends_its_own_request_with_the_reason() -> None:
    grammars = _Gives(5)

    async def drive() -> None:
        served.submit(GenerateRequest("free", (1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True)))
        served.submit(GenerateRequest("bound", (1, 2, 3), LONG, grammar=Grammar("regex", "a")))
        free, bound = await asyncio.gather(last_event(served, "free"), last_event(served, "bound"))
        assert (bound.finish_reason, bound.error) == (FinishReason.ERROR, "too many states")
        assert bound.num_generated == 6
        assert (free.finish_reason, free.num_generated) == (FinishReason.LENGTH, 40)
        served.check_health()
        assert grammars.num_live == 0
        assert served.snapshot().num_running == 0

    with closing(engine(grammars)) as served:
        asyncio.run(drive())


def test_a_least_length_beside_a_grammar_is_refused() -> None:
    # Where the grammar allows only the end and the least length forbids it, no token would be left to draw.
    with closing(engine(_Gives(5))) as served:
        asked = GenerateRequest(
            "a", (1, 2), SamplingParams(max_tokens=9, min_tokens=3), grammar=Grammar("regex", "a")
        )
        with pytest.raises(InvalidRequest, match="min_tokens") as refused:
            served.submit(asked)
        assert refused.value.field == "min_tokens"


def test_the_id_of_a_request_whose_reader_left_is_free_only_when_it_has_ended() -> None:
    async def drive() -> None:
        served.submit(GenerateRequest("one", (1, 2, 3), LONG))
        reader = served.stream("one")
        await anext(reader)
        await reader.aclose()
        with pytest.raises(InvalidRequest, match="in use"):
            # On one thread with the departure: the loop may or may not have seen the abort, so ask until it has.
            while True:
                served.submit(GenerateRequest("one", (1, 2, 3), LONG))
                again = served.stream("one")
                await anext(again)
                await again.aclose()
        await soon(lambda: not served.snapshot().num_running)
        served.submit(GenerateRequest("one", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
        assert (await last_event(served, "one")).num_generated == 4
        served.check_health()

    with closing(engine()) as served:
        asyncio.run(drive())


def test_no_snapshot_misses_a_request_that_an_earlier_one_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine()
    seen: list[int] = []
    readers: list[threading.Thread] = []
    take = served._take_snapshot

    def slow_take() -> WorkerSnapshot:
        # Another thread asks while the loop has the request in hand: it waits, or is told of it.
        readers.append(threading.Thread(target=lambda: seen.append(served.snapshot().num_submitted)))
        readers[-1].start()
        readers[-1].join(0.05)
        return take()

    async def drive() -> None:
        served.submit(GenerateRequest("one", (1, 2, 3), SamplingParams(max_tokens=2, ignore_eos=True)))
        await last_event(served, "one")

    monkeypatch.setattr(served, "_take_snapshot", slow_take)
    with closing(served):
        asyncio.run(drive())
        for reader in readers:
            reader.join(60)
    assert seen
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("stop_token_ids", {"stop_token_ids": tuple(range(129))}),
        ("logit_bias", {"logit_bias": tuple((token, 1.0) for token in range(1025))}),
    ],
)
def test_what_every_step_would_have_to_look_at_is_bounded(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} has .* at most") as caught:
        SamplingParams(max_tokens=4, **given)
    assert caught.value.field == field
    fewer: dict[str, Any] = {name: values[:-1] for name, values in given.items()}
    assert SamplingParams(max_tokens=4, **fewer)


def test_nobody_waits_for_the_audit_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "IDLE_AUDIT_S", 0.01)
    monkeypatch.setattr(native, "AUDIT_SHARE", 1e-6)
    begun, may_end = threading.Event(), threading.Event()
    num_audits = 0
    served = engine()
    with closing(served):
        audit = served._ledger.audit

        def long_audit() -> None:
            nonlocal num_audits
            num_audits += 1
            begun.set()
            assert may_end.wait(10)
            audit()

        served._ledger.audit = long_audit  # type: ignore[method-assign]
        served._loop._audit = False
        served.submit(GenerateRequest("wakes", (5, 6), SamplingParams(max_tokens=1)))
        assert begun.wait(30)
        looking = threading.Thread(target=served.snapshot, daemon=True)
        looking.start()
        served.submit(GenerateRequest("comes", (5, 6), SamplingParams(max_tokens=1)))
        looking.join(5)
        may_end.set()
        assert not looking.is_alive(), "the audit held the lock"
        assert asyncio.run(last_event(served, "comes")).finish_reason is FinishReason.LENGTH
        # It took some of the time; the next one is due when that is little of it.
        assert num_audits == 1
