"""Times the first token of a long prompt beside running streams, and what the streams notice of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.elasticity.phases import Clock, Driver, PhaseLog, Prompt
from worker.api import Engine

NUM_STREAMS = 4
CALM_TOKENS = 60
"""Of every stream, before the prompt comes: its undisturbed pace."""


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """``ttft_s`` of the prompt; ``read`` and ``beside``: experts that came over the link meanwhile for prompts and for
    decode steps; the streams' 99th percentile of gaps before it came, and while it was computed."""

    ttft_s: float
    read: int
    beside: int
    calm_p99_s: float
    busy_p99_s: float


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def time_prefill(
    engine: Engine,
    prompt: Prompt,
    clock: Clock,
    num_tokens: int,
    read_so_far: Callable[[], tuple[int, int]],
    seed: int,
) -> PrefillTimes:
    """One prompt of ``num_tokens`` beside :data:`NUM_STREAMS` streams. ``read_so_far``: experts read for
    prompts and for decode steps."""
    dice = random.Random(seed)
    driver = Driver(engine, prompt, clock)
    streams = [PhaseLog(f"stream {n}", clock()) for n in range(NUM_STREAMS)]
    room = 6 * CALM_TOKENS
    running = [
        asyncio.create_task(driver.ask(prompt(dice, 32), room, log, f"{seed} stream {n}"))
        for n, log in enumerate(streams)
    ]
    while any(len(log.gaps_s) < CALM_TOKENS for log in streams):  # noqa: ASYNC110 (gaps are told by nobody)
        await asyncio.sleep(0.005)
    # The first gaps fall into the others' prefill.
    calm = [gap for log in streams for gap in log.gaps_s[CALM_TOKENS // 4 :]]
    marks, read = [len(log.gaps_s) for log in streams], read_so_far()
    own = PhaseLog("prompt", clock())
    await driver.ask(prompt(dice, num_tokens), 1, own, f"{seed} prompt")
    staged, beside = (now - then for now, then in zip(read_so_far(), read, strict=True))
    busy = [gap for log, mark in zip(streams, marks, strict=True) for gap in log.gaps_s[mark:]]
    for n in range(NUM_STREAMS):
        engine.abort(f"{seed} stream {n}")
    await asyncio.gather(*running)
    pace = percentile(calm, 0.99), percentile(busy or calm, 0.99)
    return PrefillTimes(own.first_token_s[0], staged, beside, *pace)
