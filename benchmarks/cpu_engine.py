"""Runs prompts through the native engine on the CPU and times its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.cpu_reference import Timing
from worker.api import Engine, GenerateRequest, SamplingParams, TokenLogprobs
from worker.scheduling.step import StepPlan, StepResult

COALESCE_S = 0.02


@dataclass
class Answer:
    """One request's tokens and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


async def _follow(engine: Engine, request: GenerateRequest) -> Answer:
    answer = Answer()
    async for event in engine.stream(request.request_id):
        if event.error:
            raise RuntimeError(event.error)
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        # As the service does: the first token at once, later ones in batches. What comes meanwhile is merged.
        await asyncio.sleep(COALESCE_S)
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
        tasks.append(asyncio.create_task(_follow(engine, request)))
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


class StepClock:
    """Stamps of an engine's steps, taken on its own thread: pass :meth:`record` as the engine's ``record``."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, int, bool]] = []

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Notes when a step was done, how many tokens it brought, and whether it prefilled."""
        if plan.num_rows == 0:  # it carried memory's commands only
            return
        prefills = bool((plan.query_len > 1).any())
        self._steps.append((time.perf_counter(), int(result.num_new.sum()), prefills))

    def time(self, engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> Timing:
        """Timing of prompts submitted at once to the engine that records here. Prefill lasts until no prompt is left;
        tokens that other rows generate meanwhile count for neither rate."""
        self._steps.clear()
        start_s = time.perf_counter()
        run_prompts(engine, prompts, num_new)
        last_prefill = max(i for i, (_, _, prefills) in enumerate(self._steps) if prefills)
        stamps = [stamp for stamp, _, _ in self._steps[last_prefill:]]
        decoded = sum(tokens for _, tokens, _ in self._steps[last_prefill + 1 :])
        return Timing(
            prefill_s=stamps[0] - start_s,
            prefill_tokens=sum(len(prompt) for prompt in prompts),
            decode_s=stamps[-1] - stamps[0],
            decode_tokens=decoded,
            num_rows=len(prompts),
            steps_s=tuple(after - before for before, after in pairwise(stamps)),
        )
