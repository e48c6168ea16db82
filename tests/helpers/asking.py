"""Asking an engine in tests: requests in short, all events of an answer, and waiting for what must come true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from worker.api import Engine, GenerateRequest, SamplingParams, TokenEvent

PROMPT = tuple(range(20, 50))
ENDLESS = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """As ``wait_until``, but the event loop goes on turning."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


def ask(request_id: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(**{"temperature": 0.0, **sampling}))


async def events_of(engine: Engine, request: GenerateRequest) -> list[TokenEvent]:
    engine.submit(request)
    return [event async for event in engine.stream(request.request_id)]


def answer(engine: Engine, request: GenerateRequest) -> TokenEvent:
    """All of a request's events merged into one."""
    first, *others = asyncio.run(events_of(engine, request))
    for event in others:
        assert first.finish_reason is None, "an event came after the last one"
        first = first.merged_with(event)
    return first
