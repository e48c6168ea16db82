"""Runs prompts through the native engine on the CPU and notes when each token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cpu_reference import Timing
from worker.api import Engine, GenerateRequest, SamplingParams, TokenLogprobs


@dataclass
class Answer:
    """One request's tokens, their log-probabilities, and seconds of each token since the run's start."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


async def _follow(engine: Engine, request: GenerateRequest, start_s: float) -> Answer:
    answer = Answer()
    async for event in engine.stream(request.request_id):
        if event.error:
            raise RuntimeError(event.error)
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        answer.seconds += [time.perf_counter() - start_s] * len(event.token_ids)
    return answer


async def _run(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, gaps_s: Sequence[float]
) -> list[Answer]:
    start_s = time.perf_counter()
    tasks = []
    for i, prompt in enumerate(prompts):
        if gaps_s:
            await asyncio.sleep(gaps_s[i])
        request = GenerateRequest(f"{start_s}-{i}", tuple(prompt), sampling)
        engine.submit(request)
        tasks.append(asyncio.create_task(_follow(engine, request, start_s)))
    return await asyncio.gather(*tasks)


def run_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    logprobs: int | None = None,
    gaps_s: Sequence[float] = (),
) -> list[Answer]:
    """Greedy answers of ``num_new`` tokens, all prompts at once, or each ``gaps_s`` after the one before."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    return asyncio.run(_run(engine, prompts, sampling, gaps_s))


def time_engine(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> Timing:
    """Timing of prompts submitted at once. Prefill lasts until the last row has its first token; tokens that other
    rows generate meanwhile count for neither rate."""
    answers = run_prompts(engine, prompts, num_new)
    prefilled_s = max(answer.seconds[0] for answer in answers)
    end_s = max(answer.seconds[-1] for answer in answers)
    decoded = sum(second > prefilled_s for answer in answers for second in answer.seconds)
    return Timing(prefilled_s, sum(len(p) for p in prompts), end_s - prefilled_s, decoded)
