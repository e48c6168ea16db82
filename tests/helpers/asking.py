"""Asking an engine in tests: requests in short, and all events of an answer."""

from __future__ import annotations

import asyncio
from typing import Any

from worker.api import Engine, GenerateRequest, SamplingParams, TokenEvent

PROMPT = tuple(range(20, 50))
ENDLESS = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)


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
